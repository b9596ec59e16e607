"""Whether this machine has the device that is asked for, found out without torch."""

from __future__ import annotations

import importlib.util
import platform
import re
import subprocess
import sys
from pathlib import Path

from rlpost.errors import ConfigError

# in a process of its own: one that has asked the driver cannot fork others that use it
_COUNT = """
import ctypes
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError:
    print("no driver")
else:
    count = ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    print(f"error {failed}" if failed else count.value)
"""
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def check_device(device: str) -> None:
    """Raise ConfigError where `model.device` is one that torch, as it is installed, cannot have here.

    What does not show without torch is left to torch.
    """
    kind, _, number = device.partition(":")
    lacks = {"cuda": _lacks_cuda, "mps": _lacks_mps, "xpu": _lacks_xpu}.get(kind)
    if lacks is not None and (reason := lacks(int(number or 0))):
        raise ConfigError(f"model.device={device} cannot be used here: {reason}; leave it out for what there is")


def _lacks_cuda(number: int) -> str | None:
    built = _torch_build()
    if built.get("hip"):
        return None
    if "cuda" in built and not built["cuda"]:
        return f"torch {built.get('__version__')} is built without CUDA"
    if sys.platform != "linux":
        return None
    try:
        ran = subprocess.run([sys.executable, "-I", "-S", "-c", _COUNT], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None  # torch will say
    said = ran.stdout.strip()
    if said == "no driver":
        return "there is no CUDA driver"
    count = 0 if said == f"error {_NO_DEVICE}" else int(said) if said.isdecimal() else None
    if count is None or number < count:
        return None
    return "CUDA shows no GPU" if count == 0 else f"CUDA shows {count} of them, cuda:0 to cuda:{count - 1}"


def _lacks_mps(number: int) -> str | None:
    return None if (platform.system(), platform.machine()) == ("Darwin", "arm64") else "only Apple silicon has it"


def _lacks_xpu(number: int) -> str | None:
    built = _torch_build()
    return f"torch {built.get('__version__')} is built without XPU" if "xpu" in built and not built["xpu"] else None


def _torch_build() -> dict[str, str]:
    """What torch's version.py says it was built for: name -> value, empty for None; nothing where that is not there."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).parent / "version.py" if spec and spec.origin else None
    if file is None or not file.is_file():
        return {}
    assigned = re.findall(r"^(\w+)(?:\s*:[^=]*)?\s*=\s*(.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: "" if value.strip() == "None" else value.strip().strip("'\"") for name, value in assigned}
