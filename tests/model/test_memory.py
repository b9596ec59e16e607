"""What rlpost asks of the allocator and the kernel, and how it measures."""

from __future__ import annotations

import mmap
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rlpost.model import memory
from rlpost.model.memory import (
    CoresWatch,
    MemoryWatch,
    keep_freed_memory,
    process_tree,
    pss,
    smaps_rollup,
)

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
CPU = torch.device("cpu")
HOLD = "held = bytearray(b'x') * {size}; print('ready', flush=True); input()"


@contextmanager
def process(code: str) -> Iterator[int]:
    """A process below this one that runs `code`, once it has printed a line."""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        yield running.pid
        running.kill()


def test_the_allocator_takes_the_settings_where_it_is_glibc() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


@linux_only
def test_the_peak_counts_a_process_below_this_one_and_stays() -> None:
    watch = MemoryWatch()
    before = watch.metrics(CPU)["memory/peak_gb"]
    with process(HOLD.format(size=200_000_000)) as child:
        assert child in process_tree(os.getpid())
        most = watch.metrics(CPU)["memory/peak_gb"]
    assert 0.18 <= most - before <= 0.3  # and a Python interpreter; what is here may have shrunk meanwhile
    assert child not in process_tree(os.getpid())
    assert watch.metrics(CPU)["memory/peak_gb"] == most


@linux_only
def test_what_is_held_between_two_steps_is_seen_by_the_thread() -> None:
    watch = MemoryWatch()
    before = watch.look()
    watch.start()
    block = mmap.mmap(-1, 300_000_000)  # new pages; the allocator might hand out what this process holds already
    block.write(b"x" * 300_000_000)
    deadline = time.monotonic() + 30
    while watch.peak < before + 250e6 and time.monotonic() < deadline:
        time.sleep(0.01)
    watch.close()
    block.close()
    assert watch.peak >= before + 250e6


def test_without_proc_the_most_of_this_process_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "process_tree", lambda pid: [])
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3_000_000_000))  # bytes
    assert MemoryWatch().metrics(CPU) == {"memory/peak_gb": 3.0}
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3_000_000))  # kibibytes
    assert MemoryWatch().metrics(CPU) == {"memory/peak_gb": 3.072}


def test_on_a_gpu_the_peak_is_its_own_beside_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5_000_000_000)
    monkeypatch.setattr(MemoryWatch, "look", lambda self: 2_000_000_000)
    assert MemoryWatch().metrics(torch.device("cuda")) == {"memory/peak_gb": 5.0, "memory/host_gb": 2.0}


def test_cores_that_others_use_are_what_is_busy_beside_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    seconds = {"now": 0.0, "cpu0": 0.0, "cpu1": 0.0, "own": 0.0, "child": 0.0}

    def text(file: str) -> str:
        used = {name: round(value * ticks) for name, value in seconds.items()}
        if file == "/proc/stat":
            rows = [f"cpu{i} {used[f'cpu{i}']} 0 0 9 9 0 0 9 0 0" for i in (0, 1)]
            return "\n".join(["cpu 9 9 9 9 9 9 9 9 9 9", *rows, "cpu2 99999 0 0 0 0 0 0 0 0 0", "ctxt 9"])
        own = used["own" if file == f"/proc/{os.getpid()}/stat" else "child"]
        return f"7 (a ) name) S 1 7 7 0 -1 0 0 0 0 0 {own} 0 0 0 20 0"

    monkeypatch.setattr(memory, "_text", text)
    monkeypatch.setattr(memory, "process_tree", lambda pid: [pid, 1])
    monkeypatch.setattr(memory.time, "monotonic", lambda: seconds["now"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    watch = CoresWatch()
    seconds["now"] = 0.5
    assert watch.of_others() is None  # too short for ticks of a hundredth
    seconds |= {"now": 10.0, "cpu0": 9.0, "cpu1": 10.0, "own": 4.0, "child": 2.0}
    assert watch.of_others() == pytest.approx((9 + 10 - 4 - 2) / 10)
    watch.begin()
    seconds |= {"now": 20.0, "cpu0": 19.0, "own": 14.0}
    assert watch.of_others() == 0


@linux_only
def test_a_process_that_has_ended_holds_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert (process_tree(ended.pid), pss(ended.pid), smaps_rollup(ended.pid)) == ([], 0, {})
