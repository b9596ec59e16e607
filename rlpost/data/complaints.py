"""What is wrong with rows: a complaint each, collected, counted by kind and told in one error."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlpost.data.row_files import ONE_LIST
from rlpost.errors import DataError
from rlpost.nearest import did_you_mean, nearest

Complaint = tuple[str, str]  # (field, or "" for the row as a whole, what is wrong with it)
Malformed = Callable[[str, str], None]  # told the place of a bad row, and what is wrong with it

SHOWN = 20  # bad rows that an error lists
OR_MORE = ", or raise max_bad_share"  # what else helps where some rows may be bad

_OWN_TO_A_ROW = re.compile(r"'[^']*'|\"[^\"]*\"|\d[\d,.]*")  # what two complaints of one kind may differ in


def told(complaint: Complaint) -> str:
    """A complaint as a message has it behind "row 3"."""
    field, wrong = complaint
    return f", field {field!r}: {wrong}" if field else f" {wrong}"


class Complaints:
    """The bad rows of one file: all of them counted by kind, the first `SHOWN` with their places.

    `malformed` is told each as it is added; without it they are for an error.
    """

    def __init__(self, source: str, malformed: Malformed | None = None) -> None:
        self.source = source  # what messages call all of it
        self.malformed = malformed
        self.rows = 0  # looked at, good ones included
        self.first: list[tuple[str, Complaint]] = []
        self._kinds: Counter[str] = Counter()

    def add(self, file: str, number: int, complaint: Complaint) -> None:
        """Count the row `number` of a file as bad."""
        if len(self.first) < SHOWN:
            self.first.append((f"{file}, row {number}", complaint))
        if self.malformed is not None:
            self.malformed(f"{file}, row {number}", told(complaint).lstrip(", "))
        field, wrong = complaint
        self._kinds[told((field, _OWN_TO_A_ROW.sub("..", wrong))).lstrip(", ")] += 1

    @property
    def count(self) -> int:
        """How many rows are bad."""
        return self._kinds.total()

    def error(self, max_bad_share: float | None = None) -> DataError:
        """What to raise for them: the row where one is bad, else the first, and counts by kind.

        `max_bad_share` is how many of the rows may be bad, where there is a setting of that.
        """
        rows = [f"{where}{told(complaint)}" for where, complaint in self.first]
        allowed, otherwise = "", ""
        if max_bad_share is not None and self.count < self.rows:
            allowed, otherwise = f" (more than the {max_bad_share:.0%} allowed)", OR_MORE
        elif self.count == 1:
            return DataError(rows[0])
        if len(self._kinds) == 1 and self.count == self.rows:
            return DataError(f"{rows[0]} (and so are all {self.rows:,} rows)")
        heading = f"{self.source}: {self.count:,} of {self.rows:,} rows are bad{allowed}: correct or remove them"
        return DataError("\n".join([f"{heading}{otherwise}", *listing(rows, self._kinds)]))


def listing(rows: Sequence[str], kinds: Counter[str]) -> list[str]:
    """Lines that show the first bad rows, how many more there are, and how many there are of each kind."""
    more = kinds.total() - len(rows)
    lines = [f"  {row}" for row in rows] + ([f"  and {more:,} more"] if more > 0 else [])
    return lines + [f"  {count:,} x {kind}" for kind, count in kinds.most_common(SHOWN)]


def text_complaint(row: Any, required: Sequence[str]) -> Complaint | None:
    """The first required field that is missing, no text or blank."""
    for field in required:
        if not isinstance(row, Mapping):
            return no_object(row, field)
        if field not in row:
            return field, missing(field, row)
        if not isinstance(row[field], str):
            return field, f"must be text, and is {kind_of(row[field])}"
        if not row[field].strip():
            return field, "is empty"
    return None


def no_object(row: Any, field: str) -> Complaint:
    """The complaint about what has no fields at all."""
    advice = ONE_LIST if isinstance(row, list) and row and isinstance(row[0], Mapping) else ""
    return field, f"the row is no object of named fields but {kind_of(row)}{advice}"


def missing(field: str, row: Mapping[str, Any]) -> str:
    """What to say of a row without `field`: the nearest field it has, and all of them."""
    near = nearest(field, map(str, row))
    return f"missing{did_you_mean(near)}{'' if near else ';'} the row has {', '.join(map(str, row)) or 'no fields'}"


def kind_of(value: Any) -> str:
    """What a value is, in words."""
    if value is None:
        return "null"
    return {"str": "text", "list": "a list", "dict": "an object"}.get(type(value).__name__, type(value).__name__)
