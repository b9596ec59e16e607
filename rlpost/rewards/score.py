"""What a reward function returns."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlpost.errors import ConfigError
from rlpost.text import printable

# reward/mean and so on are the step's own figures, and `overlong` is the part that overlong.penalty_tokens adds
TAKEN = ("mean", "std", "failed", "mean_drawn", "kl_penalty", "overlong")

LARGEST = 3.4028234663852886e38  # that float32 holds, in which rewards are trained on


@dataclass(slots=True)
class Score:
    """What an environment thinks of a finished reply.

    `reward` is what is trained on and `parts` what it was made of, by name; `accuracy_strict` and
    `accuracy_lenient` are the task's own 0/1 measure, apart from the reward, or None where the task
    has none. `answer` is what the reply says, written in one way so that equal answers are equal texts:
    "" for a reply that says nothing, None where the task reads no answer out of replies; maj@k votes by
    it. `instructions` has, under strict and loose, whether each of the prompt's instructions is followed;
    None where a task has no instructions. A reward that failed is `valid=False` with its `error`: never a 0.
    Raises ConfigError for a part whose name in the metrics is taken.
    """

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    accuracy_strict: float | None = None
    accuracy_lenient: float | None = None
    answer: str | None = None
    instructions: dict[str, list[bool]] | None = None
    valid: bool = True
    error: str | None = None

    def __post_init__(self) -> None:
        if taken := next((name for name in self.parts if name in TAKEN), None):
            raise ConfigError(f"a part of a reward is named {taken}, but reward/{taken} is a figure of the whole step")


def why_untrainable(value: float) -> str | None:
    """What is wrong with a reward that is no finite number of float32; None for one that can be trained on."""
    if not math.isfinite(value):
        return "which is no finite number"
    return "which is infinite in float32, where rewards are trained on: scale it down" if abs(value) > LARGEST else None


def log_failures(errors: Sequence[str | None], count: int) -> None:
    """Write into the run's log that these of `count` rewards failed; without a run, several go to stderr."""
    if errors:
        level = logging.WARNING if count > 1 else logging.INFO
        first = printable(errors[0] or "no reason given")
        logging.getLogger("rlpost").log(level, "%d of %d rewards failed; the first: %s", len(errors), count, first)
