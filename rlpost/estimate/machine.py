"""The machine, looked at without torch: its memory and disk, whether it has a device, and its default sampler."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rlpost.errors import ConfigError
from rlpost.imports import is_installed
from rlpost.settings import (
    Autocast,
    AutoPolicySettings,
    DType,
    PolicySettings,
    TransformersSettings,
    VLLMSettings,
)


@dataclass(frozen=True)
class Room:
    """Bytes of memory or disk."""

    free: int
    total: int


@dataclass(frozen=True)
class Precision:
    """The precision that one command computes in, and why.

    `autocast` and `sampler` are the resolved values of model.autocast and policy.dtype. `used` says what is computed
    in each dtype; `warning` is set if a dtype that was named or kept is much slower here than another one.
    """

    autocast: Autocast
    sampler: DType
    used: str
    why: str
    warning: str | None = None


@dataclass(frozen=True)
class Device:
    """The device that a model computes on, as far as it is known before torch is loaded."""

    room: Room | None = None  # of a GPU
    choose: Callable[..., Precision] | None = None  # the precision there, see `choose_precision`; None without torch


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
    from rlpost.remote.process import output_of

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


def ranks_started(environ: Mapping[str, str] = os.environ) -> int:
    """How many processes torchrun, or a launcher like it, has started for this training; 1 without it."""
    return int(environ.get("WORLD_SIZE", "1"))


def chosen_policy(settings: PolicySettings) -> PolicySettings:
    """`auto` resolved: vLLM if it is installed, else transformers."""
    if not isinstance(settings, AutoPolicySettings):
        return settings
    return (VLLMSettings if is_installed("vllm") else TransformersSettings)(max_num_seqs=settings.max_num_seqs)


def check_device(device: str, engine: PolicySettings | None) -> None:
    """Raise ConfigError if vLLM as the `engine` would not run on `model.device`."""
    kind, _, number = device.partition(":")
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
