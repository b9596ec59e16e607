"""AsyncCollector's arguments and methods: what they do there, or why they are refused."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from moody import Moody, half, next_of

from rlpost.collectors import AsyncCollector, Collector, LLMCollector, SharedWeights
from rlpost.data import ReplayBuffer
from rlpost.envs.transforms import PolicyVersion
from tests.collectors.here import Here, wait_until
from tests.collectors.talk import scripted, talk

STARTED: list[Here] = []  # in place of processes, by this test


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: Any, **how: Any) -> Here:
        STARTED.append(Here(*args, **how))
        return STARTED[-1]

    STARTED.clear()
    monkeypatch.setattr("rlpost.torchrl.remote_collector.WorkerProcess", start)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # there is here


def frames(**options: Any) -> AsyncCollector:
    return AsyncCollector(Moody, options.pop("policy", half), **{"frames_per_batch": 8, **options})


def talks(**options: Any) -> AsyncCollector:
    return AsyncCollector(talk, options.pop("policy", scripted("a", "b")), **{"frames_per_batch": 2, **options})


def there() -> Any:
    """The collector that the last AsyncCollector has."""
    return STARTED[-1].object.collector


# Refused


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (frames, {"preemptive_threshold": 0.5}),
        (frames, {"weight_updater": SharedWeights}),
        (frames, {"flatten_data": True}),
        (talks, {"device": "cpu"}),
        (talks, {"env_device": "cpu"}),
        (talks, {"policy_device": "cpu"}),
        (talks, {"max_frames_per_traj": 3}),
        (talks, {"init_random_frames": 8}),
        (talks, {"split_trajs": True}),
        (talks, {"set_truncated": True}),
        (talks, {"trust_policy": True}),
    ],
    ids=lambda value: value.__name__ if callable(value) else next(iter(value)),
)
def test_an_argument_without_effect_is_refused_by_name(make: Any, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"^{next(iter(options))} "):
        make(**options)


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"^policy .*pickle"):
        frames(policy=lambda td: lock and td)


# Arguments of frames


@pytest.mark.parametrize(
    "options",
    [
        {"max_frames_per_traj": 2, "set_truncated": True},
        {"max_frames_per_traj": -1, "init_random_frames": -1, "total_frames": None},
        {"split_trajs": True, "reset_at_each_iter": True},
        {"env_device": "cpu", "policy_device": ["cpu"], "device": "cpu"},
        {"postproc": lambda batch: batch["next"]},
    ],
    ids=lambda options: "-".join(options),
)
def test_arguments_of_frames_are_those_of_a_collector_here(options: dict[str, Any]) -> None:
    collector = frames(**options)
    same = Collector(Moody, half, frames_per_batch=8, **{k: v for k, v in options.items() if v is not None})
    for _ in range(2):
        batch, wanted = next_of(collector), next_of(same)
        assert (batch.batch_size, batch.device) == (wanted.batch_size, wanted.device)
        assert set(batch.keys(True)) == set(wanted.keys(True))
        assert all((value == batch[key]).all() for key, value in wanted.items(True, True))
    collector.shutdown()


def test_a_rollout_is_collected_now_and_leaves_what_waits() -> None:
    collector, same = frames(), Collector(Moody, half, frames_per_batch=8)
    wanted = [same.rollout()["observation"] for _ in range(3)]
    batches = [next_of(collector)]
    rollout = collector.rollout()
    batches += [next_of(collector), rollout]
    assert all(torch.equal(b["observation"], w) for b, w in zip(batches, wanted, strict=True))


# Arguments of conversations


def test_arguments_of_conversations_reach_their_collector() -> None:
    talks(
        exploration_type="deterministic",
        begin_ahead=False,
        flatten_data=True,
        frames_per_batch=3,
        max_frames_per_traj=-1,
    )
    inner = there()
    assert isinstance(inner, LLMCollector)
    assert inner.policy.sampling.temperature == 0
    assert (inner.begin_ahead, inner.flatten_data, inner.frames_per_batch) == (False, True, 4)


class Copying(SharedWeights):
    """Says what it was given."""

    def send_weights(self, policy: Any, source: Any) -> None:
        policy.taken = {name: weight.tolist() for name, weight in source.items()}


def test_an_updater_of_ones_own_takes_the_weights() -> None:
    tracker = PolicyVersion("uuid")
    collector = talks(weight_updater=Copying, track_policy_version=tracker)
    first = collector.policy_version
    collector.update_policy_weights_({"x": torch.tensor([1.0, 2.0])}, worker_ids=0)
    inner = there()
    assert inner.policy.taken == {"x": [1.0, 2.0]}
    assert inner.policy.version == inner.policy_version_tracker.version == collector.policy_version == tracker.version
    assert [change[1:] for change in tracker.version_history] == [(first, tracker.version)]
    batch = next_of(collector)
    assert list(batch[:, 0]["policy_version"]) == [tracker.version] * 2
    collector.init_updater(model_metadata={"x": (torch.float32, [3])})
    assert inner.weight_updater.model_metadata == {"x": (torch.float32, [3])}


# Buffers


def test_a_buffer_of_groups_is_filled_as_far_as_it_is_used() -> None:
    buffer = ReplayBuffer()
    collector = talks(
        replay_buffer=buffer, yield_completed_trajectories=True, postproc=lambda batch: batch.set("by", batch["turns"])
    )
    assert [collector.next(), next(iter(collector))] == [None, None]
    collector.fill(3)
    taken = buffer.take(3)["group_id"].tolist()  # what is ahead of the two that were asked for may have come too
    collector.start()
    for _ in range(20):
        wait_until(lambda: collector.is_ahead)
        time.sleep(0.002)
        assert buffer.num_rows <= 1 + 2 * 4  # beside a row two batches of two, or with three turns at the end of four
        taken += buffer.take(2)["group_id"].tolist()
    assert sorted(set(taken)) == list(range(43))  # each group once
    with collector.pause():  # one moment
        state = {"collector": collector.state_dict(), "buffer": buffer.state_dict()}

    def five_times() -> list[list[int]]:
        return [(collector.fill(2), buffer.take(2)["group_id"].unique().tolist())[1] for _ in range(5)]

    following = five_times()
    with collector.pause():
        buffer.load_state_dict(state["buffer"])
        collector.load_state_dict(state["collector"])
    assert five_times() == following
    with pytest.raises(RuntimeError, match="background"):
        collector.next()


# The end


@pytest.mark.parametrize("close_env", [True, False])
def test_the_environment_is_closed_unless_that_is_not_wanted(close_env: bool) -> None:
    collector = frames()
    inner = there()
    with collector as same:
        assert same.is_initialized()
        collector.shutdown(close_env=close_env)
    assert inner.env.closed == close_env
    with pytest.raises(RuntimeError, match="shut down"):
        collector.set_seed(1)
