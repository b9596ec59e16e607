"""What rlpost asks of the allocator, and how it measures."""

from __future__ import annotations

import platform

import torch

from rlpost.memory import keep_freed_memory, peak_memory_gb


def test_the_allocator_takes_the_settings_where_it_is_glibc() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


def test_peak_memory_counts_what_was_held() -> None:
    before = peak_memory_gb(torch.device("cpu"))
    held = torch.ones(int((before + 0.2) * 1e9 / 4))  # more than was ever held before
    assert peak_memory_gb(torch.device("cpu")) >= before + 0.15
    del held
