"""The result of a run in words: its held-out figures before and after; and a table of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rlpost.config.schema import as_text, flat
from rlpost.evaluation.comparison import Comparison, Measured
from rlpost.evaluation.statistics import shown, signed
from rlpost.evaluation.sweeps import late_figure, read_sweep
from rlpost.record import (
    ACCURACY,
    LOSS,
    OF_ROWS,
    REWARD,
    STRICT,
    Interval,
    is_apart,
    main_figures,
)
from rlpost.runs.reader import RunRecord
from rlpost.text import counted

COMPARED = {ACCURACY: "accuracy_lenient", STRICT: "accuracy_strict", REWARD: "reward", LOSS: "loss"}  # in a comparison
MOST_SETTINGS = 6  # columns of the table of runs


@dataclass(frozen=True)
class Figure:
    """A held-out figure before and after training; `paired` is the comparison prompt by prompt, where it is known."""

    name: str
    key: str
    before: Interval | None
    after: Interval | None
    paired: Measured | None

    @property
    def sentence(self) -> str:
        """Whether the figure has changed, by how much, and on how many prompts."""
        before, after = self.before, self.after
        texts = [_shown(figure) for figure in (before, after)]
        count = after.prompts if after else None
        unit = "row" if self.key in OF_ROWS else "prompt"
        on = "" if count is None else f" on {counted(count, f'held-out {unit}')}"
        values = f"{self.name} {texts[0]} before, {texts[1]} after training{on}"
        if before is None or after is None:
            return values
        differs = self.paired.difference.is_significant if self.paired else before.differs_from(after)
        if not differs:
            return f"{self.paired.verdict if self.paired else 'no difference found'}; {values}"
        verb = "rose" if after.value > before.value else "fell"
        by = f"paired difference {self.difference}" if self.paired else f"95% intervals: {before}, {after}"
        return f"{self.name} {verb} from {texts[0]} to {texts[1]}{on} ({by})"

    @property
    def difference(self) -> str:
        """The paired difference with its 95% interval; a dash without one."""
        if self.paired is None or self.after is None:
            return "-"
        found = self.paired.difference
        return signed(found.value, found.low, found.high, is_share=self.after.is_share)


def figures_of(record: RunRecord, compared: Comparison | None) -> list[Figure]:
    """The held-out figures that are worth showing, the main one first."""
    measures = compared.measures if compared else {}
    found = [Figure(*each, measures.get(COMPARED.get(each.key, ""))) for each in record.held_out()]
    reward = next((each for each in found if each.key == REWARD), None)
    rows = [record.evaluation(before=first) or {} for first in (True, False)]
    if reward is not None and main_figures(rows) == [reward.before, reward.after]:
        found.sort(key=lambda figure: figure.key != REWARD)
    return found


def verdict(record: RunRecord, figures: Sequence[Figure]) -> list[str]:
    """The result in a sentence for each figure; from the training steps alone where nothing is held out."""
    if figures:
        return [figure.sentence for figure in figures]
    name, late = late_figure(record)
    course = "" if late is None else f"; mean {name} of the last quarter of the steps {late:.3g}"
    return [f"not measured: the run has no held-out evaluation{course}"]


def _shown(figure: Interval | None) -> str:
    return "not measured" if figure is None else shown(figure.value, is_share=figure.is_share)


def head_of_sweep(folder: Path) -> str:
    """The result of a sweep as HTML: its name, the verdict, and a table of the candidates over their seeds."""
    found = read_sweep(folder)
    head, *rows = found.rows()
    verdict = found.verdict.sentence if found.verdict else f"{counted(len(rows), 'candidate')}, not compared"
    notes = [line for line in found.lines() if line != verdict]
    title = f'<h1>{escape(folder.name)}</h1><p class="verdict named">{escape(verdict)}</p>'
    return title + _table(head, rows, notes)


def table_of(records: Sequence[RunRecord], figures: Sequence[Sequence[Figure]]) -> str:
    """The runs as an HTML table: the settings that differ, and the main figure before and after with its difference.

    Settings that a command line or a recipe gave go before others.
    """
    settings = [flat(record.config) for record in records]
    known = dict.fromkeys(key for its in settings for key in its)
    differing = [key for key in known if is_apart(key, [its.get(key) for its in settings])]
    given = {word.partition("=")[0] for record in records for word in record.overrides}
    columns = ([key for key in differing if key in given] or differing)[:MOST_SETTINGS]
    names = list(dict.fromkeys(its[0].name for its in figures if its))
    head = ["run", *columns, "before", "after", "paired difference (95% interval)"]
    rows = [
        [record.folder.name, *(as_text(its.get(key)) for key in columns), *_result(found, names)]
        for record, its, found in zip(records, settings, figures, strict=True)
    ]
    left = len(differing) - len(columns)
    note = [f"Before and after: held-out {' or '.join(names)}."] if names else []
    note += [f"{counted(left, 'more setting')} differ{'s' if left == 1 else ''}: see Settings."] if left else []
    return _table(head, rows, note)


def _result(figures: Sequence[Figure], names: Sequence[str]) -> list[str]:
    if not figures:
        return ["not measured", "not measured", "-"]
    main = figures[0]
    prefix = f"{main.name} " if len(names) > 1 else ""
    as_cell = _shown if main.paired else lambda figure: str(figure or "not measured").strip()
    return [*(prefix + as_cell(each) for each in (main.before, main.after)), main.difference]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """A table as HTML, and the notes below it."""
    kinds = ["th", *["td"] * len(rows)]
    lines = zip(kinds, [head, *rows], strict=True)
    cells = ["".join(f"<{kind}>{escape(text)}</{kind}>" for text in texts) for kind, texts in lines]
    table = "".join(f"<tr>{each}</tr>" for each in cells)
    return f'<div class="scroll"><table>{table}</table></div><p class="dim">{escape(" ".join(notes))}</p>'
