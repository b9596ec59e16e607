"""Rank 0 and the others: what goes where, and what a rank that is lost, silent or not there ends."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlpost import distributed
from rlpost.catalog import TRAIN_GRPO, TRAIN_SFT
from rlpost.config.compose import compose
from rlpost.errors import ConfigError, PolicyError, RankError
from rlpost.model.packing import Row
from rlpost.train import assemble_players
from rlpost.train.process_group import Place, device_of
from rlpost.train.several_ranks import Alarm, SeveralRanks, as_arrays, as_tensors
from tests.says import Says

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_view_is_sent_without_the_tensor_under_it() -> None:
    large, nothing = torch.arange(100_000.0), torch.zeros(3)
    row = Row(torch.arange(2), torch.zeros(3, dtype=torch.int64), nothing == 0, nothing, 1.0)
    sent = pickle.dumps(as_arrays([row, (large[5:8], {"a": large[:1]}, "text", None)]))
    assert len(sent) < 3000
    back, (three, kept, text, none) = as_tensors(pickle.loads(sent))
    assert back.prompt.tolist() == [0, 1]
    assert back.sampled.dtype == torch.bool
    assert three.tolist() == [5, 6, 7]
    assert (kept["a"].item(), text, none) == (0, "text", None)


def test_place_is_read_from_the_variables_of_torchrun() -> None:
    assert Place.from_environment({}) is None
    assert Place.from_environment({"WORLD_SIZE": "1", "RANK": "0"}) is None
    place = Place.from_environment(TORCHRUN | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"})
    assert place == Place(1, 4, 1, 2, "10.0.0.7", 29500)
    assert str(place) == "rank 1 of 4"
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        Place.from_environment(TORCHRUN)


def test_ranks_have_a_gpu_each_or_none() -> None:
    place = Place(0, 2, 0, 2, "127.0.0.1", 1)
    assert device_of("cpu", place) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"model\.device=cuda:1"):
        device_of("cuda:1", place)
    if not torch.cuda.is_available():
        assert device_of("auto", place) == torch.device("cpu")
        with pytest.raises(ConfigError, match="0 GPUs"):
            device_of("cuda", place)


def test_ranks_keep_their_gpus_from_a_local_ray_cluster() -> None:
    settings: Any = compose(TRAIN_GRPO, ["model=tiny", "cluster=ray", "cluster.trainer_ranks=2"]).settings
    assert assemble_players.own_gpus(settings.cluster, torch.device("cuda", 0)) == [0, 1]
    assert assemble_players.own_gpus(settings.cluster, torch.device("cpu")) == []


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


def ranks(other: Any) -> SeveralRanks:
    """Rank 0, which holds no model, and `other`."""
    made: Any = SeveralRanks([other])
    made.own = SimpleNamespace(model=None, bad_gradients=lambda: ["a"], peak_gb=lambda: 1.5)
    return made


def go_on_beside(work: Callable[[], None]) -> None:
    """Do something for long, while a thread does `work`."""
    threading.Thread(target=work).start()
    threading.Event().wait(60)


def test_rank_that_does_not_answer_raises_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "DEADLINE_SECONDS", 0.05)
    with pytest.raises(RankError, match="rank 1"), ranks(Other()) as made:
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


def test_error_in_another_rank_interrupts_rank_0() -> None:
    other = Other()
    began, made = time.monotonic(), ranks(other)
    other.future.add_done_callback(made.look)
    with pytest.raises(ConfigError, match="no room"), made:
        go_on_beside(lambda: other.future.set_exception(ConfigError("no room")))
    assert time.monotonic() - began < 30


def test_lost_rank_interrupts_rank_0_and_is_named() -> None:
    other = Other()

    def die() -> None:
        other.failure = PolicyError("SIGKILL ended rank 1")
        other.on_death()

    with pytest.raises(RankError, match="SIGKILL"), ranks(other):
        go_on_beside(die)


def test_closed_alarm_raises_nothing() -> None:
    alarm = Alarm()
    alarm.close()
    alarm.ring(RankError("late"))
    assert alarm.wait(0.1) is None


@pytest.mark.parametrize(
    ("command", "words", "key"),
    [
        (TRAIN_GRPO, ["cluster.gather_dtype=bfloat16"], "cluster.gather_dtype"),
        (TRAIN_GRPO, ["cluster.cpu_offload=true"], "cluster.cpu_offload"),
        (TRAIN_GRPO, ["cluster.sharding=full", "optim=adamw_8bit"], "optim=adamw_8bit"),
        (TRAIN_GRPO, ["cluster=ray", "collector=async", "collector.players=2"], "cluster.rollout_workers"),
        (TRAIN_SFT, ["cluster=ray"], "cluster=ray"),
    ],
    ids=["gathered", "offloaded", "no parts", "players", "nothing sampled"],
)
def test_impossible_ranks_are_refused(command: Any, words: Sequence[str], key: str, says: Says) -> None:
    with says.refused("cluster", ConfigError, key):
        compose(command, ["model=tiny", *words])
