"""The result of a run in words: its held-out figures before and after; and a table of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rlpost.config.schema import as_text, flat
from rlpost.evaluation.comparison import Comparison
from rlpost.evaluation.statistics import Difference
from rlpost.evaluation.sweeps import read_sweep
from rlpost.record import (
    ACCURACY,
    HELD_OUT_FIGURES,
    LOSS,
    MARGIN,
    OF_ROWS,
    REWARD,
    STRICT,
    Interval,
    is_apart,
    main_figures,
    trained_loss,
    worth_showing,
)
from rlpost.runs.diagnosis import FEW
from rlpost.runs.reader import RunRecord
from rlpost.text import counted

COMPARED = {ACCURACY: "accuracy_lenient", STRICT: "accuracy_strict", REWARD: "reward", LOSS: "loss"}  # in a comparison
MOST_SETTINGS = 6  # columns of the table of runs
FINE = 0.05  # a difference below it is written with a digit more


@dataclass(frozen=True)
class Figure:
    """A held-out figure before and after training; `paired` is the difference prompt by prompt, where it is known."""

    key: str
    name: str
    before: Interval | None
    after: Interval | None
    paired: Difference | None

    @property
    def sentence(self) -> str:
        """Whether the figure has changed, by how much, and on how many prompts."""
        before, after = self.before, self.after
        if before is None or after is None:
            known, when = (before, "before training") if before else (after, "after training")
            other = "after training" if before else "before training"
            measured = f"{self.name} was {self.shown(known)} {when}{self._on(known)}" if known else ""
            return f"not measured {other}: {measured}"
        if self._differs:
            verb = "rose" if after.value > before.value else "fell"
            return f"{self.name} {verb} from {self.shown(before)} to {self.shown(after)}{self._on(after)} ({self._by})"
        if self.is_of_few:
            count = counted(after.prompts or 0, f"held-out {self._unit}")
            return f"{count} {'is' if after.prompts == 1 else 'are'} too few to tell a difference: {self.values}"
        return f"no difference found: {self.values}{self._on(after)} ({self._by})"

    @property
    def values(self) -> str:
        """Both values, and no verdict."""
        return f"{self.name} {self.shown(self.before)} before, {self.shown(self.after)} after"

    @property
    def is_of_few(self) -> bool:
        """Whether the figure rests on too few prompts or rows to tell whether it has changed."""
        count = self.after.prompts if self.after else None
        return count is not None and count < FEW and not self._differs

    @property
    def difference(self) -> str:
        """The paired difference with its 95% interval; a dash without one."""
        if self.paired is None:
            return "-"
        ends = (self.paired.value, self.paired.low, self.paired.high)
        value, low, high = ("" if each is None else self._number(each, "+") for each in ends)
        return f"{value} [{low}, {high}]" if low and high else value

    def shown(self, figure: Interval | None, *, with_interval: bool = False) -> str:
        """The figure in its unit."""
        if figure is None:
            return "not measured"
        text = self._number(figure.value)
        if with_interval and figure.low is not None and figure.high is not None:
            text += f" [{self._number(figure.low)}, {self._number(figure.high)}]"
        return text

    @property
    def _differs(self) -> bool:
        if self.paired is not None:
            return self.paired.is_significant
        return self.before is not None and self.after is not None and self.before.differs_from(self.after)

    @property
    def _by(self) -> str:
        if self.paired is not None:
            return f"paired difference {self.difference}"
        ends = [self.shown(each, with_interval=True).partition(" ")[2] for each in (self.before, self.after)]
        return f"95% intervals {ends[0]} and {ends[1]}" if all(ends) else "without an interval"

    @property
    def _unit(self) -> str:
        return "row" if self.key in OF_ROWS else "prompt"

    def _on(self, figure: Interval | None) -> str:
        count = figure.prompts if figure else None
        return "" if count is None else f" on {counted(count, f'held-out {self._unit}')}"

    def _number(self, value: float, sign: str = "") -> str:
        if self.key not in (REWARD, LOSS, MARGIN):
            return f"{value:{sign}.1%}"
        known = [each.value for each in (self.before, self.after) if each]
        is_fine = self.key == LOSS or abs(known[0] - known[-1]) < FINE
        return f"{value:{sign}.{3 if is_fine else 2}f}"


def figures_of(record: RunRecord, compared: Comparison | None) -> list[Figure]:
    """The held-out figures that are worth showing, the main one first."""
    values = {key: record.before_and_after(key) for _, key in HELD_OUT_FIGURES}
    shown = worth_showing({key: [figure and figure.value for figure in its] for key, its in values.items()})
    measures = compared.measures if compared else {}
    paired = {key: measures[name].difference for key, name in COMPARED.items() if name in measures}
    found = [Figure(key, name, *values[key], paired.get(key)) for name, key in HELD_OUT_FIGURES if key in shown]
    evaluations = [record.evaluation(before=first) or {} for first in (True, False)]
    if any(values[REWARD]) and main_figures(evaluations) == [*values[REWARD]]:
        found.sort(key=lambda figure: figure.key != REWARD)
    return found


def verdict(record: RunRecord, figures: Sequence[Figure]) -> list[str]:
    """The result in a sentence for each figure; from the training steps alone where nothing is held out."""
    if figures:
        main, *others = figures
        return [main.sentence, *(each.values if each.is_of_few else each.sentence for each in others)]
    why = " (eval.enabled=false)" if record.part("eval").get("enabled") is False else ""
    rewards = record.series("reward/mean")
    learned = rewards or [loss for row in record.metrics if (loss := trained_loss(row)) is not None]
    quarter = max(1, len(learned) // 4)
    first, last = (sum(part) / quarter for part in (learned[:quarter], learned[-quarter:]))
    name, steps = "reward" if rewards else "loss", "step" if quarter == 1 else f"{quarter} steps"
    course = f"; mean {name} of the first {steps} {first:.3g}, of the last {last:.3g}" if learned else ""
    return [f"not measured: the run has no held-out evaluation{why}{course}"]


def head_of_sweep(folder: Path) -> str:
    """The result of a sweep as HTML: its name, the verdict, and a table of the candidates over their seeds."""
    found = read_sweep(folder)
    head, *rows = found.rows()
    verdict = found.verdict.sentence if found.verdict else f"{counted(len(rows), 'candidate')}, not compared"
    notes = [line for line in found.lines() if line != verdict]
    title = f'<h1>{escape(folder.name)}</h1><p class="verdict named">{escape(verdict)}</p>'
    return title + _table(head, rows, notes)


def table_of(records: Sequence[RunRecord], figures: Sequence[Sequence[Figure]], typed: Sequence[set[str]]) -> str:
    """The runs as an HTML table: the settings that differ, and the main figure before and after with its difference.

    Settings given on a command line or by a recipe, which `typed` names for each run, go before others.
    """
    settings = [flat(record.config) for record in records]
    known = dict.fromkeys(key for its in settings for key in its)
    differing = [key for key in known if is_apart(key, [its.get(key) for its in settings])]
    given = [key for key in differing if any(key in its for its in typed)] or differing
    names = list(dict.fromkeys(its[0].name for its in figures if its))
    head = ["run", *given[:MOST_SETTINGS], "before", "after", "paired difference (95% interval)"]
    rows = [
        [record.folder.name, *(as_text(its.get(key)) for key in given[:MOST_SETTINGS]), *_result(shown, names)]
        for record, its, shown in zip(records, settings, figures, strict=True)
    ]
    left = len(differing) - len(given[:MOST_SETTINGS])
    note = [f"Before and after: held-out {' or '.join(names)}."] if names else []
    note += [f"{counted(left, 'more setting')} differ{'s' if left == 1 else ''}: see Settings."] if left else []
    return _table(head, rows, note)


def _result(figures: Sequence[Figure], names: Sequence[str]) -> list[str]:
    if not figures:
        return ["not measured", "not measured", "-"]
    main = figures[0]
    prefix = f"{main.name} " if len(names) > 1 else ""
    both = [prefix + main.shown(each, with_interval=main.paired is None) for each in (main.before, main.after)]
    return [*both, main.difference]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """A table as HTML, and the notes below it."""
    kinds = ["th", *["td"] * len(rows)]
    lines = zip(kinds, [head, *rows], strict=True)
    cells = ["".join(f"<{kind}>{escape(text)}</{kind}>" for text in texts) for kind, texts in lines]
    table = "".join(f"<tr>{each}</tr>" for each in cells)
    return f'<div class="scroll"><table>{table}</table></div><p class="dim">{escape(" ".join(notes))}</p>'
