"""Rows of the TensorDicts that `rlpost.data.batch` lays out: chosen and joined."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

from rlpost.data.history import History
from rlpost.data.ragged import ATTENTION, joined, ragged, ragged_rows, strings

L = TypeVar("L", bound=Hashable)


def select_rows(batch: TensorDictBase, indices: Sequence[int]) -> TensorDict:
    """The rows at `indices`, in that order; ragged fields included."""

    def pick(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.is_nested:
                rows = ragged_rows(value)
                return ragged([rows[i] for i in indices])
            return value[list(indices)]
        if isinstance(value, History):
            chats = value.to_chats()
            return History.from_chats([chats[i] for i in indices])
        if isinstance(value, TensorDictBase) and not isinstance(value, NonTensorStack):
            return TensorDict({key: pick(field) for key, field in value.items()}, batch_size=[len(indices)])
        return strings([row_of(value, i) for i in indices])

    return pick(batch)


def concat_rows(batches: Sequence[TensorDictBase]) -> TensorDict:
    """All rows of `batches`, one after the other; a reward part that a batch lacks is NaN there.

    A ragged entry that a batch lacks is left out. Entries of different widths are padded with zeros on the right
    if an attention mask shows padding, and become ragged otherwise.
    """
    pads = any(_has_pads(batch) for batch in batches)
    size = sum(b.batch_size[0] for b in batches)

    def join(parts: list[Any], sizes: list[int]) -> Any:
        first = next(p for p in parts if p is not None)
        if isinstance(first, torch.Tensor):
            there = [
                p if p is not None else first.new_full((n, *first.shape[1:]), float("nan"))
                for p, n in zip(parts, sizes, strict=True)
            ]
            return joined(there, pads=pads)
        if isinstance(first, History):
            return History.from_chats([chat for p in parts for chat in p.to_chats()])
        if isinstance(first, TensorDictBase) and not isinstance(first, NonTensorStack):
            names = dict.fromkeys(k for p in parts if p is not None for k in p.keys())  # noqa: SIM118
            columns = {k: [None if p is None else p.get(k, None) for p in parts] for k in names}
            fields = {k: join(column, sizes) for k, column in columns.items() if not _ragged_in_some(column)}
            return TensorDict(fields, batch_size=[size])
        return strings([row_of(p, i) for p, n in zip(parts, sizes, strict=True) for i in range(n)])

    return join(list(batches), [b.batch_size[0] for b in batches])


def rows_in_line(batch: TensorDictBase) -> TensorDictBase:
    """A batch (B, T) as (B * T,): the T steps of the first row, then those of the next; (B,) stays as it is."""
    if batch.ndim < 2:
        return batch
    steps = batch.unbind(1)
    size = batch.batch_size[0]
    return select_rows(concat_rows(steps), [t * size + row for row in range(size) for t in range(len(steps))])


def places_of_each(labels: Iterable[L]) -> dict[L, list[int]]:
    """The places of each label; labels in the order of their first place."""
    places: dict[L, list[int]] = {}
    for place, label in enumerate(labels):
        places.setdefault(label, []).append(place)
    return places


def row_of(value: Any, index: int) -> Any:
    """One row of an entry: a tensor, or a Python value."""
    item = value[index]
    return getattr(item, "data", item)


def _ragged_in_some(parts: Sequence[Any]) -> bool:
    """Whether an entry is ragged in some batch and missing in another."""
    return any(p is None for p in parts) and any(isinstance(p, torch.Tensor) and p.is_nested for p in parts)


def _has_pads(batch: TensorDictBase) -> bool:
    masks = [batch.get(key, None) for key in (ATTENTION, "attention_mask")]
    return any(mask is not None and not mask.is_nested and not mask.all() for mask in masks)
