"""Trajectories inside a batch, and the rewards inside a trajectory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rlpost.data.batch import concat_rows
from rlpost.data.ragged import Key
from rlpost.data.selection import L, Selection, places_of_each

REDUCTIONS = {"sum": torch.sum, "max": torch.amax, "mean": torch.mean}


@dataclass(slots=True)
class Trajectories:
    """N trajectories, one after the other."""

    steps: Selection  # (L,)
    lengths: list[int]  # steps of each; they sum to L

    def __len__(self) -> int:
        return len(self.lengths)

    def part(self, which: Sequence[int]) -> Trajectories:
        """These trajectories, in this order; itself where that is all of them."""
        if list(which) == list(range(len(self))):
            return self
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        places = [place for i in which for place in range(ends[i] - self.lengths[i], ends[i])]
        return Trajectories(self.steps.pick(places), [self.lengths[i] for i in which])

    def __add__(self, more: Trajectories) -> Trajectories:
        """These and then `more`."""
        return Trajectories(self.steps + more.steps, [*self.lengths, *more.lengths])

    def owner(self) -> torch.Tensor:
        """The trajectory of each step, (L,)."""
        return torch.arange(len(self)).repeat_interleave(torch.tensor(self.lengths))

    def valid_steps(self) -> torch.Tensor:
        """Which steps count, (L,) bool: all, where nothing says otherwise under `valid`."""
        if not self.steps.has("valid"):
            return torch.ones(len(self.steps), dtype=torch.bool)
        return self.steps.column("valid").reshape(-1)

    def valid(self) -> torch.Tensor:
        """Which trajectories count, (N,) bool: those of which every step does."""
        wrong = torch.zeros(len(self)).index_add_(0, self.owner(), (~self.valid_steps()).float())
        return wrong == 0

    def returns(self, reduction: str, rewards_key: Key) -> torch.Tensor:
        """The `reduction` (sum, max or mean) of each trajectory's rewards, (N,)."""
        entries, step = reward_entries(self.steps.column(rewards_key))
        owner = self.owner()[step]
        return torch.stack([REDUCTIONS[reduction](entries[owner == i]) for i in range(len(self))])


def trajectories_by(
    batch: TensorDictBase, done_key: Key, keys: Callable[[TensorDictBase], Sequence[L]]
) -> dict[L, Trajectories]:
    """The trajectories of `batch` whose first steps have equal `keys`, which are one a step (L,); errors as below."""
    steps, spans = split_trajectories(batch, done_key)
    values = keys(steps)
    return {
        key: Trajectories(
            Selection.of(steps, [place for i in places for place in spans[i]]), [len(spans[i]) for i in places]
        )
        for key, places in places_of_each(values[span.start] for span in spans).items()
    }


def split_trajectories(batch: TensorDictBase, done_key: Key) -> tuple[TensorDictBase, list[range]]:
    """The steps of `batch` on one dimension (L,), and which of them each trajectory is.

    A batch of one dimension holds trajectories one after the other, each up to a step that is done;
    of several, each line along the last does. Lines of different lengths, or with entries of different widths,
    come stacked lazily.
    Raises RuntimeError where a line does not end with a step that is done.
    """
    lines = _lines(batch)
    spans: list[range] = []
    start = 0
    for line in lines:
        done = line[done_key].reshape(line.batch_size[0], -1).any(-1)
        if not done[-1]:
            raise RuntimeError(
                "a batch ends with a trajectory that is not done: collect whole ones, with "
                "yield_completed_trajectories=True"
            )
        for last in done.nonzero().flatten().tolist():
            spans.append(range(spans[-1].stop if spans else 0, start + last + 1))
        start += line.batch_size[0]
    return lines[0] if len(lines) == 1 else concat_rows(lines), spans


def _lines(batch: TensorDictBase) -> list[TensorDictBase]:
    if batch.ndim == 0:
        raise RuntimeError("a single step has no batch dimension: unsqueeze it")
    if batch.ndim > 1:
        return [line for part in batch.unbind(0) for line in _lines(part)]
    is_lazy = isinstance(batch, LazyStackedTensorDict)
    return [concat_rows([step.unsqueeze(0) for step in batch.unbind(0)]) if is_lazy else batch]


def values_of(steps: TensorDictBase, key: Key) -> list[Hashable]:
    """The entry of each step (L,) under `key` as something to group by: a string, a number or a tuple of them.

    Raises KeyError where there is no such entry.
    """
    column: Any = steps.get(key, None)
    if column is None:
        raise KeyError(f"a batch has no entry {key!r} to tell groups apart: it has {', '.join(map(str, steps.keys()))}")
    if isinstance(column, torch.Tensor):
        return [hashable(row.tolist()) for row in column.unbind()]
    values = column if isinstance(column, list) else column.tolist()
    return [hashable(value) for value in values]


def hashable(value: Any) -> Hashable:
    """`value` with tuples for its lists."""
    return tuple(hashable(each) for each in value) if isinstance(value, list | tuple) else value


def reward_entries(rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All rewards of L steps in a row (E,), and the step (E,) that each is of.

    `rewards` is (L, 1) with one a step, (L, T, 1) or (L, T) with one a token, or ragged (L, *).
    """
    if rewards.is_nested:
        ragged: Any = rewards
        sizes = ragged.offsets().diff()
        return ragged.values().flatten(), torch.arange(sizes.numel()).repeat_interleave(sizes)
    rows = rewards.reshape(rewards.shape[0], -1)
    return rows.flatten(), torch.arange(rows.shape[0]).repeat_interleave(rows.shape[1])


def like_rewards(values: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """`values` (E,) in the shape of the rewards they were made from, without a last dimension of 1."""
    if rewards.is_nested:
        ragged: Any = rewards
        return torch.nested.nested_tensor_from_jagged(values, ragged.offsets())
    return values.reshape(rewards.shape[:-1] if rewards.ndim > 1 and rewards.shape[-1] == 1 else rewards.shape)
