"""Weights where /dev/shm is small, as Docker makes it by default."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlpost.errors import PolicyError
from rlpost.model.weights import SavedWeights, save_one_by_one
from rlpost.policies import vllm_engine
from rlpost.policies.vllm import vLLMWrapper
from rlpost.remote import exchange
from rlpost.remote.exchange import exchange_folder
from rlpost.remote.process import last_of
from rlpost.settings import VLLMSettings
from tests.says import Says

WEIGHTS = {"small": torch.ones(4), "large": torch.arange(100.0)}  # 16 and 400 bytes


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], tuple[Path, Path]]:
    """Makes a memory and a disk with so many bytes free, and returns their folders."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"

    def make(in_memory: int, on_disk: int) -> tuple[Path, Path]:
        free = {memory: in_memory, disk: on_disk}
        for folder in free:
            folder.mkdir()
        for module in (vllm_engine, exchange):
            monkeypatch.setattr(module, "memory_folder", lambda: memory)
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder]))
        return memory, disk

    return make


def test_weights_without_room_in_memory_lie_on_disk_meanwhile(places: Callable[..., tuple[Path, Path]]) -> None:
    memory, disk = places(64, 10_000)
    with exchange_folder() as folder:
        save_one_by_one(WEIGHTS.items(), folder)
        assert folder.parent == memory
        assert [file.is_symlink() for file in sorted(folder.iterdir())] == [False, True]
        assert torch.equal(SavedWeights(folder)["large"], WEIGHTS["large"])
        assert len(list(disk.iterdir())) == 1
    assert [*memory.iterdir(), *disk.iterdir()] == []


def test_a_copy_without_room_in_memory_lies_on_disk_meanwhile(places: Callable[..., tuple[Path, Path]]) -> None:
    memory, disk = places(64, 10_000)
    with exchange.fetched("key", lambda: {"a": b"12", "b": bytes(400)}) as folder:
        assert (folder / "b").read_bytes() == bytes(400)
        assert (folder / "b").resolve().is_relative_to(disk)
    assert [*memory.iterdir(), *disk.iterdir()] == []


def test_no_room_anywhere_names_shm_size(places: Callable[..., tuple[Path, Path]], says: Says) -> None:
    places(64, 100)
    with exchange_folder() as folder, says.refused("policies", PolicyError, "--shm-size=8g"):
        save_one_by_one(WEIGHTS.items(), folder)


def test_an_engine_that_cannot_start_names_shm_size(
    places: Callable[..., tuple[Path, Path]], tiny_folder: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")

    def refused(arguments: Any, settings: Any) -> None:
        raise RuntimeError("Engine core initialization failed.")

    monkeypatch.setattr("rlpost.policies.vllm.start_engine", refused)
    memory, _ = places(64_000_000, 10**12)
    with pytest.raises(PolicyError, match=rf"{memory} .*64 MB .*168 MB .*--shm-size"):
        vLLMWrapper(tiny_folder, tiny_tokenizer, settings=VLLMSettings()).start()


def test_a_worker_killed_by_a_full_shm_names_shm_size(says: Says) -> None:
    worker = subprocess.Popen(["sh", "-c", "kill -BUS $$"])
    says("policies", last_of(worker))
