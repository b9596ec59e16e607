"""How this process holds memory."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from pathlib import Path

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed for the next step instead of giving it back to the kernel; whether it will.

    Every step on a CPU allocates the same gigabytes of activations and gradients. Having the kernel
    take them back and clear them anew costs about a quarter of the training time.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    wanted = ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 256 << 20))
    return all([libc.mallopt(name, value) == 1 for name, value in wanted])  # noqa: C419  each has to be set


def give_back_freed_memory(above: float = 0.4) -> bool:
    """Have glibc return what is free to the kernel once this process holds more than a share of the machine's memory.

    Steps differ in their sizes, so what is kept breaks into pieces and grows for a while: slowly, and
    beyond what a small machine has. Returns whether anything was given back.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if platform.libc_ver()[0] != "glibc" or memory_held() <= above * machine:
        return False
    return ctypes.CDLL(None).malloc_trim(0) == 1


def memory_held() -> int:
    """Bytes of physical memory that this process holds now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_memory_gb(device: torch.device) -> float:
    """The most memory held so far: on the GPU where one trains, else by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
