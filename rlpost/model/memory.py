"""How this process holds memory, and how much of it the run holds: this process and all that it started."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

LOOK_EVERY = 0.2  # seconds between two looks at the memory of a run
_GROWTH = 16_000_000  # bytes that resident memory has to gain before PSS is read again
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_MADV_DONTNEED = 4  # sys/mman.h


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed for the next use instead of giving it back to the kernel; whether it will.

    Every microbatch on a CPU allocates the same activations and gradients. Having the kernel take them
    back and clear them anew costs about a quarter of the training time. The few tensors of 16 MiB and
    more (logits, the head's gradient) go back at once: between small ones they would break the heap into pieces.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    wanted = ((_M_MMAP_THRESHOLD, 16 << 20), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 32 << 20))
    return all([libc.mallopt(name, value) == 1 for name, value in wanted])  # noqa: C419  each has to be set


@contextmanager
def frozen_heap() -> Iterator[None]:
    """A block in which Python's garbage collector leaves alone what was there before.

    Looking through the objects of torch, transformers and vLLM stops every thread for a tenth of a second, many times
    a minute.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def give_back_freed_memory() -> bool:
    """Have glibc return what is free to the kernel, at the end of a phase; whether anything was.

    Phases and steps differ in their sizes, so what is kept breaks into pieces: without this a run
    grows for a while, slowly and beyond what a small machine has.
    """
    return platform.libc_ver()[0] == "glibc" and ctypes.CDLL(None).malloc_trim(0) == 1


def give_back_contents(address: int, size: int) -> None:
    """Let the kernel take the pages between `address` and `address` + `size`, which read as zeros from then on (Linux).

    For memory of no file whose contents are worthless. A page that is only partly inside stays as it is.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    first, last = -(-address // page) * page, (address + size) // page * page
    if sys.platform == "linux" and last > first:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED) != 0:
            raise OSError(ctypes.get_errno(), "madvise refused to take pages back")


class MemoryWatch:
    """The most memory that a process and all below it have held together, since the first look.

    Pages that several processes share are counted once (PSS, as /proc/PID/smaps_rollup has it). That
    takes the kernel up to 100 ms, so it is read only where resident memory (RSS), which takes it
    microseconds, is higher than when PSS was last read. A process whose PSS cannot be read counts with
    its RSS; without a /proc the most that this process alone has held is taken.
    """

    def __init__(self, pid: int | None = None) -> None:
        self.pid = pid or os.getpid()
        self.peak = 0  # bytes
        self._resident = -_GROWTH  # RSS of all of them, when their PSS was last read
        self._looking = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self) -> int:
        """Take what is held now into account; the most so far, in bytes."""
        with self._looking:
            processes = process_tree(self.pid)
            resident = sum(map(_rss, processes))
            if not processes:
                self.peak = max(self.peak, _own_peak())
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
        """The most memory so far in GB: of the GPU where one trains, then that of the machine beside it."""
        host = self.look() / 1e9
        if device.type == "cuda":
            return {"memory/peak_gb": torch.cuda.max_memory_allocated(device) / 1e9, "memory/host_gb": host}
        return {"memory/peak_gb": host}


def process_tree(pid: int) -> list[int]:
    """`pid` and every process below it; empty where there is no /proc."""
    found = [pid] if Path(f"/proc/{pid}").is_dir() else []
    for each in found:  # which grows
        try:
            for thread in os.listdir(f"/proc/{each}/task"):
                found += [int(child) for child in _text(f"/proc/{each}/task/{thread}/children").split()]
        except OSError:
            continue  # it has ended
    return found


def pss(pid: int) -> int:
    """Bytes that a process holds, its share of those held together with others; 0 for one that has ended."""
    held = smaps_rollup(pid)
    return held["Pss"] if "Pss" in held else _rss(pid)


def smaps_rollup(pid: int) -> dict[str, int]:
    """What the kernel says of a process's memory, in bytes: Rss, Pss, Pss_Anon, ...; empty where it does not tell."""
    rows = (line.split() for line in _text(f"/proc/{pid}/smaps_rollup").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[2:] == ["kB"]}


def _rss(pid: int) -> int:
    pages = _text(f"/proc/{pid}/statm").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _text(file: str) -> str:
    """What a file of /proc says; nothing where its process has ended, or is not ours to see."""
    try:
        with open(file, encoding="ascii") as opened:
            return opened.read()
    except OSError:
        return ""


def _own_peak() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # its unit differs
