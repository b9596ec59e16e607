"""Rows of data: read one by one from a file, kept for reading in any order, and the bad ones told by cause.

A line that cannot be read is a `FormatError` among the rows, so the rows behind it are still read.
"""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rlpost.data.faults import FormatError
from rlpost.data.order import Digests, hashes_of
from rlpost.errors import DataError
from rlpost.text import did_you_mean, nearest

MOST_CELL = 16 << 20  # characters of a cell of CSV; Python's own limit is 131,072
BATCH_ROWS = 4096  # of Parquet, at a time
ONE_LIST = "; if the file is one list, name it .json"

Row = Mapping[str, Any]
Numbered = Iterator[tuple[int, Any]]  # each row with its number


# Reading a file


def read_jsonl(path: Path) -> Numbered:
    """One JSON value a line; a row's number is its line. Raises DataError for a file that cannot be read."""
    for number, text in _lines(path):
        if isinstance(text, FormatError):
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
            yield number, FormatError("", "has more cells than the header has names") if None in row else row
    except csv.Error as error:
        raise DataError(f"{path}, behind row {number}, is not CSV ({error}): correct or remove it") from error


def read_parquet(path: Path) -> Numbered:
    """The rows of a Parquet file, from 1. Raises DataError if it is malformed."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        rows = (row for batch in table.iter_batches(BATCH_ROWS) for row in batch.to_pylist())
        if "arrow.json" in str(table.schema_arrow):  # as `datasets` writes calls of unlike arguments
            whole = pyarrow.struct(list(table.schema_arrow))
            yield from enumerate((_with_json_read(row, whole) for row in rows), start=1)
        else:
            yield from enumerate(map(without_nulls, rows), start=1)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({error}): write it again, or as .jsonl") from error


def _with_json_read(value: Any, kind: Any) -> Any:
    """A value of an Arrow type, without entries that are null; what is JSON is read, and keeps its own nulls."""
    import pyarrow

    if isinstance(kind, pyarrow.JsonType):
        return value and json.loads(value)
    if isinstance(value, dict) and pyarrow.types.is_struct(kind):
        held = [each for each in kind if value[each.name] is not None]
        return {each.name: _with_json_read(value[each.name], each.type) for each in held}
    if isinstance(value, list) and not pyarrow.types.is_map(kind):
        return [_with_json_read(each, kind.value_type) for each in value]
    return value


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
    """The value of a JSON text; a `FormatError` if it is malformed."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        begun = ONE_LIST if text.strip() == "[" else ""
        return FormatError("", f"is not JSON ({error.msg}, character {error.pos + 1}){begun}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of levels
        return FormatError("", f"cannot be read ({error}): write it as text, or remove it")


def _lines(path: Path) -> Iterator[tuple[int, str | FormatError]]:
    """Lines as text, from 1, without a byte order mark. Raises DataError for a file of UTF-16."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if b"\0" in line:
                raise DataError(f"{path}, row {number} {_no_utf8(0, 'UTF-16')}")
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                yield number, FormatError("", _no_utf8(error.start, "Windows-1252 or Latin-1"))


def _whole_lines(path: Path) -> Iterator[str]:
    """Lines as text. Raises DataError for one that is not UTF-8."""
    for number, text in _lines(path):
        if isinstance(text, FormatError):
            raise DataError(f"{path}, row {number} {text.wrong}")
        yield text


def _no_utf8(at: int, likely: str) -> str:
    return f"is not UTF-8 (byte {at}, likely {likely}): save the file as UTF-8"


# Keeping rows


class PackedRows(Sequence[Row]):
    """Rows that are added one after another and then read in any order; each read makes a new dict.

    They are kept as JSON, several times smaller than dicts. Values that JSON lacks become text: dates in ISO form,
    decimals as digits, bytes in base64.
    """

    def __init__(self) -> None:
        self._rows: list[bytes] = []

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, row: Mapping[str, Any]) -> None:
        """Keep a row. Raises FormatError for one that no file takes."""
        try:
            self._rows.append(_ENCODER.encode(row).encode())
        except UnicodeEncodeError as error:
            raise FormatError("", "holds half of a character (a lone surrogate): remove it") from error
        except (TypeError, ValueError) as error:
            raise FormatError("", f"holds what is not data ({error})") from error

    def __getitem__(self, number: Any) -> Any:
        """The row `number`, from 0."""
        return json.loads(self._rows[number])

    def only(self, numbers: Sequence[int]) -> PackedRows:
        """The rows with these numbers."""
        part = PackedRows()
        part._rows = [self._rows[number] for number in numbers]
        return part

    @property
    def digests(self) -> Digests:
        """One number a row, equal for equal rows."""
        return hashes_of(self._rows)


def _as_text(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "tolist"):  # numpy's
        return value.tolist()
    return str(value)


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_as_text)


# The fields of a row


def present(row: Any, field: str) -> Any:
    """The value of a field. Raises FormatError where the row has none, or holds no fields."""
    if not isinstance(row, Mapping):
        advice = ONE_LIST if isinstance(row, list) and row and isinstance(row[0], Mapping) else ""
        raise FormatError(field, f"the row is not an object of named fields but {kind_of(row)}{advice}")
    if field not in row:
        raise FormatError(field, missing(field, row))
    return row[field]


def text_in(row: Any, field: str) -> str:
    """The text of a field. Raises FormatError where it is missing, not text, or blank."""
    value = present(row, field)
    if not isinstance(value, str):
        raise FormatError(field, f"must be text, and is {kind_of(value)}")
    if not value.strip():
        raise FormatError(field, "is empty")
    return value


def missing(field: str, row: Mapping[str, Any]) -> str:
    """The fault of a row without `field`: names the nearest field it has, and all of them."""
    near = nearest(field, map(str, row))
    return f"missing{did_you_mean(near)}{'' if near else ';'} the row has {', '.join(map(str, row)) or 'no fields'}"


def kind_of(value: Any) -> str:
    """The type of a value, in words."""
    if value is None:
        return "null"
    return {"str": "text", "list": "a list", "dict": "an object"}.get(type(value).__name__, type(value).__name__)
