"""Where vLLM engines are put, as far as a machine without vLLM, GPUs or Ray can tell."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost.errors import ConfigError
from rlpost.imports import is_installed
from rlpost.policies import LLMOnDevice, vLLMWrapper
from rlpost.policies.vllm_devices import cuda_visible
from rlpost.policies.vllm_engine import OwnProcessEngine

needs_vllm = pytest.mark.skipif(not is_installed("vllm"), reason="vLLM is not installed")


@needs_vllm
@pytest.mark.parametrize(("visible", "seen"), [(None, "1,0"), ("4,6", "6,4")])
def test_the_engines_process_sees_its_own_gpus_alone(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, visible: str | None, seen: str
) -> None:
    started: list[tuple[str, dict[str, Any]]] = []

    def start(engine: OwnProcessEngine, arguments: dict[str, Any], timeout_seconds: float) -> None:
        started.append((os.environ["CUDA_VISIBLE_DEVICES"], arguments))

    monkeypatch.setattr(OwnProcessEngine, "__init__", start)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    LLMOnDevice(tiny_folder, [1, 0], block_size=16)
    [(there, arguments)] = started
    assert there == seen
    assert (arguments["tensor_parallel_size"], arguments["block_size"]) == (2, 16)
    assert arguments["max_model_len"] == 2048  # the model's own
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    with pytest.raises(ConfigError, match="GPU 2"):
        cuda_visible([0, 2])


def test_a_policy_takes_a_folder_or_an_engine() -> None:
    with pytest.raises(TypeError, match=r"vllm\.LLM"):
        vLLMWrapper(3)
