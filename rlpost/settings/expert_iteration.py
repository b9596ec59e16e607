"""Everything `rlpost train expert-iteration` can say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlpost.errors import ConfigError
from rlpost.settings.checks import MISSING, limited
from rlpost.settings.commands import SampledSettings
from rlpost.settings.sft import DemonstrationLossSettings


@dataclass
class ExpertIterationSettings(SampledSettings):
    """`rlpost train expert-iteration`."""

    must_stay: ClassVar = ("seed", "prompts_per_step", "group_size", "topk_size")  # what a run that goes on keeps

    loss: DemonstrationLossSettings = MISSING  # what turns the selected completions into a gradient
    steps: int = limited(30, at_least=1)  # each: sample, reward, select, train on the selection, push the weights
    topk_size: int = limited(4, at_least=1)  # completions a prompt that are trained on, at most
    min_reward: float | None = None  # of a completion that is selected; None: above the median of its prompt's

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.topk_size > self.group_size:
            raise ConfigError(
                f"topk_size={self.topk_size} is more than the group_size={self.group_size} completions of a prompt: "
                "lower it, or raise group_size"
            )
