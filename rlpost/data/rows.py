"""Rows of data: read one by one from a file, kept for reading in any order, and complained about by cause.

A line that cannot be read is an `Unreadable`, so the rows behind it are still read. Complaints about bad rows are
counted by cause and raised as one error.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from rlpost.errors import ConfigError, DataError
from rlpost.text import cause_of, counted, did_you_mean, nearest

if TYPE_CHECKING:
    import numpy as np

BOMS = (b"\xff\xfe", b"\xfe\xff")  # of UTF-16
MOST_CELL = 16 << 20  # characters of a cell of CSV; Python's own limit is 131,072
BATCH_ROWS = 4096  # of Parquet, at a time
ALL_UP_TO = 100_000  # rows; more are not all tokenised before training begins
SAMPLE = 20_000  # rows of a larger file that are tokenised then; each other row is when it is drawn
SHOWN = 20  # causes that an error lists, and rows that a program is given
PLACES = 3  # rows named for each cause
LONE_SURROGATE = "holds half of a character (a lone surrogate): remove it"
ONE_LIST = "; if the file is one list, name it .json"
OR_MORE = ", or raise max_bad_share"  # further advice where some rows may be bad

Row = dict[str, Any]
Digests: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
Numbered = Iterator[tuple[int, Any]]  # each row with its number
Complaint = tuple[str, str]  # (field, or "" for the whole row; its fault)
Malformed = Callable[[str, str], None]  # called with the place and the fault of a bad row


# Reading a file


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A row that could not be read, and why."""

    wrong: str


def read_jsonl(path: Path) -> Numbered:
    """One JSON value a line; a row's number is its line. Raises DataError for a file that cannot be read."""
    for number, text in _lines(path):
        if isinstance(text, Unreadable):
            yield number, text
        elif text.strip():
            yield number, parsed(text.rstrip())


def read_json(path: Path) -> Numbered:
    """The elements of a JSON list, numbered from 1. Raises DataError for anything else."""
    try:
        rows = list(json.loads(path.read_text(encoding="utf-8-sig")))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path} is not a JSON list ({error}): correct it, or write one object a line as .jsonl"
        ) from error
    yield from enumerate(rows, start=1)


def read_csv(path: Path) -> Numbered:
    """A dict for each record, keyed by the header; a row's number is its line, and the header is line 1.

    Commas separate the cells; if the header has none, semicolons or tabs do, as spreadsheets write them.
    """
    csv.field_size_limit(MOST_CELL)
    number = 1
    try:
        lines = _whole_lines(path)
        header = next(lines, "")
        sign = next((sign for sign in ",;\t" if sign in header), ",")
        reader = csv.DictReader(chain([header], lines), strict=True, delimiter=sign)
        for name in (names := list(reader.fieldnames or [])):
            if name and names.count(name) > 1:
                raise DataError(f"{path} has two columns called {name!r}: give one of them another name")
        for row in reader:
            number = reader.line_num
            yield number, Unreadable("has more cells than the header has names") if None in row else row
    except csv.Error as error:
        raise DataError(f"{path}, behind row {number}, is not CSV ({error}): correct or remove it") from error


def read_parquet(path: Path) -> Numbered:
    """The rows of a Parquet file, from 1. Raises DataError if it is malformed."""
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(BATCH_ROWS)
        yield from enumerate((without_nulls(row) for batch in batches for row in batch.to_pylist()), start=1)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({error}): write it again, or as .jsonl") from error


def without_nulls(value: Any) -> Any:
    """Objects without the entries that are null: a typed table gives each object the entries of all others."""
    if isinstance(value, Mapping):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


READERS: dict[str, Callable[[Path], Numbered]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}


def parsed(text: str) -> Any:
    """The value of a JSON text; an `Unreadable` if it is malformed."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        begun = ONE_LIST if text.strip() == "[" else ""
        return Unreadable(f"is not JSON ({error.msg}, character {error.pos + 1}){begun}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of levels
        return Unreadable(f"cannot be read ({error}): write it as text, or remove it")


def _lines(path: Path) -> Iterator[tuple[int, str | Unreadable]]:
    """Lines as text, from 1, without a byte order mark. Raises DataError for a file of UTF-16."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if (zero := line.find(b"\0")) >= 0:
                raise DataError(f"{path}, row {number} {_no_utf8(line, 0 if line.startswith(BOMS) else zero)}")
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                yield number, Unreadable(_no_utf8(line, error.start))


def _whole_lines(path: Path) -> Iterator[str]:
    """Lines as text. Raises DataError for one that is not UTF-8."""
    for number, text in _lines(path):
        if isinstance(text, Unreadable):
            raise DataError(f"{path}, row {number} {text.wrong}")
        yield text


def _no_utf8(content: bytes, at: int) -> str:
    likely = "UTF-16" if b"\0" in content else "Windows-1252 or Latin-1"
    return f"is not UTF-8 (byte {at}, likely {likely}): save the file as UTF-8"


# Keeping rows


class Rows(Sequence[Row]):
    """Rows by number or slice; a subclass defines `at`."""

    @abstractmethod
    def at(self, number: int) -> Row:
        """The row `number`, from 0: a new dict."""

    @overload
    def __getitem__(self, number: int) -> Row: ...
    @overload
    def __getitem__(self, number: slice) -> list[Row]: ...
    def __getitem__(self, number: int | slice) -> Row | list[Row]:
        """A row, or a list of them."""
        places = range(len(self))[number]
        return self.at(places) if isinstance(places, int) else [self.at(place) for place in places]


class PackedRows(Rows):
    """Rows that are added one after another and then read in any order; each read makes a new dict.

    They are kept as JSON, several times smaller than dicts. Values that JSON lacks become text: dates in ISO form,
    decimals as digits, bytes in base64.
    """

    def __init__(self) -> None:
        self._rows: list[bytes] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Mapping[str, Any]) -> str | None:
        """Keep a row; returns its fault if it cannot be kept, else None."""
        try:
            self._rows.append(_ENCODER.encode(row).encode())
        except UnicodeEncodeError:
            return LONE_SURROGATE
        except (TypeError, ValueError) as error:
            return f"holds what is not data ({error})"
        return None

    def at(self, number: int) -> Row:
        """See `Rows.at`."""
        return json.loads(self._rows[number])

    @property
    def digests(self) -> Digests:
        """One number a row, equal for equal rows."""
        return _digests(self._rows)


def has_lone_surrogate(value: Any) -> bool:
    """Whether a text in a JSON value holds a lone surrogate, which no file and no tokenizer takes."""
    try:
        _ENCODER.encode(value).encode()
    except UnicodeEncodeError:
        return True
    return False


def same_prompt(text: str) -> str:
    """The text without what two copies of a prompt may differ in: case and white space."""
    return " ".join(text.split()).casefold()


def digests_of(rows: Sequence[Any]) -> Digests:
    """One number a row: a hash of its content for a list of JSON values, otherwise its place."""
    import numpy as np

    if isinstance(rows, list):
        with suppress(TypeError, ValueError):
            return _digests([json.dumps(row, sort_keys=True).encode() for row in rows])
    return np.arange(len(rows), dtype=np.uint64)  # reading all of another sequence may be slow


def _digests(contents: Sequence[bytes]) -> Digests:
    import numpy as np

    return np.frombuffer(b"".join(hashlib.blake2b(each, digest_size=8).digest() for each in contents), np.uint64)


def _as_text(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "tolist"):  # numpy's
        return value.tolist()
    return str(value)


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_as_text)


# Complaints


def told(complaint: Complaint) -> str:
    """A complaint as it follows "row 3" in a message."""
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
        if where not in places and len(places) <= PLACES:  # one more than `_places` names
            places.append(where)

    def state(self) -> list[list[Any]]:
        """The counts, as JSON-compatible values."""
        return [[cause, self._counts[cause], *found] for cause, found in self._causes.items()]

    @classmethod
    def of(cls, state: Sequence[Sequence[Any]]) -> Causes:
        """Restore what `state` returned."""
        causes = cls()
        for cause, number, reason, places in state:
            causes._counts[cause], causes._causes[cause] = number, (reason, list(places))
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
        for cause, number in self._counts.most_common(SHOWN):
            reason, places = self._causes[cause]
            if number == 1:
                lines.append(f"{places[0]}: {reason}")
            elif number == all_rows:
                lines.append(f"{places[0]}: {reason} (the same in all {number:,} rows)")
            else:
                lines.append(f"{counted(number, unit)}{_of_several(reason)} ({_places(places)})")
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

    `malformed` is called with each bad row as it is added.
    """

    def __init__(self, source: str, malformed: Malformed | None = None) -> None:
        self.source = source  # its name in messages
        self.malformed = malformed
        self.rows = 0  # examined so far, good ones included
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

        `max_bad_share` is the share of the rows that may be bad; None if there is no such setting.
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
    """The first required field that is missing, not text, or blank."""
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
    """The complaint about a row that is not an object."""
    advice = ONE_LIST if isinstance(row, list) and row and isinstance(row[0], Mapping) else ""
    return field, f"the row is not an object of named fields but {kind_of(row)}{advice}"


def missing(field: str, row: Mapping[str, Any]) -> str:
    """The fault of a row without `field`: names the nearest field it has, and all of them."""
    near = nearest(field, map(str, row))
    return f"missing{did_you_mean(near)}{'' if near else ';'} the row has {', '.join(map(str, row)) or 'no fields'}"


def kind_of(value: Any) -> str:
    """The type of a value, in words."""
    if value is None:
        return "null"
    return {"str": "text", "list": "a list", "dict": "an object"}.get(type(value).__name__, type(value).__name__)


# Prompts and their order


def order_seed(run_seed: int, env_seed: int) -> int:
    """One seed from two: different for every pair of seeds below 2**32."""
    return run_seed << 32 | env_seed


def filled(template: str, row: Mapping[str, Any], key: str = "env.prompt_template") -> str:
    """The value of `key` with the fields of a row. Raises ConfigError, from a KeyError for a missing field."""
    try:
        return template.format(**row)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        wrong = f"{{{error.args[0]}}} is not a field" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"{key}={template!r} does not fit: {wrong}; "
            f"the fields are {', '.join(map(str, row))}; write {{{{ and }}}} for braces"
        ) from error
