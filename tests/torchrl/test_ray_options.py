"""RayCollector without a cluster: what is refused before anything is started, and what each worker is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counting import Counting
from moody import half

from rlpost import imports
from rlpost.collectors import RayCollector, RayLLMCollector
from rlpost.data import RayReplayBuffer
from rlpost.errors import MissingExtraError
from rlpost.policies import make_vllm_worker
from rlpost.torchrl.remote_collector import worker_env
from tests.collectors.here import Here
from tests.collectors.talk import scripted, talk

STARTED: list[Here] = []  # in place of the cluster's workers


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(ray: Any, build_from: Any, folder: None, **how: Any) -> Here:
        STARTED.append(Here(build_from(folder), **how))
        return STARTED[-1]

    STARTED.clear()
    monkeypatch.setattr(
        "rlpost.remote.cluster.joined", lambda needed_for, init: SimpleNamespace(cluster_resources=dict)
    )
    monkeypatch.setattr("rlpost.remote.cluster.RayWorker", start)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # there is here


def test_arguments_that_cannot_be_are_refused_by_name(here: None) -> None:
    with pytest.raises(TypeError, match="max_restarts"):
        RayCollector(Counting, half, frames_per_batch=8, remote_configs={"max_restarts": 2})
    with pytest.raises(TypeError, match="no_such"):
        RayCollector(Counting, half, frames_per_batch=8, no_such=1)
    with pytest.raises(ValueError, match="3 collectors"):
        RayCollector(Counting, half, frames_per_batch=8, num_collectors=3, sync=True)
    with pytest.raises(TypeError, match="policy_factory"):
        RayLLMCollector(talk)
    with pytest.raises(TypeError, match="split_trajs"):
        RayLLMCollector(talk, policy=scripted("a"), split_trajs=True)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "is_installed", lambda package: package != "ray")
    for start in (
        lambda: RayCollector(Counting, frames_per_batch=8),
        lambda: make_vllm_worker("", make_ray_worker=True),
        RayReplayBuffer,
    ):
        with pytest.raises(MissingExtraError, match=r"rlpost\[ray\]"):
            start()


def test_each_worker_has_its_own_of_each_list(here: None) -> None:
    collector = RayCollector(
        [Counting] * 2,
        half,
        frames_per_batch=4,
        device="cpu",
        storing_device=["meta", None],
        policy_device=["meta", "cpu"],
        collector_kwargs=[
            {"create_env_kwargs": {"size": 2}, "policy_device": "cpu"},
            {"create_env_kwargs": {"size": 3, "lengths": (2, 3, 4)}},
        ],
        remote_configs=[{"num_cpus": 2}, {}],
    )
    first, second = (worker.object.collector for worker in STARTED)
    assert (first.env.batch_size, second.env.batch_size) == ((2,), (3,))
    assert [worker.how["options"]["num_cpus"] for worker in STARTED] == [2, 1]
    devices: set[str] = set()
    while devices != {"meta", "cpu"}:  # a batch is of the worker that was ready first
        devices.add(collector.next().device.type)  # type: ignore[union-attr]
    collector.shutdown()


def test_several_copies_of_an_environment_are_played_in_step() -> None:
    env = worker_env(Counting, 0, 2, size=None)
    assert env.batch_size == (2,)
    env.close()


def test_no_two_workers_number_their_draws_alike() -> None:
    groups = [[c.group_id for c in worker_env(talk, worker, 1, size=3).draw()] for worker in (0, 2)]
    assert groups == [[0, 1, 2], [2 * 10**12 + k for k in range(3)]]
