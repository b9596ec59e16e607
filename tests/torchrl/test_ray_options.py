"""RayCollector without a cluster: what is refused before anything is started, and whose batch is taken when."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from counting import Counting

from rlpost import imports
from rlpost.collectors import Collector, RayCollector, RayLLMCollector
from rlpost.errors import MissingExtraError
from rlpost.torchrl.ray_collector import orders_of, share, worker_env
from rlpost.torchrl.remote_collector import Batches, Member, WorkerPool, built_collector
from tests.collectors.here import wait_until
from tests.collectors.talk import scripted, talk


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remote_configs": {"max_restarts": 2}}, "has lost its state"),
        ({"remote_configs": {"lifetime": "detached"}}, "nobody would end"),
        ({"remote_configs": {"max_concurrency": 4}}, "one thing at a time"),
        ({"no_such": 1}, "unexpected keyword argument 'no_such'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_what_has_no_effect_or_contradicts_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    options = {"create_env_fn": Counting, "frames_per_batch": 8, **options}
    with pytest.raises(TypeError, match=message):
        RayCollector(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_collectors": 3, "sync": True}, "cannot be split over 3 collectors"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_numbers_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    options = {"create_env_fn": Counting, "frames_per_batch": 8, **options}
    with pytest.raises(ValueError, match=message):
        RayCollector(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": None}, "exactly one of policy and policy_factory"),
        ({"async_envs": True}, "raise its num_envs"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_what_a_collector_of_conversations_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        RayLLMCollector(talk, **{"policy": scripted("a"), **options})


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "is_installed", lambda package: package != "ray")
    with pytest.raises(MissingExtraError, match=r"rlpost\[ray\]"):
        RayCollector(Counting, frames_per_batch=8)


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


def test_frames_are_split_over_collectors_that_are_waited_for() -> None:
    assert share(12, 3, sync=True) == 4
    assert share(12, 5, sync=False) == 12


class FakeWorker:
    """Begins a batch of 4 frames whenever it is asked; it is ready when the test says so."""

    failure = None

    def __init__(self, number: int) -> None:
        self.name = f"worker {number}"
        self.asked = 0  # batches
        self.under_way: Future[int] | None = None

    def submit(self, method: str) -> Future[Any]:
        future: Future[Any] = Future()
        if method == "next":
            self.asked += 1
            self.under_way = future
        else:
            future.set_result(None)
        return future

    def gives(self) -> None:
        """The batch in flight is ready."""
        future, self.under_way = self.under_way, None
        assert future is not None
        future.set_result(4)


def table_of(count: int, **options: Any) -> tuple[Batches, list[FakeWorker]]:
    fakes = [FakeWorker(number) for number in range(count)]
    workers = WorkerPool(wait_seconds=60)
    workers.members = {n: Member(fake, frames_per_batch=4) for n, fake in enumerate(fakes)}
    return Batches(workers, **{"total_frames": -1, "ahead": 1, **options}), fakes


def take(table: Batches, fakes: list[FakeWorker], *ready: int) -> list[int]:
    """Take a batch while the workers `ready` finish theirs; returns the numbers of the workers that delivered."""
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(table.take)
        for number in ready:
            wait_until(lambda n=number: fakes[n].under_way is not None)
            fakes[number].gives()
        return [number for number, _ in taking.result(60)]


def asked(fakes: list[FakeWorker]) -> list[int]:
    return [fake.asked for fake in fakes]


def test_the_first_that_is_ready_is_served_and_goes_on() -> None:
    table, fakes = table_of(3)
    assert take(table, fakes, 2) == [2]
    assert asked(fakes) == [1, 1, 2]
    fakes.append(FakeWorker(3))
    table.workers.members[3] = Member(fakes[3], frames_per_batch=4)  # added while iterating
    assert take(table, fakes, 3, 0) in ([3], [0])
    assert fakes[3].asked == 2


def test_all_are_waited_for_and_put_in_order() -> None:
    table, fakes = table_of(2, joins=True, ahead=0)
    assert take(table, fakes, 1, 0) == [0, 1]
    assert asked(fakes) == [1, 1]  # nothing is in flight while the batch is used
    assert take(table, fakes, 0, 1) == [0, 1]


def test_no_more_is_asked_for_than_the_total_needs() -> None:
    table, fakes = table_of(3, total_frames=10)
    assert [take(table, fakes, number) for number in (0, 1, 2)] == [[0], [1], [2]]
    assert not table.wants_more  # 12 frames: 10 or more
    assert asked(fakes) == [1, 1, 1]
