"""Rows into and out of the buffers of a real local Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlpost.collectors import Collector
from rlpost.data import LazyTensorStorage, RayReplayBuffer
from rlpost.errors import PolicyError
from rlpost.imports import is_installed
from tests.collectors.here import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.skipif(not is_installed("gymnasium"), reason="gymnasium is not installed")]
SECONDS = 120


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray  # pyright: ignore[reportMissingImports]

    module: Any = ray
    module.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
    yield module
    module.shutdown()


@pytest.fixture(scope="module")
def worker(cluster: Any) -> Any:
    """A collector in an actor."""
    from rlpost.envs import GymEnv

    make = partial(Collector.as_remote({"num_cpus": 0.5}).remote, frames_per_batch=4)
    return make(lambda: GymEnv("Pendulum-v1"), torch.nn.Linear(3, 1))


def end(cluster: Any, actor: Any) -> None:
    """Kill `actor` and wait until it has ended: `kill` returns before."""
    cluster.kill(actor)
    with pytest.raises(cluster.exceptions.RayActorError):
        wait_until(lambda: not cluster.get(actor.__ray_ready__.remote(), timeout=SECONDS))


def test_groups_are_written_and_taken_across_processes(
    cluster: Any, worker: Any, batch: Callable[..., TensorDict]
) -> None:
    last = batch(first=9)
    buffer = RayReplayBuffer(
        group_size=2,
        accept=lambda group: bool(group["group_id"][0] != 2),
        remote_config={"name": "groups"},
        wait_seconds=SECONDS,
    )
    for group in range(4):
        buffer.extend(batch(first=group, version=group))
    buffer.extend(last[:1])  # waits for its second
    assert (len(buffer), buffer.num_rows, buffer.write_count) == (3, 6, 9)
    state = buffer.state_dict()
    assert buffer.take(1, max_policy_lag=2, policy_version=3)["group_id"].tolist() == [1, 1]  # 0 is too old
    counts = buffer.take_counts()
    assert (counts["groups/drawn"], counts["groups/dropped"], counts["buffer/dropped_by_age"]) == (4.0, 1.0, 1.0)
    # a worker writes while this process waits
    writing = worker.__ray_call__.remote(lambda self, there, row: there.extend(row), buffer, last[1:])
    assert buffer.take(2)["group_id"].tolist() == [3, 3, 9, 9]
    cluster.get(writing, timeout=SECONDS)
    buffer.wait_seconds = 0.5
    with pytest.raises(PolicyError, match=r"0\.5 s for 1 .* 0"):
        buffer.take(1)
    buffer.wait_seconds = SECONDS
    buffer.load_state_dict(state)
    assert buffer.take(3)["group_id"].tolist() == [0, 0, 1, 1, 3, 3]
    end(cluster, cluster.get_actor("groups"))
    with pytest.raises(PolicyError, match="with what it held, was lost"):
        len(buffer)
    buffer.close()


def test_frames_of_a_worker_are_drawn_here(cluster: Any, worker: Any) -> None:
    buffer = RayReplayBuffer(storage=LazyTensorStorage(6), batch_size=2, seed=3, wait_seconds=SECONDS)
    write = lambda self, there: there.extend(self.rollout())  # noqa: E731
    for _ in range(2):
        cluster.get(worker.__ray_call__.remote(write, buffer), timeout=SECONDS)
    assert (len(buffer), buffer.write_count) == (6, 8)
    assert buffer.sample()["observation"].shape == (2, 3)
    buffer.shutdown()


def test_a_buffer_that_finds_no_place_says_what_there_is(cluster: Any) -> None:
    with pytest.raises(PolicyError, match=r"0\.5 s .* no place, and .* 2 CPUs"):
        RayReplayBuffer(remote_config={"num_cpus": 64}, wait_seconds=0.5)
