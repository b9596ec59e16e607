"""LLMCollector: every way of delivering, and what cannot be."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
import torch
from talk import ONE_TURN, make, next_of, scripted, talk, tokenizer, told
from tensordict import LazyStackedTensorDict, TensorDictBase

from rlpost.data import ReplayBuffer
from rlpost.envs.arithmetic import ArithmeticEnv
from rlpost.errors import PolicyError
from rlpost.model.load import load_model
from rlpost.objectives import MCAdvantage
from rlpost.policies import TransformersWrapper
from rlpost.settings import ModelSettings
from rlpost.weight_sync.base import SharedWeights
from tests.says import Says

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
    reward = batch["next", "reward"].squeeze(-1)  # with the last turn alone
    assert reward.nan_to_num(-1).tolist() == [[1, -1, 2], [-1, -1, 3]]


def test_flat_batches_hold_one_environment_after_the_other() -> None:
    batch = next_of(make(talk(), dialog_turns_per_batch=6, flatten_data=True))
    assert batch.batch_size == torch.Size([6])
    assert told(batch) == [("q0", 1), ("q2", 1), ("q2", 2), ("q1", 1), ("q1", 2), ("q1", 3)]


def test_a_batch_is_rounded_up_to_whole_rounds() -> None:
    assert make(talk(4)).dialog_turns_per_batch == 4
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


def test_the_policy_reads_everything_and_its_replies_are_masked() -> None:
    rows = [{"question": "q", "turns": 3}]
    batch = next_of(make(talk(1, rows=rows), policy=scripted("yes"), dialog_turns_per_batch=3, flatten_data=True))
    first, second, third = (ids.tolist() for ids in batch["tokens", "full"].unbind())
    asked = [
        tokenizer()(f"\n<|im_start|>user\nmore {i}<|im_end|>\n<|im_start|>assistant\n")["input_ids"] for i in (1, 2)
    ]
    reply = [*tokenizer()("yes")["input_ids"], tokenizer().eos_token_id]
    # a turn that the environment has answered holds the answer's text; its ids come with the next turn
    assert second == first + asked[0] + reply
    assert third == second + asked[1] + reply
    sampled = batch["masks", "all_assistant_mask"].unbind()[2]
    assert torch.tensor(third)[sampled].tolist() == reply * 3


def test_a_model_samples_whole_rounds_up_to_the_total(tiny_folder: Path) -> None:
    model = load_model(tiny_folder, ModelSettings(path=""))
    policy = TransformersWrapper(model, generate_kwargs={"max_new_tokens": 3})
    env = talk(4, rows=ONE_TURN)
    batches = list(make(env, policy=policy, dialog_turns_per_batch=4, total_dialog_turns=10, flatten_data=True))
    assert [batch.numel() for batch in batches if batch is not None] == [4, 4, 4]
    responses = [ids for batch in batches if batch is not None for ids in batch["tokens", "response"].unbind()]
    assert all(0 < ids.numel() <= 3 for ids in responses)


# Whole trajectories


@pytest.mark.parametrize("reset", [False, True], ids=["going on", "reset"])
def test_whole_trajectories_come_in_order_and_a_surplus_waits(reset: bool) -> None:
    """Done in round 1: q0; 2: none; 3: q2 and q1; 4: q3 and q4; a reset abandons none that is complete."""
    collector = make(talk(), dialog_turns_per_batch=2, yield_completed_trajectories=True, reset_at_each_iter=reset)
    assert [told(next_of(collector)) for _ in range(4)] == [
        [("q0", 1), ("q2", 1), ("q2", 2)],
        [("q1", 1), ("q1", 2), ("q1", 3)],
        [("q3", 1), ("q4", 1)],
        [("q0", 1), ("q5", 1), ("q5", 2)],
    ]


def test_the_last_turns_alone_are_counted_and_hold_everything() -> None:
    collector = make(talk(), dialog_turns_per_batch=4, yield_only_last_steps=True)
    batch = next_of(collector)
    assert collector.yield_completed_trajectories
    assert told(batch) == [("q0", 1), ("q2", 2), ("q1", 3), ("q3", 1)]
    assert batch["next", "reward"].tolist() == [[1], [2], [3], [1]]
    assert batch["next", "done"].all()
    assert [m["content"] for m in batch["history"].to_chats()[2]] == ["q1", "b", "more 1", "b", "more 2", "b"]


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
    mark = lambda batch: batch.set("marked", torch.arange(batch.batch_size[0]))  # noqa: E731
    collector = make(talk(), dialog_turns_per_batch=2, yield_only_last_steps=True, replay_buffer=buffer, postproc=mark)
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
    with pytest.raises(PolicyError, match=r"4 rounds .* 0 of 1"):
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


@pytest.mark.parametrize("flatten", [None, False])
def test_plain_turns_reach_a_buffer_place_after_place(flatten: bool | None) -> None:
    buffer = ReplayBuffer()
    make(talk(), dialog_turns_per_batch=6, replay_buffer=buffer, flatten_data=flatten).collect()
    assert told(buffer.take(3)) == [("q0", 1), ("q2", 1), ("q2", 2), ("q1", 1), ("q1", 2), ("q1", 3)]


def test_a_queue_gets_each_batch_and_a_full_one_loses_its_oldest() -> None:
    received: queue.Queue[TensorDictBase] = queue.Queue(maxsize=2)
    collector = make(talk(), dialog_turns_per_batch=2, flatten_data=True, queue=received)
    assert next(iter(collector)) is None
    assert next(iter(collector)) is None
    with pytest.warns(UserWarning, match="oldest"):
        next(iter(collector))
    assert [told(received.get_nowait()) for _ in range(2)] == [[("q2", 1), ("q1", 2)], [("q2", 2), ("q1", 3)]]
    assert received.empty()


def test_rollout_gives_one_batch_wherever_batches_go() -> None:
    buffer = ReplayBuffer()
    collector = make(talk(), dialog_turns_per_batch=2, yield_only_last_steps=True, replay_buffer=buffer)
    assert told(collector.rollout()) == [("q0", 1), ("q2", 2)]
    assert len(buffer) == 0


def test_verbose_says_how_far_it_is(capsys: pytest.CaptureFixture[str], says: Says) -> None:
    list(make(talk(), dialog_turns_per_batch=2, verbose=True, total_dialog_turns=4))
    says("tensordict", capsys.readouterr().out)


# What cannot be


def test_a_pool_of_environments_is_for_another_collector() -> None:
    with pytest.raises(RuntimeError, match="num_envs"):
        make(talk(), dialog_turns_per_batch=2, async_envs=True)


def test_policy_and_environment_may_be_given_as_factories() -> None:
    policy = scripted("x")
    collector = make(talk, policy_factory=lambda: policy, dialog_turns_per_batch=2)
    assert collector.policy is policy
    assert next_of(collector)["text", "response"] == [["x"], ["x"]]


def test_a_collector_without_an_updater_pushes_in_the_policys_own_way() -> None:
    collector = make(talk(), dialog_turns_per_batch=2)
    assert isinstance(collector.weight_updater, SharedWeights)
    collector.update_policy_weights_(torch.nn.Linear(1, 1))
    assert collector.policy_version == 1


def test_an_updater_of_another_policy_is_refused() -> None:
    other = scripted("x")
    with pytest.raises(ValueError, match="another policy"):
        make(talk(), dialog_turns_per_batch=2, weight_updater=SharedWeights(other))
