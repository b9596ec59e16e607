"""The best completions of each group."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from statistics import fmean, median_low

from tensordict import TensorDictBase

from rlpost.data.ragged import Key, ragged_rows
from rlpost.data.selection import Selection, places_of_each

TOLERANCE = 1e-6  # relative: further apart than rounding takes equal rewards


def best_of_groups(batch: TensorDictBase, count: int, minimum: float | None) -> list[int]:
    """The places of each group's `best` in a batch (B,) of whole groups, one row a completion, group by group."""
    worth = [mean_worth([reward]) for reward in worth_of(Selection.whole(batch), ("next", "reward"))]
    groups = places_of_each(batch["group_id"].tolist()).values()
    return [places[i] for places in groups for i in best([worth[place] for place in places], count, minimum)]


def worth_of(rows: Selection, rewards_key: Key) -> list[float | None]:
    """The reward of each row, the mean if it has several: NaN where it has none (yet), None where it failed."""
    column = rows.column(rewards_key)
    each = ragged_rows(column) if column.is_nested else column.reshape(len(rows), -1)
    rewards = [row.double().mean().item() for row in each]
    valid = rows.column("valid").flatten().tolist() if rows.has("valid") else [True] * len(rewards)
    return [reward if counts else None for reward, counts in zip(rewards, valid, strict=True)]


def mean_worth(rewards: Sequence[float | None]) -> float:
    """Over the rows of a trajectory that have a reward; NaN where none has, or one failed."""
    finite = [reward for reward in rewards if reward is not None and isfinite(reward)]
    return fmean(finite) if finite and None not in rewards else nan


def best(worth: Sequence[float], count: int, minimum: float | None) -> list[int]:
    """The places of the `count` greatest candidates, greatest first; NaN is never one.

    Candidates are at least `minimum`, or where it is None strictly above the lower median of all
    that are no NaN, up to rounding.
    """
    known = [value for value in worth if value == value]
    if not known:
        return []
    bar = median_low(known) + TOLERANCE * max(1.0, *map(abs, known)) if minimum is None else minimum
    candidates = [i for i, value in enumerate(worth) if (value > bar if minimum is None else value >= bar)]
    return sorted(candidates, key=lambda i: -worth[i])[:count]
