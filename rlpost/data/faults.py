"""Rows that cannot be used as they are: the kinds of faults, and all bad rows of a file by cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from rlpost.errors import DataError
from rlpost.text import cause_of, counted

ALL_UP_TO = 100_000  # rows; more are not all tokenised before training begins
SAMPLE = 20_000  # rows of a larger file that are tokenised then; each other row is when it is drawn
SHOWN = 20  # causes that an error lists, and rows that a program is given
PLACES = 3  # rows named for each cause


class Fault(Enum):
    """Why a row cannot be trained on as it is; the value is its name in a summary."""

    malformed = "malformed"
    cut = "cut"  # longer than max_tokens: the end of an answer is missing, the rest is trained on
    empty = "nothing to train on"
    template = "refused by the chat template"
    nesting = "rendered differently once more follows"
    endless = "no end-of-turn token"
    foreign = "ids of another tokenizer"
    equal = "nothing to choose between"


class FormatError(ValueError):
    """A row that cannot be used: the `field` at fault ("" for the whole row), and its fault in words."""

    def __init__(self, field: str, wrong: str) -> None:
        super().__init__(f"field {field!r}: {wrong}" if field else wrong)
        self.field, self.wrong = field, wrong


class BadRow(NamedTuple):
    """A bad row: its place, its fault in words, and the kind of fault."""

    where: str
    reason: str
    fault: Fault = Fault.malformed

    @property
    def line(self) -> str:
        """Place and fault: "rows.jsonl, row 3, field 'answer': missing"."""
        verb = self.reason.partition(" ")[0]
        between = ", " if verb == "field" else " " if verb in _PLURALS else ": "
        return f"{self.where}{between}{self.reason}"


@dataclass
class BadRows:
    """The bad ones of `total` rows, and how many of all rows have something worth a note."""

    total: int = 0
    found: list[BadRow] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, where: str, reason: str, fault: Fault = Fault.malformed) -> None:
        """Keep a bad row."""
        self.found.append(BadRow(where, reason, fault))

    @property
    def count(self) -> int:
        """How many rows are bad."""
        return len(self.found)

    @property
    def share(self) -> float:
        """Share of the rows that are bad."""
        return self.count / self.total if self.total else 0.0

    def of(self, fault: Fault) -> list[BadRow]:
        """The bad rows with one kind of fault."""
        return [each for each in self.found if each.fault is fault]

    def lines(self, unit: str = "row") -> list[str]:
        """A line for each cause, the most frequent first; `unit` names the counted things if they are not rows."""
        causes: dict[tuple[Fault, str], list[BadRow]] = {}
        for each in self.found:
            causes.setdefault((each.fault, cause_of(each.reason)), []).append(each)
        lines = []
        for (fault, _), rows in sorted(causes.items(), key=lambda cause: -len(cause[1]))[:SHOWN]:
            prefix = "" if fault is Fault.malformed else f"{fault.value}: "
            if len(rows) == 1 or len(rows) == self.total:
                all_rows = f" (the same in all {len(rows):,} rows)" if len(rows) > 1 else ""
                lines.append(f"{prefix}{rows[0].line}{all_rows}")
            else:
                places = list(dict.fromkeys(row.where for row in rows))
                lines.append(f"{prefix}{counted(len(rows), unit)}{_of_several(rows[0].reason)} ({_places(places)})")
        more = len(causes) - SHOWN
        return [*lines, *([f"and {more:,} causes more"] if more > 0 else [])]

    def noted(self) -> list[str]:
        """A line for each note: how many rows it is about."""
        return [f"{count:,} of {counted(self.total, 'row')}: {note}" for note, count in self.notes.most_common()]

    def error(self, source: str = "", allowed: float | None = None, also: str = "") -> DataError:
        """The error for all bad rows: a line for each cause.

        `source` is the name of the rows, `allowed` the share that may be bad, if some may, which `also` precedes.
        """
        lines = self.lines()
        some_may = allowed is not None and self.count < self.total
        if len(lines) == 1 and not some_may:
            return DataError(lines[0])
        over = f" ({also}more than the {allowed:.0%} allowed)" if some_may else ""
        all_cut = len(self.of(Fault.cut)) == self.count
        advice = "raise max_tokens, or remove them" if all_cut else "correct or remove them"
        name = f"{source}: " if source else ""
        heading = f"{name}{self.count:,} of {counted(self.total, 'row')} are bad{over}: {advice}"
        more = ", or raise max_bad_share" if some_may else ""
        return DataError("\n".join([f"{heading}{more}", *(f"  {line}" for line in lines)]))


_PLURALS = {"is": "are", "has": "have", "holds": "hold"}


def _of_several(reason: str) -> str:
    """The reason as it reads after "6 rows"."""
    verb, _, rest = reason.partition(" ")
    return f" {_PLURALS[verb]} {rest}" if verb in _PLURALS else f": {reason}"


def _places(places: Sequence[str]) -> str:
    """The first `PLACES` places, a file named once: "rows.jsonl, rows 2, 5, 9, ..."."""
    files: dict[str, list[str]] = {}
    for place in places[:PLACES]:
        file, _, row = place.rpartition(" row ")
        files.setdefault(file, []).append(row)
    named = [
        ", ".join(rows) if not file else f"{file} row{'s' if len(rows) > 1 else ''} {', '.join(rows)}"
        for file, rows in files.items()
    ]
    return ", ".join(named) + (", ..." if len(places) > PLACES else "")
