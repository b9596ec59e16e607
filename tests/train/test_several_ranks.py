"""Rank 0 and the others: what goes where, and what a rank that is lost, silent or not there ends."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from rlpost import distributed
from rlpost.catalog import TRAIN_GRPO, TRAIN_SFT
from rlpost.config.compose import compose
from rlpost.errors import ConfigError, PolicyError, RankError
from rlpost.model.packing import Row
from rlpost.remote import cluster
from rlpost.train import assemble_players, several_ranks
from rlpost.train.process_group import Place, device_of
from rlpost.train.several_ranks import Alarm, Follower, SeveralRanks, as_arrays, as_tensors

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MEETING = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}


def row(prompt: int, response: int, first: int = 0) -> Row:
    ids = torch.arange(first, first + prompt)
    nothing = torch.zeros(response)
    return Row(ids, torch.zeros(response, dtype=torch.int64), nothing == 0, nothing, 1.0)


def test_a_view_is_sent_without_the_tensor_under_it() -> None:
    large = torch.arange(100_000.0)
    sent = pickle.dumps(as_arrays([row(2, 3), (large[5:8], {"a": large[:1]}, "text", None)]))
    assert len(sent) < 3000
    back, (three, kept, text, nothing) = as_tensors(pickle.loads(sent))
    assert back.prompt.tolist() == [0, 1]
    assert back.sampled.dtype == torch.bool
    assert three.tolist() == [5, 6, 7]
    assert (kept["a"].item(), text, nothing) == (0, "text", None)


def test_a_rank_reads_the_names_of_its_weights_once_for_a_push(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = torch.nn.Linear(2, 2)
    read: list[Any] = []
    monkeypatch.setattr(several_ranks, "named_weights", lambda model: read.append(model) or model.state_dict())
    nothing: Any = None
    rank = Follower(model, nothing, nothing, nothing, nothing, nothing)
    for name in ("weight", "bias", "weight"):
        rank.gather(name)
    assert read == [model]


def test_a_process_knows_its_place_from_what_torchrun_says() -> None:
    assert Place.from_environment({}) is None
    assert Place.from_environment({"WORLD_SIZE": "1", "RANK": "0"}) is None
    place = Place.from_environment({**TORCHRUN, **MEETING})
    assert place == Place(1, 4, 1, 2, "10.0.0.7", 29500)
    assert str(place) == "rank 1 of 4"
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set: start them with torchrun, or unset WORLD_SIZE"):
        Place.from_environment(TORCHRUN)


def test_ranks_have_a_gpu_each_or_none() -> None:
    place = Place(0, 2, 0, 2, "127.0.0.1", 1)
    assert device_of("cpu", place) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"model\.device=cuda:1 is one device, and 2 ranks train: take auto"):
        device_of("cuda:1", place)
    if not torch.cuda.is_available():
        assert device_of("auto", place) == torch.device("cpu")
        with pytest.raises(ConfigError, match="2 ranks train on this machine, and it has 0 GPUs"):
            device_of("cuda", place)


class Other:
    """A rank that answers as a test says."""

    failure: PolicyError | None = None

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.future: Future[Any] = Future()
        self.on_death = lambda: None

    def submit(self, method: str, *arguments: Any) -> Future[Any]:
        self.asked.append((method, *arguments))
        return self.future

    def close(self, seconds: float) -> None:
        self.asked.append(("close",))


class Own:
    """What rank 0 does itself: nothing."""

    model = None

    def bad_gradients(self) -> list[str]:
        return ["a"]

    def peak_gb(self) -> float:
        return 1.5


def ranks(other: Any) -> SeveralRanks:
    made = SeveralRanks([other])
    made.own = Own()  # pyright: ignore[reportAttributeAccessIssue]
    return made


def go_on_beside(work: Callable[[], None]) -> None:
    """Do something for long, while a thread does `work`."""
    threading.Thread(target=work).start()
    time.sleep(120)


def test_a_rank_that_does_not_answer_raises_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "DEADLINE_SECONDS", 0.05)
    with pytest.raises(RankError, match=r"waited 0 s for its memory of rank 1, which hangs"), ranks(Other()) as made:
        made.memory()


def test_answers_of_all_ranks_are_merged_and_the_end_is_sent() -> None:
    other = Other()
    with ranks(other) as made:
        other.future.set_result(2.5)
        assert made.memory() == {"memory/rank_0_gb": 1.5, "memory/rank_1_gb": 2.5}
        other.future = Future()
        other.future.set_result(["b", "a"])
        assert made.bad_gradients() == ["a", "b"]
    assert other.asked[-2:] == [("conclude", 0, ""), ("close",)]
    with pytest.raises(ConfigError), ranks(other):
        raise ConfigError("no")
    assert other.asked[-2:] == [("conclude", 2, "no"), ("close",)]


def test_an_error_in_another_rank_interrupts_rank_0() -> None:
    other = Other()

    def fail() -> None:
        time.sleep(0.2)
        other.future.set_exception(ConfigError("it has no room"))

    began = time.monotonic()
    made = ranks(other)
    other.future.add_done_callback(made.look)
    with pytest.raises(ConfigError, match="it has no room"), made:
        go_on_beside(fail)
    assert time.monotonic() - began < 60


def test_a_lost_rank_interrupts_rank_0_and_is_named() -> None:
    other = Other()

    def die() -> None:
        time.sleep(0.2)
        other.failure = PolicyError("rank 1 of 2 was ended by SIGKILL")
        other.on_death()

    with pytest.raises(RankError, match="rank 1 of 2 was ended by SIGKILL; the training ends with it"), ranks(other):
        go_on_beside(die)


def test_an_alarm_that_is_closed_raises_nothing() -> None:
    alarm = Alarm()
    alarm.close()
    alarm.ring(RankError("late"))
    time.sleep(0.1)
    assert alarm.wait(0.0) is None


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["cluster.gather_dtype=bfloat16"], "of a model that is divided among ranks: add cluster.sharding=full"),
        (["cluster.cpu_offload=true"], "of a model that is divided among ranks: add cluster.sharding=full"),
        (["cluster.sharding=full", "optim=adamw_8bit"], "cannot divide its state among ranks: take optim=adamw"),
        (["cluster=ray", "collector=async", "collector.players=2"], r"cluster\.rollout_workers"),
    ],
)
def test_settings_that_several_ranks_cannot_have_are_refused(words: Sequence[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        compose(TRAIN_GRPO, ["model=tiny", *words])


def test_fine_tuning_takes_no_cluster_that_samples() -> None:
    with pytest.raises(ConfigError, match="cluster=ray is for rlpost train grpo"):
        compose(TRAIN_SFT, ["model=tiny", "cluster=ray"])


def test_a_local_ray_cluster_is_not_offered_the_gpus_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    settings: Any = compose(TRAIN_GRPO, ["model=tiny", "cluster=ray", "cluster.trainer_ranks=2"]).settings
    own = assemble_players.own_gpus(settings.cluster, torch.device("cuda", 0))
    with cluster.without_gpus(own):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6"
    with cluster.without_gpus([0, 1, 2]):  # there are no others
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6"
    assert assemble_players.own_gpus(settings.cluster, torch.device("cpu")) == []
