"""Whole groups, each taken once."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

from rlpost.data import LazyTensorStorage, ReplayBuffer
from rlpost.data.batch import batch_from_conversations
from rlpost.data.conversation import Completion, Conversation
from rlpost.data.history import History
from rlpost.data.replay_buffer import GroupBuffer
from rlpost.errors import ConfigError, DataError, PolicyError
from rlpost.objectives.advantage import has_spread
from rlpost.torchrl.batches import concat_rows
from tests.says import Says

Batch = Callable[..., TensorDict]


def filled(buffer: ReplayBuffer, num_groups: int, batches: list[TensorDict]) -> int:
    """Writes a prepared batch in each round that `buffer` needs; returns the number of rounds."""
    rounds = 0
    for _ in buffer.rounds(num_groups):
        rounds += 1
        if batches:
            buffer.extend(batches.pop(0))
    return rounds


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


def test_groups_too_old_are_dropped_and_counted(batch: Batch) -> None:
    buffer = ReplayBuffer()
    for group, version in enumerate([1, 2, 3]):
        buffer.extend(batch(first=group, version=version))
    buffer.drop_stale(99, None)  # without a limit on the lag nothing is dropped
    assert buffer.group_numbers == [0, 1, 2]
    buffer.drop_stale(3, 1)
    assert buffer.group_numbers == [1, 2]  # sampled one push ago: still allowed
    assert buffer.num_dropped_by_age == 1
    buffer.drop_stale(3, 0)
    assert groups(buffer.take(1)) == [2, 2]
    assert buffer.num_dropped_by_age == 2


def test_the_age_of_uuids_is_refused(batch: Batch) -> None:
    buffer = ReplayBuffer()
    buffer.extend(batch(version="3f2a"))
    with pytest.raises(ConfigError, match="max_policy_lag"):
        buffer.drop_stale("9c1b", 1)
    assert groups(buffer.take(1)) == [0, 0]


def test_the_last_round_counts(batch: Batch) -> None:
    buffer = ReplayBuffer(draw_limit=2)
    assert filled(buffer, 2, [batch(first=0), batch(first=1)]) == 2
    assert groups(buffer.take(2)) == [0, 0, 1, 1]


def test_rounds_that_bring_nothing_are_given_up_with_what_there_is(batch: Batch) -> None:
    buffer = ReplayBuffer(draw_limit=2)
    with pytest.raises(PolicyError, match=r"3 rounds .* 1 of 2 "):  # two in a row brought none
        filled(buffer, 2, [batch()])
    assert groups(buffer.take(1)) == [0, 0]  # what came stays


def test_rounds_that_bring_little_go_on_until_the_groups_are_there(batch: Batch) -> None:
    buffer = ReplayBuffer(draw_limit=3)
    assert filled(buffer, 100, [batch(groups=2, first=2 * n) for n in range(50)]) == 50
    assert len(groups(buffer.take(100))) == 200  # 2 groups a round


def test_rows_of_two_prompts_are_no_group(batch: Batch, says: Says) -> None:
    buffer = ReplayBuffer(group_size=4)
    buffer.extend(batch(query="How much is 1 + 1?"))
    for query, source in (("How much is 2 + 2?", ""), ("How much is 1 + 1?", "b")):
        with says.refused("tensordict", DataError, "group 0"):
            buffer.extend(batch(query=query, source=source))
    assert (len(buffer), buffer.num_incomplete, buffer.write_count) == (0, 1, 2)


def test_a_buffer_of_frames_is_named_to_whoever_wants_one() -> None:
    given: list[dict[str, Any]] = [{"storage": LazyTensorStorage(4)}, {"batch_size": 2}]
    for wanted in given:
        with pytest.raises(TypeError, match=rf"{next(iter(wanted))}: .* rlpost.data.FrameBuffer\(storage="):
            ReplayBuffer(**wanted)


def test_too_few_groups_to_take_are_an_error(batch: Batch) -> None:
    buffer = ReplayBuffer()
    buffer.extend(batch())
    with pytest.raises(PolicyError, match=r"1 of .* 2 .*collector.fill\(2\)"):
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


# Groups of conversations, as a training has them


@pytest.fixture
def of_rewards(conversation: Callable[..., Conversation]) -> Callable[..., list[Conversation]]:
    """Makes a group with these rewards; None is one that failed."""

    def make(group: int, *rewards: float | None, version: int = 0) -> list[Conversation]:
        given = enumerate(rewards)
        return [conversation(group, i, reward=r, valid=r is not None, version=version) for i, r in given]

    return make


def test_a_rule_turns_groups_down_and_others_are_sampled(of_rewards: Any) -> None:
    buffer = GroupBuffer(2, accept=has_spread)
    rewards = iter([(1, 1), (1, 0), (0, 0), (0, 0), (0, 1), (1, 0)])
    drawn: list[tuple[list[int], list[int]]] = []
    for first in (0, 2, 4):
        kept, dropped = buffer.extend([*of_rewards(first, *next(rewards)), *of_rewards(first + 1, *next(rewards))])
        drawn.append(([group[0].group_id for group in kept], [group[0].group_id for group in dropped]))
    assert drawn == [([1], [0]), ([], [2, 3]), ([4, 5], [])]
    assert groups(buffer.take(2)) == [1, 1, 4, 4]
    known = {"buffer/dropped_by_age": 0, "groups/evicted": 0}
    # the mean reward of everything that was drawn; that of the trained groups is 1/2
    assert buffer.take_counts() == known | {"groups/drawn": 6, "groups/dropped": 3, "reward/mean_drawn": 5 / 12}
    assert groups(buffer.take(1)) == [5, 5]  # what was left over
    assert buffer.take_counts() == known | {"groups/drawn": 0, "groups/dropped": 0}


def test_giving_up_on_rewards_that_all_failed_says_that(of_rewards: Any) -> None:
    buffer = GroupBuffer(2, accept=has_spread, draw_limit=1)
    rounds = buffer.rounds(1)
    next(rounds)
    buffer.extend(of_rewards(0, None, None))
    with pytest.raises(PolicyError, match=r"1 of 1 .*valid"):
        next(rounds)


def test_the_batch_of_a_step_is_built_once_of_the_conversations_themselves(of_rewards: Any) -> None:
    built: list[Sequence[Conversation]] = []

    def build(conversations: Sequence[Conversation]) -> TensorDict:
        built.append(conversations)
        return batch_from_conversations(conversations)

    buffer, given = GroupBuffer(2, build), [*of_rewards(0, 1, 0), *of_rewards(1, 0, 1)]
    buffer.extend(given[:3])
    buffer.extend(given[3:])
    assert built == []
    buffer.take(2)
    [members] = built
    assert all(one is other for one, other in zip(members, given, strict=True))


def saved_as_json(value: Any) -> dict[str, Any]:
    """A batch, or an entry of one, in the form of older checkpoints."""
    if isinstance(value, TensorDictBase) and not isinstance(value, NonTensorStack):
        columns = {name: saved_as_json(column) for name, column in value.items()}
        return {"kind": "batch", "size": value.batch_size[0], "values": columns}
    if isinstance(value, History):
        return {"kind": "history", "values": value.to_chats()}
    if isinstance(value, torch.Tensor):
        return {"kind": "ragged", "values": [row.tolist() for row in value.unbind(0)]}
    return {"kind": "strings", "values": value.tolist()}


def test_a_group_that_was_saved_as_its_batch_goes_on(conversation: Callable[..., Conversation]) -> None:
    """A checkpoint may hold groups in the layout of the batch."""
    first = conversation(3, 0, reward=0.5, reward_parts={"a": 0.5}, part_weights={"a": 1.0}, accuracy_strict=0.0)
    first.add_observation([9, 9])
    first.messages.append({"role": "user", "content": "Go on."})
    first.add_completion(Completion([4, 5, 6], [-1.0, -2.0, -3.0], "92", "length", 1, [(2, 2)]))
    first.restarts, first.hinted_ids, first.truncated = [2], [1], True
    second = conversation(3, 1, reward=None, valid=False, source="b", tool_calls=2, tool_errors=1)
    plain = saved_as_json(batch_from_conversations([first, second]))
    state = {**GroupBuffer(2).state_dict(), "groups": [plain], "waiting": [], "transforms": []}
    buffer = GroupBuffer(2)
    buffer.load_state_dict(json.loads(json.dumps(state)))
    assert buffer.group_numbers == [3]
    again = GroupBuffer(2)
    again.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    both = [json.dumps(saved_as_json(each.take(1))) for each in (buffer, again)]  # as text, in which NaN equals NaN
    assert both == [json.dumps(plain)] * 2


def test_the_oldest_version_goes_first_where_that_is_asked_for(of_rewards: Any) -> None:
    buffer = GroupBuffer(2, oldest_first=True)
    for number, version in ((0, 2), (1, 1), (2, 2), (3, 1)):
        buffer.extend(of_rewards(number, 1, 0, version=version))
    assert buffer.group_numbers == [1, 3, 0, 2]
    buffer.remove(3)
    assert groups(buffer.take(2)) == [1, 1, 0, 0]


def test_counts_and_groups_left_over_survive_a_checkpoint(of_rewards: Any) -> None:
    buffer, resumed = GroupBuffer(2, accept=has_spread), GroupBuffer(2, accept=has_spread)
    buffer.extend([*of_rewards(0, 1, 1), *of_rewards(1, 1, 0), *of_rewards(2, 0, 1)])
    assert groups(buffer.take(1)) == [1, 1]
    resumed.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    counts = buffer.take_counts()
    assert resumed.take_counts() == counts
    assert (counts["groups/drawn"], counts["groups/dropped"], counts["reward/mean_drawn"]) == (3, 1, 4 / 6)
    assert groups(resumed.take(1)) == groups(buffer.take(1)) == [2, 2]


# Groups of rows of TensorDicts


def test_a_group_is_held_until_it_is_whole(batch: Batch) -> None:
    buffer = ReplayBuffer(group_size=3)
    buffer.extend(concat_rows([batch(first=1, size=2), batch(first=0, size=3)]))
    assert (len(buffer), buffer.num_incomplete) == (1, 1)
    buffer.extend(batch(first=1, size=1, text="the last"))
    assert buffer.num_incomplete == 0
    taken = buffer.take(2)
    assert groups(taken) == [0, 0, 0, 1, 1, 1]  # in the order they became whole
    assert list(taken["text", "response"]) == ["91"] * 5 + ["the last"]


def test_a_group_with_more_rows_than_it_can_have_is_an_error(batch: Batch) -> None:
    buffer = ReplayBuffer(group_size=3)
    buffer.extend(batch(first=7, size=2))
    with pytest.raises(ValueError, match=r"group 7 .* 4 .* 3 "):
        buffer.extend(concat_rows([batch(first=3, size=3), batch(first=7, size=2)]))
    assert (len(buffer), buffer.num_incomplete) == (0, 1)  # nothing of a batch that is refused is written


def test_the_group_that_waited_longest_since_its_last_row_is_given_up(
    batch: Batch, caplog: pytest.LogCaptureFixture, says: Says
) -> None:
    buffer = ReplayBuffer(group_size=3, max_waiting=2)
    buffer.extend(batch(groups=2, size=1))
    buffer.extend(batch(first=0, size=1))  # group 0 is heard of again: 1 has waited longer
    with caplog.at_level("WARNING"):
        buffer.extend(batch(first=2, size=1))
    says("tensordict", caplog.messages[0])
    assert (buffer.num_incomplete, buffer.num_evicted) == (2, 1)
    assert buffer.take_counts()["groups/evicted"] == 1.0
    buffer.extend(batch(first=0, size=1))
    assert groups(buffer.take(1)) == [0, 0, 0]


def test_groups_that_lack_rows_survive_a_checkpoint(batch: Batch) -> None:
    buffer, resumed = ReplayBuffer(group_size=2, max_waiting=2), ReplayBuffer(group_size=2, max_waiting=2)
    buffer.extend(batch(groups=3, size=1))
    resumed.load_state_dict(pickle.loads(pickle.dumps(buffer.state_dict())))
    assert resumed.num_evicted == buffer.num_evicted == 1
    for each in (buffer, resumed):
        each.extend(batch(first=1, groups=2, size=1, text="the second"))
        taken = each.take(2)
        assert groups(taken) == [1, 1, 2, 2]
        assert list(taken["text", "response"]) == ["91", "the second"] * 2


def test_what_a_transform_counts_is_told_with_the_buffers_own() -> None:
    class Counting:
        def __call__(self, rows: TensorDictBase) -> TensorDictBase:
            return rows

        def counts(self) -> dict[str, float]:
            return {"groups/evicted": 7.0}

    assert ReplayBuffer(transforms=[Counting()]).take_counts()["groups/evicted"] == 7.0
