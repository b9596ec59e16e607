"""Weights over a process group: two ranks over gloo, and what goes wrong between them."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch

from rlpost.errors import PolicyError
from rlpost.policies import stateless_init_process_group
from rlpost.policies.vllm_worker import vLLMWorker
from rlpost.remote.process import free_port

pytestmark = pytest.mark.thorough

HOST = "127.0.0.1"


class Model:
    """As vLLM's models say which of their weights are made of several."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


class Worker(vLLMWorker):
    """What vLLM's own worker gives the extension, with a dictionary for a model."""

    rank = 0
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.get_model = Model
        self.reload_weights = self._reload
        self.compute_weight_checksums = lambda: {name: str(w.tolist()) for name, w in self.weights.items()}

    def _reload(self, *, weights_iterator: Iterable[tuple[str, torch.Tensor]], is_checkpoint_format: bool) -> None:
        assert is_checkpoint_format
        self.weights.update(weights_iterator)


def test_a_worker_gets_the_trainers_weights() -> None:
    sent = {
        "layer.q_proj.weight": torch.tensor([[1.5, 2.0], [3.0, -4.0]]),
        "layer.k_proj.weight": torch.tensor([7.0]),
        "layer.v_proj.weight": torch.tensor([0.5, 0.25], dtype=torch.bfloat16),
        "norm.weight": torch.tensor([1 / 3], dtype=torch.float64),
    }
    described = [(name, str(w.dtype).removeprefix("torch."), list(w.shape)) for name, w in sent.items()]
    port, worker = free_port(HOST), Worker()
    with ThreadPoolExecutor(1) as other_rank:
        joined = other_rank.submit(worker.init_weight_update_group, HOST, port, 1, 2, 30.0)
        group = stateless_init_process_group(HOST, port, 0, 2, "cpu", timeout_seconds=60)
        joined.result(60)
        seen = [worker.check_weights_changed()]
        together = other_rank.submit(worker.update_weights_broadcast, described[:3])
        alone = other_rank.submit(worker.update_weight_broadcast, *described[3])
        for weight in sent.values():
            group.broadcast(weight, src=0)
            if weight is sent["layer.v_proj.weight"]:
                together.result(60)
                seen += [worker.check_weights_changed(), worker.check_weights_changed()]
        alone.result(60)
    assert [*seen, worker.check_weights_changed()] == [False, True, False, True]
    assert {name: (w.dtype, w.tolist()) for name, w in worker.weights.items()} == {
        name: (w.dtype, w.tolist()) for name, w in sent.items()
    }


def test_a_group_whose_others_do_not_come_is_given_up() -> None:
    port = free_port(HOST)
    with pytest.raises(PolicyError, match=rf"rank 0 .*{HOST}:{port} "):
        stateless_init_process_group(HOST, port, 0, 2, "cpu", timeout_seconds=1)
    with pytest.raises(PolicyError, match="rank 1 "):
        stateless_init_process_group(HOST, port, 1, 2, "cpu", timeout_seconds=1)


def test_a_weight_that_does_not_come_is_given_up_at_the_deadline() -> None:
    port = free_port(HOST)
    with ThreadPoolExecutor() as pool:
        ranks: list[Any] = list(
            pool.map(lambda r: stateless_init_process_group(HOST, port, r, 2, "cpu", timeout_seconds=5), range(2))
        )
    assert [group.rank for group in ranks] == [0, 1]
    with pytest.raises(PolicyError, match=r"rank 1 .*rank 0 "):
        ranks[1].broadcast(torch.zeros(1), src=0)


def test_nccl_is_given_a_gpu_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM compares its device with each tensor's, which has a number."""
    pynccl = pytest.importorskip("vllm.distributed.device_communicators.pynccl")
    utils = pytest.importorskip("vllm.distributed.utils")
    asked: list[torch.device] = []

    def communicator(ranks: Any, device: torch.device) -> None:
        asked.append(device)
        assert device != torch.device("cuda:1"), "only cuda:1"

    monkeypatch.setattr(pynccl, "PyNcclCommunicator", communicator)
    monkeypatch.setattr(utils.StatelessProcessGroup, "create", lambda *args, **named: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for device in ("cuda", 2, "cuda:0"):
        assert stateless_init_process_group(HOST, 1, 0, 2, device).rank == 0
    assert asked == [torch.device("cuda", number) for number in (3, 2, 0)]
    with pytest.raises(PolicyError, match="only cuda:1"):
        stateless_init_process_group(HOST, 1, 0, 2, "cuda:1")


def test_a_part_of_a_fused_weight_is_refused() -> None:
    worker = Worker()
    worker.init_weight_update_group(HOST, free_port(HOST), 0, 1)
    with pytest.raises(PolicyError, match=r"layer\.q_proj\.weight .*layer\.k_proj\.weight"):
        worker.update_weight_broadcast("layer.q_proj.weight", "float32", [1])
