"""Weights to the collectors, and rows out of the buffers, of a real local Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlpost.collectors import Collector
from rlpost.data import FrameBuffer, LazyTensorStorage, RayReplayBuffer
from rlpost.errors import PolicyError
from rlpost.files import memory_folder
from rlpost.imports import is_installed
from rlpost.remote.cluster import Actor
from rlpost.remote.exchange import EXCHANGE
from rlpost.weight_sync.base import WorkersFailed
from rlpost.weight_sync.ray import WeightSender
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
def workers(cluster: Any) -> dict[int, Actor]:
    return {number: worker(cluster, number) for number in (0, 1)}


def worker(cluster: Any, number: int) -> Actor:
    from rlpost.envs import GymEnv

    make = partial(Collector.as_remote({"num_cpus": 0.5}).remote, frames_per_batch=4, track_policy_version=True)
    handle = make(lambda: GymEnv("Pendulum-v1"), torch.nn.Linear(3, 1))
    return Actor(cluster, handle, f"worker {number}")


def end(cluster: Any, actor: Any) -> None:
    """Kill `actor` and wait until it has ended: `kill` returns before."""
    cluster.kill(actor)
    with pytest.raises(cluster.exceptions.RayActorError):
        wait_until(lambda: not cluster.get(actor.__ray_ready__.remote(), timeout=SECONDS))


def left_in_memory() -> set[str]:
    return {path.name for path in memory_folder().glob(f"{EXCHANGE}*")}


def check_left_in_memory(before: set[str]) -> None:
    """Nothing is left beside `before`; what another test's process has there meanwhile goes away."""
    left = left_in_memory() - before
    wait_until(lambda: not left & left_in_memory())


def plays_with(actor: Actor, policy: torch.nn.Module) -> Any:
    """The version of the worker's next frames, once it is known that `policy` has acted in them."""
    batch = actor.submit("rollout").result(SECONDS)
    assert torch.allclose(policy(batch["observation"]), batch["action"], atol=1e-5)
    [version] = batch["policy_version"].unique().tolist()
    return version


@pytest.mark.first
def test_a_push_reaches_all_workers_before_the_version_rises(cluster: Any, workers: dict[int, Actor]) -> None:
    before, sender = left_in_memory(), WeightSender()
    policy = torch.nn.Linear(3, 1)
    assert sender.newest == 0
    assert sender.send({"policy": policy}, workers) == sender.newest == 1
    assert [plays_with(actor, policy) for actor in workers.values()] == [1, 1]
    check_left_in_memory(before)
    weights = TensorDict.from_module(torch.nn.Linear(3, 1)).data
    assert sender.send({"policy": weights}, {1: workers[1]}) == 2  # one of them alone
    assert [a.submit("get_policy_version").result(SECONDS) for a in workers.values()] == [1, 2]


def test_workers_of_another_host_share_one_copy_that_goes_away(
    cluster: Any, workers: dict[int, Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, policy, sender = left_in_memory(), torch.nn.Linear(3, 1), WeightSender(version=10)
    monkeypatch.setattr("rlpost.weight_sync.ray.host_id", lambda: "another machine than that of the workers")
    put: list[Any] = []
    monkeypatch.setattr(cluster, "put", lambda value, put_there=cluster.put: put.append(value) or put_there(value))
    assert sender.send({"policy": policy}, workers) == 11
    assert [plays_with(actor, policy) for actor in workers.values()] == [11, 11]
    assert [len(files) for files in put] == [2]  # one object for all: its weight and its bias
    check_left_in_memory(before)


def test_workers_that_fail_are_named_and_others_have_the_weights(cluster: Any, workers: dict[int, Actor]) -> None:
    workers = {0: workers[0], 1: worker(cluster, 1)}
    sender, policy = WeightSender(version=20), torch.nn.Linear(3, 1)
    with pytest.raises(WorkersFailed, match="2 of 2 workers"):
        sender.send({"policy": torch.nn.Linear(2, 1)}, workers)
    assert sender.newest == 20
    end(cluster, workers[1].handle)
    with pytest.raises(WorkersFailed) as caught:
        sender.send({"policy": policy}, workers)
    assert list(caught.value.reasons) == [1]
    assert sender.newest == plays_with(workers[0], policy) == 21
    workers.pop(1)
    assert sender.send({"policy": policy}, workers) == 22


def test_groups_are_written_and_taken_across_processes(
    cluster: Any, workers: dict[int, Actor], batch: Callable[..., TensorDict]
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
    buffer.add(last[0])  # waits for its second
    assert (len(buffer), buffer.num_rows, buffer.write_count) == (3, 6, 9)
    state = buffer.state_dict()
    assert buffer.take(1, max_policy_lag=2, policy_version=3)["group_id"].tolist() == [1, 1]  # 0 is too old
    counts = buffer.take_counts()
    assert (counts["groups/drawn"], counts["groups/dropped"], counts["buffer/dropped_by_age"]) == (4.0, 1.0, 1.0)
    # a worker writes while this process waits
    worker = workers[0].handle.__ray_call__.remote(lambda self, there, row: there.add(row), buffer, last[1])
    assert buffer.take(2)["group_id"].tolist() == [3, 3, 9, 9]
    cluster.get(worker, timeout=SECONDS)
    with pytest.raises(PolicyError, match=r"0\.1 s for 1 .* 0"):
        buffer.take(1, wait_seconds=0.1)
    buffer.load_state_dict(state)
    assert buffer.take(3)["group_id"].tolist() == [0, 0, 1, 1, 3, 3]
    end(cluster, cluster.get_actor("groups"))
    with pytest.raises(PolicyError, match="gone"):
        len(buffer)
    buffer.close()


def test_frames_of_a_worker_are_drawn_here(cluster: Any, workers: dict[int, Actor]) -> None:
    buffer = RayReplayBuffer(storage=LazyTensorStorage(6), batch_size=2, seed=3, wait_seconds=SECONDS)
    write = lambda self, there: there.extend(self.rollout())  # noqa: E731
    for _ in range(2):
        cluster.get(workers[0].handle.__ray_call__.remote(write, buffer), timeout=SECONDS)
    assert (len(buffer), buffer.num_rows, buffer.write_count) == (6, 6, 8)
    here = FrameBuffer(storage=LazyTensorStorage(6), batch_size=2, seed=3)
    here.load_state_dict(buffer.state_dict())
    assert torch.equal(buffer.sample()["observation"], here.sample()["observation"])
    buffer.shutdown()


def test_a_buffer_that_finds_no_place_says_what_there_is(cluster: Any) -> None:
    with pytest.raises(PolicyError, match=r"0\.5 s: .*'num_cpus': 64.* 2 CPUs"):
        RayReplayBuffer(remote_config={"num_cpus": 64}, wait_seconds=0.5)
