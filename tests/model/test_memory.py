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
    MemoryWatch,
    give_back_contents,
    give_back_freed_memory,
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


def held() -> int:
    """Bytes of this process's own memory."""
    return smaps_rollup(os.getpid())["Pss_Anon"]


def test_the_allocator_takes_the_settings_where_it_is_glibc() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


@linux_only
def test_the_peak_counts_a_process_below_this_one_and_stays_when_it_has_ended() -> None:
    watch = MemoryWatch()
    before = watch.metrics(CPU)["memory/peak_gb"]
    with process(HOLD.format(size=200_000_000)) as child:
        assert child in process_tree(os.getpid())
        most = watch.metrics(CPU)["memory/peak_gb"]
    assert 0.18 <= most - before <= 0.3  # and a Python interpreter; what is here may have shrunk meanwhile
    assert child not in process_tree(os.getpid())
    assert watch.metrics(CPU)["memory/peak_gb"] == most


@linux_only
def test_a_process_below_a_process_is_in_the_tree() -> None:
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD.format(size=1)!r}])"
    with process(nested) as child:
        assert len(process_tree(child)) == 2
        assert set(process_tree(child)) < set(process_tree(os.getpid()))


@linux_only
def test_pages_that_processes_share_are_counted_once() -> None:
    """What was filled before a fork is the same memory in both: RSS has it twice."""
    fork = "import os; held = bytearray(b'x') * 200_000_000\nif os.fork(): print('ready', flush=True)\nos.read(0, 1)"
    with process(fork) as parent:
        both = process_tree(parent)
        assert len(both) == 2
        assert 0.2e9 <= sum(map(pss, both)) <= 0.3e9
        assert sum(smaps_rollup(one)["Rss"] for one in both) >= 0.4e9


@linux_only
def test_what_is_held_between_two_steps_is_seen_by_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LOOK_EVERY", 0.01)
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


@linux_only
def test_pss_is_read_only_where_resident_memory_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    resident, read = [100_000_000], []

    def counted(pid: int) -> int:
        read.append(pid)
        return resident[0] // 2

    monkeypatch.setattr(memory, "process_tree", lambda pid: [pid])
    monkeypatch.setattr(memory, "rss", lambda pid: resident[0])
    monkeypatch.setattr(memory, "pss", counted)
    watch = MemoryWatch(pid=7)
    for resident[0], peak in ((100_000_000, 50e6), (110_000_000, 50e6), (116_000_000, 58e6), (90_000_000, 58e6)):
        assert watch.look() == peak
    assert read == [7, 7]


def test_without_proc_the_most_of_this_process_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "process_tree", lambda pid: [])
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3_000_000_000))  # bytes
    assert MemoryWatch().metrics(CPU) == {"memory/peak_gb": 3.0}
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3_000_000))  # kibibytes
    assert MemoryWatch().metrics(CPU) == {"memory/peak_gb": 3.072}


def test_on_a_gpu_the_peak_is_its_own_and_the_machines_stands_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5_000_000_000)
    monkeypatch.setattr(MemoryWatch, "look", lambda self: 2_000_000_000)
    assert MemoryWatch().metrics(torch.device("cuda")) == {"memory/peak_gb": 5.0, "memory/host_gb": 2.0}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_what_is_freed_is_kept_until_it_is_given_back() -> None:
    keep_freed_memory()
    give_back_freed_memory()
    before = held()
    blocks = [torch.ones(250_000) for _ in range(400)]  # 1 MB each
    del blocks
    assert held() >= before + 300e6
    give_back_freed_memory()
    assert held() <= before + 100e6


@linux_only
def test_contents_given_back_read_as_zeros_and_what_lies_beside_them_stays() -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    numbers = torch.full((40_000_000,), 7, dtype=torch.uint8)
    start = -numbers.data_ptr() % page + 10  # ten bytes into a page
    before = held()
    give_back_contents(numbers.data_ptr() + start, 30_000_000)
    assert held() <= before - 25e6
    whole = start - 10 + page  # the first page that is wholly inside
    assert numbers[whole - 1] == 7
    assert numbers[whole] == 0
    end = (start + 30_000_000 + numbers.data_ptr()) // page * page - numbers.data_ptr()
    assert numbers[end - 1] == 0
    assert numbers[end] == 7
    numbers.fill_(9)  # it may be written again
    assert int(numbers.min()) == 9


@linux_only
def test_a_process_that_has_ended_holds_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert (process_tree(ended.pid), pss(ended.pid), smaps_rollup(ended.pid)) == ([], 0, {})
