"""The live picture of a training on a terminal: drawn from its state, and painted twice a second.

`frame` draws it for a terminal of any size: before the first step the plan of the run; then curves of the metrics over
all steps, the latest values, the split of the time, completions, and what the short words mean. `Picture` takes the
terminal over and gives it back.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from rlpost.output import Ticker, in_front, output_into, size_of, where_it_leads
from rlpost.record import legend
from rlpost.screen.state import FIGURES, SPEED, Shown, State, clock, evaluation_line, tokens_per_second
from rlpost.text import both_ends, fold, one_line, wrapped

ENTER = b"\x1b[?1049h\x1b[?25l"  # the alternate screen, no cursor
LEAVE = b"\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
HINT = "Ctrl-C finishes the step, saves and stops"
HINT_EVALUATING = "Ctrl-C abandons the evaluation, saves and stops"
ROOMY = 20  # lines from which there are curves
TALL = 30  # lines from which the short words are explained
AIRY = 40  # lines from which there are empty lines between the parts, even if texts are cut
READABLE = 9  # lines of a long completion and its prompt, with which it is of use
GAP = 3  # columns between curves
SCALE = 6  # columns of a curve's scale
CELL = 20  # columns of a value with its label
FEW = 6  # steps from which there is a curve: fewer points look like a trend by chance
NOISE = 8  # least range of a curve, in standard deviations of its noise
EIGHTHS = " ▁▂▃▄▅▆▇█"
NICE = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
TURNS = {  # kind of phase -> its name and colour in the split of the time
    "loading": ("load", "dim"),
    "sampling": ("rollout", "cyan"),
    "building": ("rollout", "cyan"),
    "scoring": ("scoring", "magenta"),
    "training": ("train", "green"),
    "pushing weights": ("sync", "yellow"),
    "checking": ("check", "yellow"),
    "evaluating": ("eval", "blue"),
    "saving checkpoint": ("save", "red"),
    "recording": ("record", "red"),
}
FIRST = {  # kind of phase -> why it comes before the first step
    "evaluating": "Before step 1: held-out data is measured, to compare with after training.",
    "checking": "Before step 1: sampler and trainer score the same completions and must agree.",
}
NO_FIGURES = "The first figures come with the end of the first step."
ABOVE = ("why", "curves", "figures", "evaluations", "time", "plan", "completions")  # in the order of the picture
CUTTABLE = ("plan", "figures")  # parts whose first lines are of use without the others


def frame(state: State, width: int, height: int) -> list[Text]:
    """The picture in `height` lines of less than `width` cells: erasing behind a full line would take its last cell."""
    inner = max(1, width - 2)
    head = [
        _spread(Text(state.title, "bold"), Text(state.about, "dim"), inner),
        _bar(state, inner),
        _phase(state, inner),
    ]
    latest = _latest(state)
    parts = _progress(state, latest, inner, height) if latest else _plan(state, inner)
    foot = _foot(state, inner, height)
    room = height - len(head) - len(foot)
    wanted = len(_completions(state.samples, inner, room))
    whole = sum(len(part) + 1 for part in [*parts.values(), foot] if part) + wanted + 1
    gap = 1 if height >= AIRY or whole <= room + len(foot) else 0  # empty lines before each part
    least = min(wanted, max(3, height * 3 // 8))  # lines of completions, which come first
    free = room - (least + gap if least else 0) - gap
    shown: dict[str, list[Text]] = {}
    for name, part in parts.items():
        lines = part[: max(0, free - gap)] if name in CUTTABLE else part
        if lines and len(lines) + gap <= free:
            shown[name] = [*[Text()] * gap, *lines]
            free -= len(shown[name])
    if completions := _completions(state.samples, inner, least + free):
        shown["completions"] = [*[Text()] * gap, *completions]
    above = [line for name in ABOVE for line in shown.get(name, [])]
    below = [*shown.get("legend", []), *[Text()] * gap, *foot]
    lines = [*head, *above, *[Text()] * (height - len(head) - len(above) - len(below)), *below][:height]
    padded = [Text(" ").append_text(line) for line in lines]
    for line in padded:
        line.truncate(max(1, width - 1), overflow="ellipsis")
    return padded


def shares(wanted: Sequence[int], room: int) -> list[int]:
    """`room` lines in equal shares; what one part does not need goes to the others."""
    given = [0] * len(wanted)
    for done, i in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        given[i] = min(wanted[i], room // (len(wanted) - done))
        room -= given[i]
    return given


def _bar(state: State, width: int) -> Text:
    left = state.left()
    tail = f"  {state.done}/{state.total}" + (" steps" if width >= 36 else "")
    if left is not None and not state.stopping and state.done < state.total:
        tail += f"  {clock(left)} left"
    length = max(0, width - len(tail))
    filled = round(length * state.done / max(1, state.total))
    return Text().append("█" * filled, "green").append("░" * (length - filled), "dim").append(tail)


def _phase(state: State, width: int) -> Text:
    words = Text("starting" if state.phase is None else "", "bold")
    if (phase := state.phase) is not None:
        extent = f" {phase.done or 0}/{phase.total}" if phase.total else ""
        words.append(" ".join(filter(None, [phase.kind, phase.what])) + extent, "bold")
        if (seconds := (now := state.now()) - phase.since) >= 1:
            words.append("  ".join(["", _seconds(seconds), *phase.figures(now)]), "dim")
    pace = state.step_seconds()
    elapsed = f"elapsed {clock(state.now() - state.started)}"
    with_pace = elapsed if pace is None else f"{_seconds(pace, digits=1)} a step  {elapsed}"
    if words.cell_len + 2 + len(with_pace) <= width:
        elapsed = with_pace
    return _spread(words, Text(elapsed, "dim"), width)


def _foot(state: State, width: int, height: int) -> list[Text]:
    """The latest notes, and the effect of Ctrl-C."""
    evaluating = state.phase is not None and state.phase.kind == "evaluating"
    hint = [Text(HINT_EVALUATING if evaluating else HINT, "dim")] if height >= ROOMY else []
    if state.stopping:
        hint = [Text(row, "bold yellow") for row in fold(state.stopping, width, 2)]
    notes: list[str] = []
    room = height // 6
    for note in reversed(state.notes):
        if len(notes) < room:
            notes = [*both_ends(note, width, room - len(notes)), *notes]
    return [*(Text(row, "yellow") for row in notes), *hint]


def _plan(state: State, width: int) -> dict[str, list[Text]]:
    """The parts before the first step: the work in progress, held-out figures, the time, and the plan of the run."""
    why = FIRST.get(state.phase.kind if state.phase else "", NO_FIGURES)
    plan = []
    for line in state.plan:
        label, _, text = line.partition(" ")
        for i, row in enumerate(fold(text.strip(), width - 10, 3)):
            plan.append(Text().append(f"{'' if i else label:<10}", "dim").append(row))
    return {
        "why": [Text(row, "bold") for row in fold(why, width, 2)],
        "plan": plan,
        "evaluations": _evaluations(state, width),
        "time": _time(state, width),
    }


def _progress(state: State, latest: Mapping[str, str], width: int, height: int) -> dict[str, list[Text]]:
    """The parts after the first step, the most important first."""
    drawn = [name for name in latest if len(state.series.get(name, [])) >= FEW]
    drawn = drawn[: min(3, max(1, width // 38))] if height >= ROOMY else []
    parts = {
        "curves": _curves(state, latest, drawn, width, max(4, height // 6)),
        "evaluations": _evaluations(state, width),
        "time": _time(state, width),
        "figures": _figures({name: value for name, value in latest.items() if name not in drawn}, width),
    }
    if height >= TALL:
        entries = legend(" ".join(line.plain for name in ("curves", "figures", "time") for line in parts[name]))
        parts["legend"] = [Text(row.rstrip(), "dim") for row in wrapped(entries, width)]
    return parts


def _latest(state: State) -> dict[str, str]:
    """The latest values as shown, the most important first."""
    values = {**state.latest, SPEED: tokens_per_second(state.latest)}
    found = {name: (figure, values.get(name)) for name, figure in FIGURES.items()}
    return {n: f.form.format(v) for n, (f, v) in found.items() if v is not None and math.isfinite(v)}


def _curves(state: State, latest: Mapping[str, str], names: Sequence[str], width: int, rows: int) -> list[Text]:
    if not names:
        return []
    each = (width - GAP * (len(names) - 1)) // len(names)
    blocks = [_curve(name, state.series[name], state.done, latest[name], each, rows) for name in names]
    return [Text(" " * GAP).join(row) for row in zip(*blocks, strict=True)]


def _curve(name: str, series: Sequence[float], last: int, latest: str, width: int, rows: int) -> list[Text]:
    """A title with the latest value, and below it the curve up to step `last` with its range, each `width` cells."""
    figure = FIGURES[name]
    title = Text().append(f"{'':{SCALE}}  {figure.label} ", "dim").append(latest, "bold")
    lines = [title.append(f"  steps {last - len(series) + 1}-{last}", "dim")]
    values = means(series, min(len(series), width - SCALE - 2))
    low, high = scale_of(values, from_zero=figure.from_zero)
    scale = [figure.scale.format(high), *[""] * (rows - 2), figure.scale.format(low)]
    for label, row in zip(scale, area(values, rows, low, high), strict=True):
        axis = f"{label[:SCALE]:>{SCALE}} {'┤' if label else '│'}"
        lines.append(Text().append(axis, "dim").append(row, figure.colour))
    for line in lines:
        line.truncate(width, overflow="ellipsis", pad=True)
    return lines


def _figures(latest: Mapping[str, str], width: int) -> list[Text]:
    """At most three lines of values."""
    across = max(1, (width + 2) // CELL)
    cells = [Text().append(f"{FIGURES[n].label:<9} ", "dim").append(f"{v:<10}") for n, v in latest.items()]
    rows = [Text().join(cells[i : i + across]) for i in range(0, len(cells), across)][:3]
    for row in rows:
        row.rstrip()
    return rows


def _evaluations(state: State, width: int) -> list[Text]:
    """The first and the latest evaluation, a line each."""
    lines = []
    for step, metrics in state.evaluations:
        when = f"after step {step}" if step else "before training"
        lines.append(Text(one_line(evaluation_line(metrics, when), width)))
    return lines


def _time(state: State, width: int) -> list[Text]:
    """The split of the time so far, with minutes if there is room; small parts only if there is room."""
    phases = state.spent(state.now())
    whole = sum(phases.values())
    if whole <= 0:
        return []
    spent = dict.fromkeys([*TURNS.values(), ("rest", "dim")], 0.0)
    for kind, seconds in phases.items():
        spent[TURNS.get(kind, ("rest", "dim"))] += seconds
    line = Text()
    for least, exactly in [(0.01, True), (0.01, False), (0.02, False), (0.04, False)]:
        line = Text().append("time    ", "dim")
        for (name, colour), seconds in spent.items():
            if seconds > least * whole:
                line.append("  ").append(name, colour).append(f" {seconds / whole:.0%}")
                line.append(f" {clock(seconds)}" if exactly else "", "dim")
        if line.cell_len <= width:
            break
    return [line]


def _completions(samples: Sequence[Shown], width: int, room: int) -> list[Text]:
    """Completions, as many as are readable in `room` lines; one prompt of several stands above the first."""
    prompts = [sample.prompt for sample in samples]
    samples = [
        replace(each, prompt="") if i and prompts[i] == prompts[i - 1] else each for i, each in enumerate(samples)
    ]
    needed: list[int] = []
    for sample in samples:
        needed.append(len(_completion(sample, width, room)) + (1 if needed else 0))
        if len(needed) > 1 and sum(min(READABLE, each) for each in needed) > room:
            del needed[-1]
            break
    shown: list[Text] = []
    for sample, its_room in zip(samples, shares(needed, room), strict=False):
        gap = [Text()] if shown else []
        shown += [*gap, *_completion(sample, width, its_room - len(gap))]
    return shown


def _completion(sample: Shown, width: int, room: int) -> list[Text]:
    """A completion: its reward, and as much of its prompt and its text as fits into `room` lines."""
    when = f"step {sample.step}" + (f", {sample.rank}" if sample.rank else "")
    lines = [Text().append(f"{when}  ", "dim").append(one_line(sample.verdict, width), "bold")]
    texts = [(sample.completion, "│ ", "")]
    if sample.prompt:
        texts = [(sample.prompt, "  ", "cyan"), *texts]
    rooms = shares([len(both_ends(text, width - 2, room)) for text, _, _ in texts], room - 1)
    for (text, edge, style), its_room in zip(texts, rooms, strict=True):
        rows = both_ends(text, width - 2, its_room) if its_room else []
        lines += [Text().append(edge, "dim").append(row, style) for row in rows]
    return lines


def _spread(left: Text, right: Text, width: int) -> Text:
    """`left` and `right` at the ends of a line; `right` only if some of it fits."""
    room = width - left.cell_len - 2
    if room < 12:
        return left
    right.truncate(room, overflow="ellipsis")
    space = Text(" " * (width - left.cell_len - right.cell_len))
    return Text().append_text(left).append_text(space).append_text(right)


def _seconds(seconds: float, digits: int = 0) -> str:
    """4.2 -> 4 s, 65 -> 1:05."""
    return f"{seconds:.{digits}f} s" if round(seconds) < 60 else clock(seconds)


# Curves


def means(values: Sequence[float], num: int) -> list[float]:
    """`num` means over neighbouring values; NaN for a mean of no number."""
    parts = [values[i * len(values) // num : (i + 1) * len(values) // num] for i in range(num)]
    numbers = [[value for value in part if math.isfinite(value)] for part in parts]
    return [fmean(part) if part else math.nan for part in numbers]


def scale_of(values: Sequence[float], *, from_zero: bool) -> tuple[float, float]:
    """Round numbers around all values, and around 0 if `from_zero`; never below 0 unless a value is.

    They are so far apart that noise, estimated from the second differences, does not fill the range.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    least, most = min(finite), max(finite)
    bends = [(a - 2 * b + c) ** 2 / 6 for a, b, c in zip(finite, finite[1:], finite[2:], strict=False)]
    spread = NOISE * math.sqrt(fmean(bends)) if bends else 0.0
    if from_zero:
        low, high = 0.0 - round_up(-least), round_up(max(most, min(least, 0.0) + spread))
        high = 1.0 if most <= 1.0 < high else high  # as of shares, and of most rewards
        return low, high if high > low else low + 1.0
    least = max(min(least, 0.0), least - max(0.0, spread - (most - least)) / 2)
    most = max(most, least + spread)
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


# On the terminal


class Picture:
    """Takes the terminal over: frames on its alternate screen, all other output into `log`.

    `draw(width, height)` returns the lines to paint; it is called in a thread of its own.
    """

    def __init__(self, descriptor: int, draw: Callable[[int, int], Sequence[Text]], *, log: Path) -> None:
        self._draw = draw
        self._lock = threading.Lock()  # held while something is written to the terminal
        self._entered = False
        self._closed = False
        self._styles = Console(file=io.StringIO(), force_terminal=True, highlight=False)
        with ExitStack() as opening:
            self._terminal = opening.enter_context(where_it_leads(descriptor))
            opening.enter_context(output_into(log))
            self._opened = opening.pop_all()
        self._previous: Any = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTSTP, self._suspend)
        self._ticker = Ticker(self._paint)

    @property
    def width(self) -> int:
        """Columns of the terminal now."""
        return size_of(self._terminal)[0]

    def close(self) -> None:
        """Restore the terminal, stdout and stderr."""
        self._ticker.stop()
        with contextlib.suppress(OSError):  # there may be no terminal any more
            self.leave()
        if self._previous is not None:
            signal.signal(signal.SIGTSTP, self._previous)
        with contextlib.suppress(OSError):  # the last output may not have fitted into the log
            self._opened.close()

    def leave(self, last_words: bytes = b"") -> None:
        """Restore the terminal, write `last_words` and paint no more; may be called in a signal's handler."""
        held = self._lock.acquire(timeout=1)  # a frame in writing may hold it, or the code that the signal interrupted
        self._closed = True
        self._give_back()
        self._write(last_words)
        if held:
            self._lock.release()

    def _paint(self) -> None:
        """Paint one frame, if this process is in front on the terminal."""
        if not in_front(self._terminal):
            self._entered = False
            return
        picture = self._encode(self._draw(*size_of(self._terminal)))
        with self._lock:
            if not self._closed:
                self._write(picture if self._entered else ENTER + picture)
                self._entered = True

    def _encode(self, lines: Sequence[Text]) -> bytes:
        """Put each line at its place, even if the terminal measures other lines differently; nothing wraps."""
        with self._styles.capture() as styled:
            self._styles.print(Text("\n").join(lines), soft_wrap=True)
        rows = styled.get().removesuffix("\n").split("\n")
        placed = "".join(f"\x1b[{i};1H{row}\x1b[K" for i, row in enumerate(rows, 1))
        return f"\x1b[?7l{placed}\x1b[J\x1b[1;1H\x1b[?7h".encode()

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """On Ctrl-Z restore the terminal and stop; the next frame after `fg` takes it again."""
        held = self._lock.acquire(timeout=1)
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns when the process is continued
        signal.signal(signal.SIGTSTP, self._suspend)
        if held:
            self._lock.release()

    def _give_back(self) -> None:
        if self._entered:
            self._entered = False
            self._write(LEAVE)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._terminal, data) :]
