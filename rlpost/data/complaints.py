"""Complaints about rows, counted by cause and raised as one error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlpost.data.row_files import ONE_LIST
from rlpost.errors import DataError
from rlpost.nearest import did_you_mean, nearest
from rlpost.text import cause_of, counted

Complaint = tuple[str, str]  # (field, or "" for the row as a whole, what is wrong with it)
Malformed = Callable[[str, str], None]  # told the place of a bad row, and what is wrong with it

SHOWN = 20  # causes that an error lists, and rows that a program is given
PLACES = 3  # rows that are named for each cause
OR_MORE = ", or raise max_bad_share"  # what else helps where some rows may be bad


def told(complaint: Complaint) -> str:
    """A complaint as a message has it behind "row 3"."""
    field, wrong = complaint
    return f", field {field!r}: {wrong}" if field else f" {wrong}"


class Causes:
    """Bad rows by cause: the count, the places of the first rows and the message of the first."""

    def __init__(self) -> None:
        self._causes: dict[str, tuple[str, list[str]]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, where: str, reason: str) -> None:
        """Count the row at `where`."""
        cause = cause_of(reason)
        self._counts[cause] += 1
        _, places = self._causes.setdefault(cause, (reason, []))
        if where not in places and len(places) <= PLACES:  # one more than is named
            places.append(where)

    def state(self) -> list[list[Any]]:
        """The counts, as JSON-compatible values."""
        return [[cause, self._counts[cause], *found] for cause, found in self._causes.items()]

    @classmethod
    def of(cls, state: Sequence[Sequence[Any]]) -> Causes:
        """Restore what `state` returned."""
        causes = cls()
        for cause, count, reason, places in state:
            causes._counts[cause], causes._causes[cause] = count, (reason, list(places))
        return causes

    @property
    def count(self) -> int:
        """How many rows are bad."""
        return self._counts.total()

    def lines(self, all_rows: int | None = None, unit: str = "row") -> list[str]:
        """A line for each cause, the most frequent first.

        `all_rows` is the number of rows, good and bad; `unit` names the counted things if they are not rows.
        """
        lines = []
        for cause, count in self._counts.most_common(SHOWN):
            reason, places = self._causes[cause]
            if count == 1:
                lines.append(f"{places[0]}: {reason}")
            elif count == all_rows:
                lines.append(f"{places[0]}: {reason} (the same in all {count:,} rows)")
            else:
                lines.append(f"{counted(count, unit)}{_of_several(reason)} ({_places(places)})")
        more = len(self._counts) - SHOWN
        return [*lines, *([f"and {more:,} causes more"] if more > 0 else [])]


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


class Complaints:
    """The bad rows of one file, by cause.

    `malformed` is told each as it is added; without it they are for an error.
    """

    def __init__(self, source: str, malformed: Malformed | None = None) -> None:
        self.source = source  # what messages call all of it
        self.malformed = malformed
        self.rows = 0  # looked at, good ones included
        self.causes = Causes()
        self._first = ""

    def add(self, file: str, number: int, complaint: Complaint) -> None:
        """Count the row `number` of a file as bad."""
        where, wrong = f"{file}, row {number}", told(complaint).lstrip(", ")
        self._first = self._first or f"{where}{told(complaint)}"
        if self.malformed is not None:
            self.malformed(where, wrong)
        self.causes.add(where, wrong)

    @property
    def count(self) -> int:
        """How many rows are bad."""
        return self.causes.count

    def error(self, max_bad_share: float | None = None) -> DataError:
        """The error for all bad rows: the row if only one is bad, else a line for each cause.

        `max_bad_share` is how many of the rows may be bad, where there is a setting of that.
        """
        lines = self.causes.lines(self.rows)
        if len(lines) == 1 and self.count == self.rows > 1:
            return DataError(f"{self._first} (the same in all {self.rows:,} rows)")
        allowed, otherwise = "", ""
        if max_bad_share is not None and self.count < self.rows:
            allowed, otherwise = f" (more than the {max_bad_share:.0%} allowed)", OR_MORE
        elif self.count == 1:
            return DataError(self._first)
        heading = f"{self.source}: {self.count:,} of {self.rows:,} rows are bad{allowed}: correct or remove them"
        return DataError("\n".join([f"{heading}{otherwise}", *(f"  {line}" for line in lines)]))


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
