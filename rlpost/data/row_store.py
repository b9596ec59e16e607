"""Rows kept as JSON: in memory while they are few, else in a temporary file that ends with the process."""

from __future__ import annotations

import base64
import hashlib
import json
import mmap
import tempfile
from abc import abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from rlpost.data.row_files import MOST_ROW_BYTES, TOO_DEEP
from rlpost.errors import DataError

if TYPE_CHECKING:
    import numpy as np

    Digests = np.ndarray[Any, np.dtype[np.uint64]]

ALL_UP_TO = 100_000  # rows that are all tokenised before training begins
SAMPLE = 20_000  # of more rows, those that are tokenised then; the others are when they are drawn
LONE_SURROGATE = "holds half of a character (a lone surrogate): remove it"
IN_MEMORY_BYTES = 64 << 20  # more than that is written to the temporary file

Row = dict[str, Any]


class Rows(Sequence[Row]):
    """Rows by number or slice; a subclass says each with `at`."""

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
    """Rows to be added one after the other and then read in any order; each read makes a new dict.

    What JSON has no word for is kept as text: dates in their ISO form, decimals in digits, bytes in base64.
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
        """Keep a row; or say what is wrong with it, where it cannot be kept."""
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
        """All rows have been added: they can be read from now on."""
        if self._file is not None:
            self._spill()
            self._read = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def _spill(self) -> None:
        try:
            self._write()
        except OSError as error:
            raise DataError(
                f"the rows cannot be kept in {tempfile.gettempdir()} ({error.strerror}): make room there, or name "
                "another folder with TMPDIR"
            ) from error

    def _write(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="rlpost-rows-")  # noqa: SIM115  open as long as the rows are used
        self._file.write(self._held)
        self._file.flush()
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
    """Whether a text in a value of JSON holds half of a character, which no file and no tokenizer takes."""
    try:
        _ENCODER.encode(value).encode()
    except UnicodeEncodeError:
        return True
    return False


def digests_of(rows: Sequence[Any]) -> Digests:
    """One number a row: of its content where the rows are a list of what JSON can write, else its place."""
    import numpy as np

    if isinstance(rows, list):
        try:
            written = [json.dumps(row, sort_keys=True).encode() for row in rows]
        except (TypeError, ValueError, RecursionError):
            return np.arange(len(rows), dtype=np.uint64)
        digests = (hashlib.blake2b(each, digest_size=8).digest() for each in written)
        return np.frombuffer(b"".join(digests), np.uint64)
    return np.arange(len(rows), dtype=np.uint64)  # reading all of another sequence may take its time


def _as_text(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "tolist"):  # numpy's
        return value.tolist()
    return str(value)


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_as_text)
