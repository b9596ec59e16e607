"""Rows of a dataset: the prompt a template makes of one, and their order, a pure function of seed and position."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

from rlpost.errors import ConfigError

T = TypeVar("T")


def order_seed(run_seed: int, env_seed: int) -> int:
    """One number for the two: different for every pair of seeds below 2**32."""
    return run_seed << 32 | env_seed


def filled(template: str, row: Mapping[str, Any]) -> str:
    """`env.prompt_template` with the fields of a row. Raises ConfigError, of a KeyError for a field it has not."""
    try:
        return template.format(**row)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        wrong = f"{{{error.args[0]}}} is no field" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"env.prompt_template={template!r} does not fit: {wrong}; "
            f"the fields are {', '.join(map(str, row))}; write {{{{ and }}}} for braces"
        ) from error


class OrderedRows(Generic[T]):
    """Rows without end: epoch after epoch, each in its own permutation if `shuffle`.

    Position p is row `p % len(rows)` of the permutation of (seed, epoch `p // len(rows)`), so a
    position alone says where to go on. `read_ahead` rows are fetched at a time, through the
    dataset's `__getitems__` where it has one.
    """

    def __init__(self, rows: Sequence[T], *, shuffle: bool, seed: int, read_ahead: int = 1) -> None:
        self.rows = rows
        self.shuffle = shuffle
        self.seed = seed
        self.read_ahead = read_ahead

    def __iter__(self) -> Iterator[T]:
        return self.iter_from(0)

    def iter_from(self, position: int) -> Iterator[T]:
        """The rows from `position` on, without end."""
        epoch, start = divmod(position, len(self.rows))
        while True:
            order = self.order(epoch)
            for first in range(start, len(order), self.read_ahead):
                yield from self._fetch(order[first : first + self.read_ahead])
            epoch, start = epoch + 1, 0

    def order(self, epoch: int) -> list[int]:
        """The row numbers of one epoch."""
        order = list(range(len(self.rows)))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def count(self) -> int:
        """How many different rows there are."""
        return len(self.rows)

    def fingerprint(self) -> str:
        """What a saved position depends on besides the seed, in words; their content too, where JSON can write it."""
        order = "shuffled" if self.shuffle else "in order"
        return f"{len(self.rows)} rows, {order}" + (f", content {self._digest}" if self._digest else "")

    @cached_property
    def _digest(self) -> str:
        """A few letters that depend on every field of every row; empty where a row holds what JSON does not."""
        if not isinstance(self.rows, list):  # reading all of another sequence may take its time
            return ""
        try:
            return hashlib.blake2b(json.dumps(self.rows, sort_keys=True).encode(), digest_size=4).hexdigest()
        except (TypeError, ValueError):
            return ""

    def _fetch(self, numbers: list[int]) -> Sequence[T]:
        fetch_many = getattr(self.rows, "__getitems__", None)
        return fetch_many(numbers) if fetch_many else [self.rows[number] for number in numbers]
