"""LLMCollector: every way of delivering, with scripted replies."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rlpost.collectors import LLMCollector
from rlpost.data import ReplayBuffer
from rlpost.data.conversation import Conversation
from rlpost.envs import ChatEnv, DatasetChatEnv
from rlpost.envs.arithmetic import ArithmeticEnv
from rlpost.envs.base import EnvBase
from rlpost.envs.transforms import PolicyVersion
from rlpost.errors import CheckpointError, DataError, PolicyError
from rlpost.objectives import MCAdvantage
from rlpost.policies import ScriptedPolicy
from rlpost.policies.base import Policy, Request
from rlpost.rewards.score import Score
from rlpost.settings import SamplingSettings
from rlpost.weight_sync.base import SharedWeights

Make = Callable[..., LLMCollector]
ROWS = [{"question": f"q{i}", "turns": turns} for i, turns in enumerate([1, 3, 2, 1, 1, 2])]


class Talk(DatasetChatEnv):
    """Asks for more until the task's number of turns, three at most; the reward is that number."""

    def next_message(self, conversation: Conversation) -> str | None:
        return None if conversation.turns == conversation.task["turns"] else f"more {conversation.turns}"

    def score(self, conversation: Conversation) -> Score:
        return Score(float(conversation.turns), {"turns": float(conversation.turns)})


def talk(size: int = 2, repeats: int = 1, rows: Sequence[Any] = ROWS) -> Talk:
    return Talk(rows, shuffle=False, num_envs=size, repeats=repeats, max_steps=3)


@pytest.fixture
def make(tiny_tokenizer: Any) -> Make:
    """`make(env, ...)`: a collector whose policy answers "a" to the first request of a call and "b" to the second."""

    def collector(env: EnvBase | Callable[[], EnvBase], *, replies: Sequence[str] = ("a", "b"), **options: Any) -> Any:
        if not {"policy", "policy_factory"} & set(options):
            options["policy"] = ScriptedPolicy(replies, tiny_tokenizer, sampling=SamplingSettings())
        return LLMCollector(env, **options)

    return collector


def next_of(collector: LLMCollector) -> TensorDictBase:
    batch = next(iter(collector))
    assert batch is not None
    return batch


def told(batch: TensorDictBase) -> list[tuple[str, int]]:
    """(query, turns the conversation had by then) of each row."""
    chats = batch["history"].to_chats()
    return [(q, sum(m["role"] == "assistant" for m in c)) for q, c in zip(batch["query"], chats, strict=True)]


# Plain mode


def test_plain_batches_are_stacked_by_environment_and_turn(make: Make) -> None:
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


def test_the_reward_comes_with_the_last_turn_alone(make: Make) -> None:
    batch = next_of(make(talk(), dialog_turns_per_batch=6))
    reward = batch["next", "reward"].squeeze(-1)
    assert reward.nan_to_num(-1).tolist() == [[1, -1, 2], [-1, -1, 3]]


def test_flat_batches_hold_one_environment_after_the_other(make: Make) -> None:
    batch = next_of(make(talk(), dialog_turns_per_batch=6, flatten_data=True))
    assert batch.batch_size == torch.Size([6])
    assert told(batch) == [("q0", 1), ("q2", 1), ("q2", 2), ("q1", 1), ("q1", 2), ("q1", 3)]


def test_a_batch_is_rounded_up_to_whole_rounds(make: Make) -> None:
    assert make(talk(4), dialog_turns_per_batch=1).dialog_turns_per_batch == 4
    collector = make(talk(4), dialog_turns_per_batch=5)
    assert collector.dialog_turns_per_batch == 8
    assert next_of(collector).batch_size == torch.Size([4, 2])


def test_a_conversation_goes_on_in_the_next_batch_unless_reset(make: Make) -> None:
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


def test_a_turn_is_a_snapshot_that_later_turns_leave_alone(make: Make) -> None:
    batch = next_of(make(talk(), dialog_turns_per_batch=6, flatten_data=True))
    assert [len(row) for row in batch["tokens", "response"].unbind()] == [2, 2, 4, 2, 4, 6]  # "a" and end of turn
    assert batch["history"].to_chats()[3] == [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "more 1"},
    ]


@pytest.mark.xfail(reason="Policy._request leaves the environment's new messages out", strict=True)
def test_the_policy_reads_what_the_environment_said_and_it_is_masked(make: Make, tiny_tokenizer: Any) -> None:
    batch = next_of(make(talk(), dialog_turns_per_batch=6, flatten_data=True))
    ids = batch["tokens", "full"].unbind()[4]
    sampled = batch["masks", "all_assistant_mask"].unbind()[4]
    text = tiny_tokenizer.decode(ids)
    assert text.count("<|im_start|>user\nmore 1<|im_end|>\n<|im_start|>assistant\n") == 1
    assert tiny_tokenizer.decode(ids[sampled]) == "b<|im_end|>b<|im_end|>"


# Whole trajectories


def test_whole_trajectories_come_one_after_the_other_and_a_surplus_waits(make: Make) -> None:
    collector = make(talk(), dialog_turns_per_batch=2, yield_completed_trajectories=True)
    # done in round 1: q0; 2: none; 3: q2 and q1; 4: q3 and q4; 5: none; 6: q5 and the q0 of the next epoch
    assert told(next_of(collector)) == [("q0", 1), ("q2", 1), ("q2", 2)]
    assert told(next_of(collector)) == [("q1", 1), ("q1", 2), ("q1", 3)]
    assert told(next_of(collector)) == [("q3", 1), ("q4", 1)]


def test_a_trajectory_under_way_survives_the_end_of_a_batch(make: Make) -> None:
    collector = make(talk(), dialog_turns_per_batch=2, yield_completed_trajectories=True)
    batches = [told(next_of(collector)) for _ in range(5)]
    assert sorted({query for batch in batches for query, _ in batch}) == ["q0", "q1", "q2", "q3", "q4", "q5"]
    assert all(turns == list(range(1, len(turns) + 1)) for turns in _turns_by_conversation(batches))


def _turns_by_conversation(batches: Sequence[Sequence[tuple[str, int]]]) -> Iterator[list[int]]:
    for batch in batches:
        starts = [i for i, (_, turn) in enumerate(batch) if turn == 1]
        for start, end in zip(starts, [*starts[1:], len(batch)], strict=True):
            yield [turn for _, turn in batch[start:end]]


def test_resetting_each_time_abandons_what_is_under_way_but_no_complete_trajectory(make: Make) -> None:
    collector = make(talk(), dialog_turns_per_batch=2, yield_completed_trajectories=True, reset_at_each_iter=True)
    assert told(next_of(collector)) == [("q0", 1), ("q2", 1), ("q2", 2)]  # q1 is complete too, and waits
    assert told(next_of(collector)) == [("q1", 1), ("q1", 2), ("q1", 3)]
    assert told(next_of(collector)) == [("q3", 1), ("q4", 1)]


def test_the_last_turns_alone_are_counted_and_hold_everything(make: Make) -> None:
    collector = make(talk(), dialog_turns_per_batch=4, yield_only_last_steps=True)
    batch = next_of(collector)
    assert collector.yield_completed_trajectories
    assert told(batch) == [("q0", 1), ("q2", 2), ("q1", 3), ("q3", 1)]
    assert batch["next", "reward"].tolist() == [[1], [2], [3], [1]]
    assert batch["next", "done"].all()
    assert [m["content"] for m in batch["history"].to_chats()[2]] == ["q1", "b", "more 1", "b", "more 2", "b"]


def test_without_a_number_of_turns_a_batch_is_one_round(make: Make) -> None:
    collector = make(talk(4), yield_completed_trajectories=True)
    assert collector.dialog_turns_per_batch == 4
    assert next_of(collector).batch_size[0] >= 4


def test_real_groups_arrive_whole_and_are_scored(make: Make) -> None:
    env = ArithmeticEnv(num_envs=2, repeats=2, group_repeats=True, seed=1)
    env.start()
    questions = [drawn.task for drawn in env.draw()]
    env.reset_dataloader()
    replies = [questions[0]["answer"], "no", questions[2]["answer"], f"It is {questions[2]['answer']}."]
    batch = next_of(make(env, replies=replies, dialog_turns_per_batch=4, yield_only_last_steps=True))
    assert batch["group_id"].tolist() == [0, 0, 1, 1]
    assert batch["sample"].tolist() == [0, 1, 0, 1]
    assert batch["next", "accuracy_lenient"].squeeze(-1).tolist() == [1, 0, 1, 1]
    assert batch["text", "response"] == replies
    assert batch["query"][0] == f"What is {questions[0]['question']}?"


# Where batches go, and how many there are


@pytest.mark.parametrize(("total", "sizes"), [(0, []), (1, [2]), (4, [2, 2]), (5, [2, 2, 2])])
def test_iteration_ends_once_the_total_is_delivered(make: Make, total: int, sizes: list[int]) -> None:
    collector = make(talk(), dialog_turns_per_batch=2, total_dialog_turns=total)
    assert [batch.numel() for batch in collector if batch is not None] == sizes
    assert list(collector) == []


def test_whole_trajectories_may_exceed_the_total_by_their_length(make: Make) -> None:
    collector = make(talk(), dialog_turns_per_batch=2, yield_completed_trajectories=True, total_dialog_turns=4)
    assert [batch.numel() for batch in collector if batch is not None] == [3, 3]


def test_postproc_sees_each_batch_before_it_goes_anywhere(make: Make) -> None:
    buffer = ReplayBuffer()
    collector = make(talk(), dialog_turns_per_batch=2, yield_only_last_steps=True, replay_buffer=buffer)
    collector.set_postproc(lambda batch: batch.set("marked", torch.arange(batch.batch_size[0])))
    collector.collect()
    assert buffer.take(2)["marked"].tolist() == [0, 1]
    with pytest.raises(RuntimeError, match="postproc already"):
        collector.set_postproc(lambda batch: batch)


def test_with_a_buffer_iteration_yields_none_and_fills_it(make: Make) -> None:
    buffer = ReplayBuffer()
    collector = make(
        talk(), dialog_turns_per_batch=2, yield_only_last_steps=True, replay_buffer=buffer, total_dialog_turns=4
    )
    assert list(collector) == [None, None]
    assert told(buffer.take(4)) == [("q0", 1), ("q2", 2), ("q1", 3), ("q3", 1)]


def test_a_buffer_asks_for_as_many_rounds_as_its_groups_need(make: Make) -> None:
    buffer = ReplayBuffer(transforms=[MCAdvantage(2)])
    make(talk(2, repeats=2), dialog_turns_per_batch=2, yield_only_last_steps=True, replay_buffer=buffer)
    batch = buffer.take(3)
    assert batch["query"] == ["q0", "q0", "q1", "q1", "q2", "q2"]
    assert batch["advantage"].tolist() == [0.0] * 6  # both samples of a group earn the same


def test_a_group_that_never_completes_is_an_error_and_no_endless_wait(make: Make) -> None:
    buffer = ReplayBuffer(transforms=[MCAdvantage(3)], draw_limit=4)
    make(talk(2, repeats=2), dialog_turns_per_batch=2, yield_only_last_steps=True, replay_buffer=buffer)
    with pytest.raises(PolicyError, match="4 rounds of sampling brought 0 of 1 groups"):
        buffer.take(1)


def test_plain_turns_are_flat_in_a_buffer(make: Make) -> None:
    buffer = ReplayBuffer()
    make(talk(), dialog_turns_per_batch=6, replay_buffer=buffer).collect()
    assert told(buffer.take(3)) == [("q0", 1), ("q2", 1), ("q2", 2), ("q1", 1), ("q1", 2), ("q1", 3)]


def test_a_queue_gets_each_batch_and_a_full_one_loses_its_oldest(make: Make) -> None:
    received: queue.Queue[TensorDictBase] = queue.Queue(maxsize=2)
    collector = make(talk(), dialog_turns_per_batch=2, flatten_data=True, queue=received)
    assert next(iter(collector)) is None
    assert next(iter(collector)) is None
    with pytest.warns(UserWarning, match="oldest batch is lost"):
        next(iter(collector))
    assert [told(received.get_nowait()) for _ in range(2)] == [[("q2", 1), ("q1", 2)], [("q2", 2), ("q1", 3)]]
    assert received.empty()


def test_rollout_gives_one_batch_wherever_batches_go(make: Make) -> None:
    buffer = ReplayBuffer()
    collector = make(talk(), dialog_turns_per_batch=2, yield_only_last_steps=True, replay_buffer=buffer)
    assert told(collector.rollout()) == [("q0", 1), ("q2", 2)]
    assert len(buffer) == 0


def test_verbose_says_how_far_it_is(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    collector = make(talk(), dialog_turns_per_batch=2, verbose=True, total_dialog_turns=4)
    list(collector)
    assert capsys.readouterr().out == "collected 2 turns, 2 in all\ncollected 2 turns, 4 in all\n"


# What cannot be


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, "exactly one of policy and policy_factory", {"policy": None}),
        (TypeError, "contradicts", {"yield_only_last_steps": True, "yield_completed_trajectories": False}),
        (TypeError, "excludes", {"yield_only_last_steps": True, "flatten_data": True}),
        (TypeError, "excludes", {"yield_only_last_steps": True, "reset_at_each_iter": True}),
        (TypeError, "may be left out only", {"dialog_turns_per_batch": None}),
        (TypeError, "single dimension", {"replay_buffer": ReplayBuffer(), "flatten_data": False}),
        (TypeError, "int is no Transform", {"track_policy_version": 7}),
        (RuntimeError, "not into both", {"replay_buffer": ReplayBuffer(), "queue": queue.Queue()}),
        (RuntimeError, "pool of environments", {"async_envs": True}),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    make: Make, error: type[Exception], message: str, options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=message):
        make(talk(), **{"dialog_turns_per_batch": 2, **options})


def test_policy_and_environment_may_be_given_as_factories(make: Make, tiny_tokenizer: Any) -> None:
    policy = ScriptedPolicy(["x"], tiny_tokenizer, sampling=SamplingSettings())
    collector = make(talk, policy_factory=lambda: policy, dialog_turns_per_batch=2)
    assert collector.policy is policy
    assert next_of(collector)["text", "response"] == [["x"], ["x"]]
    with pytest.raises(TypeError, match="exactly one"):
        make(talk, policy=policy, policy_factory=lambda: policy, dialog_turns_per_batch=2)


def test_what_needs_a_part_that_is_missing_says_so(make: Make) -> None:
    collector = make(talk(), dialog_turns_per_batch=2)
    with pytest.raises(RuntimeError, match="iterate over it instead"):
        collector.collect()
    with pytest.raises(TypeError, match="needs a weight_updater"):
        collector.update_policy_weights_(torch.nn.Linear(1, 1))


def test_an_updater_of_another_policy_is_refused(make: Make, tiny_tokenizer: Any) -> None:
    other = ScriptedPolicy(["x"], tiny_tokenizer, sampling=SamplingSettings())
    with pytest.raises(ValueError, match="another policy"):
        make(talk(), dialog_turns_per_batch=2, weight_updater=SharedWeights(other))


# Versions


def test_versions_are_stamped_when_a_turn_is_sampled(make: Make) -> None:
    collector = make(
        talk(), dialog_turns_per_batch=2, flatten_data=True, weight_updater=SharedWeights, track_policy_version=True
    )
    weights = torch.nn.Linear(1, 1)
    first = next_of(collector)
    collector.update_policy_weights_(weights)
    second = next_of(collector)  # q2 is new, q1 goes on under the new weights
    collector.update_policy_weights_(weights)
    third = next_of(collector)
    assert [b["policy_version"].tolist() for b in (first, second, third)] == [[0, 0], [1, 0], [1, 0]]
    assert [b["policy_version_max"].tolist() for b in (first, second, third)] == [[0, 0], [1, 1], [2, 2]]
    assert collector.policy_version == collector.get_policy_version() == 2
    assert collector.policy_version_tracker is not None
    assert collector.policy_version_tracker.version == 2
    assert [(old, new) for _, old, new in collector.policy_version_tracker.version_history] == [(0, 1), (1, 2)]


def test_versions_may_be_uuids(make: Make) -> None:
    tracker = PolicyVersion("uuid")
    collector = make(
        talk(), dialog_turns_per_batch=2, flatten_data=True, weight_updater=SharedWeights, track_policy_version=tracker
    )
    before = tracker.version
    assert list(next_of(collector)["policy_version"]) == [before, before]
    collector.update_policy_weights_(torch.nn.Linear(1, 1))
    assert tracker.version != before
    second = next_of(collector)
    assert list(second["policy_version"]) == [tracker.version, before]
    assert list(second["policy_version_max"]) == [tracker.version, tracker.version]


def test_a_push_that_fails_leaves_the_version(make: Make) -> None:
    class Broken(SharedWeights):
        def _send(self, policy: Policy, weights: dict[str, torch.Tensor]) -> None:
            raise PolicyError("half of it arrived")

    collector = make(talk(), dialog_turns_per_batch=2, weight_updater=Broken, track_policy_version=True)
    with pytest.raises(PolicyError):
        collector.update_policy_weights_(torch.nn.Linear(1, 1))
    assert collector.policy_version == 0
    assert collector.policy_version_tracker is not None
    assert collector.policy_version_tracker.version == 0


def test_the_tracker_is_among_the_transforms_of_the_environment(make: Make) -> None:
    collector = make(talk(), dialog_turns_per_batch=2, track_policy_version=True)
    assert collector.env.transforms == [collector.policy_version_tracker]
    assert make(talk(), dialog_turns_per_batch=2).policy_version_tracker is None


# Time and state


def test_seconds_are_of_sampling_and_scoring_and_start_again_when_taken(make: Make, tiny_tokenizer: Any) -> None:
    class Slow(ScriptedPolicy):
        def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Any]:
            time.sleep(0.05)
            return super().generate(requests, sampling)

    class SlowEnv(Talk):
        def score(self, conversation: Conversation) -> Score:
            time.sleep(0.02)
            return super().score(conversation)

    policy = Slow(["x"], tiny_tokenizer, sampling=SamplingSettings())
    rows = [{"question": "q", "turns": 1}]
    collector = make(SlowEnv(rows, num_envs=2, max_steps=1), policy=policy, dialog_turns_per_batch=2)
    next_of(collector)
    taken = collector.take_seconds()
    assert list(taken) == ["time/rollout", "time/reward"]
    assert 0.05 <= taken["time/rollout"] < 1
    assert 0.04 <= taken["time/reward"] < 1
    assert collector.take_seconds() == {"time/rollout": 0.0, "time/reward": 0.0}


MODES: list[dict[str, Any]] = [
    {"flatten_data": True},
    {"yield_completed_trajectories": True},
    {"yield_only_last_steps": True},
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: next(iter(mode)))
@pytest.mark.parametrize("batches_before", range(4))
def test_the_next_batch_after_a_round_trip_through_json_is_the_same(
    make: Make, mode: dict[str, Any], batches_before: int
) -> None:
    def observed(batch: TensorDictBase) -> list[Any]:
        tokens = [row.tolist() for row in batch["tokens", "full"].unbind()]
        plain = [batch[key].tolist() for key in ("group_id", "sample", "policy_version")]
        return [*plain, tokens, batch["history"].to_chats(), batch["next", "reward"].nan_to_num(-1).tolist()]

    going_on, resumed = (
        make(talk(2, repeats=2), dialog_turns_per_batch=2, total_dialog_turns=40, **mode) for _ in range(2)
    )
    for _ in range(batches_before):
        next_of(going_on)
    state = json.loads(json.dumps(going_on.state_dict()))
    resumed.load_state_dict(state)
    expected = [observed(b) for b in going_on if b is not None]
    assert len(expected) > 5
    assert [observed(b) for b in resumed if b is not None] == expected


def test_a_saved_conversation_is_its_last_turn_where_the_others_are_not_delivered(make: Make) -> None:
    rows = [{"question": "long", "turns": 3}, {"question": "short", "turns": 1}]
    collector = make(talk(rows=rows), dialog_turns_per_batch=2, yield_only_last_steps=True)
    assert told(next_of(collector)) == [("short", 1), ("long", 3)]
    state = collector.state_dict()
    assert [len(turns) for turns in state["live"]] == [0, 1]
    assert len(state["live"][1][0]["policy_versions"]) == 2  # the second "long" has had two turns
    assert state["turns_delivered"] == 2


def test_a_state_of_another_size_is_refused_while_conversations_are_under_way(make: Make) -> None:
    small = make(talk(2), dialog_turns_per_batch=2, flatten_data=True)
    next_of(small)  # q1 is under way
    with pytest.raises(CheckpointError, match="had 2 conversations under way at once, and this environment has 3"):
        make(talk(3), dialog_turns_per_batch=3).load_state_dict(small.state_dict())


def test_the_size_may_change_where_nothing_is_under_way(make: Make) -> None:
    rows = [{"question": f"q{i}", "turns": 1} for i in range(9)]
    small = make(talk(2, rows=rows), dialog_turns_per_batch=2, flatten_data=True)
    next_of(small)
    larger = make(talk(3, rows=rows), dialog_turns_per_batch=3, flatten_data=True)
    larger.load_state_dict(small.state_dict())
    assert next_of(larger)["query"] == ["q2", "q3", "q4"]


def test_the_seed_chooses_the_order_of_tasks(make: Make) -> None:
    def queries(seed: int) -> list[str]:
        collector = make(DatasetChatEnv(ROWS, num_envs=6), dialog_turns_per_batch=6, flatten_data=True)
        collector.set_seed(seed)
        return list(next_of(collector)["query"])

    assert queries(1) == queries(1) != queries(2)
    assert sorted(queries(1)) == sorted(queries(2)) == ["q0", "q1", "q2", "q3", "q4", "q5"]


def test_prompts_from_outside_need_a_primer(make: Make) -> None:
    with pytest.raises(DataError, match="append a DataLoadingPrimer"):
        next_of(make(ChatEnv(2, max_steps=1), dialog_turns_per_batch=2))
