"""How far a training is, which of its evaluations was best, and whether it learns anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpost.config.paths import BEST
from rlpost.errors import DataError
from rlpost.record import ACCURACY, DECIDING, REWARD, Interval, has_evaluation, interval, main_figure, read_metrics
from rlpost.runs.checkpoint import point_best
from rlpost.runs.writer import Run
from rlpost.settings.evaluation import HeldOutSettings
from rlpost.text import counted

ENDS_TRAINING = "eval/ends_training"  # 1 in the metrics of an evaluation that has ended training early
PATIENCE = 5  # steps before a run that stands still says so


@dataclass
class BestSoFar:
    """The evaluation after a step with the highest held-out figure; the earlier of equal ones.

    The figure is lenient accuracy and, between equal ones or where none is measured, the reward; of the prompts that
    decide when training ends, where some are kept for that.
    """

    best_step: int | None = None  # None: no evaluation has measured either
    best_accuracy: float | None = None
    best_reward: float | None = None
    evaluated_step: int = 0  # the last one whose evaluation was taken in
    evaluations_since_best: int = 0

    def is_new_best(self, step: int, evaluated: Mapping[str, float]) -> bool:
        """Take in the metrics of the evaluation after `step`; whether it is the best from now on."""
        figure, reward = decisive(evaluated), decisive_reward(evaluated)
        if step <= self.evaluated_step or figure is None:
            return False
        if self.best_accuracy is not None and not figure.is_share:  # a reward is no accuracy
            return False
        self.evaluated_step = step
        self.evaluations_since_best += 1
        accuracy, earned = figure.value if figure.is_share else 0.0, reward.value if reward else 0.0
        so_far = self.best_accuracy or 0.0, self.best_reward or 0.0
        if self.best_step is not None and (accuracy, earned) <= so_far:
            return False
        self.best_step, self.evaluations_since_best = step, 0
        self.best_accuracy = accuracy if figure.is_share else None
        self.best_reward = earned if reward else None
        return True


def decisive(evaluated: Mapping[str, float]) -> Interval | None:
    """What evaluations are compared by; None for one that measures nothing of the kind."""
    deciding = interval(evaluated, ACCURACY.replace("eval/", DECIDING))
    return deciding or interval(evaluated, REWARD.replace("eval/", DECIDING)) or main_figure(evaluated)


def decisive_reward(evaluated: Mapping[str, float]) -> Interval | None:
    """The reward of the prompts that `decisive` is of."""
    return interval(evaluated, REWARD.replace("eval/", DECIDING)) or interval(evaluated, REWARD)


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


@dataclass
class Progress(LearningSoFar, BestSoFar):
    """How far a training is; what a loop does not count stays 0."""

    step: int = 0  # steps done
    updates: int = 0  # optimizer steps done
    nothing_selected: int = 0  # steps that had nothing to train on
    position: int = 0  # samples trained on, those of every epoch counted
    eval_before: dict[str, float] | None = None  # the evaluation before the first step
    eval_after: dict[str, float] | None = None  # the latest one after a step
    symptoms: list[str] = field(default_factory=list)  # names of those that were told


def check_measured(settings: HeldOutSettings, evaluated: Mapping[str, float]) -> None:
    """Raise DataError for an accuracy that ends training and that the environment does not measure."""
    if settings.stop_at_accuracy is not None and ACCURACY not in evaluated:
        raise DataError(
            "eval.stop_at_accuracy: this environment measures no accuracy: set env.accuracy where it has that, or take "
            "eval.stop_at_reward in its place"
        )


def why_ended(settings: HeldOutSettings, progress: Progress) -> str:
    """Why the latest evaluation ends training before its last step; empty where it does not."""
    evaluated, patience = progress.eval_after, settings.patience
    targets = {"accuracy": settings.stop_at_accuracy, "reward": settings.stop_at_reward}
    figure = None if evaluated is None else decisive(evaluated)
    if evaluated is None or figure is None or not settings.stops:
        return ""
    check_measured(settings, evaluated)
    where = f"on the {counted(figure.prompts, 'prompt')} that decide" if figure.prompts else "held out"
    reward = decisive_reward(evaluated)
    for (name, wanted), found in zip(targets.items(), (figure, reward), strict=True):
        if wanted is not None and found is not None and found.value >= wanted:
            return f"the {name} {where}, {f'{found}'.strip()}, has reached eval.stop_at_{name}={wanted:g}"
    if patience is not None and progress.evaluations_since_best >= patience:
        name = "accuracy" if figure.is_share else "reward"
        return (
            f"the {name} {where} has not risen in {counted(progress.evaluations_since_best, 'evaluation')} since step "
            f"{progress.best_step} (eval.patience={patience})"
        )
    return ""


def restore_best(run: Run, best: BestSoFar) -> None:
    """Let `checkpoints/best` be what it was at the step that the run goes on from."""
    if not point_best(run.folder / "checkpoints", best.best_step) and best.best_step is not None:
        run.screen.note(
            f"the checkpoint of step {best.best_step}, the best so far, is no longer there: "
            f"checkpoints/{BEST} comes back with a better one"
        )


def evaluations_until(checkpoint: Path, step: int) -> list[dict[str, Any]]:
    """The lines of the evaluations up to `step` of the run that `checkpoint` is of: it was saved before its own."""
    rows, _ = read_metrics(checkpoint.resolve().parents[1] / "metrics.jsonl")
    return [row for row in rows if 0 < row["step"] <= step and has_evaluation(row)]


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
