"""The screen's content: the state of a training, and the plain lines of steps and evaluations."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from rlpost.output import Pace
from rlpost.record import (
    ACCURACY,
    DECIDING,
    LOSS,
    MARGIN,
    OF_ROWS,
    PAIR_ACCURACY,
    REWARD,
    has_evaluation,
    interval,
    trained_loss,
)
from rlpost.text import counted, fold

if TYPE_CHECKING:
    from tensordict import TensorDictBase

WIDTH = 100  # columns of a plain line
SAMPLE_LINES = 8
SAMPLES = 8  # most completions of a step that the picture has to choose from
RECENT = 8  # steps from which the time left is estimated
NOTES = 4  # most notes kept for the picture
AGAIN = "Ctrl-C again leaves at once"
STOPPING = f"stopping: this step is finished and saved first; {AGAIN}"
Figures = Mapping[str, float | None]  # a step's metrics by their names in metrics.jsonl; None: not a finite number
SPEED = "tokens/second"


class Figure(NamedTuple):
    """A metric's label and format, and how its curve is drawn, if it is."""

    label: str
    form: str
    scale: str = "{:.3g}"  # at the axis of its curve
    colour: str = ""  # of its curve; empty: it is not drawn as one
    from_zero: bool = False


FIGURES = {
    "reward/mean": Figure("reward", "{:.2f}", colour="green", from_zero=True),
    "accuracy/lenient": Figure("accuracy", "{:.0%}", "{:.0%}", "cyan", from_zero=True),
    "loss/dpo": Figure("loss", "{:.3f}", colour="green"),
    "pair_accuracy": Figure("pairs", "{:.0%}", "{:.0%}", "cyan", from_zero=True),
    "loss/sft": Figure("loss", "{:.3f}", colour="green"),
    "loss/distill": Figure("loss", "{:.3f}", colour="blue"),
    "completion/tokens_mean": Figure("tokens", "{:.1f}", colour="magenta"),
    "sampler/logprob_gap": Figure("gap", "{:.3f}", colour="yellow"),
    SPEED: Figure("tok/s", "{:.0f}"),
    "grad_norm": Figure("grad", "{:.2f}", colour="red"),
    "entropy": Figure("entropy", "{:.2f}", colour="blue"),
    "groups/zero_std": Figure("no spread", "{:.0%}"),
    "selected/share": Figure("selected", "{:.0%}"),
    "epoch": Figure("epoch", "{:.2f}"),
    "completion/truncated": Figure("truncated", "{:.0%}"),
    "kl/ref": Figure("kl to ref", "{:.4f}"),
    "kl/teacher": Figure("kl to teacher", "{:.4f}"),
    "ratio/clip_fraction": Figure("clipped", "{:.1%}"),
    "lr": Figure("lr", "{:.2g}"),
    "reward/std": Figure("reward sd", "{:.2f}"),
    "policy/version": Figure("version", "{:.0f}"),
    "policy/lag_mean": Figure("lag", "{:.1f}"),
    "memory/peak_gb": Figure("memory", "{:.1f} GB"),
    "ess": Figure("ess", "{:.2f}"),
}


@dataclass
class Phase(Pace):
    """The current work, its beginning, and how much of it is done if that can be counted."""

    kind: str = ""
    what: str = ""

    def __str__(self) -> str:
        extent = f" {self.done or 0} of {self.total}" if self.total is not None else ""
        return f"{self.kind} {self.what}".strip() + extent


@dataclass
class State:
    """The state of a training while it runs."""

    now: Callable[[], float] = time.monotonic
    title: str = ""
    about: str = ""
    plan: Sequence[str] = ()  # lines on the model, the data and the work
    started: float = field(init=False)
    total: int = 0  # steps
    done: int = 0
    phase: Phase | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # of finished phases, by kind; `loading` comes first
    latest: dict[str, float] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)  # for curves; NaN for a step without a number
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # the first and the latest
    samples: Sequence[Shown] = ()  # of the last step that had any
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=NOTES))
    stopping: str = ""  # the answer to a signal
    _step_started: float | None = None
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def __post_init__(self) -> None:
        self.started = self.now()

    def begin(self, done: int, total: int, recorded: Iterable[tuple[int, Figures]] = ()) -> None:
        """Begin after step `done`; `recorded` are the metrics so far, with their steps."""
        self.done, self.total = done, total
        self.series, self.evaluations = {}, []
        for step, metrics in recorded:
            self._remember(step, metrics)

    def begin_step(self) -> None:
        """Note that a step begins."""
        self._step_started = self.now()

    def begin_phase(
        self, kind: str, what: str = "", done: int | None = None, total: int | None = None, tokens: int | None = None
    ) -> None:
        """Enter the phase `kind`, or, in the same phase, update how far it is."""
        now = self.now()
        if self.phase is None or self.phase.kind != kind:
            self.seconds = self.spent(now)
            self.phase = Phase(now, kind=kind)
        self.phase.what, self.phase.done, self.phase.total, self.phase.tokens = what, done, total, tokens

    def spent(self, now: float) -> dict[str, float]:
        """Seconds by kind of phase until `now`, the current one included; together the time since the beginning."""
        kind, since = ("loading", self.started) if self.phase is None else (self.phase.kind, self.phase.since)
        return {**self.seconds, kind: self.seconds.get(kind, 0.0) + now - since}

    def end_step(self, step: int, metrics: Figures, samples: Sequence[Shown] = ()) -> None:
        """Note that `step` is done; step 0 is the evaluation before training."""
        self._remember(step, metrics)
        self.done = step
        if (seconds := metrics.get("time/step")) is not None:
            self._recent.append(seconds)
        self._step_started = None
        self.samples = samples or self.samples

    def end_evaluation(self, step: int, metrics: Figures) -> None:
        """Keep the metrics of the evaluation after `step`."""
        self.evaluations = [*self.evaluations[:1], (step, _numbers(metrics))]

    def progress_line(self) -> str:
        """The current phase, how far it is and how fast, on one line; empty before the first phase."""
        phase = self.phase
        if phase is None:
            return ""
        where = "" if self._step_started is None else f"step {self.done + 1}: "
        if phase.total is not None and phase.what == f"{phase.total} completions":  # 40 of 64 completions
            return phase.line(f"{where}{phase.kind}", self.now(), " completions")
        return phase.line(f"{where}{phase.kind} {phase.what}".rstrip(), self.now())

    def left(self) -> float | None:
        """Seconds until the last step is done, at the pace of the last few steps; None before the first.

        The pace leaves out evaluations, checkpoints and the start.
        """
        each = self.step_seconds()
        if each is None:
            return None
        spent = 0.0 if self._step_started is None else min(each, self.now() - self._step_started)
        return each * (self.total - self.done) - spent

    def step_seconds(self) -> float | None:
        """Mean seconds of the last few steps."""
        return fmean(self._recent) if self._recent else None

    def _remember(self, step: int, metrics: Figures) -> None:
        if has_evaluation(metrics):
            self.end_evaluation(step, metrics)
        if step == 0:
            return
        self.latest = _numbers(metrics)
        for name, figure in FIGURES.items():
            if figure.colour and name in metrics:
                self.series.setdefault(name, []).append(self.latest.get(name, math.nan))


def _numbers(metrics: Figures) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None}


@dataclass(frozen=True)
class Shown:
    """One completion of a batch as people read it; a failed reward is None, and NaN where nothing gives one."""

    step: int
    prompt: str
    completion: str
    reward: float | None
    reward_parts: dict[str, float]
    finish_reason: str
    rank: str = ""  # best or worst of the step; empty for any other

    @classmethod
    def some_of(cls, step: int, batch: TensorDictBase) -> list[Shown]:
        """Completions of a step's batch: the first; the best and the worst, if it is neither; then others."""
        count = batch.batch_size[0]
        valid, rewards = batch["valid"].flatten().tolist(), batch["next", "reward"].flatten().tolist()
        earned = {i: rewards[i] for i in range(count) if valid[i] and not math.isnan(rewards[i])}
        chosen = {0: ""}
        ordered = sorted(earned, key=earned.__getitem__)
        for rank, i in (("best", ordered[-1]), ("worst", ordered[0])) if earned else ():
            if earned[i] != earned.get(0):
                chosen[i] = rank
        for i in range(0, count, -(-count // SAMPLES)):
            chosen.setdefault(i, "")
        return [cls._of(step, batch, i, rank) for i, rank in list(chosen.items())[:SAMPLES]]

    @classmethod
    def _of(cls, step: int, batch: TensorDictBase, i: int, rank: str) -> Shown:
        parts = {name: values[i].item() for name, values in batch["next", "reward_parts"].items()}
        return cls(
            step=step,
            prompt=str(batch["query"][i]),
            completion=str(batch["text", "response"][i]),
            reward=batch["next", "reward"][i].item() if batch["valid"][i] else None,
            reward_parts={name: value for name, value in parts.items() if not math.isnan(value)},
            finish_reason=str(batch["finish_reason"][i]),
            rank=rank,
        )

    @property
    def verdict(self) -> str:
        """The reward and finish reason: `reward 1.1 (correct 1, format 0.1), stop`."""
        if self.reward is None:
            return f"reward failed, {self.finish_reason}"
        if math.isnan(self.reward):
            return self.finish_reason
        parts = ", ".join(f"{name} {value:.3g}" for name, value in self.reward_parts.items())
        return f"reward {self.reward:.3g}" + (f" ({parts})" if parts else "") + f", {self.finish_reason}"


# Plain lines: for a pipe, a dumb terminal, the log, and the end of the live picture


def step_line(step: int, total: int, metrics: Mapping[str, float], left: str, *, width: int | None = None) -> str:
    """A step's metrics on one line; the most important ones if `width` columns do not hold all."""
    beside = "time/wait" in metrics  # collector=async: sampling goes on while the model is trained
    names = ("wait", "train", "idle") if beside else ("rollout", "train")
    seconds = [_figure(name + " {:.1f}s", metrics.get(f"time/{name}")) for name in names]
    if "time/rollout" not in metrics:  # nothing was sampled
        seconds = [_figure("{:.1f}s", metrics.get("time/step"))]
    parts = {
        "step": f"step {step:>{len(str(total))}}/{total}",
        "reward": _figure("reward {:.2f}", metrics.get("reward/mean")),
        "loss": _figure("loss {:.3f}", trained_loss(metrics)),
        "accuracy": _figure("accuracy {:4.0%}", metrics.get("accuracy/lenient")),
        "pairs": _figure("pairs {:3.0%}", metrics.get("pair_accuracy")),
        "selected": _figure("selected {:.0%}", metrics.get("selected/share")),
        "tokens": _figure("tokens {:.0f}", metrics.get("completion/tokens_mean")),
        "epoch": _figure("epoch {:.2f}", metrics.get("epoch")),
        "lag": _figure("lag {:.1f}", metrics.get("policy/lag_mean")) if beside else "",
        "ess": _figure("ess {:.2f}", metrics.get("sampler/ess")) if beside else "",
        "gap": _figure("gap {:.3f}", metrics.get("sampler/logprob_gap")),
        "grad": _figure("grad {:.2f}", metrics.get("grad_norm")),
        "speed": _figure("{:.0f} tok/s", tokens_per_second(metrics)),
        "seconds": " ".join(filter(None, seconds)),
        "left": f"left {left}",
    }
    dispensable = ["seconds", "grad", "speed", "gap", "ess", "epoch", "tokens", "lag", "left", "selected"]
    while width is not None and len(_joined(parts)) > width and dispensable:
        del parts[dispensable.pop(0)]
    return _joined(parts)


def evaluation_line(metrics: Mapping[str, float | None], when: str) -> str:
    """An evaluation on one line, with 95% intervals and the number of prompts; missing measures are left out."""
    prompts, failed, truncated = (metrics.get(f"eval/{name}") for name in ("prompts", "failed", "truncated"))
    count = None if prompts is None else round(prompts)
    measured = {"loss": LOSS, "pairs": PAIR_ACCURACY, "margin": MARGIN, "accuracy": ACCURACY, "reward": REWARD}
    measured["deciding"] = f"{DECIDING}accuracy_lenient"
    if measured["deciding"] not in metrics:
        measured["deciding"] = f"{DECIDING}reward"
    found = {name: interval(metrics, key) for name, key in measured.items()}
    figures_by_name = {
        name: f"{name} {each.as_text('row' if measured[name] in OF_ROWS else 'prompt', shown=count)}"
        for name, each in found.items()
        if each is not None
    }
    figures = [
        *figures_by_name.values(),
        _figure("tokens {:.0f}", metrics.get("eval/tokens_mean")),
        _figure("truncated {:.0%}", truncated) if truncated else "",
        f"{counted(round(failed), 'reward')} failed" if failed else "",
    ]
    on = "" if count is None else f", {counted(count, 'prompt')}"
    return f"held-out {when}{on}:  " + "  ".join(figure for figure in figures if figure)


def sample_lines(sample: Shown) -> list[str]:
    """A completion on at most a dozen plain lines."""
    prompt = fold(sample.prompt, WIDTH - 4, 2)
    body = fold(sample.completion, WIDTH - 6, SAMPLE_LINES)
    return [*(f"    {line}" for line in prompt), *(f"    | {line}" for line in body), f"    {sample.verdict}"]


def tokens_per_second(metrics: Mapping[str, float]) -> float | None:
    """Tokens a second sampled in the step, or read if it only trained; over the whole step if both go on at once."""
    beside = "time/wait" in metrics
    tokens, seconds = metrics.get("tokens/generated"), metrics.get("time/step" if beside else "time/rollout")
    if tokens is None:
        tokens, seconds = metrics.get("tokens/read"), metrics.get("time/step")
    return None if tokens is None or seconds is None else tokens / max(seconds, 1e-9)


def clock(seconds: float) -> str:
    """65 -> 1:05, 3700 -> 1:01:40."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _joined(parts: Mapping[str, str]) -> str:
    return "  ".join(filter(None, parts.values()))


def _figure(form: str, value: float | None) -> str:
    return "" if value is None or math.isnan(value) else form.format(value)
