"""The terminal of a training: plain lines, or a live picture that fills it and is followed by the lines worth keeping.

The picture is painted twice a second, and the terminal is restored however the process ends.
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
from rlpost.screen import layout
from rlpost.screen.layout import STOPPING, Figures, Layout, Shown, State
from rlpost.text import one_line, printable

if TYPE_CHECKING:
    from tensordict import TensorDictBase

SAMPLE_EVERY = 10  # steps


class Screen:
    """A live picture of the training on a terminal, plain lines elsewhere.

    The picture fills the terminal from `open` to `end`; lines and notes of that time go to the log at once, and are
    printed after the picture. Pipes, `TERM=dumb`, `plain` and terminals without UTF-8 get one line a step and now and
    then a completion. `NO_COLOR` removes the colours. As a context manager it calls `end`, however it is left. Text of
    models and users is shown as text: control characters visible, markup inert.
    """

    def __init__(self, console: Console | None = None, *, plain: bool = False) -> None:
        self.console = console or _Output(highlight=False, soft_wrap=True)
        self.state = State()
        self._descriptor = None if plain else _descriptor_for_pictures(self.console)
        self._picture: Picture | None = None
        self._record: Record | None = None  # of the lines to print when the picture ends
        self._lock = threading.Lock()  # guards the state, which another thread draws
        colour = self.console.color_system is not None and not os.environ.get("NO_COLOR")
        self._styled = self.console.is_terminal and colour
        self._heartbeat: Heartbeat | None = None  # of a training without a picture
        self._answers_to = 2  # the descriptor for the answer to a signal
        self._layout: Layout | None = None
        if self._descriptor is not None:
            self._layout, self._record = Layout(self.state, colour=colour), Record()

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    @property
    def is_live(self) -> bool:
        """Whether a picture shows the current work, so that no line needs to."""
        return self._picture is not None

    def line(self, text: str, style: str = "") -> None:
        """Print one line, at once or after the picture."""
        if self._picture is None or self._record is None:
            self._print(text, style)
        else:
            self._record.add(text, style)
            self._log(text)

    def note(self, text: str) -> None:
        """Show a warning, in the picture too."""
        with self._lock:
            self.state.add_note(text)
        self.line(text, "yellow")

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Print what the block waits for, and now and then for how long, before there is a picture.

        The lines reach the terminal even if the block sends other output elsewhere.
        """
        began = time.monotonic()
        live = self._descriptor is not None

        def line() -> str:
            return f"{'' if live else 'still '}{printable(what)} ...  {time.monotonic() - began:.0f} s"

        if not live:
            self.line(f"{what} ...")
        with contextlib.ExitStack() as opened:
            self._answers_to = opened.enter_context(where_it_leads(2))
            opened.callback(setattr, self, "_answers_to", 2)
            if (descriptor := _descriptor_of(self.console)) is not None:
                opened.enter_context(WaitingLine(descriptor, line, live=live))
            yield

    def open(self, *, title: str, about: str, total_steps: int, log: Path) -> None:
        """Begin the picture, if the terminal takes one; other output of this process then goes into `log`."""
        with self._lock:
            self.state.title, self.state.about = one_line(title, layout.WIDTH), one_line(about, layout.WIDTH)
            self.state.total = total_steps
        if self._descriptor is not None:
            self.console.file.flush()
            last_words = printable(f"the training's process has died; what it said last is in {log}")
            self._picture = Picture(self._descriptor, self._frame, log=log, last_words=last_words)
        else:
            self._heartbeat = Heartbeat(self._under_way, self._print)
            self._heartbeat.__enter__()

    def begin(self, done: int, total: int, recorded: Iterable[tuple[int, Figures]] = ()) -> None:
        """Begin after step `done` of `total`; `recorded` are the metrics so far, with their steps."""
        with self._lock:
            self.state.begin(done, total, recorded)

    def begin_step(self) -> None:
        """Note that the next step begins."""
        with self._lock:
            self.state.begin_step()

    @property
    def doing(self) -> str:
        """The current phase in words, with how far it is."""
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
        """Enter the phase of doing `kind` (a verb) to `what`, or update how much of it is done.

        `tokens` is the number sampled in it so far.
        """
        with self._lock:
            self.state.begin_phase(kind, what, done, total, tokens)

    def step(self, step: int, total: int, metrics: Mapping[str, float], batch: TensorDictBase | None) -> None:
        """Show a finished step: its metrics and its first completion. Step 0 is the evaluation before training."""
        sample = None if batch is None else Shown.first_of(step, batch)
        with self._lock:
            self.state.total = total
            self.state.end_step(step, metrics, sample)
            left = self.state.left()
        if step == 0:
            return
        remaining = "-" if left is None else layout.clock(left)
        fitting = layout.step_line(step, total, metrics, remaining, width=self._width())
        if self._picture is not None and self._record is not None:
            self._record.add_step(fitting)
            self._log(layout.step_line(step, total, metrics, remaining))
            return
        self._print(fitting)
        if sample is not None and (step == 1 or step % SAMPLE_EVERY == 0):
            for each in layout.sample_lines(sample):
                self._print(each, "dim")

    def evaluated(self, step: int, metrics: Figures) -> None:
        """Show the evaluation after `step`."""
        with self._lock:
            self.state.end_evaluation(step, metrics)
        self.line(layout.evaluation_line(metrics, f"after step {step}"))

    def stop_asked(self, answer: str = STOPPING) -> None:
        """Show the answer to a signal; called in the signal's handler, so nothing here waits."""
        self.state.stopping = answer
        if self._picture is None:
            with contextlib.suppress(OSError):  # there may be no terminal any more
                os.write(self._answers_to, f"\n{answer}\n".encode())

    def leave_at_once(self, last_words: str) -> None:
        """Restore the terminal just before the process ends; called in a signal's handler."""
        if self._picture is None:
            with contextlib.suppress(OSError):
                os.write(self._answers_to, f"\n{last_words}\n".encode())
        else:
            self._picture.leave_at_once(f"{last_words}\n".encode())

    def end(self) -> None:
        """End the picture and print the lines worth keeping; a second call does nothing."""
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
        """Columns of a line; None: no limit."""
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
            # the terminal was closed, or the reader was stopped together with this process: go on without
            if error.errno != errno.EIO and not (self.state.stopping and error.errno == errno.EPIPE):
                raise
            leave_dead_terminals()

    def _under_way(self) -> str:
        with self._lock:
            return self.state.under_way()

    def _log(self, text: str) -> None:
        with contextlib.suppress(OSError):  # on a full disk the run ends when it writes its metrics, with advice
            print(printable(text), flush=True)  # stdout leads into the log while there is a picture


class _Output(Console):
    """Stdout, whose reader may leave, as in `| head`; a run that catches signals then gets SIGHUP."""

    def on_broken_pipe(self) -> None:
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            raise  # the BrokenPipeError, for the program to handle
        lead_nowhere(1)
        signal.raise_signal(signal.SIGHUP)


def _descriptor_of(console: Console) -> int | None:
    """The descriptor that `console` writes to; None if it does not write to a file."""
    try:
        return console.file.fileno()
    except (AttributeError, io.UnsupportedOperation):
        return None


def _descriptor_for_pictures(console: Console) -> int | None:
    """The descriptor of `console`'s terminal if a picture can be painted on it and this process is in front."""
    descriptor = _descriptor_of(console)
    if descriptor is None or not (console.encoding.startswith("utf") and os.isatty(descriptor)):
        return None
    paintable = os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    return descriptor if paintable and in_front(descriptor) else None


# The picture

ENTER = b"\x1b[?1049h\x1b[?25l"  # the alternate screen, no cursor
LEAVE = b"\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
# the child that outlives this process: wait until our end of the pipe is closed, then restore the terminal
WATCH = 'cat >/dev/null; printf "\\033[0m\\033[?7h\\033[?25h\\033[?1049l%s\\n" "$0"'


class Picture:
    """Takes the terminal over: frames on its alternate screen, all other output into `log`.

    `frame(width, height)` returns the lines to paint; it is called in a thread of its own. A child process prints
    `last_words` if this one dies without restoring the terminal.
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
        """Paint one frame, if this process is in front on the terminal."""
        if not in_front(self._terminal):
            self._entered = False
            return
        picture = self._encode(self._frame(*size_of(self._terminal)))
        with self._lock:
            if not self._closed:
                self._write(picture if self._entered else ENTER + picture)
                self._entered = True

    def close(self) -> None:
        """Restore the terminal, stdout and stderr; a second call does nothing."""
        if self._closed:
            return
        self._ticker.stop()
        with self._lock:
            self._closed = True
            with contextlib.suppress(OSError):  # there may be no terminal any more
                self._leave()
        if self._previous is not None:
            signal.signal(signal.SIGTSTP, self._previous)
        with contextlib.suppress(OSError):  # the last output may not have fitted into the log
            self._opened.close()

    def leave_at_once(self, last_words: bytes) -> None:
        """Restore the terminal and write `last_words`, in a signal's handler and just before the process ends."""
        held = self._lock.acquire(timeout=1)  # a frame in writing may hold it, or the code that the signal interrupted
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
        """On Ctrl-Z restore the terminal and stop; the next frame after `fg` takes it again."""
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
        """Put each line at its place, even if the terminal measures other lines differently; nothing wraps."""
        with self._styles.capture() as styled:
            self._styles.print(Text("\n").join(lines), soft_wrap=True)
        rows = styled.get().removesuffix("\n").split("\n")
        placed = "".join(f"\x1b[{i};1H{row}\x1b[K" for i, row in enumerate(rows, 1))
        return f"\x1b[?7l{placed}\x1b[J\x1b[1;1H\x1b[?7h".encode()

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._terminal, data) :]


# What stays of it

STEPS = 12  # most lines of steps
FIRST, LAST = 20, 80  # how many of all other lines, from their beginning and their end
Line = tuple[str, str]  # text and style


class Record:
    """A bounded record of lines in order: of steps every n-th and the last, of other lines the first and the last."""

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
        """Add a line that is not a step's."""
        entry = (next(self._serial), (text, style))
        if len(self._first) < FIRST:
            self._first.append(entry)
        else:
            self._last.append(entry)
        self._num_others += 1

    def add_step(self, text: str) -> None:
        """Add the line of the next step."""
        self._latest_step = (next(self._serial), (text, ""))
        if self._num_steps % self._every == 0:
            self._steps.append(self._latest_step)
        self._num_steps += 1
        if len(self._steps) > STEPS:
            self._steps = self._steps[::2]
            self._every *= 2

    def lines(self) -> list[Line]:
        """The kept lines, and how many are missing."""
        entries = {*self._first, *self._last, *self._steps}
        if self._latest_step is not None:
            entries.add(self._latest_step)
        lines = [line for _, line in sorted(entries)]
        missing = self._num_others - len(self._first) - len(self._last)
        if missing:
            lines.append((f"{missing} more lines are in the run's log.txt", "dim"))
        return lines
