"""How much of the machine a program may use."""

from __future__ import annotations

import os
import platform
import re
import resource
from dataclasses import dataclass
from pathlib import Path

from rlpost.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What one sandbox may take.

    `memory_mb` is the address space of each of its processes, and what all of them and their files
    hold together; a process that asks for more gets a MemoryError, several that have more are killed.
    `processes` counts threads too. `disk_mb` is the size of its /tmp and the longest file there,
    `output_bytes` what is kept of stdout and of stderr.
    """

    memory_mb: int = 512
    processes: int = 16
    disk_mb: int = 32
    files: int = 10_000
    open_files: int = 128
    output_bytes: int = 64 * 1024

    def __post_init__(self) -> None:
        least = {"memory_mb": 64, "processes": 4, "disk_mb": 1, "files": 16, "open_files": 16, "output_bytes": 2}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigError(f"{name}={getattr(self, name)} is too little for Python: it must be at least {value}")

    @property
    def flood_bytes(self) -> int:
        """Output after which a program is ended: reading and dropping more would only heat the machine."""
        return self.output_bytes + 16 * MIB

    def rlimits(self, cpu_seconds: int, other_tasks: int) -> dict[int, int]:
        """Resource limits of each process, where `other_tasks` of the same user count as processes too."""
        return {
            resource.RLIMIT_AS: self.memory_mb * MIB,
            # 1, not 0: the kernel pipes the dump of a process with limit 0 to a handler if it has one, outside
            resource.RLIMIT_CORE: 1,
            resource.RLIMIT_CPU: cpu_seconds,
            resource.RLIMIT_FSIZE: self.disk_mb * MIB,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_NOFILE: self.open_files,
            resource.RLIMIT_NPROC: self.processes + other_tasks,
            resource.RLIMIT_SIGPENDING: 128,
        }


def tasks_counted_with(*, own_user: bool, own_namespace: bool) -> int:
    """How many tasks outside a sandbox its RLIMIT_NPROC counts too.

    None where its user has no other processes, or, since Linux 5.14, where it is in a user
    namespace of its own, as processes are counted by user and namespace.
    """
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    counted_apart = release is not None and (int(release[1]), int(release[2])) >= (5, 14)
    if own_user or (own_namespace and counted_apart):
        return 0
    return sum(_tasks(process) for process in Path("/proc").glob("[0-9]*"))


def _tasks(process: Path) -> int:
    try:
        return len(os.listdir(process / "task")) if process.stat().st_uid == os.getuid() else 0
    except OSError:  # it has just ended
        return 0
