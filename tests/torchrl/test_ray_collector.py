"""RayCollector and RayLLMCollector on a local Ray cluster."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from moody import Moody, Scaled, half, next_of, seen

from rlpost.collectors import Collector, RayCollector, RayLLMCollector
from rlpost.data import ReplayBuffer
from rlpost.errors import PolicyError
from tests.collectors.here import wait_until
from tests.collectors.talk import scripted, talk, told

pytestmark = pytest.mark.ray
SMALL = {"num_cpus": 0.25, "memory": 2**20}
HERE = Path(__file__).parent
WEIGHTS = {"scale": torch.tensor(3.0)}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    """A cluster whose workers import what the tests define."""
    import ray  # pyright: ignore[reportMissingImports]

    module: Any = ray
    with pytest.MonkeyPatch.context() as patch:
        path = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1]), path]))
        module.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
        )
        yield module
        module.shutdown()


def begun(**options: Any) -> tuple[RayCollector, list[dict[str, Any]]]:
    collector = RayCollector(
        lambda lengths: Moody(lengths=lengths),
        Scaled(),
        collector_kwargs={"create_env_kwargs": {"lengths": (3, 9)}, "track_policy_version": True},
        max_frames_per_traj=4,
        exploration_type="mode",
        remote_configs=SMALL,
        wait_seconds=60,
        **options,
    )
    return collector, collector.state_dict()


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[RayCollector, list[dict[str, Any]]]]:
    collector, state = begun(
        num_collectors=2,
        frames_per_batch=16,
        total_frames=40,
        sync=True,
        storing_device="cpu",
        postproc=lambda batch: batch.set("seen_in", torch.full(batch.batch_size, os.getpid())),
    )
    yield collector, state
    collector.shutdown()


@pytest.fixture
def both(started: tuple[RayCollector, list[dict[str, Any]]]) -> RayCollector:
    """Two collectors of frames, waited for, that have collected nothing."""
    collector, state = started
    collector.set_seed(0, static_seed=True)
    collector.load_state_dict(state)
    return collector


def plain(seed: int = 0) -> Collector:
    """What one of them does, in this process."""
    collector = Collector(Moody(lengths=(3, 9)), half, frames_per_batch=8, max_frames_per_traj=4)
    collector.set_seed(seed, static_seed=True)
    return collector


# All are waited for


def test_a_batch_is_what_all_collectors_give_until_the_total(both: RayCollector) -> None:
    here = plain()
    batches: list[Any] = list(both)
    assert len(batches) == 3  # 48 frames are 40 or more
    for batch in batches:
        same = seen(here.next())
        assert seen(batch) == same + same
        assert batch["seen_in"].unique().tolist() == [os.getpid()]  # by the postproc, here
        numbers = batch["collector", "traj_ids"]
        assert (numbers[2:] - numbers[:2] == 10**12).all()
        assert batch["threads"].reshape(-1, 2).unique(dim=0).tolist() == [[1, 1]]  # as many as CPUs
    assert (both.next(), both.wants_more) == (None, False)


def test_each_collector_gets_the_seed_that_the_last_returned(both: RayCollector) -> None:
    assert both.set_seed(3) == 5
    assert [row[0] for row in seen(both.next())] == [30, 30, 40, 40]  # Moody begins at 10 times its seed
    assert both.set_seed(7, static_seed=True) == 7
    assert [row[0] for row in seen(both.next())] == [7, 7, 7, 7]


def test_a_state_is_gone_on_from_with_one_for_all_or_one_each(both: RayCollector) -> None:
    both.set_seed(2)
    both.next()
    states = both.state_dict()
    assert [state["frames"] for state in states] == [state["delivered"] for state in states] == [8, 8]
    both.load_state_dict(states[1])
    assert [row[0] for row in seen(both.next())] == [30] * 4
    assert len(list(both)) == 1  # of three


@pytest.mark.first
def test_weights_and_their_version_reach_all_or_those_named(both: RayCollector) -> None:
    tracker: Any = both.policy_version_tracker
    both.update_policy_weights_(WEIGHTS)
    pushed: Any = both.policy_version
    batch = next_of(both)
    assert (batch["action"] == 3 * batch["observation"]).all()
    assert set(batch["policy_version"].unique().tolist()) == {both.policy_version} == {tracker.version}
    both.update_policy_weights_(weights_dict={"policy": {"scale": torch.tensor(5.0)}}, worker_ids=[1])
    first, second = next_of(both).split(2)
    assert (first["action"] == 3 * first["observation"]).all()
    assert (second["action"] == 5 * second["observation"]).all()
    assert first["policy_version"].unique().tolist() == [pushed]
    assert second["policy_version"].unique().tolist() == [pushed + 1] == [both.get_policy_version()]
    both.update_policy_weights_()  # those of the policy that was given
    assert both.state_dict()[0]["policy_state_dict"]["scale"] == 0.5


def test_what_a_worker_raises_is_raised_here_and_then_it_goes_on(both: RayCollector) -> None:
    both.set_seed(66)  # the first is at 660
    with pytest.raises(OSError, match="went away") as raised:
        both.next()
    assert "worker 0" in raised.value.__notes__[-1]
    both.set_seed(1)
    assert both.next() is not None


# The first that is ready


def test_givers_are_updated_and_workers_join_and_are_lost(cluster: Any) -> None:
    collector: Any = begun(frames_per_batch=8, update_after_each_batch=True)[0]
    model = collector.policy.model
    with torch.no_grad():
        model.scale.fill_(2.0)
    collector.set_seed(1)
    actions = [next_of(collector)["action"] for _ in range(3)]
    assert collector.policy_version == 2  # after the first batch and the second
    batch = next_of(collector)
    assert (batch["action"] == 2 * batch["observation"]).all()
    assert (actions[0] < batch["action"]).all()
    collector.add_collectors(lambda: Moody(lengths=(2, 2)), collector_kwargs={}, remote_configs=SMALL)
    assert collector.policy_version == 4  # what was sent before is sent to all
    second = collector.remote_collectors[1]
    numbers = set()
    while len(numbers) < 2:
        numbers.add(int(next_of(collector)["collector", "traj_ids"].max()) // 10**12)
    assert numbers == {0, 1}
    os.kill(second.call("call", "env.pid", seconds=60), signal.SIGKILL)
    with pytest.raises(PolicyError, match=r"worker 1.*SIGKILL"):
        wait_until(lambda: collector.next() is None)
    with pytest.raises(PolicyError, match="worker 1 "):
        collector.next()
    assert not collector.is_initialized()
    asyncio.run(collector.async_shutdown())
    with pytest.raises(RuntimeError, match="shut down"):
        collector.next()


# Conversations


def test_conversations_fill_a_buffer_and_follow_the_weights(cluster: Any) -> None:
    buffer = ReplayBuffer(group_size=2)
    collector = RayLLMCollector(
        lambda: talk(size=2, repeats=2),
        policy=scripted("a", "b"),
        dialog_turns_per_batch=8,
        total_dialog_turns=40,
        yield_completed_trajectories=True,
        yield_only_last_steps=True,
        track_policy_version=True,
        replay_buffer=buffer,
        num_collectors=2,
        num_cpus=0.5,
        remote_config={"memory": 2**20},
        wait_seconds=60,
    )
    assert collector.dialog_turns_per_batch == 8
    assert collector.rollout().batch_size == (8,)
    assert collector.next() is None
    assert sorted(number // 10**12 for number in buffer.group_numbers) == [0, 0, 1, 1]
    tracker: Any = collector.policy_version_tracker
    assert tracker.version == 0
    collector.update_policy_weights_(state_dict={"w": torch.zeros(1)})
    assert tracker.version == 1
    [_, second] = collector.get_policy_model()
    assert second.call("call", "get_policy_version", seconds=60) == 1
    state = collector.state_dict()
    collector.start()
    collector.fill(6)
    batch = buffer.take(6)
    assert {1} == set(batch["policy_version"][batch["group_id"] % 10**12 >= 4].tolist())
    with collector.pause():
        rows = buffer.write_count
        assert all(told(batch))
    assert rows >= 12
    collector.shutdown()
    assert state[0]["delivered"] == 4
