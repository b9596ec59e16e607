"""A training that learns nothing says so: no step with a gradient, or a reward that is always the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlpost.run import Run
from rlpost.settings import ExpertIterationSettings, GRPOSettings
from rlpost.text import counted

PATIENCE = 5  # steps before a run that stands still says so


@dataclass
class LearningSoFar:
    """Whether any step of the run had a gradient, and whether any two completions earned different rewards."""

    steps_watched: int = 0
    had_gradient: bool = False
    reward_varied: bool = False
    first_reward: float | None = None
    stands_still: str = ""  # what the latest step gives as the reason, while nothing is learned

    def take_in(self, metrics: Mapping[str, float]) -> None:
        """The metrics of one more step."""
        self.steps_watched += 1
        self.had_gradient |= metrics["grad_norm"] > 0
        mean = metrics.get("reward/mean", math.nan)
        if math.isfinite(mean):
            self.first_reward = mean if self.first_reward is None else self.first_reward
            self.reward_varied |= metrics["reward/std"] > 0 or not math.isclose(mean, self.first_reward, abs_tol=1e-9)

    @property
    def same_reward(self) -> float | None:
        """The reward of every completion so far; None where they differ, or there is none."""
        return None if self.reward_varied else self.first_reward


def watch(run: Run, learning: LearningSoFar, metrics: Mapping[str, float], why: Callable[[], str]) -> None:
    """Take in a step; after a few of them without a gradient, or with one reward alone, say so and `why`, once."""
    learning.take_in(metrics)
    stands_still = not learning.had_gradient or learning.same_reward is not None
    learning.stands_still = why() if stands_still else ""
    if stands_still and learning.steps_watched == PATIENCE:
        run.warn(f"{_what(learning, f'the first {PATIENCE} steps')}; likely reason: {learning.stands_still}")


def say_at_end(run: Run, learning: LearningSoFar) -> None:
    """Say of a run that ends whether it has learned nothing."""
    if learning.steps_watched and learning.stands_still:
        steps = f"the {counted(learning.steps_watched, 'step')} of this run"
        run.warn(f"{_what(learning, steps)}; likely reason: {learning.stands_still}")


def _what(learning: LearningSoFar, steps: str) -> str:
    if not learning.had_gradient:
        return f"there was no gradient in {steps}, so the weights are those it began with"
    return f"every completion in {steps} earned the same reward, so nothing was learned from it"


def why_sampled(
    settings: GRPOSettings | ExpertIterationSettings, run: Run, learning: LearningSoFar, metrics: Mapping[str, float]
) -> str:
    """The likely reason why nothing is learned from a step's completions, and what to do."""
    reward, look = learning.same_reward, f"read some with rlpost rollouts show {run.folder}"
    if metrics["completion/truncated"] == 1:
        limit = settings.env.max_completion_tokens
        return f"every completion is cut at env.max_completion_tokens={limit}; raise it"
    if reward is not None and metrics.get("accuracy/lenient") == 1:
        return "every completion is right; the task is too easy for this model"
    if reward == 0:
        return f"every reward is 0: the task is too hard, or the reward does not find the answer in the reply; {look}"
    if reward is not None:
        return f"every reward is {reward:g}, which tells no completion from another; {look}"
    if isinstance(settings, ExpertIterationSettings):
        bar = "better than its prompt's median" if settings.min_reward is None else f"worth {settings.min_reward:g}"
        return f"no completion was {bar}; {look}"
    if metrics["groups/zero_std"] == 1:
        return "the completions of each prompt earn the same; raise group_size or sampling.temperature"
    return "no token is left to train on; see loss.clip_low, loss.clip_high, overlong.mask and max_policy_lag"
