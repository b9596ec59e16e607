"""How a gradient becomes an update."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rlpost.settings.checks import Settings, limited


class Schedule(Enum):
    """How the learning rate goes on after its warm-up; linear and cosine end at 0."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class OptimSettings(Settings, group="optim"):
    """AdamW, its schedule and gradient clipping."""

    lr: float = limited(1.5e-5, above=0.0)  # learning rate after the warm-up; an adapter wants about 10 times as much
    weight_decay: float = limited(0.0, at_least=0.0)  # of matrices only, apart from the gradient
    beta1: float = limited(0.9, 0.0, 0.9999)  # decay of the gradient's running mean
    beta2: float = limited(0.999, 0.0, 0.99999)  # decay of the squared gradient's running mean
    eps: float = limited(1e-8, above=0.0)  # added to the root of the squared gradient's mean
    warmup_steps: int = limited(0, at_least=0)  # optimizer steps over which lr rises to its value
    schedule: Schedule = Schedule.constant  # of lr after the warm-up
    max_grad_norm: float = limited(1.0, above=0.0)  # a longer gradient is scaled down to it


@dataclass
class AdamW8bitSettings(OptimSettings):
    """AdamW of bitsandbytes (arXiv:2110.02861): running means in 8 bits, a quarter of the memory."""
