"""The terminal of a training, as the loop and the run see it."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from rlpost.folding import one_line
from rlpost.heartbeat import Heartbeat, WaitingLine
from rlpost.output import lead_nowhere, leave_dead_terminals, size_of, where_it_leads
from rlpost.screen.lines import STOPPING, WIDTH, clock, evaluation_line, sample_lines, step_line
from rlpost.screen.shown import Shown
from rlpost.screen.state import Figures, State
from rlpost.text import printable

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from rlpost.screen.layout import Layout
    from rlpost.screen.record import Record
    from rlpost.screen.terminal import Picture

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
            from rlpost.screen.record import Record

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
            from rlpost.screen.terminal import Picture

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
    from rlpost.screen.terminal import takes_pictures

    return descriptor if takes_pictures(descriptor) else None
