"""What a machine has, from files that are laid out as Linux does."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rlpost.estimate.machine import Room, disk, gpu_memory, host_memory

MEMINFO = "MemTotal:       8000 kB\nMemFree:         100 kB\nMemAvailable:   6000 kB\nSwapTotal:      1000 kB\n"
KB = 1024


def machine(root: Path, cgroup: str = "", **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, content in files.items():
        file = root / "sys/fs/cgroup" / name.replace("__", "/").replace("memory_", "memory.")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return root


def test_without_a_limit_it_is_what_the_machine_has_and_swap(tmp_path: Path) -> None:
    assert host_memory(machine(tmp_path)) == Room(6000 * KB, 9000 * KB)


def test_a_control_group_above_this_process_limits_it(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "0::/job/step\n",
        job__memory_max=str(4000 * KB),
        job__memory_current=str(1500 * KB),
        job__memory_stat=f"anon 3\ninactive_file {500 * KB}\n",
        job__step__memory_max="max\n",
    )
    assert host_memory(root) == Room(3000 * KB, 5000 * KB)


def test_the_older_kind_of_control_group_counts_too(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "7:cpu:/x\n4:memory:/docker\n",
        memory__docker__memory_limit_in_bytes=str(2000 * KB),
        memory__docker__memory_usage_in_bytes=str(1900 * KB),
        memory__docker__memory_stat="total_inactive_file 0\n",
    )
    assert host_memory(root) == Room(100 * KB, 3000 * KB)


def test_a_machine_that_does_not_say_has_none(tmp_path: Path) -> None:
    assert host_memory(tmp_path) is None


def test_this_machine_says_what_it_has() -> None:
    room = host_memory()
    assert room is not None
    assert 0 < room.free <= room.total <= 64 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_gpu_is_asked_with_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory() is None
    tool = tmp_path / "nvidia-smi"
    for said, room in (("70000, 81920", Room(70000 * 2**20, 81920 * 2**20)), ("[N/A], [N/A]", None)):
        tool.write_text(f"#!/bin/sh\necho '{said}'\necho '1, 2'\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        assert gpu_memory() == room


def test_the_disk_is_that_of_the_folder_that_is_to_be(tmp_path: Path) -> None:
    here, later = disk(tmp_path), disk(tmp_path / "runs" / "new")
    assert here is not None
    assert later is not None
    assert here.total == later.total > 0
