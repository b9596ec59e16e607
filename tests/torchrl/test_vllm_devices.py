"""Where vLLM engines are put, as far as a machine without vLLM, GPUs or Ray can tell."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost.errors import ConfigError, MissingExtraError
from rlpost.imports import is_installed
from rlpost.policies import LLMOnDevice, make_vllm_worker, vLLMWrapper
from rlpost.policies.vllm import engine_arguments
from rlpost.policies.vllm_engine import OwnProcessEngine
from rlpost.settings import VLLMSettings
from rlpost.torchrl.vllm_devices import check_devices

needs_vllm = pytest.mark.skipif(not is_installed("vllm"), reason="vLLM is not installed")


def test_devices_have_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert check_devices([1, 0]) == [1, 0]
    with pytest.raises(ConfigError, match="there is no GPU 2: this machine has 2"):
        check_devices([0, 2])


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
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


def test_the_context_is_the_models_own_unless_it_is_said(tiny_folder: Path, tmp_path: Path) -> None:
    settings = VLLMSettings()
    assert engine_arguments(tiny_folder, settings, max_model_len=None, seed=0)["max_model_len"] == 2048
    assert engine_arguments(tiny_folder, settings, max_model_len=64, seed=0)["max_model_len"] == 64


def test_a_policy_takes_a_folder_or_an_engine() -> None:
    with pytest.raises(
        TypeError, match=r"was given a int: give it a folder, a vllm\.LLM or what make_vllm_worker returns"
    ):
        vLLMWrapper(3)


def test_a_worker_in_ray_needs_ray(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.imports.is_installed", lambda package: package != "ray")
    with pytest.raises(MissingExtraError, match=r"make_ray_worker=True needs ray, .*rlpost\[ray\]"):
        make_vllm_worker(tiny_folder, make_ray_worker=True)
