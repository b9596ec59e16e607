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


@dataclass(frozen=True)
class UsualRates:
    """The lowest and the highest learning rate that a kind of training is known to be done with."""

    kind: str
    whole: tuple[float, float]  # of all weights
    adapter: tuple[float, float]  # of LoRA's A and B, which want about 10 times as much

    def question(self, lr: float, *, adapter: bool) -> str | None:
        """One line about a rate beyond them; None for one within."""
        low, high = self.adapter if adapter else self.whole
        if low <= lr <= high:
            return None
        return (
            f"optim.lr={lr:g} is unusually {'low' if lr < low else 'high'}: {self.kind} of "
            f"{'an adapter' if adapter else 'all weights'} is done with {low:g} to {high:g}"
        )


# From rewards: INTELLECT-2 trains 32B at 3e-7, TRL and verl at 1e-6, AReaL 1.5B at 1.7e-5, rlpost's default for 135M is
# 2e-5; adapters: verl 3e-6, TRL 1e-5, tinker 9B at 8e-5 and small models up to 5e-4. Ten times less than any of them
# moves nothing in a run's length, and ten times more has broken every model.
GRPO_RATES = UsualRates("GRPO", (1e-8, 1e-4), (1e-6, 1e-3))
# From demonstrations: 1e-6 (70B) to 5e-5 for most, 1e-3 for models of 100M and less; adapters 1e-5 to 1e-3.
SFT_RATES = UsualRates("fine-tuning", (1e-7, 1e-3), (1e-6, 5e-3))


@dataclass
class OptimSettings(Settings, group="optim"):
    """AdamW, its schedule and gradient clipping."""

    lr: float = limited(2e-5, above=0.0)  # learning rate after the warm-up; an adapter wants about 10 times as much
    weight_decay: float = limited(0.0, at_least=0.0)  # of matrices only, apart from the gradient
    beta1: float = limited(0.9, 0.0, 0.9999)  # decay of the gradient's running mean
    beta2: float = limited(0.999, 0.0, 0.99999)  # decay of the squared gradient's running mean
    eps: float = limited(1e-8, above=0.0)  # added to the root of the squared gradient's mean
    warmup_steps: int = limited(0, at_least=0)  # optimizer steps over which lr rises to its value
    schedule: Schedule = Schedule.linear  # of lr after the warm-up
    max_grad_norm: float = limited(1.0, above=0.0)  # a longer gradient is scaled down to it


@dataclass
class AdamW8bitSettings(OptimSettings):
    """AdamW of bitsandbytes (arXiv:2110.02861): running means in 8 bits, a quarter of the memory."""
