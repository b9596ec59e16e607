"""The terminal of a training, as the loop and the run see it.

A whole terminal painted twice a second, and given back however the process ends.

What stays on the terminal after the live picture: every note, and some of the steps.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from rlpost.output import (
    Heartbeat,
    Ticker,
    WaitingLine,
    descriptors_onto,
    in_front,
    lead_nowhere,
    leave_dead_terminals,
    size_of,
    where_it_leads,
)
from rlpost.screen.layout import STOPPING, WIDTH, Figures, Shown, State, clock, evaluation_line, sample_lines, step_line
from rlpost.text import one_line, printable

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from rlpost.screen.layout import Layout

SAMPLE_EVERY = 10  # steps


class _Output(Console):
    """Stdout, whose reader may leave, as in `| head`: for a run that catches signals its terminal is closed then."""

    def on_broken_pipe(self) -> None:
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            raise  # the BrokenPipeError, which the program answers
        lead_nowhere(1)
        signal.raise_signal(signal.SIGHUP)


class Screen:
    """A live picture of the training where somebody is looking, plain lines elsewhere.

    The picture fills the terminal from `open` to `end`; lines and notes of that time are printed
    after it, and go to the log at once. Pipes, `TERM=dumb`, `plain` and terminals that do not take
    UTF-8 get one line a step and now and then a completion. `NO_COLOR` takes the colours alone.
    As a context manager it calls `end`, however it is left.
    Anybody's text is shown as text: control characters visible, markup inert.
    """

    def __init__(self, console: Console | None = None, *, plain: bool = False) -> None:
        self.console = console or _Output(highlight=False, soft_wrap=True)
        self.state = State()
        self._descriptor = None if plain else _descriptor_for_pictures(self.console)
        self._picture: Picture | None = None
        self._record: Record | None = None  # of what stays when the picture ends
        self._lock = threading.Lock()  # of the state, which another thread draws
        colour = self.console.color_system is not None and not os.environ.get("NO_COLOR")
        self._styled = self.console.is_terminal and colour
        self._heartbeat: Heartbeat | None = None  # while plain lines are all there is
        self._said_to = 2  # the descriptor of what is said in a signal's function
        self._layout: Layout | None = None
        if self._descriptor is not None:
            from rlpost.screen.layout import Layout

            self._layout, self._record = Layout(self.state, colour=colour), Record()

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    @property
    def is_live(self) -> bool:
        """Whether a picture shows what is under way, so that no line needs to."""
        return self._picture is not None

    def line(self, text: str, style: str = "") -> None:
        """One line that stays."""
        if self._picture is None or self._record is None:
            self._print(text, style)
        else:
            self._record.add(text, style)
            self._log(text)

    def note(self, text: str) -> None:
        """A line that wants attention."""
        with self._lock:
            self.state.add_note(text)
        self.line(text, "yellow")

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say what is being waited for before there is a picture, and now and then for how long already.

        Wherever other output is sent meanwhile.
        """
        began = time.monotonic()
        live = self._descriptor is not None

        def line() -> str:
            return f"{'' if live else 'still '}{printable(what)} ...  {time.monotonic() - began:.0f} s"

        if not live:
            self.line(f"{what} ...")
        with contextlib.ExitStack() as opened:
            self._said_to = opened.enter_context(where_it_leads(2))
            opened.callback(setattr, self, "_said_to", 2)
            if (descriptor := _descriptor_of(self.console)) is not None:
                opened.enter_context(WaitingLine(descriptor, line, live=live))
            yield

    def open(self, *, title: str, about: str, total_steps: int, log: Path) -> None:
        """Begin the picture, where there is one; other output of this process goes into `log` from now on."""
        with self._lock:
            self.state.title, self.state.about = one_line(title, WIDTH), one_line(about, WIDTH)
            self.state.total = total_steps
        if self._descriptor is not None:
            self.console.file.flush()
            last_words = printable(f"the training's process has died; what it said last is in {log}")
            self._picture = Picture(self._descriptor, self._frame, log=log, last_words=last_words)
        else:
            self._heartbeat = Heartbeat(self._under_way, self._print)
            self._heartbeat.__enter__()

    def begin(self, done: int, total: int, recorded: Iterable[tuple[int, Figures]] = ()) -> None:
        """Steps up to `done` of `total` were done before, and `recorded` is everything that was said so far."""
        with self._lock:
            self.state.begin(done, total, recorded)

    def begin_step(self) -> None:
        """The next step begins now."""
        with self._lock:
            self.state.begin_step()

    @property
    def doing(self) -> str:
        """The phase under way in words, with how far it is."""
        phase = self.state.phase
        if phase is None:
            return ""
        extent = f" {phase.done} of {phase.total}" if phase.total is not None else ""
        return f"{phase.kind} {phase.what}".strip() + extent

    def phase(
        self,
        kind: str,
        what: str = "",
        done: int | None = None,
        total: int | None = None,
        tokens: int | None = None,
    ) -> None:
        """From now on `kind` (a verb) is being done to `what`; called again it tells how much of it is done.

        `tokens` are those sampled in it so far.
        """
        with self._lock:
            self.state.begin_phase(kind, what, done, total, tokens)

    def step(self, step: int, total: int, metrics: Mapping[str, float], batch: TensorDictBase | None) -> None:
        """A finished step: its figures, and the first of its completions. Step 0 is what came before training."""
        sample = None if batch is None else Shown.first_of(step, batch)
        with self._lock:
            self.state.total = total
            self.state.end_step(step, metrics, sample)
            left = self.state.left()
        if step == 0:
            return
        remaining = "-" if left is None else clock(left)
        fitting = step_line(step, total, metrics, remaining, width=self._width())
        if self._picture is not None and self._record is not None:
            self._record.add_step(fitting)
            self._log(step_line(step, total, metrics, remaining))
            return
        self._print(fitting)
        if sample is not None and (step == 1 or step % SAMPLE_EVERY == 0):
            for each in sample_lines(sample):
                self._print(each, "dim")

    def evaluated(self, step: int, metrics: Figures) -> None:
        """The evaluation after `step` is done."""
        with self._lock:
            self.state.end_evaluation(step, metrics)
        self.line(evaluation_line(metrics, f"after step {step}"))

    def stop_asked(self, answer: str = STOPPING) -> None:
        """Say what becomes of the run that a signal has asked to end; called in its function, so nothing here waits."""
        self.state.stopping = answer
        if self._picture is None:
            with contextlib.suppress(OSError):  # there may be no terminal any more
                os.write(self._said_to, f"\n{answer}\n".encode())

    def leave_at_once(self, last_words: str) -> None:
        """Give the terminal back just before the process ends; called in a signal's function."""
        if self._picture is None:
            with contextlib.suppress(OSError):
                os.write(self._said_to, f"\n{last_words}\n".encode())
        else:
            self._picture.leave_at_once(f"{last_words}\n".encode())

    def end(self) -> None:
        """End the picture and print what stays of it; a second call does nothing."""
        if self._heartbeat is not None:
            self._heartbeat.__exit__()
            self._heartbeat = None
        picture, self._picture = self._picture, None
        if picture is None:
            return
        picture.close()
        leave_dead_terminals()
        for text, style in self._record.lines() if self._record is not None else ():
            self._print(text, style)

    def _width(self) -> int | None:
        """Columns that a line has; None: as many as it likes."""
        if self._descriptor is not None:
            return size_of(self._descriptor)[0] if self._picture is None else self._picture.width
        return self.console.width if self.console.is_terminal else None

    def _frame(self, width: int, height: int) -> Sequence[Text]:
        assert self._layout is not None
        with self._lock:
            return self._layout.frame(width, height)

    def _print(self, text: str, style: str = "") -> None:
        shown = printable(text).encode(self.console.encoding, "backslashreplace").decode(self.console.encoding)
        if self._heartbeat is not None:
            self._heartbeat.said()
        try:
            self.console.print(Text(shown, style=style if self._styled else ""))
        except OSError as error:
            # the terminal has been closed, or who reads has stopped with us: what is under way goes on without
            if error.errno != errno.EIO and not (self.state.stopping and error.errno == errno.EPIPE):
                raise
            leave_dead_terminals()

    def _under_way(self) -> str:
        with self._lock:
            return self.state.under_way()

    def _log(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk ends the run where its records are written, with advice
            print(printable(text), flush=True)  # stdout leads into the log while there is a picture


def _descriptor_of(console: Console) -> int | None:
    """The descriptor that `console` writes to; None for one that writes to no file."""
    try:
        return console.file.fileno()
    except (AttributeError, io.UnsupportedOperation):
        return None


def _descriptor_for_pictures(console: Console) -> int | None:
    """The descriptor of the terminal that `console` writes to, where a picture can be painted on it."""
    descriptor = _descriptor_of(console)
    if descriptor is None or not (console.encoding.startswith("utf") and os.isatty(descriptor)):
        return None

    return descriptor if takes_pictures(descriptor) else None


ENTER = b"\x1b[?1049h\x1b[?25l"  # the alternate screen, no cursor
LEAVE = b"\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
# what a child does that outlives us: wait until our end of the pipe is closed, then give the terminal back
WATCH = 'cat >/dev/null; printf "\\033[0m\\033[?7h\\033[?25h\\033[?1049l%s\\n" "$0"'


def takes_pictures(descriptor: int) -> bool:
    """Whether somebody looks at `descriptor` through a terminal that can be painted, and it is ours to paint."""
    return os.isatty(descriptor) and os.environ.get("TERM", "dumb") not in ("dumb", "unknown") and in_front(descriptor)


class Picture:
    """Takes the terminal over: frames on its alternate screen, all other output into `log`.

    `frame(width, height)` gives the lines to paint; it is called in a thread of its own. `last_words`
    is printed by a child process should this one die without giving the terminal back.
    """

    def __init__(
        self, descriptor: int, frame: Callable[[int, int], Sequence[Text]], *, log: Path, last_words: str
    ) -> None:
        self._frame = frame
        self._lock = threading.Lock()  # held while something is written to the terminal
        self._entered = False
        self._closed = False
        self._styles = Console(file=io.StringIO(), force_terminal=True, highlight=False)
        with ExitStack() as opening:
            self._terminal = os.dup(descriptor)
            opening.callback(os.close, self._terminal)
            self._watcher = subprocess.Popen(
                ["/bin/sh", "-c", WATCH, last_words],
                stdin=subprocess.PIPE,
                stdout=self._terminal,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            opening.callback(self._dismiss_watcher)
            sink = opening.enter_context(log.open("a"))
            opening.enter_context(descriptors_onto(sink.fileno(), 1, 2))
            self._opened = opening.pop_all()
        self._previous: Any = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTSTP, self._suspend)
        self._ticker = Ticker(self.paint, failed=self._give_up)

    @property
    def width(self) -> int:
        """Columns of the terminal now."""
        return size_of(self._terminal)[0]

    def paint(self) -> None:
        """One frame, where the terminal is ours."""
        if not in_front(self._terminal):
            self._entered = False
            return
        picture = self._encode(self._frame(*size_of(self._terminal)))
        with self._lock:
            if not self._closed:
                self._write(picture if self._entered else ENTER + picture)
                self._entered = True

    def close(self) -> None:
        """Give the terminal back, and stdout and stderr their way; a second call does nothing."""
        if self._closed:
            return
        self._ticker.stop()
        with self._lock:
            self._closed = True
            with contextlib.suppress(OSError):  # there may be no terminal any more
                self._leave()
        if self._previous is not None:
            signal.signal(signal.SIGTSTP, self._previous)
        with contextlib.suppress(OSError):  # what was written last may not have fitted into the log
            self._opened.close()

    def leave_at_once(self, last_words: bytes) -> None:
        """Give the terminal back and write `last_words`, in a signal's function and just before the process ends."""
        held = self._lock.acquire(timeout=1)  # by a frame being written; not by the code that the signal interrupted
        self._closed = True
        self._watcher.kill()
        with contextlib.suppress(OSError):  # there may be no terminal any more
            self._leave()
            self._write(last_words)
        if held:
            self._lock.release()

    def _leave(self) -> None:
        if self._entered:
            self._entered = False
            self._write(LEAVE)

    def _give_up(self) -> None:
        with self._lock:
            self._leave()
            self._write(b"the live display has failed, its traceback is in the log; the training goes on\n")

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: give the terminal back, stop; the next frame after `fg` takes it again."""
        held = self._lock.acquire(timeout=1)
        self._leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns when the process is continued
        signal.signal(signal.SIGTSTP, self._suspend)
        if held:
            self._lock.release()

    def _dismiss_watcher(self) -> None:
        self._watcher.kill()
        self._watcher.wait()
        if self._watcher.stdin is not None:
            self._watcher.stdin.close()

    def _encode(self, lines: Sequence[Text]) -> bytes:
        """Each line at its place, whatever the terminal makes of the widths of the others; nothing wraps."""
        with self._styles.capture() as styled:
            self._styles.print(Text("\n").join(lines), soft_wrap=True)
        rows = styled.get().removesuffix("\n").split("\n")
        placed = "".join(f"\x1b[{i};1H{row}\x1b[K" for i, row in enumerate(rows, 1))
        return f"\x1b[?7l{placed}\x1b[J\x1b[1;1H\x1b[?7h".encode()

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._terminal, data) :]


STEPS = 12
FIRST, LAST = 20, 80  # of all other lines

Line = tuple[str, str]  # text and style


class Record:
    """Lines in the order they came, bounded: of the steps every n-th and the last, of others the first and last."""

    def __init__(self) -> None:
        self._serial = count()
        self._steps: list[tuple[int, Line]] = []  # every n-th, the first among them
        self._latest_step: tuple[int, Line] | None = None
        self._num_steps = 0
        self._every = 1
        self._first: list[tuple[int, Line]] = []
        self._last: deque[tuple[int, Line]] = deque(maxlen=LAST)
        self._num_others = 0

    def add(self, text: str, style: str) -> None:
        """A line that matters."""
        entry = (next(self._serial), (text, style))
        if len(self._first) < FIRST:
            self._first.append(entry)
        else:
            self._last.append(entry)
        self._num_others += 1

    def add_step(self, text: str) -> None:
        """The line of the next step."""
        self._latest_step = (next(self._serial), (text, ""))
        if self._num_steps % self._every == 0:
            self._steps.append(self._latest_step)
        self._num_steps += 1
        if len(self._steps) > STEPS:
            self._steps = self._steps[::2]
            self._every *= 2

    def lines(self) -> list[Line]:
        """What is left of it all, with a word on what is not."""
        entries = {*self._first, *self._last, *self._steps}
        if self._latest_step is not None:
            entries.add(self._latest_step)
        lines = [line for _, line in sorted(entries)]
        missing = self._num_others - len(self._first) - len(self._last)
        if missing:
            lines.append((f"{missing} more lines are in the run's log.txt", "dim"))
        return lines
