"""The terminal of a training: plain lines, or a live picture that is followed by the lines worth keeping."""

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
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.text import Text

from rlpost.output import (
    Heartbeat,
    WaitingLine,
    in_front,
    lead_nowhere,
    leave_dead_terminals,
    size_of,
    where_it_leads,
)
from rlpost.record import legend
from rlpost.screen.state import STOPPING, WIDTH, Figures, Shown, State, clock, evaluation_line, sample_lines, step_line
from rlpost.text import one_line, printable, wrapped

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from rlpost.screen.picture import Picture

SAMPLE_EVERY = 10  # steps
NOTE = "yellow"
STEPS = 12  # most lines of steps that are printed after the picture


class Line(NamedTuple):
    """A line to print after the picture."""

    text: str
    style: str = ""
    is_step: bool = False


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
        self._lines: list[Line] = []  # to print when the picture ends
        self._lock = threading.Lock()  # guards the state, which another thread draws
        self._heartbeat: Heartbeat | None = None  # of a training without a picture
        self._answers_to = 2  # the descriptor for the answer to a signal
        self._log: Path | None = None  # takes the lines too, from `open` to `end`
        self._explained = False  # whether the words of the steps' lines were

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
        self._say(Line(text, style), text)

    def note(self, text: str, *, is_logged: bool = False) -> None:
        """Show a warning, in the picture too; `is_logged` if the log has it already."""
        with self._lock:
            self.state.notes.append(text)
        self._say(Line(text, NOTE), None if is_logged else text)

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

    def open(self, *, title: str, about: str, total_steps: int, log: Path, plan: Sequence[str] = ()) -> None:
        """Begin the picture, if the terminal takes one; other output of this process then goes into `log`.

        It shows the lines of `plan` until the first step is done.
        """
        self._log = log
        with self._lock:
            self.state.title, self.state.about = one_line(title, WIDTH), one_line(about, WIDTH)
            self.state.total, self.state.plan = total_steps, plan
        if self._descriptor is not None:
            from rlpost.screen.picture import Picture

            self._picture = Picture(self._descriptor, self._frame, log=log)
        else:
            self._heartbeat = Heartbeat(self._progress_line, self._print)
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
        return "" if self.state.phase is None else str(self.state.phase)

    def phase(
        self, kind: str, what: str = "", done: int | None = None, total: int | None = None, tokens: int | None = None
    ) -> None:
        """Enter the phase of doing `kind` (a verb) to `what`, or update how much of it is done.

        `tokens` is the number sampled in it so far.
        """
        with self._lock:
            self.state.begin_phase(kind, what, done, total, tokens)

    def step(self, step: int, total: int, metrics: Mapping[str, float], batch: TensorDictBase | None) -> None:
        """Show a finished step: its metrics and its first completion."""
        samples = [] if batch is None else Shown.some_of(step, batch)
        with self._lock:
            self.state.total = total
            self.state.end_step(step, metrics, samples)
            left = self.state.left()
        remaining = "-" if left is None else clock(left)
        whole = step_line(step, total, metrics, remaining)
        if not self._explained:
            self._explained = True
            for i, row in enumerate(wrapped(legend(whole), min(WIDTH, self._width() or WIDTH) - 8)):
                self.line(f"{'' if i else 'words':<8}{row}".rstrip(), "dim")
        self._say(Line(step_line(step, total, metrics, remaining, width=self._width()), is_step=True), whole)
        if samples and self._picture is None and (step == 1 or step % SAMPLE_EVERY == 0):
            for each in sample_lines(samples[0]):
                self._print(each, "dim")

    def evaluated(self, step: int, metrics: Figures) -> None:
        """Show the evaluation after `step`; 0: before training."""
        with self._lock:
            self.state.end_evaluation(step, metrics)
        self.line(evaluation_line(metrics, f"after step {step}" if step else "before training"))

    def show_stopping(self, answer: str = STOPPING) -> None:
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
            with contextlib.suppress(OSError):
                self._picture.leave(f"{last_words}\n".encode())

    def end(self) -> None:
        """End the picture and print the lines worth keeping; a second call does nothing."""
        if self._heartbeat is not None:
            self._heartbeat.__exit__()
            self._heartbeat = None
        picture, self._picture, self._log = self._picture, None, None
        if picture is not None:
            picture.close()
            leave_dead_terminals()
            for line in worth_keeping(self._lines):
                self._print(line.text, line.style)

    def _width(self) -> int | None:
        """Columns of a line; None: no limit."""
        if self._descriptor is not None:
            return size_of(self._descriptor)[0] if self._picture is None else self._picture.width
        return self.console.width if self.console.is_terminal else None

    def _frame(self, width: int, height: int) -> Sequence[Text]:
        from rlpost.screen.picture import frame

        with self._lock:
            return frame(self.state, width, height)

    def _say(self, line: Line, logged: str | None) -> None:
        """Print `line`, or keep it until the picture ends; and put `logged` into the log."""
        if self._picture is None:
            self._print(line.text, line.style)
        else:
            self._lines.append(line)
        if self._log is not None and logged is not None:
            # on a full disk the run ends when it writes its metrics, with advice
            with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as log:
                print(printable(logged), file=log)

    def _print(self, text: str, style: str = "") -> None:
        shown = printable(text).encode(self.console.encoding, "backslashreplace").decode(self.console.encoding)
        if (width := self._width()) and (style or "rlpost " not in shown):  # a command is copied whole
            shown = "\n".join(row.rstrip() for line in shown.split("\n") for row in wrapped(line, width))
        if self._heartbeat is not None:
            self._heartbeat.restart()
        try:
            self.console.print(Text(shown, style=style))
        except OSError as error:
            # the terminal was closed, or the reader was stopped together with this process: go on without
            if error.errno != errno.EIO and not (self.state.stopping and error.errno == errno.EPIPE):
                raise
            leave_dead_terminals()

    def _progress_line(self) -> str:
        with self._lock:
            return self.state.progress_line()


def worth_keeping(lines: Sequence[Line]) -> list[Line]:
    """Every n-th and the last of the steps' lines, and all others."""
    steps = [i for i, line in enumerate(lines) if line.is_step]
    kept = {*steps[:: 1 + len(steps) // STEPS], *steps[-1:]}
    return [line for i, line in enumerate(lines) if i in kept or not line.is_step]


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
