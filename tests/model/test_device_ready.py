"""A GPU is made ready before anything is computed on it; none is needed to see how."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from rlpost.model.device import compute_deterministically, leave_room, make_ready

GPU = torch.device("cuda")
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)
    torch.use_deterministic_algorithms(False)


def test_attention_on_a_gpu_builds_no_plan_for_each_shape() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    make_ready(torch.device("cpu"))
    assert torch.backends.cuda.cudnn_sdp_enabled()
    make_ready(GPU)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_the_allocator_grows_its_segments_unless_the_user_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    make_ready(torch.device("cpu"))
    assert NAMES[0] not in os.environ
    make_ready(GPU)
    assert os.environ[NAMES[0]] == "expandable_segments:True"
    monkeypatch.delenv(NAMES[0])
    monkeypatch.setenv(NAMES[1], "max_split_size_mb:64")
    make_ready(GPU)
    assert NAMES[0] not in os.environ


def test_deterministic_kernels_get_the_workspace_that_cublas_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_deterministically(False)
    assert NAMES[2] not in os.environ
    compute_deterministically(True)
    assert os.environ[NAMES[2]] == ":4096:8"
    assert torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv(NAMES[2], ":16:8")
    compute_deterministically(True)
    assert os.environ[NAMES[2]] == ":16:8"


def test_the_trainer_leaves_an_engine_beside_it_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, device: fractions.append(part))
    leave_room(0.0, GPU)
    leave_room(0.4, torch.device("cpu"))
    leave_room(0.4, GPU)
    assert fractions == [pytest.approx(0.57)]
