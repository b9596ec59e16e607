"""How this process keeps and frees memory; and of memory and cores, how much a run has: it and all below it."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

LOOK_EVERY = 0.2  # seconds between two looks at the memory of a run
_GROWTH = 16_000_000  # bytes by which resident memory must grow before PSS is read again
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_MADV_DONTNEED = 4  # sys/mman.h


def keep_freed_memory() -> bool:
    """Have glibc keep freed memory instead of returning it to the kernel; returns whether it will.

    Every microbatch on a CPU allocates the same activations and gradients. If the kernel takes them back and clears
    them again, that costs about a quarter of the training time. The few tensors of 16 MiB and more (logits, the
    head's gradient) are returned at once: between small ones they would fragment the heap.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    wanted = ((_M_MMAP_THRESHOLD, 16 << 20), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 32 << 20))
    return all([libc.mallopt(name, value) == 1 for name, value in wanted])  # noqa: C419  each must be set


@contextmanager
def frozen_heap() -> Iterator[None]:
    """A block in which Python's garbage collector ignores all objects that existed before.

    Traversing the objects of torch, transformers and vLLM stops every thread for a tenth of a second, many times a
    minute.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def give_back_freed_memory() -> bool:
    """Have glibc return freed memory to the kernel, at the end of a phase; returns whether it freed any.

    Phases and steps differ in their sizes, so the kept memory fragments: without this a run slowly grows beyond a
    small machine's memory.
    """
    return platform.libc_ver()[0] == "glibc" and ctypes.CDLL(None).malloc_trim(0) == 1


def give_back_contents(address: int, size: int) -> None:
    """Return the pages between `address` and `address` + `size` to the kernel; they then read as zeros (Linux).

    For anonymous memory whose contents are no longer needed. A page that is only partly inside stays as it is.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    first, last = -(-address // page) * page, (address + size) // page * page
    if sys.platform == "linux" and last > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)


class MemoryWatch:
    """The peak memory of a process and all below it together, since the first look.

    Pages that several processes share count once (PSS, from /proc/PID/smaps_rollup). Reading that takes the kernel
    up to 100 ms, so it happens only if resident memory (RSS), which takes microseconds, is higher than at the last
    reading. A process whose PSS cannot be read counts with its RSS; without a /proc, the peak is that of this
    process alone.
    """

    def __init__(self, pid: int | None = None) -> None:
        self.pid = pid or os.getpid()
        self.peak = 0  # bytes
        self._resident = -_GROWTH  # RSS of all processes when PSS was last read
        self._looking = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self) -> int:
        """Update the peak, and return it in bytes."""
        with self._looking:
            processes = process_tree(self.pid)
            resident = sum(map(rss, processes))
            if not processes:
                unit = 1 if sys.platform == "darwin" else 1024
                self.peak = max(self.peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
            elif resident >= self._resident + _GROWTH:
                self._resident = resident
                self.peak = max(self.peak, sum(map(pss, processes)))
            return self.peak

    def start(self) -> None:
        """Look every 0.2 s from a thread, until `close`."""
        self._thread = threading.Thread(target=self._keep_looking, name="rlpost-memory", daemon=True)
        self._thread.start()

    def _keep_looking(self) -> None:
        while not self._ended.wait(LOOK_EVERY):
            self.look()

    def close(self) -> None:
        """Stop looking; a second call does nothing."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def metrics(self, device: torch.device) -> dict[str, float]:
        """Peak memory in GB: of the GPU if `device` is one, and of the host."""
        host = self.look() / 1e9
        if device.type == "cuda":
            return {"memory/peak_gb": torch.cuda.max_memory_allocated(device) / 1e9, "memory/host_gb": host}
        return {"memory/peak_gb": host}


class CoresWatch:
    """How many of the cores that this process may use other programs have kept busy since `begin`."""

    def __init__(self) -> None:
        self.cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self.begin()

    def begin(self) -> None:
        """Begin to watch."""
        self._began = self._seconds()

    def of_others(self) -> float | None:
        """Cores that were busy with other programs, on average; None within a second, or without a /proc."""
        passed, busy, own = (now - then for now, then in zip(self._seconds(), self._began, strict=True))
        return None if passed < 1 or busy <= 0 else max(0.0, busy - own) / passed

    def _seconds(self) -> tuple[float, float, float]:
        """The time, and how long the cores were busy, and with this process and all below it."""
        ticks = os.sysconf("SC_CLK_TCK")
        rows = [row.split() for row in _text("/proc/stat").splitlines()]
        names = {f"cpu{core}" for core in self.cores}
        # user, nice and system; interrupts
        busy = sum(int(row[i]) for row in rows if row[0] in names for i in (1, 2, 3, 6, 7))
        stats = [_text(f"/proc/{each}/stat").rpartition(")")[2].split() for each in process_tree(os.getpid())]
        own = sum(sum(map(int, stat[11:15])) for stat in stats)  # its own, and that of children that have ended
        return time.monotonic(), busy / ticks, own / ticks


def process_tree(pid: int) -> list[int]:
    """`pid` and every process below it; empty where there is no /proc."""
    found = [pid] if Path(f"/proc/{pid}").is_dir() else []
    for each in found:  # grows meanwhile
        try:
            for thread in os.listdir(f"/proc/{each}/task"):
                found += [int(child) for child in _text(f"/proc/{each}/task/{thread}/children").split()]
        except OSError:
            continue  # it has ended
    return found


def pss(pid: int) -> int:
    """Bytes that a process holds, with its share of pages held by several; 0 for one that has ended."""
    held = smaps_rollup(pid)
    return held["Pss"] if "Pss" in held else rss(pid)


def smaps_rollup(pid: int) -> dict[str, int]:
    """The kernel's figures for a process's memory, in bytes: Rss, Pss, Pss_Anon, ...; empty if unreadable."""
    rows = (line.split() for line in _text(f"/proc/{pid}/smaps_rollup").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[2:] == ["kB"]}


def rss(pid: int) -> int:
    """Bytes of a process's resident memory, shared pages included; 0 for one that has ended."""
    pages = _text(f"/proc/{pid}/statm").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _text(file: str) -> str:
    """The text of a file in /proc; empty if its process has ended or may not be read."""
    try:
        with open(file, encoding="ascii") as opened:
            return opened.read()
    except OSError:
        return ""
