"""LLMCollector: versions stamped when sampled, seconds, and a state that resumes exactly."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from talk import ROWS, make, next_of, talk
from tensordict import TensorDictBase

from rlpost.envs import ChatEnv, DatasetChatEnv
from rlpost.errors import CheckpointError, DataError, PolicyError
from rlpost.policies.base import Policy
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


def test_a_state_of_another_size_is_refused() -> None:
    small = make(talk(2), dialog_turns_per_batch=2, flatten_data=True)
    next_of(small)  # q1 is under way
    with pytest.raises(CheckpointError, match=r"2 conversations .* 3"):
        make(talk(3), dialog_turns_per_batch=3).load_state_dict(small.state_dict())


def test_prompts_from_outside_need_a_primer() -> None:
    with pytest.raises(DataError, match="append a DataLoadingPrimer"):
        next_of(make(ChatEnv(2, max_steps=1), dialog_turns_per_batch=2))


def test_what_was_under_way_before_a_seed_is_abandoned() -> None:
    collector = make(talk(), dialog_turns_per_batch=2, yield_completed_trajectories=True)
    next_of(collector)  # q1 has two turns more
    collector.set_seed(0)
    assert next_of(collector)["group_id"].tolist()[0] == 3


def test_numbers_and_order_after_a_seed_survive_a_checkpoint() -> None:
    going_on, resumed = (
        make(DatasetChatEnv(ROWS, num_envs=2), dialog_turns_per_batch=2, flatten_data=True) for _ in range(2)
    )
    next_of(going_on)
    going_on.set_seed(3)
    next_of(going_on)
    resumed.load_state_dict(json.loads(json.dumps(going_on.state_dict())))
    batches = [next_of(each) for each in (going_on, resumed)]
    assert batches[0]["group_id"].tolist() == batches[1]["group_id"].tolist() == [4, 5]
    assert list(batches[0]["query"]) == list(batches[1]["query"])
    assert resumed.policy.seed == 3
