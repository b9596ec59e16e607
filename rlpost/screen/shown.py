"""One completion of a batch, as people read it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensordict import TensorDictBase


@dataclass(frozen=True)
class Shown:
    """What was asked, what came back and what it earned; a reward that failed is None, as is a missing measure."""

    step: int
    prompt: str
    completion: str
    reward: float | None
    reward_parts: dict[str, float]
    finish_reason: str
    accuracy_strict: float | None
    accuracy_lenient: float | None

    @classmethod
    def first_of(cls, step: int, batch: TensorDictBase) -> Shown:
        """The first completion of a step's batch."""
        parts = {name: values[0].item() for name, values in batch["next", "reward_parts"].items()}
        return cls(
            step=step,
            prompt=str(batch["query"][0]),
            completion=str(batch["text", "response"][0]),
            reward=batch["next", "reward"][0].item() if batch["valid"][0] else None,
            reward_parts={name: value for name, value in parts.items() if not math.isnan(value)},
            finish_reason=str(batch["finish_reason"][0]),
            accuracy_strict=_measured(batch["next", "accuracy_strict"][0].item()),
            accuracy_lenient=_measured(batch["next", "accuracy_lenient"][0].item()),
        )


def _measured(value: float) -> float | None:
    return None if math.isnan(value) else value
