"""Rows of a file, one after the other and never the whole file at once, each with its number.

A row that cannot be read is given as `Unreadable`, so that the rows behind it are read too.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rlpost.errors import DataError

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

MOST_ROW_BYTES = 16 << 20  # of a row
MOST_GROUP_BYTES = 8 << 30  # of a row group of Parquet, whose columns are held while its rows are read
MOST_ROWS = 100_000_000
MOST_LEVELS = 100  # of lists and objects within each other in a row: what reads them calls itself for each
BATCH_ROWS = 4096  # of Parquet, at a time
BATCH_BYTES = 64 << 20  # of rows of Parquet, and of a column of repeated text in full, at a time
_CHUNK = 1 << 20

ONE_LIST = "; if the file is one list, name it .json"
TOO_DEEP = f"is nested too deeply ({MOST_LEVELS} levels at most): flatten or remove it"
TOO_MANY_DIGITS = "holds a number of more digits than can be read: write it as text, or remove it"

_BLANK = re.compile(r"[ \t\r\n]*")
_HOLDING = (dict, list, tuple)
_LONE_RETURN = re.compile(r"(?<=\r)(?!\n)(?!$)")

Numbered = Iterator[tuple[int, Any]]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A row that could not be read, and why."""

    wrong: str


def read_jsonl(path: Path) -> Numbered:
    """One JSON value a line; a row's number is its line. Raises DataError for a file that is no UTF-8."""
    for number, text in _lines(path):
        if isinstance(text, Unreadable):
            yield number, text
        elif text.strip():
            yield number, parsed(text.rstrip())


def parsed(text: str) -> Any:
    """The value that is written in a text as JSON, or what is wrong with it as `Unreadable`."""
    try:
        return json.loads(text)
    except RecursionError:
        return Unreadable(TOO_DEEP)
    except json.JSONDecodeError as error:
        begun = ONE_LIST if text.strip() == "[" else ""
        return Unreadable(f"is not JSON ({error.msg}, character {error.pos + 1}){begun}")
    except ValueError:  # Python reads no integer of more than 4,300 digits
        return Unreadable(TOO_MANY_DIGITS)


def is_too_deep(value: Any) -> bool:
    """Whether a value holds more than `MOST_LEVELS` lists and objects within each other."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        level = [each for each in level if isinstance(each, _HOLDING)]
        if not level:
            return False
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return True


def read_json(path: Path) -> Numbered:
    """The elements of a list, from 1. Raises DataError for what is no list of JSON: then no row of it is known."""
    decoder, of_any_size = json.JSONDecoder(), json.JSONDecoder(parse_int=str)
    number, size, wants_element = 0, _CHUNK, True

    def broken(why: str) -> DataError:
        return DataError(
            f"{path} is not JSON (row {number + 1}: {why}): correct it, or write one object a line as .jsonl"
        )

    with _opened_text(path) as read:
        text = next((part for part in iter(lambda: read(size), "") if part.strip()), "")
        at = _end_of_blank(text, 0)
        if text[at : at + 1] != "[":
            raise DataError(f"{path} holds no list at its top: it must be a list of objects, or one a line as .jsonl")
        at += 1
        while True:
            at = _end_of_blank(text, at)
            if at < len(text) and text[at] == "]" and (number == 0 or not wants_element):
                break
            if at < len(text) and not wants_element:
                if text[at] != ",":
                    raise broken("a comma is missing before it")
                at, wants_element = at + 1, True
                continue
            row, end, why = None, len(text), "the list has no end"
            try:
                if at < len(text):
                    row, end = decoder.raw_decode(text, at)
            except json.JSONDecodeError as error:
                why = error.msg
            except RecursionError as error:
                raise broken("it is nested too deeply") from error
            except ValueError:
                row = Unreadable(TOO_MANY_DIGITS)
                _, end = of_any_size.raw_decode(text, at)
            if end == len(text):  # it may go on, a number for one
                more = read(size)
                if not more:
                    raise broken(why)
                text, at, size = text[at:] + more, 0, 2 * size  # so that a long one is not tried over and over
                continue
            number += 1
            yield number, row
            at, size, wants_element = end, _CHUNK, False
        while text:
            if _end_of_blank(text, at + 1) < len(text):
                raise broken("there is more behind the list")
            text, at = read(_CHUNK), -1


def _end_of_blank(text: str, at: int) -> int:
    match = _BLANK.match(text, at)
    return at if match is None else match.end()


@contextmanager
def _opened_text(path: Path) -> Iterator[Callable[[int], str]]:
    """Reads so many more characters of a file; "" at its end. Raises DataError for what is no UTF-8."""
    with _opened(path) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:

        def read(count: int) -> str:
            try:
                part = text.read(count)
            except UnicodeDecodeError as error:
                raise DataError(f"{path} {_no_utf8(error.object, error.start)}") from error
            if "\0" in part:
                raise DataError(f"{path} {_no_utf8(part.encode(), part.index(chr(0)))}")
            return part

        yield read


def read_csv(path: Path) -> Numbered:
    """A dict a record, under the names of the header; a row's number is its line, the header's being 1.

    Cells are separated by commas, or where the header has none by semicolons or tabs, as spreadsheets write them.
    """
    csv.field_size_limit(MOST_ROW_BYTES)
    reader = None
    try:
        records = _records(path)
        header = next(records, "")
        reader = csv.DictReader(chain([header], records), strict=True, delimiter=_delimiter(header))
        for name in (names := list(reader.fieldnames or [])):
            if name and names.count(name) > 1:
                raise DataError(f"{path} has two columns called {name!r}: give one of them another name")
        for row in reader:
            more = None in row
            yield reader.line_num, Unreadable("has more cells than the header has names") if more else row
    except csv.Error as error:
        number = 1 if reader is None else reader.line_num
        raise DataError(f"{path}, row {number} is not CSV ({error}): correct or remove it") from error


def _delimiter(header: str) -> str:
    return "," if "," in header else next((sign for sign in ";\t" if sign in header), ",")


def _records(path: Path) -> Iterator[str]:
    """Lines of CSV: a record ends at a lone carriage return too."""
    for number, text in _lines(path):
        if isinstance(text, Unreadable):
            raise DataError(f"{path}, row {number} {text.wrong}")
        yield from _LONE_RETURN.split(text)


def _lines(path: Path) -> Iterator[tuple[int, str | Unreadable]]:
    """Lines as text, from 1, without a byte order mark.

    Raises DataError for a file that cannot be read, or whose first line shows that it is no UTF-8.
    """
    with _opened(path) as stream:
        for number in count(1):
            line = stream.readline(MOST_ROW_BYTES)
            if not line:
                return
            if len(line) == MOST_ROW_BYTES and not line.endswith(b"\n"):
                while len(line) == MOST_ROW_BYTES and not line.endswith(b"\n"):
                    line = stream.readline(MOST_ROW_BYTES)
                yield number, Unreadable(f"has more than {MOST_ROW_BYTES >> 20} MB: cut it up, or remove it")
                continue
            yield number, _decoded(path, number, line)


def _decoded(path: Path, number: int, line: bytes) -> str | Unreadable:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        if "\0" not in text:
            return text[:-2] + "\n" if text.endswith("\r\n") else text
        at = line.index(0)
    except UnicodeDecodeError as error:
        at = error.start
    wrong = _no_utf8(line, at)
    if number == 1 or b"\0" in line:
        raise DataError(f"{path}, row {number} {wrong}")
    return Unreadable(wrong)


def _no_utf8(content: bytes, at: int) -> str:
    if content.count(0) * 4 < len(content) and content[at] == 0:  # of UTF-16 every second byte is 0
        return f"holds a byte 0 (byte {at}), which no text has: is the file whole? Write it again"
    likely = "UTF-16" if b"\0" in content else "Windows-1252 or Latin-1"
    return f"is not UTF-8 (byte {at}, likely {likely}): save the file as UTF-8"


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        stream = path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check its permissions") from error
    with stream:
        yield stream


def read_parquet(path: Path) -> Numbered:
    """Its rows from 1. Raises DataError for what is no Parquet, or would not fit into memory a row group at a time."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        _check_size(path, file.metadata)
        # a text that is repeated is held once: else a small file could stand for any amount of memory
        file = pyarrow.parquet.ParquetFile(path, read_dictionary=_repeating(file))
        number = 0
        for batch in _batches(file):
            for row in _rows_of(batch):
                number += 1
                yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({error}): write it again, or as .jsonl") from error


def _check_size(path: Path, metadata: Any) -> None:
    """Raise DataError for a file that promises more than is reasonable to read."""
    if metadata.num_rows > MOST_ROWS:
        raise DataError(f"{path} has {metadata.num_rows:,} rows, more than {MOST_ROWS:,}: give a part of it")
    for number in range(metadata.num_row_groups):
        if (size := metadata.row_group(number).total_byte_size) > MOST_GROUP_BYTES:
            raise DataError(
                f"{path}: its row group {number + 1} takes {size / 1e9:,.0f} GB when it is read, more than "
                f"{MOST_GROUP_BYTES / 1e9:,.0f}: write it again with smaller row groups"
            )


def _repeating(file: pyarrow.parquet.ParquetFile) -> list[str]:
    """The columns of text that a file may hold each text of once."""
    texts = {field.name for field in file.schema_arrow if _is_text(field.type)}
    groups = map(file.metadata.row_group, range(file.num_row_groups))
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    held_once = {c.path_in_schema for c in columns if any("DICTIONARY" in encoding for encoding in c.encodings)}
    return sorted(texts & held_once)


def _batches(file: pyarrow.parquet.ParquetFile) -> Iterator[pyarrow.RecordBatch]:
    """The rows of one row group after the other: Arrow holds what repeats of all those that it reads together."""
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        each = group.total_byte_size // max(group.num_rows, 1) + 1
        yield from file.iter_batches(max(1, min(BATCH_ROWS, BATCH_BYTES // each)), row_groups=[number])


def _rows_of(batch: pyarrow.RecordBatch) -> Iterator[Any]:
    import pyarrow

    longest = max((_longest(column) for column in batch.columns), default=0)
    step = max(1, min(batch.num_rows, BATCH_BYTES // (longest + 1)))
    for start in range(0, batch.num_rows, step):
        columns = [_spelled_out(column) for column in batch.slice(start, step).columns]
        part = pyarrow.RecordBatch.from_arrays(columns, batch.schema.names)
        try:
            yield from part.to_pylist()
        except UnicodeDecodeError:  # of one of its texts: it is looked for row by row
            for number in range(part.num_rows):
                yield _row(part, number)


def _longest(column: Any) -> int:
    """Bytes of the longest of the texts that a column repeats."""
    import pyarrow.compute
    import pyarrow.types

    if not pyarrow.types.is_dictionary(column.type) or not len(column.dictionary):
        return 0
    compute: Any = pyarrow.compute  # its functions are made at import
    return compute.max(compute.binary_length(column.dictionary)).as_py() or 0


def _spelled_out(column: Any) -> Any:
    """The column with each of its repeated texts in full."""
    return column.dictionary_decode() if hasattr(column, "dictionary_decode") else column


def _row(batch: pyarrow.RecordBatch, number: int) -> Any:
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[number].as_py()
        except UnicodeDecodeError:
            return Unreadable(f"has text in {name!r} that is not UTF-8: write the file again with valid text")
    return row


def _is_text(kind: pyarrow.DataType) -> bool:
    import pyarrow.types

    return pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)


READERS: dict[str, Callable[[Path], Numbered]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
