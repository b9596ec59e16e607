"""RayCollector without a cluster: what is refused before anything is started, and what each worker is given."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from counting import Counting

from rlpost import imports
from rlpost.collectors import Collector, RayCollector, RayLLMCollector
from rlpost.data import RayReplayBuffer, ReplayBuffer
from rlpost.errors import MissingExtraError
from rlpost.policies import make_vllm_worker
from rlpost.torchrl.ray_collector import orders_of, worker_env
from rlpost.torchrl.remote_collector import built_collector
from rlpost.weight_sync.ray import WeightSender
from tests.collectors.talk import scripted, talk


@pytest.mark.parametrize(
    ("collector", "options", "error", "part"),
    [
        (RayCollector, {"remote_configs": {"max_restarts": 2}}, TypeError, "max_restarts"),
        (RayCollector, {"remote_configs": {"lifetime": "detached"}}, TypeError, "lifetime"),
        (RayCollector, {"remote_configs": {"max_concurrency": 4}}, TypeError, "max_concurrency"),
        (RayCollector, {"no_such": 1}, TypeError, "no_such"),
        (RayCollector, {"num_collectors": 3, "sync": True}, ValueError, "3 collectors"),
        (RayLLMCollector, {"policy": None}, TypeError, "policy_factory"),
        (RayLLMCollector, {"async_envs": True}, TypeError, "async_envs"),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name(
    collector: Any, options: dict[str, Any], error: type[Exception], part: str
) -> None:
    frames = {"create_env_fn": Counting, "frames_per_batch": 8}
    turns = {"env": talk, "policy": scripted("a")}
    with pytest.raises(error, match=part):
        collector(**(frames if collector is RayCollector else turns) | options)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "is_installed", lambda package: package != "ray")
    for start in (
        lambda: RayCollector(Counting, frames_per_batch=8),
        lambda: make_vllm_worker("", make_ray_worker=True),
        RayReplayBuffer,
        lambda: WeightSender().send({"policy": torch.nn.Linear(1, 1)}, {0: ReplayBuffer()}),  # type: ignore[dict-item]
    ):
        with pytest.raises(MissingExtraError, match=r"rlpost\[ray\]"):
            start()


def test_each_worker_has_its_own_of_each_list() -> None:
    devices = {"device": "cpu", "storing_device": ["meta", None], "env_device": None, "policy_device": ["meta", "cpu"]}
    kwargs = [{"reset_when_done": False, "storing_device": "cpu"}, {"create_env_kwargs": {"size": 3}}]
    configs = [{"num_cpus": 2}, {}]
    build = partial(built_collector, frames_per_batch=4, collector_class=None)
    made = orders_of([Counting] * 2, None, kwargs, configs, 2, build=build, options=devices)
    plans, configs_made, members = zip(*made, strict=True)
    assert [member.storing_device for member in members] == [torch.device("cpu")] * 2  # its own first; then `device`
    assert [str(member.policy_device) for member in members] == ["meta", "cpu"]
    assert [plan.keywords["options"].get("reset_when_done") for plan in plans] == [False, None]
    assert list(configs_made) == [{"num_cpus": 2}, {}]
    plans[1].keywords["options"] |= {"policy_device": None, "device": None}
    collector = plans[1]()
    assert isinstance(collector, Collector)
    assert collector.env.batch_size == (3,)


def test_several_copies_of_an_environment_are_played_in_step() -> None:
    env = worker_env(Counting, 0, 2, size=None)
    assert env.batch_size == (2,)
    env.close()


def test_no_two_workers_number_their_draws_alike() -> None:
    groups = [[c.group_id for c in worker_env(talk, worker, 1, size=3).draw()] for worker in (0, 2)]
    assert groups == [[0, 1, 2], [2 * 10**12 + k for k in range(3)]]
