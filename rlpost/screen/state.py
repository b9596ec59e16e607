"""What the screen knows of a training: how far it is, what it does now, and what the steps so far said."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from rlpost.heartbeat import Pace
from rlpost.screen.curves import Series
from rlpost.screen.lines import tokens_per_second
from rlpost.screen.shown import Shown

RECENT = 8  # steps that the time left is estimated from
NOTES = 20  # remembered for the picture
CURVES = (
    "reward/mean",
    "accuracy/lenient",
    "loss/sft",
    "completion/tokens_mean",
    "sampler/logprob_gap",
    "entropy",
    "grad_norm",
)
SPEED = "tokens/second"

Figures = Mapping[str, float | None]  # of a step, by their names in metrics.jsonl; None is no number


@dataclass
class Phase(Pace):
    """What is being done, since when, and how much of it is done where that can be counted."""

    kind: str = ""
    what: str = ""


@dataclass
class State:
    """Everything the picture is drawn from; `revision` rises with whatever is not merely the clock."""

    now: Callable[[], float] = time.monotonic
    title: str = ""
    about: str = ""
    started: float = field(init=False)
    total: int = 0  # steps
    done: int = 0
    phase: Phase | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # of finished phases, by kind
    latest: dict[str, float] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # the first and the latest
    sample: Shown | None = None
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=NOTES))
    stopping: str = ""  # what a signal was answered with
    revision: int = 0
    _step_started: float | None = None
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def __post_init__(self) -> None:
        self.started = self.now()

    def begin(self, done: int, total: int, recorded: Iterable[tuple[int, Figures]] = ()) -> None:
        """Steps up to `done` were done before; `recorded` is everything that was said so far."""
        self.done, self.total = done, total
        self.series, self.evaluations = {}, []
        for step, metrics in recorded:
            self._remember(step, metrics)

    def begin_step(self) -> None:
        """A step begins now."""
        self._step_started = self.now()

    def begin_phase(
        self,
        kind: str,
        what: str = "",
        done: int | None = None,
        total: int | None = None,
        tokens: int | None = None,
    ) -> None:
        """From now on `kind` is being done; the same kind again tells how far it is."""
        now = self.now()
        if self.phase is None or self.phase.kind != kind:
            self._end_phase(now)
            self.phase = Phase(now, kind=kind)
            self.revision += 1
        self.phase.what = what
        self.phase.count(now, done, total, tokens)

    def end_step(self, step: int, metrics: Figures, sample: Shown | None) -> None:
        """`step` is done; step 0 is the evaluation before training."""
        self._remember(step, metrics)
        self.done = step
        if (seconds := metrics.get("time/step")) is not None:
            self._recent.append(seconds)
        self._step_started = None
        self.sample = sample or self.sample

    def end_evaluation(self, step: int, metrics: Figures) -> None:
        """What the evaluation after `step` found."""
        found = {name: value for name, value in metrics.items() if value is not None}
        self.evaluations = [*self.evaluations[:1], (step, found)]
        self.revision += 1

    def add_note(self, text: str) -> None:
        """Something that wants attention."""
        self.notes.append(text)
        self.revision += 1

    def under_way(self) -> str:
        """What is being done, how far it is and how fast, on one line; empty before anything is."""
        phase = self.phase
        if phase is None:
            return ""
        where = "" if self._step_started is None else f"step {self.done + 1}: "
        if phase.total is not None and phase.what == f"{phase.total} completions":  # 40 of 64 completions
            return phase.line(f"{where}{phase.kind}", self.now(), " completions")
        return phase.line(f"{where}{phase.kind} {phase.what}".rstrip(), self.now())

    def left(self) -> float | None:
        """Seconds until the last step is done, at the pace of the last few; None before the first.

        Evaluations, checkpoints and the start are not part of the pace.
        """
        if not self._recent:
            return None
        each = fmean(self._recent)
        spent = 0.0 if self._step_started is None else min(each, self.now() - self._step_started)
        return each * (self.total - self.done) - spent

    def step_seconds(self) -> float | None:
        """The pace of the last few steps."""
        return fmean(self._recent) if self._recent else None

    def _end_phase(self, now: float) -> None:
        if self.phase is not None:
            kind = self.phase.kind
            self.seconds[kind] = self.seconds.get(kind, 0.0) + now - self.phase.since

    def _remember(self, step: int, metrics: Figures) -> None:
        self.revision += 1
        found = {name: value for name, value in metrics.items() if value is not None}
        if any(name.startswith("eval/") for name in found):
            self.end_evaluation(step, found)
        if step == 0:
            return
        speed = tokens_per_second(found)
        self.latest = found if speed is None else {**found, SPEED: speed}
        for name in CURVES:
            if name in metrics:
                self.series.setdefault(name, Series()).add(found.get(name, math.nan))
