"""The order of rows, a pure function of seed and position."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from rlpost.data.row_store import digests_of
from rlpost.text import counted

if TYPE_CHECKING:
    from rlpost.data.row_store import Digests

T = TypeVar("T")


class OrderedRows(Generic[T]):
    """Rows without end: epoch after epoch, each in its own order if `shuffle`.

    Position p is row `p % len(rows)` of the order of (seed, epoch `p // len(rows)`), so a position alone
    says where to go on. Rows are shuffled by a hash of their content: a row that is taken out leaves the
    order of all others as it was. `read_ahead` rows are fetched at a time, through the dataset's
    `__getitems__` where it has one. `digests` are one number a row (None: of the content, where `rows`
    are a list or know them, else of the place).
    """

    def __init__(
        self, rows: Sequence[T], *, shuffle: bool, seed: int, read_ahead: int = 1, digests: Digests | None = None
    ) -> None:
        self.rows = rows
        self.shuffle = shuffle
        self.seed = seed
        self.read_ahead = read_ahead
        self._digests = digests
        self._ordered: tuple[int, Any] | None = None  # an epoch and its order

    def __iter__(self) -> Iterator[T]:
        return self.iter_from(0)

    def iter_from(self, position: int) -> Iterator[T]:
        """The rows from `position` on, without end."""
        epoch, start = divmod(position, len(self.rows))
        while True:
            order = self.order(epoch)
            for first in range(start, len(order), self.read_ahead):
                yield from self._fetch(order[first : first + self.read_ahead].tolist())
            epoch, start = epoch + 1, 0

    def order(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The row numbers of one epoch."""
        if self._ordered is None or self._ordered[0] != epoch:
            self._ordered = epoch, self._order(epoch)
        return self._ordered[1]

    def _order(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if not self.shuffle:
            return np.arange(len(self.rows))
        salt = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=8).digest()
        return np.argsort(_mixed(self.digests ^ np.uint64(int.from_bytes(salt, "little"))), kind="stable")

    def row_at(self, position: int) -> int:
        """The number of the row at `position`."""
        epoch, place = divmod(position, len(self.rows))
        return int(self.order(epoch)[place])

    def count(self) -> int:
        """How many different rows there are."""
        return len(self.rows)

    def fingerprint(self, served: int) -> str:
        """What a saved position rests on besides the seed, in words, `served` rows having been drawn.

        Those rows, in their order; in the first epoch rows that are still to come may go or change.
        """
        order = "shuffled" if self.shuffle else "in order"
        epoch, place = divmod(served, len(self.rows))
        drawn = self.digests[self.order(0)[:place]] if epoch == 0 else self.digests
        content = hashlib.blake2b((np.sort(drawn) if epoch else drawn).tobytes(), digest_size=4).hexdigest()
        return f"{counted(len(drawn), 'different row')} drawn, {order}, content {content}"

    @cached_property
    def digests(self) -> Digests:
        """One number a row; equal rows have different ones, in the order in which they stand."""
        digests = self._digests
        if digests is None:
            digests = getattr(self.rows, "digests", None)
        if digests is None:
            digests = digests_of(self.rows)
        order = np.argsort(digests, kind="stable")
        new = np.r_[True, digests[order][1:] != digests[order][:-1]]
        first = np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))
        copies = np.empty(len(order), np.uint64)
        copies[order] = np.arange(len(order)) - first
        return _mixed(digests + copies)

    def _fetch(self, numbers: list[int]) -> Sequence[T]:
        fetch_many = getattr(self.rows, "__getitems__", None)
        return fetch_many(numbers) if fetch_many else [self.rows[number] for number in numbers]


def _mixed(numbers: Digests) -> Digests:
    """A 64-bit hash of each number: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
