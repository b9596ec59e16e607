"""Weight sync schemes of several workers: what needs no cluster."""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlpost.collectors import GroupWeightSyncScheme
from rlpost.errors import PolicyError
from rlpost.files import memory_folder
from rlpost.model.weights import SavedWeights
from rlpost.remote import exchange
from rlpost.weight_sync.base import Worker
from rlpost.weight_sync.ray import WeightSender

HOST = "127.0.0.1"


class Taker:
    """A collector, as a receiver sees it."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, dict[str, list[float]], Any, bool]] = []

    def take_up_model(self, model_id: str, weights: Any, version: Any, *, adapter: bool = False) -> None:
        given = SavedWeights(weights) if isinstance(weights, Path) else weights
        self.taken.append((model_id, {name: given[name].flatten().tolist() for name in given}, version, adapter))


def line(*values: float) -> torch.nn.Linear:
    made = torch.nn.Linear(len(values), 1, bias=False)
    made.weight.data[:] = torch.tensor([values])
    return made


def test_without_a_worker_no_version_rises() -> None:
    sender = WeightSender(version=5)
    assert sender.send({"policy": line(1.0)}, {}) == sender.newest == 5


# Copies on another host


def test_a_copy_is_written_once_and_whole_before_any_sees_it() -> None:
    key, written, all_there = str(uuid.uuid4()), [], threading.Barrier(4)

    def files() -> dict[str, bytes]:
        written.append(1)
        time.sleep(0.05)
        return {"a": b"12", "b": b"345"}

    def load(_: int) -> dict[str, bytes]:
        with exchange.fetched(key, files) as folder:
            all_there.wait(30)
            return {file.name: file.read_bytes() for file in folder.iterdir()}

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(load, range(4))) == [{"a": b"12", "b": b"345"}] * 4
    assert written == [1]
    assert not [left for left in memory_folder().iterdir() if key in left.name]  # the last has removed it
    with exchange.fetched(key, lambda: {"a": b"2"}) as folder:  # and it is written anew
        assert (folder / "a").read_bytes() == b"2"


# A process group


def pushed(
    scheme: GroupWeightSyncScheme, source: Any, receivers: dict[int, Any], version: int
) -> tuple[list[Taker], int]:
    """A push to workers that are threads here: what each took up, and the number of the group."""
    takers = [Taker() for _ in receivers]
    workers = {n: Worker(id(receiver), receiver.place()) for n, receiver in receivers.items()}
    with scheme.offered(source, workers) as offers, ThreadPoolExecutor(len(receivers)) as pool:
        for number, receiver in receivers.items():
            receiver.offer(offers[number], version)
        receiving = [
            pool.submit(receiver.receive, taker, "policy")
            for receiver, taker in zip(receivers.values(), takers, strict=True)
        ]
        scheme.transmit(source)
        for each in receiving:
            each.result(30)
    [number] = {offer.number for offer in offers.values()}
    return takers, number


def test_a_group_brings_all_weights_to_all_workers() -> None:
    scheme = GroupWeightSyncScheme(HOST, timeout_seconds=20)
    receivers = {3: scheme.receiver(), 5: scheme.receiver()}
    source = TensorDict({"a": torch.tensor([1.0, 2.0]), "b": {"c": torch.tensor([3.0], dtype=torch.bfloat16)}})
    expected = [("policy", {"a": [1.0, 2.0], "b.c": [3.0]}, 1, False)]
    takers, first = pushed(scheme, source, receivers, 1)
    assert [taker.taken for taker in takers] == [expected] * 2
    assert pushed(scheme, source, receivers, 2)[1] == first
    [joined], second = pushed(scheme, line(7.0), {3: scheme.receiver()}, 3)  # another one instead of both
    assert joined.taken == [("policy", {"weight": [7.0]}, 3, False)]
    assert second == first + 1


def test_a_worker_that_does_not_come_is_waited_for_so_long() -> None:
    scheme = GroupWeightSyncScheme(HOST, timeout_seconds=0.2)
    for number in (1, 2):  # a group that has failed is not used again
        with scheme.offered(line(1.0), {0: Worker(0, "cpu")}) as offers:
            assert offers[0].number == number
            with pytest.raises(PolicyError, match="rank 0 of 2"):
                scheme.transmit(line(1.0))
