"""LLMCollector: whose draws are whose, how far the background runs ahead, and what it says to wrong calls."""

from __future__ import annotations

import json
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from talk import ROWS, make, next_of, scripted, talk, told
from tensordict import TensorDict
from test_llm_background import ONE_TURN, Gate, started, until

from rlpost.collectors import LLMCollector, SharedWeights, WeightUpdaterBase
from rlpost.data import ReplayBuffer
from rlpost.envs import DatasetChatEnv
from rlpost.train.sampling import SamplingParts

# Numbers of draws


def test_a_second_collector_of_a_buffer_is_refused_until_the_first_is_shut_down() -> None:
    buffer = ReplayBuffer(group_size=2)
    first = make(talk(rows=ONE_TURN), dialog_turns_per_batch=2, replay_buffer=buffer)
    with pytest.raises(RuntimeError, match="another collector fills this replay buffer, and both would number"):
        make(talk(rows=ONE_TURN), dialog_turns_per_batch=2, replay_buffer=buffer)
    first.shutdown()
    make(talk(rows=ONE_TURN), dialog_turns_per_batch=2, replay_buffer=buffer).collect()


def test_what_was_under_way_before_a_seed_is_abandoned() -> None:
    collector = make(talk(), dialog_turns_per_batch=2, yield_completed_trajectories=True)
    next_of(collector)  # q1 has two turns more
    collector.set_seed(0)
    assert next_of(collector)["group_id"].tolist()[0] == 3


def test_numbers_and_order_after_a_seed_survive_a_checkpoint() -> None:
    def seeded() -> LLMCollector:
        return make(DatasetChatEnv(ROWS, num_envs=2), dialog_turns_per_batch=2, flatten_data=True)

    going_on, resumed = seeded(), seeded()
    next_of(going_on)
    going_on.set_seed(3)
    next_of(going_on)
    resumed.load_state_dict(json.loads(json.dumps(going_on.state_dict())))
    batches = [next_of(each) for each in (going_on, resumed)]
    assert batches[0]["group_id"].tolist() == batches[1]["group_id"].tolist() == [4, 5]
    assert list(batches[0]["query"]) == list(batches[1]["query"])
    assert resumed.policy.seed == 3


# The background


def test_the_background_rests_while_nobody_takes_and_goes_on_when_somebody_does() -> None:
    collector, buffer = started(batches_ahead=3)  # of 2 rows
    until(lambda: buffer.write_count == 6)
    time.sleep(0.1)
    assert buffer.write_count == 6
    assert told(buffer.take(2)) == [("q0", 1), ("q1", 1)]
    until(lambda: buffer.write_count == 8)
    collector.fill(20)
    assert buffer.take(20).batch_size[0] == 20  # more than fits: whoever waits is served
    collector.shutdown(timeout=60)


def test_a_resting_background_ends_at_once() -> None:
    collector, buffer = started()
    until(lambda: buffer.write_count == 4)
    collector.shutdown(timeout=60)
    assert buffer.write_count == 4


def test_what_is_saved_in_the_background_is_of_one_moment() -> None:
    class Slow(ReplayBuffer):
        def state_dict(self) -> dict[str, Any]:
            end = time.monotonic() + 0.2
            while self.write_count == written and time.monotonic() < end:
                time.sleep(0.005)
            return super().state_dict()

    buffer, policy = Slow(), scripted("a", "b")
    collector = LLMCollector(
        talk(rows=ONE_TURN), policy=policy, dialog_turns_per_batch=2, replay_buffer=buffer, batches_ahead=None
    )
    collector.start()
    until(lambda: buffer.write_count > 0)
    written = buffer.write_count
    parts: Any = SimpleNamespace(collector=collector, buffer=buffer, policy=policy)
    state = SamplingParts.state(parts)
    collector.shutdown()
    drawn = state["collector"]["env_state_dict"]["primer"]["position"]
    assert len(state["buffer"]["groups"]) == drawn  # every draw of a prompt is a group: none is drawn again


def test_an_error_at_the_end_may_be_logged_instead(caplog: pytest.LogCaptureFixture) -> None:
    policy = Gate()
    collector, _ = started(policy=policy, wait_seconds=0.05)
    assert policy.asked.wait(60)
    collector.shutdown(raise_on_error=False)
    assert re.search(r"the collector was shut down after an error: waited \d+ s for the batch", caplog.text)
    policy.open.set()


# Weights


class Told(WeightUpdaterBase):
    """An updater as a user writes one."""

    def send_weights(self, policy: Any, source: Any) -> None:
        self.sent = source


def test_weights_come_under_any_of_their_names() -> None:
    weights = torch.nn.Linear(1, 1)
    collector = make(talk(), dialog_turns_per_batch=2, weight_updater=Told)
    collector.policy.model = weights  # type: ignore[attr-defined]
    named: list[dict[str, Any]] = [
        {"weights": weights},
        {"policy": weights},
        {"weights_dict": {"policy": weights}},
        {"policy_or_weights": weights, "model_id": "policy"},
    ]
    for given in named:
        collector.update_policy_weights_(**given)
        assert collector.weight_updater.sent is weights  # type: ignore[attr-defined]
    assert collector.get_policy_version() == 4
    with pytest.raises(ValueError, match="given weights twice, as weights and policy"):
        collector.update_policy_weights_(weights=weights, policy=weights)
    assert collector.get_policy_version() == 4


def test_workers_are_those_of_an_updater_that_was_given() -> None:
    collector = make(talk(), dialog_turns_per_batch=2)
    collector.update_policy_weights_(torch.nn.Linear(1, 1))  # the policy's own way
    assert collector.get_policy_version() == 1


def test_weights_that_do_not_reach_the_policy_raise_no_version() -> None:
    policy = scripted("a")
    policy.shares_weights = False
    collector = make(talk(), dialog_turns_per_batch=2, policy=policy, weight_updater=SharedWeights)
    assert collector.get_policy_version() == 0


@pytest.mark.parametrize("empty", [{}, TensorDict(), torch.nn.Identity()], ids=["mapping", "tensordict", "module"])
@pytest.mark.parametrize("updater", [None, Told], ids=["the policy's own", "the user's"])
def test_a_source_without_weights_is_refused_and_raises_no_version(empty: Any, updater: Any) -> None:
    collector = make(talk(), dialog_turns_per_batch=2, weight_updater=updater)
    with pytest.raises(TypeError, match=f"this {type(empty).__name__} has no weights to push"):
        collector.update_policy_weights_(empty)
    assert collector.policy_version == 0


# Smaller things


def test_rows_that_are_not_flattened_reach_a_buffer_row_after_row() -> None:
    buffer = ReplayBuffer()
    make(talk(rows=ONE_TURN), dialog_turns_per_batch=6, replay_buffer=buffer, flatten_data=False).collect()
    assert buffer.take(6)["query"] == ["q0", "q2", "q4", "q1", "q3", "q5"]  # place 0 played the even ones
