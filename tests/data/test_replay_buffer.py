"""Whole groups, each taken once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from rlpost.data import ReplayBuffer
from rlpost.data.batch import concat_rows, select_rows
from rlpost.errors import ConfigError, PolicyError

Batch = Callable[..., TensorDict]


class Source:
    """Writes a prepared batch each time it is asked."""

    def __init__(self, buffer: ReplayBuffer, batches: list[TensorDict], version: int | str | None = 0) -> None:
        self.buffer = buffer
        self.batches = batches
        self.policy_version = version
        self.asked = 0
        buffer.source = self

    def collect(self) -> None:
        self.asked += 1
        if self.batches:
            self.buffer.extend(self.batches.pop(0))


def groups(batch: TensorDictBase) -> list[int]:
    return batch["group_id"].tolist()


def test_groups_leave_whole_in_the_order_they_came_and_once(batch: Batch) -> None:
    buffer = ReplayBuffer()
    buffer.extend(batch(groups=3, size=2))
    buffer.extend(batch(groups=1, size=3, first=7))
    assert len(buffer) == 4
    assert groups(buffer.take(2)) == [0, 0, 1, 1]
    assert groups(buffer.take(2)) == [2, 2, 7, 7, 7]
    assert len(buffer) == 0


def test_interleaved_rows_are_sorted_into_their_groups(batch: Batch) -> None:
    mixed = select_rows(batch(groups=2, size=2), [2, 0, 3, 1])
    buffer = ReplayBuffer()
    buffer.extend(mixed)
    taken = buffer.take(2)
    assert groups(taken) == [1, 1, 0, 0]
    assert taken["sample"].tolist() == [0, 1, 0, 1]


def test_the_source_is_asked_only_for_what_is_missing(batch: Batch) -> None:
    buffer = ReplayBuffer()
    source = Source(buffer, [batch(groups=2, first=n) for n in (0, 2, 4)])
    assert groups(buffer.take(3)) == [0, 0, 1, 1, 2, 2]
    assert source.asked == 2
    assert groups(buffer.take(1)) == [3, 3]
    assert source.asked == 2


def test_groups_too_old_are_dropped_and_counted(batch: Batch) -> None:
    buffer = ReplayBuffer()
    for group, version in enumerate([1, 2, 3]):
        buffer.extend(batch(first=group, version=version))
    Source(buffer, [], version=3)
    assert groups(buffer.take(1, max_policy_lag=1)) == [1, 1]  # sampled one push ago: still allowed
    assert buffer.num_dropped_by_age == 1
    assert groups(buffer.take(1, max_policy_lag=0)) == [2, 2]
    assert buffer.num_dropped_by_age == 1


def test_the_oldest_row_is_the_age_of_its_group(batch: Batch) -> None:
    buffer = ReplayBuffer()
    buffer.extend(concat_rows([batch(size=1, version=5), batch(size=1, version=3)]))
    source = Source(buffer, [batch(first=1, version=5)], version=5)
    assert groups(buffer.take(1, max_policy_lag=1)) == [1, 1]
    assert (buffer.num_dropped_by_age, source.asked) == (1, 1)


def test_what_the_source_brings_may_be_too_old_as_well(batch: Batch) -> None:
    buffer = ReplayBuffer(draw_limit=3)
    source = Source(buffer, [batch(first=n, version=0) for n in range(9)], version=4)
    with pytest.raises(PolicyError, match=r"3 rounds of sampling brought 0 of 1 groups \(3 dropped by age so far\)"):
        buffer.take(1, max_policy_lag=2)
    assert source.asked == 3


def test_without_a_limit_on_the_lag_nothing_is_dropped(batch: Batch) -> None:
    buffer = ReplayBuffer()
    buffer.extend(batch(version=0))
    Source(buffer, [], version=99)
    assert groups(buffer.take(1)) == [0, 0]


def test_the_age_of_uuids_is_refused(batch: Batch) -> None:
    buffer = ReplayBuffer()
    buffer.extend(batch(version="3f2a"))
    Source(buffer, [], version="9c1b")
    assert groups(buffer.take(1)) == [0, 0]
    with pytest.raises(ConfigError, match="uuids have no order"):
        buffer.take(1, max_policy_lag=1)


def test_the_last_round_counts(batch: Batch) -> None:
    buffer = ReplayBuffer(draw_limit=2)
    source = Source(buffer, [batch(first=0), batch(first=1)])
    assert groups(buffer.take(2)) == [0, 0, 1, 1]
    assert source.asked == 2


def test_a_source_that_brings_nothing_is_given_up_with_what_there_is(batch: Batch) -> None:
    buffer = ReplayBuffer(draw_limit=2)
    source = Source(buffer, [batch()])
    with pytest.raises(PolicyError, match="2 rounds of sampling brought 1 of 2 groups"):
        buffer.take(2)
    assert source.asked == 2
    assert groups(buffer.take(1)) == [0, 0]  # what came stays


def test_too_few_groups_without_a_source_is_an_error(batch: Batch) -> None:
    buffer = ReplayBuffer()
    buffer.extend(batch())
    with pytest.raises(PolicyError, match="holds 1 of the 2 groups asked for and has no collector"):
        buffer.take(2)


def test_transforms_act_in_order_and_may_hold_rows_back(batch: Batch) -> None:
    held: list[TensorDictBase] = []

    def two_at_a_time(rows: TensorDictBase) -> TensorDictBase | None:
        held.append(rows)
        return concat_rows(held) if len(held) == 2 else None

    def mark(rows: TensorDictBase) -> TensorDictBase:
        return rows.set("advantage", torch.arange(rows.batch_size[0], dtype=torch.float32))

    buffer = ReplayBuffer(transforms=[two_at_a_time, mark])
    buffer.extend(batch(size=1))
    assert len(buffer) == 0
    buffer.extend(batch(size=1, first=1))
    assert buffer.take(2)["advantage"].tolist() == [0.0, 1.0]


def test_the_key_of_groups_can_be_chosen(batch: Batch) -> None:
    buffer = ReplayBuffer(group_key="sample")
    buffer.extend(batch(groups=2, size=2))
    assert groups(buffer.take(1)) == [0, 1]
