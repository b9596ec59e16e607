"""A GPU is made ready before anything is computed on it; none is needed to see how."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rlpost.model.device import leave_room

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


def test_the_trainer_leaves_an_engine_beside_it_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, device: fractions.append(part))
    leave_room(0.0, GPU)
    leave_room(0.4, torch.device("cpu"))
    leave_room(0.4, GPU)
    assert fractions == [pytest.approx(0.57)]
