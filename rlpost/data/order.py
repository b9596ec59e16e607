"""The split that a row belongs to, and the order in which rows are drawn.

Both are functions of content, seed and position alone, so a position says where to go on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from rlpost.text import counted

HELD_OUT = 0.1  # share of the prompts held out for a test split without rows of its own
HASHES = 1 << 48  # of prompts
_64_BITS = (1 << 64) - 1
Digests: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
T = TypeVar("T")


# What is held out


def held_out_of(prompts: Sequence[str], share: float) -> list[bool]:
    """Whether each prompt is held out: a hash of the prompt decides, for about `share` of them.

    With `share` between 0 and 1 and two different prompts there is at least one on each side.
    """
    return hashes_held_out([hash_of(prompt) for prompt in prompts], share)


def hashes_held_out(hashes: Sequence[int], share: float) -> list[bool]:
    """`held_out_of`, of the hashes of prompts."""
    different = set(hashes)
    least, most = (min(different), max(different)) if 0 < share < 1 and len(different) > 1 else (-1, -1)
    return [each == least or (each < share * HASHES and each != most) for each in hashes]


def hash_of(prompt: str) -> int:
    """A pseudo-random number below `HASHES`, the same for the copies of a prompt in other case or spacing."""
    same = " ".join(prompt.split()).casefold()
    digest = hashlib.blake2b(same.encode("utf-8", "surrogatepass"), digest_size=6).digest()
    return int.from_bytes(digest, "big")


# The order


def order_seed(run_seed: int, env_seed: int) -> int:
    """One seed from two: different for every pair of seeds below 2**32."""
    return run_seed << 32 | env_seed


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
        self._ordered: tuple[int, Any] | None = None  # (epoch, its order) of the last epoch read

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
        return np.argsort(mixed(self.digests ^ np.uint64(int.from_bytes(salt, "little"))), kind="stable")

    def row_at(self, position: int) -> int:
        """The number of the row at `position`."""
        epoch, place = divmod(position, len(self.rows))
        return int(self.order(epoch)[place])

    def where(self, number: int) -> str | None:
        """The place of the row `number`, from 0; None unless the rows know theirs."""
        where = getattr(self.rows, "where", None)
        return None if where is None else where(number)

    def without(self, numbers: Iterable[int]) -> OrderedRows[T]:
        """Leave out the rows `numbers`, from 0; the others keep their order."""
        gone = set(numbers)
        kept = [number for number in range(len(self.rows)) if number not in gone]
        only = getattr(self.rows, "only", None)
        rows = [self.rows[number] for number in kept] if only is None else only(kept)
        return OrderedRows(rows, shuffle=self.shuffle, seed=self.seed, read_ahead=self.read_ahead)

    def count(self) -> int:
        """How many different rows there are."""
        return len(self.rows)

    def fingerprint(self, served: int) -> str:
        """Everything besides the seed that a saved position depends on, in words, after `served` rows were drawn.

        That is those rows, in their order; rows not drawn yet may be removed or changed in the first epoch.
        """
        order = "shuffled" if self.shuffle else "in order"
        epoch, place = divmod(served, len(self.rows))
        drawn = self.digests[self.order(0)[:place]] if epoch == 0 else self.digests
        content = hashlib.blake2b((np.sort(drawn) if epoch else drawn).tobytes(), digest_size=4).hexdigest()
        return f"{counted(len(drawn), 'different row')} drawn, {order}, content {content}"

    def content(self) -> str:
        """How many rows there are, and a hash of all of them: in their order, unless they are shuffled."""
        digests = np.sort(self.digests) if self.shuffle else self.digests
        content = hashlib.blake2b(digests.tobytes(), digest_size=6).hexdigest()
        return f"{counted(len(self.rows), 'row')}, content {content}"

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
        return mixed(digests + copies)

    def _fetch(self, numbers: list[int]) -> Sequence[T]:
        fetch_many = getattr(self.rows, "__getitems__", None)
        return fetch_many(numbers) if fetch_many else [self.rows[number] for number in numbers]


def mixed(numbers: Any) -> Any:
    """A 64-bit hash of a number, or of each in an array: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    numbers = (numbers + 0x9E3779B97F4A7C15) & _64_BITS
    numbers = ((numbers ^ (numbers >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    numbers = ((numbers ^ (numbers >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return numbers ^ (numbers >> 31)


def digests_of(rows: Sequence[Any]) -> Digests:
    """One number a row: a hash of its content for a list of JSON values, otherwise its place."""
    if isinstance(rows, list):
        with suppress(TypeError, ValueError):
            return hashes_of([json.dumps(row, sort_keys=True).encode() for row in rows])
    return np.arange(len(rows), dtype=np.uint64)  # reading all of another sequence may be slow


def hashes_of(contents: Sequence[bytes]) -> Digests:
    """One number for each of `contents`: a hash of it."""
    return np.frombuffer(b"".join(hashlib.blake2b(each, digest_size=8).digest() for each in contents), np.uint64)
