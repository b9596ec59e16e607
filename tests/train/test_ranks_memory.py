"""What a rank of a divided model holds while it loads and exports: its part, and a layer more."""

from __future__ import annotations

import ctypes
import gc
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlpost.model.sharding import GatheredWeights, ShardingPlan, export, load_sharded
from rlpost.model.weights import announce_with


def peak() -> int:
    """The most memory that this process held since `forget_peak`, in bytes; right after it: what it holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def forget_peak() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def loaded(folder: Path) -> Any:
    return load_sharded(folder, torch.float32, torch.device("cpu"), ShardingPlan())


def exported(rank: int, model: Any, folder: Path) -> None:
    if rank == 0:
        announce_with(model, lambda name: dist.broadcast_object_list([name], 0))
        export(model, folder)
        dist.broadcast_object_list([None], 0)
    else:
        weights, said = GatheredWeights(model), [""]
        while dist.broadcast_object_list(said, 0) or said[0] is not None:
            weights[said[0]]


def load_and_export(rank: int, folder: Path, meeting: str, found: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    exported(rank, loaded(folder / "small"), folder / "small-out")  # what is imported for it is not a part of a model
    forget_peak()
    before = peak()
    model = loaded(folder)
    part = sum(p.to_local().nbytes for p in model.parameters())
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    loading = peak() - before
    forget_peak()
    exported(rank, model, folder / "out")
    found[rank] = (part, largest, loading, peak() - before)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux tells the most that was held")
def test_rank_holds_its_part_and_a_layer_as_it_loads_and_exports(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    heads: dict[str, Any] = {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=151936, **sizes, **heads)).save_pretrained(tmp_path)  # as Qwen2.5-0.5B
    small = {**sizes, "hidden_size": 56, "num_hidden_layers": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=300, **small, **heads)).save_pretrained(tmp_path / "small")
    context = multiprocessing.get_context("spawn")
    found = context.Manager().dict()
    meeting = f"file://{tmp_path}/meeting"
    ranks = [context.Process(target=load_and_export, args=(rank, tmp_path, meeting, found)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(250)
    for part, largest, loading, exporting in found.values():
        assert part < 1.0e9
        assert loading <= 1.2 * (part + largest)
        assert exporting <= 1.2 * (part + largest)
    ours, right = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "out", tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), right.parameters(), strict=True))
    assert len(found) == 2
