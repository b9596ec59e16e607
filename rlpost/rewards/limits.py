"""Limits that a process sets itself before it works on what a model wrote."""

from __future__ import annotations

import resource

MEMORY_BYTES = 4 << 30  # enough for sympy and NumPy; a number of a billion digits fails instead of filling the machine


def limit_memory(num_bytes: int = MEMORY_BYTES) -> None:
    """Let every later request for more memory than this fail, with a MemoryError."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))
