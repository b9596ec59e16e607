"""Rows of data: read one by one from a file, kept for reading in any order, and complained about by cause.

A file is never read as a whole, and a row that cannot be read is an `Unreadable`, so the rows behind it are
still read. Kept rows are JSON: in memory while they are few, otherwise in a temporary file that is deleted when
the process ends. Complaints about bad rows are counted by cause and raised as one error.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import mmap
import re
import tempfile
from abc import abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias, overload

from rlpost.errors import ConfigError, DataError
from rlpost.text import cause_of, counted, did_you_mean, nearest

if TYPE_CHECKING:
    import numpy as np
    import pyarrow
    import pyarrow.parquet

MOST_ROW_BYTES = 16 << 20  # of a row
MOST_GROUP_BYTES = 8 << 30  # of a row group of Parquet, whose columns are held while its rows are read
MOST_ROWS = 100_000_000
MOST_LEVELS = 100  # of nested lists and objects in a row; their readers are recursive
BATCH_ROWS = 4096  # of Parquet, at a time
BATCH_BYTES = 64 << 20  # of rows of Parquet, and of a column of repeated text in full, at a time
IN_MEMORY_BYTES = 64 << 20  # more than that is written to the temporary file
ALL_UP_TO = 100_000  # rows; more are not all tokenised before training begins
SAMPLE = 20_000  # rows of a larger file that are tokenised then; each other row is when it is drawn
SHOWN = 20  # causes that an error lists, and rows that a program is given
PLACES = 3  # rows named for each cause
TOO_DEEP = f"is nested too deeply ({MOST_LEVELS} levels at most): flatten or remove it"
TOO_MANY_DIGITS = "holds a number of more digits than can be read: write it as text, or remove it"
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
    """One JSON value a line; a row's number is its line. Raises DataError for a file that is not UTF-8."""
    for number, text in _lines(path):
        if isinstance(text, Unreadable):
            yield number, text
        elif text.strip():
            yield number, parsed(text.rstrip())


def read_json(path: Path) -> Numbered:
    """The elements of a JSON list, numbered from 1. Raises DataError for malformed JSON, which has no further rows."""
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


def read_csv(path: Path) -> Numbered:
    """A dict for each record, keyed by the header; a row's number is its line, and the header is line 1.

    Commas separate the cells; if the header has none, semicolons or tabs do, as spreadsheets write them.
    """
    csv.field_size_limit(MOST_ROW_BYTES)
    reader = None
    try:
        records = _records(path)
        header = next(records, "")
        reader = csv.DictReader(
            chain([header], records), strict=True, delimiter=next((sign for sign in ",;\t" if sign in header), ",")
        )
        for name in (names := list(reader.fieldnames or [])):
            if name and names.count(name) > 1:
                raise DataError(f"{path} has two columns called {name!r}: give one of them another name")
        for row in reader:
            more = None in row
            yield reader.line_num, Unreadable("has more cells than the header has names") if more else row
    except csv.Error as error:
        number = 1 if reader is None else reader.line_num
        raise DataError(f"{path}, row {number} is not CSV ({error}): correct or remove it") from error


def read_parquet(path: Path) -> Numbered:
    """The rows of a Parquet file, from 1. Raises DataError if it is malformed or one of its row groups is too large."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        _check_size(path, file.metadata)
        # hold a repeated text once: otherwise a small file could expand to any amount of memory
        file = pyarrow.parquet.ParquetFile(path, read_dictionary=_repeating(file))
        number = 0
        for batch in _batches(file):
            for row in _rows_of(batch):
                number += 1
                yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({error}): write it again, or as .jsonl") from error


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
    except RecursionError:
        return Unreadable(TOO_DEEP)
    except json.JSONDecodeError as error:
        begun = ONE_LIST if text.strip() == "[" else ""
        return Unreadable(f"is not JSON ({error.msg}, character {error.pos + 1}){begun}")
    except ValueError:  # Python reads no integer of more than 4,300 digits
        return Unreadable(TOO_MANY_DIGITS)


def is_too_deep(value: Any) -> bool:
    """Whether lists and objects of a value are nested more than `MOST_LEVELS` deep."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        level = [each for each in level if isinstance(each, _HOLDING)]
        if not level:
            return False
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return True


_CHUNK = 1 << 20
_BLANK = re.compile(r"[ \t\r\n]*")
_LONE_RETURN = re.compile(r"(?<=\r)(?!\n)(?!$)")
_HOLDING = (dict, list, tuple)


def _end_of_blank(text: str, at: int) -> int:
    match = _BLANK.match(text, at)
    return at if match is None else match.end()


@contextmanager
def _opened_text(path: Path) -> Iterator[Callable[[int], str]]:
    """A function that reads the next `count` characters, "" at the end. Raises DataError if they are not UTF-8."""
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


def _records(path: Path) -> Iterator[str]:
    """Lines of CSV: a record ends at a lone carriage return too."""
    for number, text in _lines(path):
        if isinstance(text, Unreadable):
            raise DataError(f"{path}, row {number} {text.wrong}")
        yield from _LONE_RETURN.split(text)


def _lines(path: Path) -> Iterator[tuple[int, str | Unreadable]]:
    """Lines as text, from 1, without a byte order mark.

    Raises DataError for a file that cannot be read, or whose first line is not UTF-8.
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


def _check_size(path: Path, metadata: Any) -> None:
    """Raise DataError for a file with too many rows, or too large a row group."""
    if metadata.num_rows > MOST_ROWS:
        raise DataError(f"{path} has {metadata.num_rows:,} rows, more than {MOST_ROWS:,}: give a part of it")
    for number in range(metadata.num_row_groups):
        if (size := metadata.row_group(number).total_byte_size) > MOST_GROUP_BYTES:
            raise DataError(
                f"{path}: its row group {number + 1} takes {size / 1e9:,.0f} GB when it is read, more than "
                f"{MOST_GROUP_BYTES / 1e9:,.0f}: write it again with smaller row groups"
            )


def _repeating(file: pyarrow.parquet.ParquetFile) -> list[str]:
    """The text columns that are dictionary-encoded."""
    texts = {field.name for field in file.schema_arrow if str(field.type) in ("string", "large_string")}
    groups = map(file.metadata.row_group, range(file.num_row_groups))
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    held_once = {c.path_in_schema for c in columns if any("DICTIONARY" in encoding for encoding in c.encodings)}
    return sorted(texts & held_once)


def _batches(file: pyarrow.parquet.ParquetFile) -> Iterator[pyarrow.RecordBatch]:
    """The rows, one row group after another: Arrow holds the dictionaries of all groups it reads together."""
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        each = group.total_byte_size // max(group.num_rows, 1) + 1
        yield from file.iter_batches(max(1, min(BATCH_ROWS, BATCH_BYTES // each)), row_groups=[number])


def _rows_of(batch: pyarrow.RecordBatch) -> Iterator[Any]:
    longest = max((_longest(column) for column in batch.columns), default=0)
    step = max(1, min(batch.num_rows, BATCH_BYTES // (longest + 1)))
    for start in range(0, batch.num_rows, step):
        columns: list[Any] = batch.slice(start, step).columns
        whole = [c.dictionary_decode() if hasattr(c, "dictionary_decode") else c for c in columns]
        part = type(batch).from_arrays(whole, batch.schema.names)
        try:
            yield from part.to_pylist()
        except UnicodeDecodeError:  # in one of the texts: find it row by row
            for number in range(part.num_rows):
                yield _row(part, number)


def _longest(column: Any) -> int:
    """Bytes of the longest text in a column's dictionary."""
    import pyarrow.compute

    if not len(getattr(column, "dictionary", ())):
        return 0
    compute: Any = pyarrow.compute  # its functions are made at import
    return compute.max(compute.binary_length(column.dictionary)).as_py() or 0


def _row(batch: pyarrow.RecordBatch, number: int) -> Any:
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[number].as_py()
        except UnicodeDecodeError:
            return Unreadable(f"has text in {name!r} that is not UTF-8: write the file again with valid text")
    return row


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

    Values that JSON lacks become text: dates in ISO form, decimals as digits, bytes in base64.
    """

    def __init__(self) -> None:
        self._ends = array("q")
        self._digests = array("Q")
        self._held = bytearray()
        self._written = 0
        self._file: Any = None
        self._read: mmap.mmap | bytearray = self._held

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, row: Mapping[str, Any]) -> str | None:
        """Keep a row; returns its fault if it cannot be kept, else None."""
        try:
            content = _ENCODER.encode(row).encode()
        except UnicodeEncodeError:
            return LONE_SURROGATE
        except RecursionError:
            return TOO_DEEP
        except (TypeError, ValueError) as error:
            return f"holds what is no data ({error})"
        if len(content) > MOST_ROW_BYTES:
            return f"has more than {MOST_ROW_BYTES >> 20} MB: cut it up, or remove it"
        self._digests.append(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little"))
        self._held += content
        self._written += len(content)
        self._ends.append(self._written)
        if len(self._held) > IN_MEMORY_BYTES:
            self._spill()
        return None

    def finish(self) -> None:
        """Make the rows readable, after the last one was added."""
        if self._file is not None:
            self._spill()
            self._read = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def _spill(self) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="rlpost-rows-")  # noqa: SIM115  open while the rows are used
            self._file.write(self._held)
            self._file.flush()
        except OSError as error:
            raise DataError(
                f"the rows cannot be kept in {tempfile.gettempdir()} ({error.strerror}): make room there, or name "
                "another folder with TMPDIR"
            ) from error
        self._held.clear()

    def at(self, number: int) -> Row:
        """See `Rows.at`."""
        begin = self._ends[number - 1] if number else 0
        return json.loads(self._read[begin : self._ends[number]])

    @property
    def digests(self) -> Digests:
        """One number a row, equal for equal rows."""
        import numpy as np

        return np.frombuffer(self._digests, np.uint64) if self._digests else np.empty(0, np.uint64)


def has_lone_surrogate(value: Any) -> bool:
    """Whether a text in a JSON value holds a lone surrogate, which no file and no tokenizer takes."""
    try:
        _ENCODER.encode(value).encode()
    except UnicodeEncodeError:
        return True
    return False


def digests_of(rows: Sequence[Any]) -> Digests:
    """One number a row: a hash of its content for a list of JSON values, otherwise its place."""
    import numpy as np

    if isinstance(rows, list):
        try:
            written = [json.dumps(row, sort_keys=True).encode() for row in rows]
        except (TypeError, ValueError, RecursionError):
            return np.arange(len(rows), dtype=np.uint64)
        digests = (hashlib.blake2b(each, digest_size=8).digest() for each in written)
        return np.frombuffer(b"".join(digests), np.uint64)
    return np.arange(len(rows), dtype=np.uint64)  # reading all of another sequence may be slow


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
    return field, f"the row is no object of named fields but {kind_of(row)}{advice}"


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


def filled(template: str, row: Mapping[str, Any]) -> str:
    """`env.prompt_template` with the fields of a row. Raises ConfigError, from a KeyError for a missing field."""
    try:
        return template.format(**row)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        wrong = f"{{{error.args[0]}}} is no field" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"env.prompt_template={template!r} does not fit: {wrong}; "
            f"the fields are {', '.join(map(str, row))}; write {{{{ and }}}} for braces"
        ) from error
