"""How fast this CPU multiplies matrices in each format: measured once, then read from the cache."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import torch

from rlpost.config.paths import cache_folder
from rlpost.files import remembered
from rlpost.settings import DType

MEASURED = (DType.float32, DType.bfloat16)
FEW_ROWS, MANY_ROWS, WIDTH, WIDE = 64, 512, 576, 1536  # a layer of a small model, sampling and training
ROUNDS = 6  # products of each size, the best of which counts
SECONDS = 0.2  # for one format: slow products are measured on fewer
LIMITS = (  # variables that say which kernels torch takes, and on how many cores
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "KMP_AFFINITY",
    "GOMP_CPU_AFFINITY",
)

Speeds = dict[DType, float]  # GFLOP/s of matrix products


def product_speeds() -> Speeds:
    """GFLOP/s of this machine's products in float32 and bfloat16, on one core.

    Kept in the cache under what they depend on. A cache that cannot be read or written is no error:
    the log says so, and the products are measured.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(threads)  # measuring does so too: a run computes alike whether it measures or reads the cache
    asked = conditions(threads)
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    file = cache_folder() / "products" / f"{digest}.json"

    def measured() -> dict[str, Any]:
        return {**asked, "gflops": {dtype.value: round(speed, 3) for dtype, speed in measure().items()}}

    return remembered(file, measured, _speeds, "the speed of products is measured")


def measure() -> Speeds:
    """GFLOP/s in each format, the best of a few products: at most about half a second, however slow they are.

    One core and its own time, so that what else the machine does changes nothing.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {dtype: _speed(getattr(torch, dtype.value)) for dtype in MEASURED}
    finally:
        torch.set_num_threads(threads)


def _speed(dtype: torch.dtype) -> float:
    best = spent = 0.0
    for rows in [FEW_ROWS] * ROUNDS + [MANY_ROWS] * ROUNDS:
        work = 2e-9 * rows * WIDTH * WIDE
        if best and spent + work / best > SECONDS:
            break
        left = torch.ones(rows, WIDTH, dtype=dtype)  # nothing random: the run's random numbers stay as they are
        right = torch.ones(WIDTH, WIDE, dtype=dtype)
        began = time.thread_time()
        torch.mm(left, right)
        seconds = max(time.thread_time() - began, 1e-9)
        spent += seconds
        best = max(best, work / seconds)
    return best


def conditions(threads: int) -> dict[str, Any]:
    """What the speed of products depends on."""
    return {
        "cpu": _cpu(),
        "threads": threads,
        "torch": torch.__version__,
        "variables": {name: os.environ[name] for name in LIMITS if name in os.environ},
    }


def _cpu() -> list[str]:
    """Name and instruction sets of the CPU."""
    try:
        listed = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        listed = ""
    found = (re.search(rf"^{name}\s*:\s*(.*)$", listed, re.M) for name in ("model name", "flags", "Features"))
    return [platform.machine(), platform.processor(), *(line[1] for line in found if line)]


def _speeds(content: Any) -> Speeds:
    """What is kept of them. Raises ValueError or LookupError for anything else."""
    kept = content["gflops"]
    speeds = {dtype: float(kept[dtype.value]) for dtype in MEASURED}
    if not all(math.isfinite(speed) and speed > 0 for speed in speeds.values()):
        raise ValueError(f"these are no speeds: {kept}")
    return speeds
