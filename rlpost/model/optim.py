"""AdamW, with full or 8-bit state, its learning rate, and its state as tensors for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from math import cos, pi

import torch

from rlpost.errors import CheckpointError
from rlpost.imports import require_bitsandbytes
from rlpost.model.weights import is_sharded
from rlpost.settings import AdamW8bitSettings, OptimSettings, Schedule

# of the 8-bit state: quantization tables that all parameters share, and a scale per block
SHARED_STATE = ("qmap1", "qmap2")
OTHER_SHAPES = (*SHARED_STATE, "absmax1", "absmax2")  # not shaped like their parameter


def build_optimizer(model: torch.nn.Module, settings: OptimSettings) -> torch.optim.Optimizer:
    """AdamW over every parameter that takes a gradient; weight decay on matrices only.

    Raises MissingExtraError for 8-bit state without bitsandbytes.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    if isinstance(settings, AdamW8bitSettings):
        require_bitsandbytes()
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, lr=settings.rate, betas=betas, eps=settings.eps)
    return torch.optim.AdamW(groups, lr=settings.rate, betas=betas, eps=settings.eps, fused=True)


def learning_rate(update: int, total_updates: int, settings: OptimSettings) -> float:
    """Learning rate of optimizer step `update`, counted from 0: a linear warm-up, then the schedule."""
    if update < settings.warmup_steps:
        return settings.rate * (update + 1) / settings.warmup_steps
    remaining = max(1, total_updates - settings.warmup_steps)
    progress = min(1.0, (update - settings.warmup_steps) / remaining)
    if settings.schedule is Schedule.linear:
        return settings.rate * (1 - progress)
    if settings.schedule is Schedule.cosine:
        return settings.rate * (1 + cos(pi * progress)) / 2
    return settings.rate


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def learning_rate_of(optimizer: torch.optim.Optimizer) -> float:
    """The current learning rate."""
    return optimizer.param_groups[0]["lr"]


def optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The RNG state, and the optimizer's moments under the names of their parameters."""
    tensors = {"rng": torch.get_rng_state()}
    if is_sharded(model):  # each rank writes its moments: `rlpost.model.sharding.save_moments`
        return tensors
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            saved = torch.as_tensor(value)  # a count may be an int
            # clone shared tables: a file takes no tensor twice
            tensors[f"optimizer/{key}/{name}"] = saved.clone() if key in SHARED_STATE else saved
    return tensors


def restore_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Restore the state from `optimizer_tensors`. Raises CheckpointError if it belongs to another model."""
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        if key == "rng":
            continue
        _, moment, name = key.split("/", 2)
        parameter = parameters.get(name)
        if parameter is None or (value.ndim and moment not in OTHER_SHAPES and value.shape != parameter.shape):
            raise CheckpointError(f"the checkpoint's optimizer state {key} does not fit the model: another model's?")
        # AdamW keeps its step count on the CPU in float32, unless it is fused on a GPU
        on_cpu = not value.ndim and parameter.device.type != "cuda"
        device = torch.device("cpu") if on_cpu else parameter.device
        optimizer.state[parameter][moment] = value.item() if value.dtype is torch.int64 else value.to(device)
    torch.set_rng_state(tensors["rng"])
