"""The terminal: what runs, how far it is, and now and then what the model says."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from rlpost.text import printable

if TYPE_CHECKING:
    from tensordict import TensorDictBase

SAMPLE_EVERY = 10  # steps
RECENT = 8  # steps that the time left is estimated from


class Screen:
    """Lines that stay and, on a terminal, a progress bar under them.

    Without a terminal, with `NO_COLOR` or `TERM=dumb` there are plain lines only. Model text is
    printed as text: control characters shown, markup inert.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.live = self.console.is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._progress: Progress | None = None
        self._bar = None
        self._recent: list[float] = []  # when the last steps ended

    def line(self, text: str, style: str = "") -> None:
        """One line that stays."""
        shown = Text(printable(text), style=style if self.live else "")
        (self._progress.console if self._progress else self.console).print(shown)

    def note(self, text: str) -> None:
        """A line that wants attention."""
        self.line(text, "yellow")

    def begin(self, done: int, total: int) -> None:
        """Start the progress bar; steps up to `done` were done before."""
        self._recent = [time.monotonic()]
        if not self.live:
            return
        self._progress = Progress(
            TextColumn("  training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            transient=True,
        )
        self._bar = self._progress.add_task("training", total=total, completed=done, left="")
        self._progress.start()

    def end(self) -> None:
        """Take the progress bar away."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = None

    def step(self, step: int, total: int, metrics: Mapping[str, float], batch: TensorDictBase | None) -> None:
        """One line for a finished step, and a sample completion every few."""
        left = self._time_left(total - step)
        if batch is not None:
            self.line(step_line(step, total, metrics, left))
            if step == 1 or step % SAMPLE_EVERY == 0:
                self.sample(batch)
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, completed=step, left=f"{left} left")

    def sample(self, batch: TensorDictBase) -> None:
        """The first completion of a batch, with what was asked and what it earned."""
        reward = batch["next", "reward"][0].item()
        self.line(f"    {batch['query'][0]}", "cyan")
        for part in str(batch["text", "response"][0]).splitlines()[:8] or [""]:
            self.line(f"    | {part}", "dim")
        self.line(f"    reward {reward:g}, {batch['finish_reason'][0]}", "dim")

    def _time_left(self, steps: int) -> str:
        self._recent = [*self._recent[-RECENT:], time.monotonic()]
        each = (self._recent[-1] - self._recent[0]) / max(1, len(self._recent) - 1)
        return clock(each * steps)


def step_line(step: int, total: int, metrics: Mapping[str, float], left: str) -> str:
    """A step's figures on one line of about 100 columns."""
    accuracy = metrics.get("accuracy/lenient", math.nan)
    parts = [
        f"step {step:>{len(str(total))}}/{total}",
        f"reward {metrics['reward/mean']:.2f}",
        "" if math.isnan(accuracy) else f"accuracy {accuracy:4.0%}",
        f"tokens {metrics['completion/tokens_mean']:.0f}",
        _optional("gap {:.3f}", metrics.get("sampler/logprob_gap")),
        _optional("grad {:.2f}", metrics.get("grad_norm")),
        f"{metrics['tokens/generated'] / max(metrics['time/rollout'], 1e-9):.0f} tok/s",
        f"rollout {metrics['time/rollout']:.1f}s train {metrics['time/train']:.1f}s",
        f"left {left}",
    ]
    return "  ".join(part for part in parts if part)


def _optional(form: str, value: float | None) -> str:
    return "" if value is None or math.isnan(value) else form.format(value)


def clock(seconds: float) -> str:
    """65 -> 1:05, 3700 -> 1:01:40."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


@contextmanager
def output_into(file: Path) -> Iterator[None]:
    """Send everything written to stdout and stderr meanwhile, by C++ and subprocesses too, to `file`."""
    with file.open("a") as sink:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = [os.dup(1), os.dup(2)]
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
