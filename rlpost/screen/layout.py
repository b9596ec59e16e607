"""The picture: lines of text for a terminal of any size, drawn from the state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from rlpost.folding import fold, one_line
from rlpost.record import LOSS, interval, main_figure
from rlpost.screen.curves import area, line, range_around, range_from_zero
from rlpost.screen.lines import clock
from rlpost.screen.shown import Shown
from rlpost.screen.state import CURVES, SPEED, State

HINT = "Ctrl-C finishes the step, saves and stops"
HINT_EVALUATING = "Ctrl-C abandons the evaluation, saves and stops"
ROOMY, TALL = 20, 36  # lines from which there are empty lines between the parts, and larger curves
ROOM_FOR_PACE = 60  # columns
GAP = 3  # columns between curves
SCALE = 6  # columns of a curve's scale
LEGEND = 88  # columns of the longest legend of the time, where each kind takes tens of percent
ROOM_FOR_LEGEND = 70  # columns that one fits with all but the least shares
CELL = 20  # columns of a figure with its label
TURNS = {  # kind of phase -> its name, colour, and its fill where there is no colour
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
    """How a metric is called and written."""

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
    """Draws frames; what changes only with a step, a phase or the size is drawn once for all of them."""

    def __init__(self, state: State, *, colour: bool) -> None:
        self.state = state
        self.colour = colour
        self._kept: tuple[object, list[Text]] = (None, [])

    def frame(self, width: int, height: int) -> list[Text]:
        """At most `height` lines of less than `width` cells: erasing the rest of a full line would take its last."""
        inner = max(1, width - 2)
        head = [self._heading(inner), self._bar(inner), self._phase(inner)]
        foot = self._foot(inner, height)
        key = (self.state.revision, width, height, len(foot))
        if self._kept[0] != key:
            self._kept = (key, self._body(inner, height - len(head) - len(foot), height))
        lines = [*head, *self._kept[1], *foot] if height >= len(head) + len(foot) else [head[2], head[1], head[0]]
        return [_fit(Text(" ").append_text(line), max(1, width - 1)) for line in lines[:height]]

    def _heading(self, width: int) -> Text:
        return _spread(Text(self.state.title, "bold"), Text(self.state.about, "dim"), width)

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
        """The latest notes, and what Ctrl-C does."""
        most = 0 if height < 10 else 1 if height < TALL else 4
        notes = [Text(one_line(note, width), "yellow") for note in list(self.state.notes)[-most:]] if most else []
        if self.state.stopping:
            return [*notes, Text(self.state.stopping, "bold yellow")]
        evaluating = self.state.phase is not None and self.state.phase.kind == "evaluating"
        return [*notes, Text(HINT_EVALUATING if evaluating else HINT, "dim")] if height >= ROOMY else notes

    def _body(self, width: int, room: int, height: int) -> list[Text]:
        """At most `room` lines: curves, figures, where the time goes, and a completion in what is left."""
        roomy = height >= ROOMY
        parts = [
            self._curves(width, height),
            self._figures(width, height),
            self._evaluations(width),
            self._time(width, height),
        ]
        least = 3 if self.state.sample is not None else 0  # lines of a completion
        order = [1, 2, 3, 0]  # what gives way first where the room is short
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
        """The figures that there is a curve of."""
        return [name for name in CURVES if name in self.state.series and self.state.series[name].has_numbers]

    def _curve(self, name: str, width: int, rows: int) -> list[Text]:
        """A title with the latest value over the curve with its scale, each `width` cells."""
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
        """The latest values, those first that say most."""
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
        """The main held-out figure, at the first evaluation and at the latest, or where there is little room there."""
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
        """Where the time went so far: a bar and its legend, below it or beside it."""
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
    """What an evaluation found: value, its interval and number of prompts, when."""
    main = main_figure(metrics)
    found = main or interval(metrics, LOSS)
    if found is None:
        return None
    value, _, ends = f"{found}".strip().partition(" ")
    extent = "" if found.prompts is None else f" of {found.prompts}"
    name = "" if found.is_share else "reward " if main else "loss "
    return f"{name}{value}", f" {ends}{extent}", "before training" if step == 0 else f"after step {step}"


def _completion(sample: Shown, width: int, room: int) -> list[Text]:
    """What a completion earned, what was asked, and as much of what came back as there is room for."""
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
    """Curves beside and below each other."""
    return 1 if width < 56 else 2 if width < 112 else 3, 1 if height < TALL else 2


def _shares(values: Sequence[float], width: int) -> list[int]:
    """`width` cells shared out in proportion, by largest remainders."""
    exact = [value / sum(values) * width for value in values]
    cells = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: cells[i] - exact[i])
    for i in by_remainder[: width - sum(cells)]:
        cells[i] += 1
    return cells


def _spread(left: Text, right: Text, width: int) -> Text:
    """`left` and `right` at the ends of a line; the right one only where both fit."""
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
