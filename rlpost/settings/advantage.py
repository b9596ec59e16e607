"""What a completion's reward becomes before it is a gradient, and which completions count."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rlpost.settings.checks import Settings, limited


class Estimator(Enum):
    """What a completion's reward is compared with; std is a standard deviation."""

    grpo = "grpo"  # minus its group's mean, divided by its group's std
    dr_grpo = "dr_grpo"  # minus its group's mean
    rloo = "rloo"  # minus the mean of the others in its group
    reinforce_pp = "reinforce_pp"  # minus the batch's mean, divided by the batch's std; with a KL penalty, per token
    reinforce_pp_baseline = "reinforce_pp_baseline"  # minus its group's mean, divided by the batch's std of that
    lite_ppo = "lite_ppo"  # minus its group's mean, divided by the std of the batch's rewards


@dataclass
class AdvantageSettings:
    """How good a completion is, told from the rewards around it.

    `shuffle_rewards` permutes the rewards within each group before the advantage is taken. It is
    the control experiment: accuracy that still rises, over several seeds, was not learned from the reward.
    """

    estimator: Estimator = Estimator.grpo  # what a reward is compared with
    shuffle_rewards: bool = False  # the control: rewards permuted within each group


@dataclass
class DynamicSamplingSettings(Settings, group="dynamic"):
    """DAPO's dynamic sampling (arXiv:2503.14476): groups whose rewards are all equal are drawn anew.

    Each step then trains on prompts_per_step groups that differ; `groups/drawn` and `groups/dropped`
    say what that took, and `reward/mean_drawn` is the task's mean before anything was dropped.
    """

    enabled: bool = False  # true: groups with equal rewards are dropped and more are drawn
    draw_limit: int = limited(32, at_least=1)  # rounds of prompts_per_step prompts in a step; then the run gives up


@dataclass
class OverlongSettings(Settings, group="overlong"):
    """What becomes of completions near or at env.max_completion_tokens (DAPO, arXiv:2503.14476)."""

    mask: bool = False  # true: what was cut, at the limit or by its context, is not trained on; its reward counts
    penalty_tokens: int = limited(0, at_least=0)  # the last so many tokens cost up to 1 of reward, linearly; 0: none do
