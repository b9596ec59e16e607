"""The device of a training: chosen, and made ready before anything is computed on it."""

from __future__ import annotations

import os

import torch

from rlpost.errors import ConfigError
from rlpost.text import first_line

CONTEXT = 0.03  # share of a GPU that CUDA itself takes in each process
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # variables that configure torch's allocator


def pick_device(name: str) -> torch.device:
    """The device called `name`, ready; `auto` is cuda if there is a GPU. Raises ConfigError if torch cannot use it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda":
            # cuDNN's attention builds a plan for every new shape, and each microbatch has new shapes. The lengths of
            # packed rows differ too, and split the memory that the allocator keeps unless its segments can grow
            torch.backends.cuda.enable_cudnn_sdp(False)
            if not any(variable in os.environ for variable in ALLOCATOR):
                os.environ[ALLOCATOR[0]] = "expandable_segments:True"
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"model.device={name} cannot be used here: {first_line(error)}") from error
    return device


def leave_room(share: float, device: torch.device) -> None:
    """Keep torch from a share of a GPU's memory, which engines in other processes have; it runs out of memory before.

    Otherwise its allocator takes what such an engine gave back for a moment, and the engine runs out of memory.
    """
    if share and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(max(0.05, 1 - share - CONTEXT), device)


def compute_deterministically(wanted: bool) -> None:
    """Have torch take kernels that give the same result each time; cuBLAS reads its part when CUDA starts."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
