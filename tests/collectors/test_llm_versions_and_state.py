"""LLMCollector: versions stamped when sampled, seconds, and a state that resumes exactly."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from talk import ROWS, Talk, make, next_of, talk, tokenizer, told
from tensordict import TensorDictBase

from rlpost.data.conversation import Conversation
from rlpost.envs import ChatEnv, DatasetChatEnv
from rlpost.envs.transforms import PolicyVersion
from rlpost.errors import CheckpointError, DataError, PolicyError
from rlpost.policies import ScriptedPolicy
from rlpost.policies.base import Policy, Request
from rlpost.rewards.score import Score
from rlpost.settings import SamplingSettings
from rlpost.weight_sync.base import SharedWeights, WeightSource

# Versions


def test_versions_are_stamped_when_a_turn_is_sampled() -> None:
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


def test_versions_may_be_uuids() -> None:
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


def test_a_push_that_fails_leaves_the_version() -> None:
    class Broken(SharedWeights):
        def send_weights(self, policy: Policy, source: WeightSource) -> None:
            raise PolicyError("half of it arrived")

    collector = make(talk(), dialog_turns_per_batch=2, weight_updater=Broken, track_policy_version=True)
    with pytest.raises(PolicyError):
        collector.update_policy_weights_(torch.nn.Linear(1, 1))
    assert collector.policy_version == 0
    assert collector.policy_version_tracker is not None
    assert collector.policy_version_tracker.version == 0


def test_the_tracker_is_among_the_transforms_of_the_environment() -> None:
    collector = make(talk(), dialog_turns_per_batch=2, track_policy_version=True)
    assert collector.env.transforms == [collector.policy_version_tracker]
    assert make(talk(), dialog_turns_per_batch=2).policy_version_tracker is None


# Time and state


def test_seconds_are_of_sampling_and_scoring_and_start_again_when_taken() -> None:
    class Slow(ScriptedPolicy):
        def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Any]:
            time.sleep(0.05)
            return super().generate(requests, sampling)

    class SlowEnv(Talk):
        def score(self, conversation: Conversation) -> Score:
            time.sleep(0.02)
            return super().score(conversation)

    policy = Slow(["x"], tokenizer(), sampling=SamplingSettings())
    rows = [{"question": "q", "turns": 1}]
    collector = make(SlowEnv(rows, num_envs=2, max_steps=1), policy=policy, dialog_turns_per_batch=2)
    began = time.monotonic()
    next_of(collector)
    passed = time.monotonic() - began
    taken = collector.player.take_seconds()
    assert list(taken) == ["time/rollout", "time/reward"]
    assert taken["time/rollout"] >= 0.05
    assert taken["time/reward"] >= 0.04
    assert sum(taken.values()) <= passed
    assert collector.player.take_seconds() == {"time/rollout": 0.0, "time/reward": 0.0}


MODES: list[dict[str, Any]] = [
    {"flatten_data": True},
    {"yield_completed_trajectories": True},
    {"yield_only_last_steps": True},
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: next(iter(mode)))
@pytest.mark.parametrize("batches_before", range(4))
def test_the_next_batch_after_a_round_trip_through_json_is_the_same(mode: dict[str, Any], batches_before: int) -> None:
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


def test_a_saved_conversation_is_its_last_turn_where_the_others_are_not_delivered() -> None:
    rows = [{"question": "long", "turns": 3}, {"question": "short", "turns": 1}]
    collector = make(talk(rows=rows), dialog_turns_per_batch=2, yield_only_last_steps=True)
    assert told(next_of(collector)) == [("short", 1), ("long", 3)]
    state = collector.state_dict()
    assert [len(turns) for turns in state["live"]] == [0, 1]
    assert len(state["live"][1][0]["policy_versions"]) == 2  # the second "long" has had two turns
    assert state["turns_delivered"] == 2


def test_a_state_of_another_size_is_refused_while_conversations_are_under_way() -> None:
    small = make(talk(2), dialog_turns_per_batch=2, flatten_data=True)
    next_of(small)  # q1 is under way
    with pytest.raises(CheckpointError, match="had 2 conversations in flight at once, and this environment has 3"):
        make(talk(3), dialog_turns_per_batch=3).load_state_dict(small.state_dict())


def test_the_size_may_change_where_nothing_is_under_way() -> None:
    rows = [{"question": f"q{i}", "turns": 1} for i in range(9)]
    small = make(talk(2, rows=rows), dialog_turns_per_batch=2, flatten_data=True)
    next_of(small)
    larger = make(talk(3, rows=rows), dialog_turns_per_batch=3, flatten_data=True)
    larger.load_state_dict(small.state_dict())
    assert next_of(larger)["query"] == ["q2", "q3", "q4"]


def test_the_seed_chooses_the_order_of_tasks() -> None:
    def queries(seed: int) -> list[str]:
        collector = make(DatasetChatEnv(ROWS, num_envs=6), dialog_turns_per_batch=6, flatten_data=True)
        collector.set_seed(seed)
        return list(next_of(collector)["query"])

    assert queries(1) == queries(1) != queries(2)
    assert sorted(queries(1)) == sorted(queries(2)) == ["q0", "q1", "q2", "q3", "q4", "q5"]


def test_prompts_from_outside_need_a_primer() -> None:
    with pytest.raises(DataError, match="append a DataLoadingPrimer"):
        next_of(make(ChatEnv(2, max_steps=1), dialog_turns_per_batch=2))
