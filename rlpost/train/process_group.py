"""The process group of a training on several ranks: which rank this process is, how it joins, and how it leaves."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from rlpost import distributed
from rlpost.distributed import reason_of
from rlpost.errors import ConfigError, RankError
from rlpost.estimate.machine import ranks_started

# environment variables that torchrun, and launchers like it, set for each process
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STORE_IS_THERE = "TORCHELASTIC_USE_AGENT_STORE"  # the launcher has opened the store where ranks meet


@dataclass(frozen=True)
class Place:
    """A process's rank, the number of ranks, and the address where they meet."""

    rank: int
    world: int
    local_rank: int  # among the ranks of this machine
    local_world: int  # ranks of this machine
    address: str
    port: int
    store_is_there: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Place | None:
        """The place from the variables of torchrun, or of a launcher that sets the same; None with one process.

        Raises ConfigError if a variable is missing.
        """
        if ranks_started(environ) == 1:
            return None
        if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]:
            raise ConfigError(
                f"WORLD_SIZE={environ['WORLD_SIZE']} says that this is one of several processes, and {missing[0]} is "
                "not set: start them with torchrun, or unset WORLD_SIZE"
            )
        rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        return cls(
            rank,
            world,
            int(environ.get("LOCAL_RANK", rank)),
            int(environ.get("LOCAL_WORLD_SIZE", world)),
            environ["MASTER_ADDR"],
            int(environ["MASTER_PORT"]),
            environ.get(STORE_IS_THERE) == "True",
        )

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world}"

    def open_store(self, seconds: float) -> dist.TCPStore:
        """Connect to the store; rank 0 opens it, unless the launcher has. Raises RankError if it is not reached."""
        opens = self.rank == 0 and not self.store_is_there
        try:
            wait = timedelta(seconds=seconds)
            return dist.TCPStore(self.address, self.port, is_master=opens, wait_for_workers=False, timeout=wait)
        except RuntimeError as error:
            at = f"{self.address}:{self.port}"
            raise RankError(
                f"{self} cannot meet the others at {at} ({reason_of(error)}): see that rank 0 runs, and that this "
                "port is free there and open between the machines"
            ) from error


def forget_place() -> None:
    """Remove torchrun's variables, so that child processes do not take themselves for ranks.

    Its limit of one thread a process goes too: `form_group` chooses the threads.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":
        del os.environ["OMP_NUM_THREADS"]
    for name in [*PLACE, *(name for name in os.environ if name.startswith("TORCHELASTIC_"))]:
        os.environ.pop(name, None)


def device_of(device: str, place: Place) -> torch.device:
    """The device of the rank at `place`: a GPU of its own, or the CPU.

    Raises ConfigError if `device`, the value of model.device, cannot serve every rank.
    """
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if device not in ("auto", "cuda"):
        raise ConfigError(f"model.device={device} is one device, and {place.world} ranks train: take auto")
    there_are = torch.cuda.device_count()
    if there_are == 1 and not place.store_is_there:  # a launcher such as srun shows each process its own
        return torch.device("cuda", 0)
    if there_are < place.local_world:
        raise ConfigError(
            f"{place.local_world} ranks train on this machine, and it has {there_are} GPUs: start as many ranks as "
            "GPUs, or add model.device=cpu"
        )
    return torch.device("cuda", place.local_rank)


def form_group(place: Place, store: dist.Store, device: torch.device, seconds: float) -> None:
    """Join the process group of all ranks: gloo for tensors on a CPU, NCCL for tensors on a GPU.

    A wait for another rank ends after `seconds`. Raises RankError if the others do not come.
    """
    distributed.DEADLINE_SECONDS = seconds
    if place.local_world == place.world and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # works where the host's name does not resolve
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // place.local_world))
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("rlpost/group", store),
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=seconds),
        )
    except RuntimeError as error:
        raise RankError(f"{place} could not reach the others: {reason_of(error)}") from error


def leave_group() -> None:
    """Leave the process group, if any."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
