"""Weights over a process group: two processes over gloo, and what goes wrong between them."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from worker_double import Worker

from rlpost.errors import PolicyError
from rlpost.policies import stateless_init_process_group
from rlpost.remote.process import free_port

HOST = "127.0.0.1"


OTHER_SIDE = """
import json, sys
sys.path.insert(0, sys.argv[2])
from worker_double import Worker
worker = Worker()
worker.init_weight_update_group("127.0.0.1", int(sys.argv[1]), 1, 2, 30.0)
seen = [worker.check_weights_changed()]
worker.update_weights_broadcast([("layer.q_proj.weight", "float32", [2, 2]), ("layer.k_proj.weight", "float32", [1]),
                                 ("layer.v_proj.weight", "bfloat16", [2])])
seen.append(worker.check_weights_changed())
seen.append(worker.check_weights_changed())
worker.update_weight_broadcast("norm.weight", "float64", [1])
seen.append(worker.check_weights_changed())
kept = {name: [str(w.dtype), w.tolist()] for name, w in worker.weights.items()}
print(json.dumps([seen, kept]))
"""


def test_another_process_gets_the_trainers_weights() -> None:
    port = free_port(HOST)
    here = __file__.rpartition("/")[0]
    other = subprocess.Popen([sys.executable, "-c", OTHER_SIDE, str(port), here], stdout=subprocess.PIPE, text=True)
    group = stateless_init_process_group(HOST, port, 0, 2, "cpu", timeout_seconds=60)
    sent = [
        torch.tensor([[1.5, 2.0], [3.0, -4.0]]),
        torch.tensor([7.0]),
        torch.tensor([0.5, 0.25], dtype=torch.bfloat16),
        torch.tensor([1 / 3], dtype=torch.float64),
    ]
    for weight in sent:
        group.broadcast(weight, src=0)
    output, _ = other.communicate(timeout=60)
    seen, kept = json.loads(output)
    assert seen == [False, True, False, True]
    assert kept == {
        "layer.q_proj.weight": ["torch.float32", [[1.5, 2.0], [3.0, -4.0]]],
        "layer.k_proj.weight": ["torch.float32", [7.0]],
        "layer.v_proj.weight": ["torch.bfloat16", [0.5, 0.25]],
        "norm.weight": ["torch.float64", [1 / 3]],
    }


def test_a_group_whose_others_do_not_come_is_given_up_at_the_deadline() -> None:
    port = free_port(HOST)
    with pytest.raises(PolicyError, match=rf"rank 0 of 2 found no group at {HOST}:{port} within 1 s"):
        stateless_init_process_group(HOST, port, 0, 2, "cpu", timeout_seconds=1)
    with pytest.raises(PolicyError, match="rank 1 of 2 found no group"):
        stateless_init_process_group(HOST, port, 1, 2, "cpu", timeout_seconds=1)


def test_a_weight_that_does_not_come_is_given_up_at_the_deadline() -> None:
    port = free_port(HOST)
    with ThreadPoolExecutor() as pool:
        ranks: list[Any] = list(
            pool.map(lambda r: stateless_init_process_group(HOST, port, r, 2, "cpu", timeout_seconds=5), range(2))
        )
    assert [group.rank for group in ranks] == [0, 1]
    with pytest.raises(PolicyError, match="rank 1 of 2 lost the weights that rank 0 was to send"):
        ranks[1].broadcast(torch.zeros(1), src=0)


def test_nccl_is_given_a_gpu_by_its_number_and_what_it_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM compares its device with each tensor's, which has a number."""
    pynccl = pytest.importorskip("vllm.distributed.device_communicators.pynccl")
    utils = pytest.importorskip("vllm.distributed.utils")
    asked: list[torch.device] = []

    def communicator(ranks: Any, device: torch.device) -> None:
        asked.append(device)
        assert device != torch.device("cuda:1"), "this nccl communicator is created to work on cuda:1"

    monkeypatch.setattr(pynccl, "PyNcclCommunicator", communicator)
    monkeypatch.setattr(utils.StatelessProcessGroup, "create", lambda *args, **named: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for device in ("cuda", 2, "cuda:0"):
        assert stateless_init_process_group(HOST, 1, 0, 2, device).rank == 0
    assert asked == [torch.device("cuda", number) for number in (3, 2, 0)]
    with pytest.raises(PolicyError, match="this nccl communicator is created to work on cuda:1"):
        stateless_init_process_group(HOST, 1, 0, 2, "cuda:1")


def test_a_worker_outside_of_any_group_and_a_part_of_a_fused_weight_are_refused() -> None:
    worker = Worker()
    worker.init_weight_update_group(HOST, free_port(HOST), 0, 1)
    with pytest.raises(PolicyError, match=r"keeps layer\.q_proj\.weight and layer\.k_proj\.weight as one weight"):
        worker.update_weight_broadcast("layer.q_proj.weight", "float32", [1])
