"""How a gradient becomes an update."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rlpost.settings.checks import above, at_least, between


class Schedule(Enum):
    """How the learning rate goes on after its warm-up; linear and cosine end at 0."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class OptimSettings:
    """AdamW, its schedule and gradient clipping."""

    lr: float = 1.5e-5  # learning rate after the warm-up; an adapter (lora.enabled) wants about 10 times as much
    weight_decay: float = 0.0  # of matrices only, apart from the gradient
    beta1: float = 0.9  # decay of the gradient's running mean
    beta2: float = 0.999  # decay of the squared gradient's running mean
    eps: float = 1e-8  # added to the root of the squared gradient's mean
    warmup_steps: int = 0  # optimizer steps over which lr rises to its value
    schedule: Schedule = Schedule.constant  # of lr after the warm-up
    max_grad_norm: float = 1.0  # a longer gradient is scaled down to it

    def __post_init__(self) -> None:
        above("optim.lr", self.lr, 0.0)
        at_least("optim.weight_decay", self.weight_decay, 0.0)
        between("optim.beta1", self.beta1, 0.0, 0.9999)
        between("optim.beta2", self.beta2, 0.0, 0.99999)
        above("optim.eps", self.eps, 0.0)
        at_least("optim.warmup_steps", self.warmup_steps, 0)
        above("optim.max_grad_norm", self.max_grad_norm, 0.0)


@dataclass
class AdamW8bitSettings(OptimSettings):
    """AdamW of bitsandbytes (arXiv:2110.02861): running means in 8 bits, a quarter of the memory."""
