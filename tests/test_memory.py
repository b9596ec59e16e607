"""What rlpost asks of the allocator, and how it measures."""

from __future__ import annotations

import platform

import torch

from rlpost.memory import give_back_freed_memory, keep_freed_memory, memory_held, peak_memory_gb


def test_the_allocator_takes_the_settings_where_it_is_glibc() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


def test_peak_memory_counts_what_was_held() -> None:
    before = peak_memory_gb(torch.device("cpu"))
    held = torch.ones(int((before + 0.2) * 1e9 / 4))  # more than was ever held before
    assert peak_memory_gb(torch.device("cpu")) >= before + 0.15
    del held


def test_what_was_kept_is_given_back_above_the_limit_and_kept_below() -> None:
    keep_freed_memory()
    blocks = [torch.ones(250_000) for _ in range(400)]  # 1 MB each
    del blocks
    kept = memory_held()
    assert not give_back_freed_memory(above=1.0)
    assert memory_held() >= kept - 50e6
    if platform.libc_ver()[0] == "glibc":
        assert give_back_freed_memory(above=0.0)
        assert memory_held() <= kept - 300e6
