"""What a training shows: its state, the plain lines of steps and evaluations, and the picture drawn from the state.

`Layout` draws frames for a terminal of any size: curves of the metrics over all steps, kept in bounded memory, the
latest values, the split of the time, and one completion.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from rich.text import Text

from rlpost.output import Pace
from rlpost.record import ACCURACY, DECIDING, LOSS, REWARD, interval, main_figure
from rlpost.text import counted, fold, one_line

if TYPE_CHECKING:
    from tensordict import TensorDictBase

WIDTH = 100  # columns of a plain line
SAMPLE_LINES = 8
AGAIN = "Ctrl-C again leaves at once"
STOPPING = f"stopping: this step is finished and saved first; {AGAIN}"
Figures = Mapping[str, float | None]  # a step's metrics by their names in metrics.jsonl; None: not a finite number


# What the screen knows of a training

RECENT = 8  # steps from which the time left is estimated
NOTES = 20  # most notes kept for the picture
SPEED = "tokens/second"
CURVES = (
    "reward/mean",
    "accuracy/lenient",
    "loss/sft",
    "completion/tokens_mean",
    "sampler/logprob_gap",
    "entropy",
    "grad_norm",
)


@dataclass
class State:
    """Everything that the picture shows; `revision` rises with each change except that of the clock."""

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
    stopping: str = ""  # the answer to a signal
    revision: int = 0
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
        self,
        kind: str,
        what: str = "",
        done: int | None = None,
        total: int | None = None,
        tokens: int | None = None,
    ) -> None:
        """Enter the phase `kind`, or, in the same phase, update how far it is."""
        now = self.now()
        if self.phase is None or self.phase.kind != kind:
            self._end_phase(now)
            self.phase = Phase(now, kind=kind)
            self.revision += 1
        self.phase.what = what
        self.phase.count(now, done, total, tokens)

    def end_step(self, step: int, metrics: Figures, sample: Shown | None) -> None:
        """Note that `step` is done; step 0 is the evaluation before training."""
        self._remember(step, metrics)
        self.done = step
        if (seconds := metrics.get("time/step")) is not None:
            self._recent.append(seconds)
        self._step_started = None
        self.sample = sample or self.sample

    def end_evaluation(self, step: int, metrics: Figures) -> None:
        """Keep the metrics of the evaluation after `step`."""
        found = {name: value for name, value in metrics.items() if value is not None}
        self.evaluations = [*self.evaluations[:1], (step, found)]
        self.revision += 1

    def add_note(self, text: str) -> None:
        """Keep a warning."""
        self.notes.append(text)
        self.revision += 1

    def under_way(self) -> str:
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
        if not self._recent:
            return None
        each = fmean(self._recent)
        spent = 0.0 if self._step_started is None else min(each, self.now() - self._step_started)
        return each * (self.total - self.done) - spent

    def step_seconds(self) -> float | None:
        """Mean seconds of the last few steps."""
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


@dataclass
class Phase(Pace):
    """The current work, its beginning, and how much of it is done if that can be counted."""

    kind: str = ""
    what: str = ""


@dataclass(frozen=True)
class Shown:
    """One completion of a batch as people read it; a failed reward is None, as is a missing accuracy."""

    step: int
    prompt: str
    completion: str
    reward: float | None
    reward_parts: dict[str, float]
    finish_reason: str
    accuracy_strict: float | None
    accuracy_lenient: float | None

    @classmethod
    def first_of(cls, step: int, batch: TensorDictBase) -> Shown:
        """The first completion of a step's batch."""
        parts = {name: values[0].item() for name, values in batch["next", "reward_parts"].items()}
        return cls(
            step=step,
            prompt=str(batch["query"][0]),
            completion=str(batch["text", "response"][0]),
            reward=batch["next", "reward"][0].item() if batch["valid"][0] else None,
            reward_parts={name: value for name, value in parts.items() if not math.isnan(value)},
            finish_reason=str(batch["finish_reason"][0]),
            accuracy_strict=_measured(batch["next", "accuracy_strict"][0].item()),
            accuracy_lenient=_measured(batch["next", "accuracy_lenient"][0].item()),
        )


def _measured(value: float) -> float | None:
    return None if math.isnan(value) else value


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
        "loss": _figure("loss {:.3f}", metrics.get("loss/sft")),
        "accuracy": _figure("accuracy {:4.0%}", metrics.get("accuracy/lenient")),
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
    measured = {"loss": LOSS, "accuracy": ACCURACY, "reward": REWARD, "deciding": f"{DECIDING}accuracy_lenient"}
    if measured["deciding"] not in metrics:
        measured["deciding"] = f"{DECIDING}reward"
    found = {name: interval(metrics, key) for name, key in measured.items()}
    told = {
        name: f"{name} {each.told('row' if name == 'loss' else 'prompt', said=count)}"
        for name, each in found.items()
        if each is not None
    }
    figures = [
        *told.values(),
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
    return [*(f"    {line}" for line in prompt), *(f"    | {line}" for line in body), f"    {_verdict(sample)}"]


def _verdict(sample: Shown) -> str:
    """A completion's reward and finish reason: `reward 1.1 (correct 1, format 0.1), stop`."""
    if sample.reward is None:
        return f"reward failed, {sample.finish_reason}"
    parts = ", ".join(f"{name} {value:.3g}" for name, value in sample.reward_parts.items())
    return f"reward {sample.reward:.3g}" + (f" ({parts})" if parts else "") + f", {sample.finish_reason}"


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


# The picture

HINT = "Ctrl-C finishes the step, saves and stops"
HINT_EVALUATING = "Ctrl-C abandons the evaluation, saves and stops"
ROOMY, TALL = 20, 36  # lines from which there are empty lines between the parts, and larger curves
ROOM_FOR_PACE = 60  # columns from which the pace is shown
GAP = 3  # columns between curves
SCALE = 6  # columns of a curve's scale
LEGEND = 88  # columns of the longest legend of the time, in which each kind takes tens of percent
ROOM_FOR_LEGEND = 70  # columns for a legend with all but the smallest shares
CELL = 20  # columns of a value with its label
TURNS = {  # kind of phase -> its name, its colour, and its fill without colour
    "sampling": ("rollout", "cyan", "█"),
    "scoring": ("reward", "magenta", "▓"),
    "training": ("train", "green", "▒"),
    "pushing weights": ("sync", "yellow", "▚"),
    "evaluating": ("eval", "blue", "░"),
    "saving checkpoint": ("save", "red", "▞"),
}
OTHER = ("other", "dim", "·")


@dataclass(frozen=True)
class Figure:
    """A metric's label and format."""

    label: str
    form: str
    scale: str = "{:.3g}"  # at the axis of its curve
    colour: str = "cyan"
    from_zero: bool = False  # drawn as the area over 0 rather than as a line


FIGURES = {
    "reward/mean": Figure("reward", "{:.2f}", colour="green", from_zero=True),
    "accuracy/lenient": Figure("accuracy", "{:.0%}", "{:.0%}", "cyan", from_zero=True),
    "loss/sft": Figure("loss", "{:.3f}", colour="green"),
    "completion/tokens_mean": Figure("length", "{:.1f} tok", colour="magenta"),
    "sampler/logprob_gap": Figure("gap", "{:.3f}", colour="yellow"),
    SPEED: Figure("tok/s", "{:.0f}"),
    "grad_norm": Figure("grad norm", "{:.2f}", colour="red"),
    "entropy": Figure("entropy", "{:.2f}", colour="blue"),
    "groups/zero_std": Figure("zero std", "{:.0%}"),
    "selected/share": Figure("selected", "{:.0%}"),
    "epoch": Figure("epoch", "{:.2f}"),
    "completion/truncated": Figure("truncated", "{:.0%}"),
    "kl/ref": Figure("kl to ref", "{:.4f}"),
    "ratio/clip_fraction": Figure("clipped", "{:.1%}"),
    "lr": Figure("lr", "{:.2g}"),
    "reward/std": Figure("reward sd", "{:.2f}"),
    "policy/version": Figure("version", "{:.0f}"),
    "policy/lag_mean": Figure("lag", "{:.1f}"),
    "memory/peak_gb": Figure("memory", "{:.1f} GB"),
    "ess": Figure("ess", "{:.2f}"),
}


class Layout:
    """Draws frames; parts that change only with a step, a phase or the size are drawn once and kept."""

    def __init__(self, state: State, *, colour: bool) -> None:
        self.state = state
        self.colour = colour
        self._kept: tuple[object, list[Text]] = (None, [])

    def frame(self, width: int, height: int) -> list[Text]:
        """At most `height` lines of less than `width` cells: erasing behind a full line would take its last cell."""
        inner = max(1, width - 2)
        heading = _spread(Text(self.state.title, "bold"), Text(self.state.about, "dim"), inner)
        head = [heading, self._bar(inner), self._phase(inner)]
        foot = self._foot(inner, height)
        key = (self.state.revision, width, height, len(foot))
        if self._kept[0] != key:
            self._kept = (key, self._body(inner, height - len(head) - len(foot), height))
        lines = [*head, *self._kept[1], *foot] if height >= len(head) + len(foot) else [head[2], head[1], head[0]]
        return [_fit(Text(" ").append_text(line), max(1, width - 1)) for line in lines[:height]]

    def _bar(self, width: int) -> Text:
        state = self.state
        left = state.left()
        tail = f"  {state.done}/{state.total}" + (" steps" if width >= 36 else "")
        if not state.stopping and state.done < state.total:
            tail += "" if left is None else f"  {clock(left)} left"
        length = max(0, width - len(tail))
        filled = round(length * state.done / max(1, state.total))
        bar = Text().append("━" * filled, "green").append("─" * (length - filled), "dim")
        return bar.append(tail if length else tail.strip())

    def _phase(self, width: int) -> Text:
        state = self.state
        words = Text()
        if state.phase is not None:
            phase = state.phase
            words.append(phase.kind, "bold")
            if phase.what:
                words.append(f" {phase.what}", "bold")
            if phase.total:
                words.append(f" {phase.done or 0}/{phase.total}", "bold")
            if (seconds := (now := state.now()) - phase.since) >= 1:
                pace = phase.figures(now) if phase.tokens else []
                words.append("  ".join(["", _seconds(seconds), *pace]), "dim")
        pace = state.step_seconds()
        elapsed = f"elapsed {clock(state.now() - state.started)}"
        if pace is not None and width >= ROOM_FOR_PACE:
            elapsed = f"{_seconds(pace, digits=1)} a step  {elapsed}"
        return _spread(words, Text(elapsed, "dim"), width)

    def _foot(self, width: int, height: int) -> list[Text]:
        """The latest notes, and the effect of Ctrl-C."""
        most = 0 if height < 10 else 1 if height < TALL else 4
        notes = [Text(one_line(note, width), "yellow") for note in list(self.state.notes)[-most:]] if most else []
        if self.state.stopping:
            return [*notes, Text(self.state.stopping, "bold yellow")]
        evaluating = self.state.phase is not None and self.state.phase.kind == "evaluating"
        return [*notes, Text(HINT_EVALUATING if evaluating else HINT, "dim")] if height >= ROOMY else notes

    def _body(self, width: int, room: int, height: int) -> list[Text]:
        """At most `room` lines: curves, values, the split of the time, and a completion in the remaining lines."""
        roomy = height >= ROOMY
        parts = [
            self._curves(width, height),
            self._figures(width, height),
            self._evaluations(width),
            self._time(width, height),
        ]
        least = 3 if self.state.sample is not None else 0  # lines of a completion
        order = [1, 2, 3, 0]  # parts to drop if there are too few lines, the first first
        blank = int(roomy)
        while sum(len(part) + blank for part in parts if part) + least + blank > room and order:
            parts[order.pop(0)] = []
        lines: list[Text] = []
        for part in parts:
            if part:
                lines += [Text()] * blank + part
        if self.state.sample is not None:
            lines += [Text()] * blank
            lines += _completion(self.state.sample, width, room - len(lines))
        return [*lines, *[Text()] * (room - len(lines))][: max(0, room)]

    def _curves(self, width: int, height: int) -> list[Text]:
        names = self._drawable()
        if not names:
            return [Text("the first figures come with the first step", "dim")] if height >= ROOMY else []
        if height < ROOMY:
            return [self._sparkline(name, width) for name in names[:2]]
        across, down = _grid(width, height)
        rows = 4 if height < 30 else 5 if height < 44 else 8
        each = (width - GAP * (across - 1)) // across
        lines: list[Text] = []
        for start in range(0, min(len(names), across * down), across):
            blocks = [self._curve(name, each, rows) for name in names[start : start + across]]
            lines += [Text()] if lines else []
            lines += [Text(" " * GAP).join(row) for row in zip(*blocks, strict=True)]
        return lines

    def _drawable(self) -> list[str]:
        """The metrics that have a curve."""
        return [name for name in CURVES if name in self.state.series and self.state.series[name].has_numbers]

    def _curve(self, name: str, width: int, rows: int) -> list[Text]:
        """A title with the latest value, and below it the curve with its scale, each `width` cells."""
        figure = FIGURES[name]
        series = self.state.series[name]
        columns = min(len(series), width - SCALE - 2)
        values = series.means(columns if figure.from_zero else 2 * columns)
        low, high = range_from_zero(values) if figure.from_zero else range_around(values)
        drawn = (area if figure.from_zero else line)(values, rows, low, high)
        scale = [""] * rows
        scale[0], scale[-1] = _scale_label(figure, high), _scale_label(figure, low)
        title = Text().append(f"{'':{SCALE}}  {figure.label} ", "dim").append(self._value(name), "bold")
        lines = [_fit(title, width, pad=True)]
        for label, row in zip(scale, drawn, strict=True):
            left = Text().append(f"{label:>{SCALE}} ", "dim").append("┤" if label else "│", "dim")
            lines.append(_fit(left.append(row, figure.colour), width, pad=True))
        return lines

    def _sparkline(self, name: str, width: int) -> Text:
        series = self.state.series[name]
        values = series.means(min(len(series), max(1, width - CELL)))
        [row] = area(values, 1, *range_from_zero(values))
        left = Text().append(f"{FIGURES[name].label:<9} ", "dim").append(f"{self._value(name):<9} ", "bold")
        return left.append(row, FIGURES[name].colour)

    def _value(self, name: str) -> str:
        value = self.state.latest.get(name)
        return "-" if value is None or not math.isfinite(value) else FIGURES[name].form.format(value)

    def _figures(self, width: int, height: int) -> list[Text]:
        """The latest values, the most important first."""
        drawn = 2 if height < ROOMY else math.prod(_grid(width, height))
        curves = self._drawable()[:drawn]
        names = [name for name in FIGURES if name not in curves and self._value(name) != "-"]
        across = max(1, (width + 2) // CELL)
        most = across * (1 if height < ROOMY - 6 else 2)
        cells = [
            Text().append(f"{FIGURES[name].label:<9} ", "dim").append(f"{self._value(name):<10}")
            for name in names[:most]
        ]
        rows = [Text().join(cells[i : i + across]) for i in range(0, len(cells), across)]
        for row in rows:
            row.rstrip()
        return rows

    def _evaluations(self, width: int) -> list[Text]:
        """The main held-out measure at the first and the latest evaluation; in few columns only at the latest."""
        shown = [held_out for step, metrics in self.state.evaluations if (held_out := _held_out(step, metrics))]
        line = Text()
        for first, with_when in ((0, (True, True)), (0, (False, True)), (-1, (True,)), (-1, (False,))) if shown else ():
            line = Text().append("held-out  ", "dim")
            for i, (value, about, when) in enumerate(shown[first:]):
                line.append("  →  " if i else "").append(value, "bold").append(about)
                line.append(f" {when}" if with_when[i - len(shown[first:])] else "", "dim")
            if line.cell_len <= width:
                break
        return [line] if shown else []

    def _time(self, width: int, height: int) -> list[Text]:
        """The split of the time so far: a bar, and its legend below or beside it."""
        seconds = self.state.seconds
        spent = {turn: seconds[kind] for kind, turn in TURNS.items() if kind in seconds}
        spent[OTHER] = sum(each for kind, each in seconds.items() if kind not in TURNS)
        whole = sum(spent.values())
        if whole <= 0:
            return []
        beside = width >= 2 * LEGEND
        bar, legend = Text(), Text()
        cells = _shares(list(spent.values()), width - LEGEND if beside else width)
        least = 0.01 if width >= ROOM_FOR_LEGEND else 0.05
        for (turn, each), num in zip(spent.items(), cells, strict=True):
            name, colour, fill = turn
            fill = "▆" if self.colour else fill
            bar.append(fill * num, colour)
            if each / whole >= least:
                legend.append("  " if legend else "").append(fill, colour).append(f" {name} ", "dim")
                legend.append(f"{each / whole:.0%}")
        if beside:
            return [bar.append("  ").append_text(legend)]
        return [bar, legend] if height >= ROOMY else [legend]


def _held_out(step: int, metrics: Mapping[str, float]) -> tuple[str, str, str] | None:
    """An evaluation's main measure: its value, its interval with the number of prompts, and when it was."""
    main = main_figure(metrics)
    found = main or interval(metrics, LOSS)
    if found is None:
        return None
    value, _, ends = f"{found}".strip().partition(" ")
    extent = "" if found.prompts is None else f" of {found.prompts}"
    name = "" if found.is_share else "reward " if main else "loss "
    return f"{name}{value}", f" {ends}{extent}", "before training" if step == 0 else f"after step {step}"


def _completion(sample: Shown, width: int, room: int) -> list[Text]:
    """A completion: its reward, its prompt, and as much of its text as fits into `room` lines."""
    if room <= 0:
        return []
    earned = "reward failed" if sample.reward is None else f"reward {sample.reward:.3g}"
    title = Text().append(f"step {sample.step}  ", "dim").append(earned, "bold")
    for name, value in sample.reward_parts.items():
        title.append(f"  {one_line(name, 30)} ", "dim").append(f"{value:.3g}")
    for name, value in (("lenient", sample.accuracy_lenient), ("strict", sample.accuracy_strict)):
        if value is not None:
            title.append(f"  {name} ", "dim")
            title.append(*{1.0: ("✓", "green"), 0.0: ("✗", "red")}.get(value, (f"{value:.0%}", "")))
    title.append("  ended by ", "dim").append(
        "its length" if sample.finish_reason == "length" else one_line(sample.finish_reason, 30)
    )
    prompt = fold(sample.prompt, width - 2, max(1, (room - 1) // 4))
    lines = [title, *(Text().append("│ ", "dim").append(line, "cyan") for line in prompt)]
    if room > len(lines):
        lines += [
            Text().append("│ ", "dim").append(line) for line in fold(sample.completion, width - 2, room - len(lines))
        ]
    return lines[:room]


def _scale_label(figure: Figure, value: float) -> str:
    label = figure.scale.format(value)
    return label if len(label) <= SCALE else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")


def _grid(width: int, height: int) -> tuple[int, int]:
    """How many curves fit beside each other, and how many below each other."""
    return 1 if width < 56 else 2 if width < 112 else 3, 1 if height < TALL else 2


def _shares(values: Sequence[float], width: int) -> list[int]:
    """`width` cells shared out in proportion to `values`, by largest remainders."""
    exact = [value / sum(values) * width for value in values]
    cells = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: cells[i] - exact[i])
    for i in by_remainder[: width - sum(cells)]:
        cells[i] += 1
    return cells


def _spread(left: Text, right: Text, width: int) -> Text:
    """`left` and `right` at the ends of a line; `right` only if both fit."""
    if left.cell_len + 2 + right.cell_len > width:
        room = width - left.cell_len - 2
        if room < 12:
            return left
        right = _fit(right, room)
    space = Text(" " * (width - left.cell_len - right.cell_len))
    return Text().append_text(left).append_text(space).append_text(right)


def _fit(line: Text, width: int, *, pad: bool = False) -> Text:
    line.truncate(width, overflow="ellipsis", pad=pad)
    return line


def _seconds(seconds: float, digits: int = 0) -> str:
    """4.2 -> 4 s, 65 -> 1:05."""
    return f"{seconds:.{digits}f} s" if round(seconds) < 60 else clock(seconds)


# Curves

EIGHTHS = " ▁▂▃▄▅▆▇█"
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a braille cell, 4 rows of 2
NICE = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


class Series:
    """A metric over all steps: one mean per bin; a bin has one step at first, and twice as many when bins run out."""

    def __init__(self, most: int = 2048) -> None:
        self._most = most  # an even number of bins
        self._steps_per_bin = 1
        self._steps = 0  # in the last bin
        self._sums: list[float] = []
        self._counts: list[int] = []  # values that are numbers in each bin

    def add(self, value: float) -> None:
        """Add the next step's value; a value that is not finite leaves its place empty."""
        if not self._sums or self._steps == self._steps_per_bin:
            if len(self._sums) == self._most:
                self._halve()
            self._sums.append(0.0)
            self._counts.append(0)
            self._steps = 0
        self._steps += 1
        if math.isfinite(value):
            self._sums[-1] += value
            self._counts[-1] += 1

    def _halve(self) -> None:
        self._sums = [a + b for a, b in zip(self._sums[::2], self._sums[1::2], strict=True)]
        self._counts = [a + b for a, b in zip(self._counts[::2], self._counts[1::2], strict=True)]
        self._steps_per_bin *= 2

    def __len__(self) -> int:
        """The number of bins in use."""
        return len(self._sums)

    @property
    def has_numbers(self) -> bool:
        """Whether there was any number at all."""
        return any(self._counts)

    def means(self, num: int) -> list[float]:
        """`num` means over neighbouring steps, repeated if there are fewer steps; NaN for steps without a number."""
        bins = len(self._sums)
        means = []
        for i in range(num):
            start = i * bins // num
            part = slice(start, max(start + 1, (i + 1) * bins // num))
            count = sum(self._counts[part])
            means.append(sum(self._sums[part]) / count if count else math.nan)
        return means


def range_from_zero(values: Sequence[float]) -> tuple[float, float]:
    """Round numbers around 0 and all values."""
    finite = [value for value in values if math.isfinite(value)]
    low = 0.0 - round_up(-min(finite, default=0.0))
    high = round_up(max(finite, default=0.0))
    return low, high if high > low else low + 1.0


def range_around(values: Sequence[float]) -> tuple[float, float]:
    """The closest round numbers around all values; never below 0 unless a value is."""
    finite = [value for value in values if math.isfinite(value)]
    least, most = min(finite, default=0.0), max(finite, default=1.0)
    unit = round_up((most - least) / 4) or round_up(abs(most) / 4) or 1.0
    low, high = math.floor(least / unit) * unit, math.ceil(most / unit) * unit
    return (low, high) if high > low else (max(low - unit, min(low, 0.0)), high + unit)


def round_up(value: float) -> float:
    """The smallest round number that is not below `value`; 0 for values up to 0."""
    if value <= 0:
        return 0.0
    scale = 10.0 ** math.floor(math.log10(value))
    return next(nice * scale for nice in NICE if nice * scale >= value * (1 - 1e-9))


def area(values: Sequence[float], rows: int, low: float, high: float) -> list[str]:
    """The area under a curve, one column a value, `rows` lines from top to bottom; NaN is an empty column."""
    full = rows * 8
    levels = [
        0 if math.isnan(value) else min(full, max(1, round((value - low) / (high - low) * full))) for value in values
    ]
    return ["".join(EIGHTHS[min(8, max(0, level - 8 * row))] for level in levels) for row in reversed(range(rows))]


def line(values: Sequence[float], rows: int, low: float, high: float) -> list[str]:
    """A line through all values, two per column, as `rows` lines of braille from top to bottom."""
    bits = [[0] * ((len(values) + 1) // 2) for _ in range(rows)]
    bottom = rows * 4 - 1
    before: int | None = None
    for x, value in enumerate(values):
        if math.isnan(value):
            before = None
            continue
        y = bottom - round((value - low) / (high - low) * bottom)
        start = y if before is None else before + (y > before) - (y < before)  # the dot next to the last one
        for each in range(min(start, y), max(start, y) + 1):
            bits[each // 4][x // 2] |= DOTS[each % 4][x % 2]
        before = y
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in bits]
