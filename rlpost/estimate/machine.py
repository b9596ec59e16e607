"""The machine, looked at without torch: its memory and disk, whether it has a device, and its default sampler."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rlpost.errors import ConfigError
from rlpost.imports import is_installed
from rlpost.remote.process import output_of
from rlpost.settings import AutoPolicySettings, PolicySettings, TransformersSettings, VLLMSettings


@dataclass(frozen=True)
class Room:
    """Bytes of memory or disk."""

    free: int
    total: int


def host_memory(root: Path = Path("/")) -> Room | None:
    """The memory that this process can have: the machine's, or its control group's if that is less (Linux).

    `total` includes swap. None if the machine does not say.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        facts = {key: int(value.split()[0]) * 1024 for key, _, value in (line.partition(":") for line in lines)}
        free, total = facts["MemAvailable"], facts["MemTotal"]
    except (OSError, ValueError, LookupError):
        return None
    for limit, used in _group_limits(root):
        free, total = min(free, max(0, limit - used)), min(total, limit)
    return Room(free, total + facts.get("SwapTotal", 0))


def gpu_memory() -> Room | None:
    """Memory of the first GPU that nvidia-smi lists; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = output_of(query, 10)
        free, total = (int(number) * 2**20 for number in answer.splitlines()[0].split(","))
    except (OSError, ValueError, IndexError):
        return None
    return Room(free, total)


def disk(folder: Path) -> Room | None:
    """Space of the file system on which `folder` lies or will lie; None if the system does not say."""
    there = next((place for place in (folder, *folder.absolute().parents) if place.exists()), None)
    try:
        usage = shutil.disk_usage(there) if there is not None else None
    except OSError:
        return None
    return Room(usage.free, usage.total) if usage is not None else None


def cores() -> int:
    """Cores that this process may use: a container can allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def chosen_policy(settings: PolicySettings) -> PolicySettings:
    """`auto` resolved: vLLM if it is installed, else transformers."""
    if not isinstance(settings, AutoPolicySettings):
        return settings
    return (VLLMSettings if is_installed("vllm") else TransformersSettings)(max_num_seqs=settings.max_num_seqs)


def check_device(device: str, engine: PolicySettings | None = None) -> None:
    """Raise ConfigError if the installed torch cannot use `model.device` on this machine, or vLLM as the `engine`.

    Faults that do not show without torch are left to torch.
    """
    kind, _, number = device.partition(":")
    lacks = {"cuda": _lacks_cuda, "mps": _lacks_mps, "xpu": _lacks_xpu}.get(kind)
    if lacks is not None and (reason := lacks(int(number or 0))):
        raise ConfigError(f"model.device={device} cannot be used here: {reason}; leave it out for what there is")
    if kind == "cuda" and int(number or 0) and isinstance(engine, VLLMSettings):
        raise ConfigError(
            f"model.device={device}: vLLM takes the first GPU it sees; set CUDA_VISIBLE_DEVICES={number} and leave "
            "model.device out"
        )


def _group_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, in use) of each control group around this process that has a limit; caches do not count as in use."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, kinds, group = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        mount = root / "sys/fs/cgroup" / kinds
        inside = PurePosixPath(group.lstrip("/"))
        for place in (inside, *inside.parents):
            found += _limit(mount / place, new=not kinds)
    return found


def _limit(group: Path, *, new: bool) -> list[tuple[int, int]]:
    limit, used = ("memory.max", "memory.current") if new else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    droppable = "inactive_file" if new else "total_inactive_file"
    try:
        most = int((group / limit).read_text())
        lines = (group / "memory.stat").read_text().splitlines()
        held = int((group / used).read_text())
    except (OSError, ValueError):  # "max", or no file: no limit
        return []
    cached = sum(int(line.split()[1]) for line in lines if line.split()[:1] == [droppable])
    return [(most, held - cached)] if most < os.sysconf("SC_PAGE_SIZE") * 2**50 else []


# run in a process of its own: a process that has asked the driver cannot fork others that use it
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


def _lacks_cuda(number: int) -> str | None:
    built = _torch_build()
    if built.get("hip"):
        return None
    if "cuda" in built and not built["cuda"]:
        return f"torch {built.get('__version__')} is built without CUDA"
    if sys.platform != "linux":
        return None
    try:
        answer = output_of([sys.executable, "-I", "-S", "-c", _COUNT], 20).strip()
    except OSError:
        return None  # torch will say
    if answer == "no driver":
        return "there is no CUDA driver"
    count = 0 if answer == f"error {_NO_DEVICE}" else int(answer) if answer.isdecimal() else None
    if count is None or number < count:
        return None
    return "CUDA shows no GPU" if count == 0 else f"CUDA shows {count} of them, cuda:0 to cuda:{count - 1}"


def _lacks_mps(number: int) -> str | None:
    return None if (platform.system(), platform.machine()) == ("Darwin", "arm64") else "only Apple silicon has it"


def _lacks_xpu(number: int) -> str | None:
    built = _torch_build()
    return f"torch {built.get('__version__')} is built without XPU" if "xpu" in built and not built["xpu"] else None


def _torch_build() -> dict[str, str]:
    """The names in torch's version.py, which say what it was built for, with their values; "" for None."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).parent / "version.py" if spec and spec.origin else None
    if file is None or not file.is_file():
        return {}
    assigned = re.findall(r"^(\w+)(?:\s*:[^=]*)?\s*=\s*(.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: "" if value.strip() == "None" else value.strip().strip("'\"") for name, value in assigned}
