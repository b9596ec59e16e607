"""LLMCollector: every way of delivering, and what cannot be."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from talk import make, next_of, scripted, talk, tokenizer, told
from tensordict import LazyStackedTensorDict, TensorDictBase

from rlpost.data import ReplayBuffer
from rlpost.envs.arithmetic import ArithmeticEnv
from rlpost.errors import PolicyError
from rlpost.objectives import MCAdvantage
from rlpost.weight_sync.base import SharedWeights

# Plain mode


def test_plain_batches_are_stacked_by_environment_and_turn() -> None:
    collector = make(talk(), dialog_turns_per_batch=6)
    batch = next_of(collector)
    assert isinstance(batch, LazyStackedTensorDict)
    assert (batch.batch_size, batch.stack_dim) == (torch.Size([2, 3]), 1)
    # place 0: q0 (1 turn), then q2 (2 turns); place 1: q1 (3 turns)
    assert [told(step) for step in batch.unbind(1)] == [
        [("q0", 1), ("q1", 1)],
        [("q2", 1), ("q1", 2)],
        [("q2", 2), ("q1", 3)],
    ]
    assert batch["next", "done"].squeeze(-1).tolist() == [[True, False, True], [False, False, True]]
    assert batch["group_id"].tolist() == [[0, 2, 2], [1, 1, 1]]


def test_the_reward_comes_with_the_last_turn_alone() -> None:
    batch = next_of(make(talk(), dialog_turns_per_batch=6))
    reward = batch["next", "reward"].squeeze(-1)
    assert reward.nan_to_num(-1).tolist() == [[1, -1, 2], [-1, -1, 3]]


def test_flat_batches_hold_one_environment_after_the_other() -> None:
    batch = next_of(make(talk(), dialog_turns_per_batch=6, flatten_data=True))
    assert batch.batch_size == torch.Size([6])
    assert told(batch) == [("q0", 1), ("q2", 1), ("q2", 2), ("q1", 1), ("q1", 2), ("q1", 3)]


def test_a_batch_is_rounded_up_to_whole_rounds() -> None:
    assert make(talk(4), dialog_turns_per_batch=1).dialog_turns_per_batch == 4
    collector = make(talk(4), dialog_turns_per_batch=5)
    assert collector.dialog_turns_per_batch == 8
    assert next_of(collector).batch_size == torch.Size([4, 2])


def test_a_conversation_goes_on_in_the_next_batch_unless_reset() -> None:
    going_on = make(talk(), dialog_turns_per_batch=2, flatten_data=True)
    assert [told(next_of(going_on)) for _ in range(3)] == [
        [("q0", 1), ("q1", 1)],
        [("q2", 1), ("q1", 2)],
        [("q2", 2), ("q1", 3)],
    ]
    anew = make(talk(), dialog_turns_per_batch=2, flatten_data=True, reset_at_each_iter=True)
    assert [told(next_of(anew)) for _ in range(3)] == [
        [("q0", 1), ("q1", 1)],
        [("q2", 1), ("q3", 1)],
        [("q4", 1), ("q5", 1)],
    ]


def test_the_policy_reads_what_the_environment_said_and_it_is_masked() -> None:
    batch = next_of(make(talk(), dialog_turns_per_batch=6, flatten_data=True))
    ids = batch["tokens", "full"].unbind()[4]
    sampled = batch["masks", "all_assistant_mask"].unbind()[4]
    text = tokenizer().decode(ids)
    assert text.count("<|im_start|>user\nmore 1<|im_end|>\n<|im_start|>assistant\n") == 1
    assert tokenizer().decode(ids[sampled]) == "b<|im_end|>b<|im_end|>"


# Whole trajectories


def test_whole_trajectories_come_one_after_the_other_and_a_surplus_waits() -> None:
    collector = make(talk(), dialog_turns_per_batch=2, yield_completed_trajectories=True)
    # done in round 1: q0; 2: none; 3: q2 and q1; 4: q3 and q4; 5: none; 6: q5 and the q0 of the next epoch
    assert told(next_of(collector)) == [("q0", 1), ("q2", 1), ("q2", 2)]
    assert told(next_of(collector)) == [("q1", 1), ("q1", 2), ("q1", 3)]
    assert told(next_of(collector)) == [("q3", 1), ("q4", 1)]


def test_a_trajectory_under_way_survives_the_end_of_a_batch() -> None:
    collector = make(talk(), dialog_turns_per_batch=2, yield_completed_trajectories=True)
    batches = [told(next_of(collector)) for _ in range(5)]
    assert sorted({query for batch in batches for query, _ in batch}) == ["q0", "q1", "q2", "q3", "q4", "q5"]
    assert all(turns == list(range(1, len(turns) + 1)) for turns in _turns_by_conversation(batches))


def _turns_by_conversation(batches: Sequence[Sequence[tuple[str, int]]]) -> Iterator[list[int]]:
    for batch in batches:
        starts = [i for i, (_, turn) in enumerate(batch) if turn == 1]
        for start, end in zip(starts, [*starts[1:], len(batch)], strict=True):
            yield [turn for _, turn in batch[start:end]]


def test_resetting_each_time_abandons_what_is_under_way_but_no_complete_trajectory() -> None:
    collector = make(talk(), dialog_turns_per_batch=2, yield_completed_trajectories=True, reset_at_each_iter=True)
    assert told(next_of(collector)) == [("q0", 1), ("q2", 1), ("q2", 2)]  # q1 is complete too, and waits
    assert told(next_of(collector)) == [("q1", 1), ("q1", 2), ("q1", 3)]
    assert told(next_of(collector)) == [("q3", 1), ("q4", 1)]


def test_the_last_turns_alone_are_counted_and_hold_everything() -> None:
    collector = make(talk(), dialog_turns_per_batch=4, yield_only_last_steps=True)
    batch = next_of(collector)
    assert collector.yield_completed_trajectories
    assert told(batch) == [("q0", 1), ("q2", 2), ("q1", 3), ("q3", 1)]
    assert batch["next", "reward"].tolist() == [[1], [2], [3], [1]]
    assert batch["next", "done"].all()
    assert [m["content"] for m in batch["history"].to_chats()[2]] == ["q1", "b", "more 1", "b", "more 2", "b"]


def test_without_a_number_of_turns_a_batch_is_one_round() -> None:
    collector = make(talk(4), yield_completed_trajectories=True)
    assert collector.dialog_turns_per_batch == 4
    assert next_of(collector).batch_size[0] >= 4


def test_real_groups_arrive_whole_and_are_scored() -> None:
    env = ArithmeticEnv(num_envs=2, repeats=2, group_repeats=True, seed=1)
    env.start()
    questions = [drawn.task for drawn in env.draw()]
    env.reset_dataloader()
    replies = [questions[0]["answer"], "no", questions[2]["answer"], f"It is {questions[2]['answer']}."]
    batch = next_of(make(env, policy=scripted(*replies), dialog_turns_per_batch=4, yield_only_last_steps=True))
    assert batch["group_id"].tolist() == [0, 0, 1, 1]
    assert batch["sample"].tolist() == [0, 1, 0, 1]
    assert batch["next", "accuracy_lenient"].squeeze(-1).tolist() == [1, 0, 1, 1]
    assert batch["text", "response"] == replies
    assert batch["query"][0] == f"What is {questions[0]['question']}?"


# Where batches go, and how many there are


@pytest.mark.parametrize(("total", "sizes"), [(0, []), (1, [2]), (4, [2, 2]), (5, [2, 2, 2])])
def test_iteration_ends_once_the_total_is_delivered(total: int, sizes: list[int]) -> None:
    collector = make(talk(), dialog_turns_per_batch=2, total_dialog_turns=total)
    assert [batch.numel() for batch in collector if batch is not None] == sizes
    assert list(collector) == []


def test_whole_trajectories_may_exceed_the_total_by_their_length() -> None:
    collector = make(talk(), dialog_turns_per_batch=2, yield_completed_trajectories=True, total_dialog_turns=4)
    assert [batch.numel() for batch in collector if batch is not None] == [3, 3]


def test_postproc_sees_each_batch_before_it_goes_anywhere() -> None:
    buffer = ReplayBuffer()
    collector = make(talk(), dialog_turns_per_batch=2, yield_only_last_steps=True, replay_buffer=buffer)
    collector.set_postproc(lambda batch: batch.set("marked", torch.arange(batch.batch_size[0])))
    collector.collect()
    assert buffer.take(2)["marked"].tolist() == [0, 1]


def test_with_a_buffer_iteration_yields_none_and_fills_it() -> None:
    buffer = ReplayBuffer()
    collector = make(
        talk(), dialog_turns_per_batch=2, yield_only_last_steps=True, replay_buffer=buffer, total_dialog_turns=4
    )
    assert list(collector) == [None, None]
    assert told(buffer.take(4)) == [("q0", 1), ("q2", 2), ("q1", 3), ("q3", 1)]


def test_a_group_that_never_completes_is_an_error_and_no_endless_wait() -> None:
    buffer = ReplayBuffer(transforms=[MCAdvantage(3)], draw_limit=4)
    env = talk(2, repeats=2)
    collector = make(env, dialog_turns_per_batch=2, yield_only_last_steps=True, replay_buffer=buffer)
    with pytest.raises(PolicyError, match="4 rounds of sampling brought 0 of 1 groups"):
        collector.fill(1)


def test_a_buffer_is_filled_as_far_as_its_groups_are_young_enough() -> None:
    buffer = ReplayBuffer()
    env = talk(rows=[{"question": "q", "turns": 1}])
    collector = make(env, dialog_turns_per_batch=2, replay_buffer=buffer, weight_updater=SharedWeights)
    collector.collect()
    collector.update_policy_weights_(torch.nn.Linear(1, 1))
    assert collector.fill(2, max_policy_lag=1)["buffer/dropped_by_age"] == 0
    assert buffer.group_numbers == [0, 1]
    assert collector.fill(2, max_policy_lag=0)["buffer/dropped_by_age"] == 2
    assert buffer.take(2)["group_id"].tolist() == [2, 3]
    with pytest.raises(RuntimeError, match="give the collector one as replay_buffer"):
        make(env, dialog_turns_per_batch=2).fill(1)


def test_plain_turns_are_flat_in_a_buffer() -> None:
    buffer = ReplayBuffer()
    make(talk(), dialog_turns_per_batch=6, replay_buffer=buffer).collect()
    assert told(buffer.take(3)) == [("q0", 1), ("q2", 1), ("q2", 2), ("q1", 1), ("q1", 2), ("q1", 3)]


def test_a_queue_gets_each_batch_and_a_full_one_loses_its_oldest() -> None:
    received: queue.Queue[TensorDictBase] = queue.Queue(maxsize=2)
    collector = make(talk(), dialog_turns_per_batch=2, flatten_data=True, queue=received)
    assert next(iter(collector)) is None
    assert next(iter(collector)) is None
    with pytest.warns(UserWarning, match="oldest batch is lost"):
        next(iter(collector))
    assert [told(received.get_nowait()) for _ in range(2)] == [[("q2", 1), ("q1", 2)], [("q2", 2), ("q1", 3)]]
    assert received.empty()


def test_rollout_gives_one_batch_wherever_batches_go() -> None:
    buffer = ReplayBuffer()
    collector = make(talk(), dialog_turns_per_batch=2, yield_only_last_steps=True, replay_buffer=buffer)
    assert told(collector.rollout()) == [("q0", 1), ("q2", 2)]
    assert len(buffer) == 0


def test_verbose_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    collector = make(talk(), dialog_turns_per_batch=2, verbose=True, total_dialog_turns=4)
    list(collector)
    assert capsys.readouterr().out == "collected 2 turns, 2 in all\ncollected 2 turns, 4 in all\n"


# What cannot be


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (RuntimeError, "raise its num_envs", {"async_envs": True}),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    error: type[Exception], message: str, options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=message):
        make(talk(), **{"dialog_turns_per_batch": 2, **options})


def test_policy_and_environment_may_be_given_as_factories() -> None:
    policy = scripted("x")
    collector = make(talk, policy_factory=lambda: policy, dialog_turns_per_batch=2)
    assert collector.policy is policy
    assert next_of(collector)["text", "response"] == [["x"], ["x"]]


def test_what_needs_a_part_that_is_missing_says_so() -> None:
    collector = make(talk(), dialog_turns_per_batch=2)
    with pytest.raises(RuntimeError, match="iterate over it instead"):
        collector.collect()


def test_a_collector_without_an_updater_pushes_in_the_policys_own_way() -> None:
    collector = make(talk(), dialog_turns_per_batch=2)
    assert isinstance(collector.weight_updater, SharedWeights)
    collector.update_policy_weights_(torch.nn.Linear(1, 1))
    assert collector.policy_version == 1


def test_an_updater_of_another_policy_is_refused() -> None:
    other = scripted("x")
    with pytest.raises(ValueError, match="another policy"):
        make(talk(), dialog_turns_per_batch=2, weight_updater=SharedWeights(other))
