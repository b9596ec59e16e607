"""Rows chosen from batches, copied out only when they are read whole.

Taking a batch apart into groups and putting it together again costs more than everything else that
happens to it; what waits for more rows, or for its turn, therefore remembers where its rows are.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase

from rlpost.data.batch import concat_rows, row_of, select_rows
from rlpost.data.ragged import Key, joined, ragged, ragged_rows
from rlpost.errors import DataError

log = logging.getLogger("rlpost")

L = TypeVar("L", bound=Hashable)
G = TypeVar("G")  # a group that waits: it has a length, and `+` adds members


@dataclass(frozen=True, slots=True)
class Selection:
    """L rows of one batch or of several, in an order of their own."""

    parts: tuple[tuple[TensorDictBase, tuple[int, ...]], ...]  # a batch (B,), and places in it

    @classmethod
    def of(cls, batch: TensorDictBase, places: Iterable[int]) -> Selection:
        """The rows of `batch` at `places`."""
        return cls(((batch, tuple(places)),))

    @classmethod
    def whole(cls, batch: TensorDictBase) -> Selection:
        """Every row of `batch`."""
        return cls.of(batch, range(batch.batch_size[0]))

    @classmethod
    def joined(cls, selections: Sequence[Selection]) -> Selection:
        """The rows of all `selections`, one selection after the other."""
        parts: list[tuple[TensorDictBase, list[int]]] = []
        for batch, places in (part for selection in selections for part in selection.parts):
            if not parts or parts[-1][0] is not batch:
                parts.append((batch, []))
            parts[-1][1].extend(places)
        return cls(tuple((batch, tuple(places)) for batch, places in parts))

    def __len__(self) -> int:
        return sum(len(places) for _, places in self.parts)

    def __add__(self, more: Selection) -> Selection:
        """The rows of this selection and then those of `more`."""
        return Selection.joined([self, more])

    def pick(self, which: Iterable[int]) -> Selection:
        """The rows at `which`, counted within this selection, in that order."""
        rows = [(batch, place) for batch, places in self.parts for place in places]
        return Selection.joined([Selection.of(batch, [place]) for batch, place in (rows[i] for i in which)])

    def has(self, key: Key) -> bool:
        """Whether every row has an entry `key`."""
        return all(batch.get(key, None) is not None for batch, _ in self.parts)

    def column(self, key: Key) -> torch.Tensor:
        """One entry of the rows, (L, ...) or ragged (L, *).

        Raises KeyError where a batch lacks it, TypeError where it is no tensor.
        """
        columns = [(batch.get(key, None), places) for batch, places in self.parts]
        for (values, _), (batch, _) in zip(columns, self.parts, strict=True):
            if values is None:
                raise KeyError(f"a batch has no entry {key!r}: it has {', '.join(map(str, batch.keys()))}")
            if not isinstance(values, torch.Tensor):
                raise TypeError(f"the entry {key!r} is no tensor: copy the rows, and read it there")
        return joined(
            [
                ragged([rows[i] for rows in [ragged_rows(values)] for i in places])
                if values.is_nested
                else values[list(places)]
                for values, places in columns
            ]
        )

    def first(self, key: Key) -> Any:
        """The entry `key` of the first row as a Python value; None where its batch has none."""
        batch, places = self.parts[0]
        values = batch.get(key, None)
        return None if values is None else row_of(values, places[0])

    def measures(self) -> TensorDict:
        """The dense tensors of the rows (L,), without texts and ragged entries, which cost more than all else."""
        parts = [select_rows(_dense(batch), places) for batch, places in self.parts]
        return parts[0] if len(parts) == 1 else concat_rows(parts)

    def copied(self) -> TensorDict:
        """The rows as a batch (L,) of their own, which may share tensors with the one they are of."""

        def is_whole(batch: TensorDictBase, places: Sequence[int]) -> bool:
            return isinstance(batch, TensorDict) and tuple(places) == tuple(range(batch.batch_size[0]))

        rows = [batch if is_whole(batch, places) else select_rows(batch, places) for batch, places in self.parts]
        return rows[0].copy() if len(rows) == 1 else concat_rows(rows)


class Waiting(dict[L, G]):
    """Groups that lack some of their `size` members, the one that has longest gained none first.

    More than `most` never wait. Raises ValueError for a `most` below 1.
    """

    def __init__(self, most: int, size: int | None, members: str) -> None:
        super().__init__()
        if most < 1:
            raise ValueError(f"max_waiting={most} lets no group wait: it must be at least 1")
        self.most = most
        self.size = size
        self.members = members  # what the log calls them
        self.num_evicted = 0

    def with_more(self, key: L, new: G) -> G:
        """The group `key` with `new` behind what waits of it, which goes on waiting."""
        waiting: Any = self.get(key)
        return new if waiting is None else waiting + new

    def hold(self, key: L, group: G) -> None:
        """Let `group` wait, behind all others."""
        self.pop(key, None)
        self[key] = group

    def evict(self) -> None:
        """Give up the groups that have waited longest since they last gained a member, logged and counted."""
        while len(self) > self.most:
            group: Any = self.pop(next(iter(self)))
            self.num_evicted += 1
            log.warning(
                "gave up a group with %d of %s %s, since %d others wait (max_waiting); %d given up so far",
                len(group),
                self.size,
                self.members,
                self.most,
                self.num_evicted,
            )


class HoldsGroups:
    """What holds groups back in `_waiting` until they are whole."""

    _waiting: Waiting[Any, Any]

    @property
    def num_incomplete(self) -> int:
        """Groups that still wait for members."""
        return len(self._waiting)

    @property
    def num_evicted(self) -> int:
        """Groups that were given up, since too many waited."""
        return self._waiting.num_evicted


def check_one_group(number: int, waiting: Selection, new: Selection) -> None:
    """Raise DataError where `new` rows are of another prompt, or source, than those that wait."""
    for key in ("query", "source"):
        first, second = waiting.first(key), new.first(key)
        if None not in (first, second) and first != second:
            raise DataError(
                f"group {number} would hold rows of two prompts ({key} {str(first)[:40]!r} and {str(second)[:40]!r}): "
                "two collectors number their draws alike, so give each a buffer of its own"
            )


def places_of_each(labels: Iterable[L]) -> dict[L, list[int]]:
    """The places where each label stands, labels in the order they first come."""
    places: dict[L, list[int]] = {}
    for place, label in enumerate(labels):
        places.setdefault(label, []).append(place)
    return places


def _dense(batch: TensorDictBase) -> TensorDict:
    kept = {}
    for key, value in batch.items():
        if isinstance(value, TensorDict):
            kept[key] = _dense(value)
        elif isinstance(value, torch.Tensor) and not value.is_nested:
            kept[key] = value
    return TensorDict(kept, batch_size=batch.batch_size)
