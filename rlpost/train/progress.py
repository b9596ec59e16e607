"""How far a training is: the figures of its steps, its best evaluation, and whether it learns anything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlpost import record
from rlpost.errors import DataError
from rlpost.objectives.policy_loss import PolicyOutput, policy_metrics
from rlpost.settings import EnvSettings
from rlpost.settings.commands import HeldOutSettings
from rlpost.text import counted
from rlpost.train.facts import more_held_out

FEWEST_TO_DECIDE = 10  # held-out prompts on which training can be ended early, and as many to report
# what policy_metrics calls it -> its name in metrics.jsonl
TOKEN_METRICS = {
    "clip_fraction": "ratio/clip_fraction",
    "clip_fraction_low": "ratio/clip_low",
    "clip_fraction_high": "ratio/clip_high",
    "ess": "ess",
    "kl_to_ref": "kl/ref",
    "kl_to_sampler": "kl/sampler",
    "sampler_gap": "sampler/logprob_gap",
    "sampler_ess": "sampler/ess",
}
CORRECTION_METRICS = {"sampler_weight_mean": "sampler/weight_mean", "sampler_cut_fraction": "sampler/cut"}


def loss_metrics(updates: Sequence[Sequence[PolicyOutput]], *, corrected: bool) -> dict[str, float]:
    """Metrics of a step's optimizer steps, each given by its microbatches' outputs.

    Losses are means over the optimizer steps, all other metrics over every token read, however rows were split. If
    nothing was read, the loss is 0 and the means are NaN. `corrected` adds the weights that correct for the sampler.
    """
    outputs = [output for update in updates for output in update]
    num_updates = sum(bool(update) for update in updates)
    losses = {"loss/policy": 0.0}
    for output in outputs:
        for name, share in output.losses.items():
            losses[name] = losses.get(name, 0.0) + share.item() / num_updates
    means = policy_metrics([output.terms for output in outputs])
    names = TOKEN_METRICS | (CORRECTION_METRICS if corrected else {})
    entropy = torch.cat([output.entropy for output in outputs]).mean().item() if outputs else float("nan")
    return losses | {names[key]: value.item() for key, value in means.items() if key in names} | {"entropy": entropy}


ENDS_TRAINING = "eval/ends_training"  # 1 in the metrics of an evaluation that has ended training early
PATIENCE = 5  # steps before a run that stands still says so


@dataclass
class BestSoFar:
    """The evaluation after a step with the highest held-out figure; the earlier of equal ones.

    The figure is lenient accuracy and, between equal ones or where none is measured, the reward; of the prompts that
    decide when training ends, where some are kept for that. Where no reply is scored it is the loss, the lowest.
    """

    best_step: int | None = None  # None: no evaluation has measured any
    best_accuracy: float | None = None
    best_reward: float | None = None
    best_loss: float | None = None
    evaluated_step: int = 0  # the last step whose evaluation was compared
    evaluations_since_best: int = 0

    def is_new_best(self, step: int, evaluated: Mapping[str, float]) -> bool:
        """Compare the evaluation after `step` with the best so far; returns whether it is the new best."""
        figure, reward = decisive(evaluated), decisive_reward(evaluated)
        if step <= self.evaluated_step or figure is None:
            return False
        if self.best_accuracy is not None and not figure.is_share:  # a reward cannot be compared with an accuracy
            return False
        self.evaluated_step = step
        self.evaluations_since_best += 1
        accuracy = figure.value if figure.is_share else None
        earned = reward.value if reward is not None else None
        loss = figure.value if accuracy is None and earned is None else None
        if self.best_step is not None:
            so_far = self.best_accuracy or 0.0, self.best_reward or 0.0
            is_better = (accuracy or 0.0, earned or 0.0) > so_far
            if loss is not None:
                is_better = self.best_loss is not None and loss < self.best_loss
            if not is_better:
                return False
        self.best_step, self.evaluations_since_best = step, 0
        self.best_accuracy, self.best_reward, self.best_loss = accuracy, earned, loss
        return True


def decisive(evaluated: Mapping[str, float]) -> record.Interval | None:
    """The figure by which evaluations are compared: accuracy, reward, or the loss of rows; None without any."""
    decides = _deciding(evaluated, record.ACCURACY) or _deciding(evaluated, record.REWARD)
    return decides or record.main_figure(evaluated) or record.interval(evaluated, record.LOSS)


def decisive_reward(evaluated: Mapping[str, float]) -> record.Interval | None:
    """The reward of the prompts by which evaluations are compared."""
    return _deciding(evaluated, record.REWARD) or record.interval(evaluated, record.REWARD)


def _deciding(evaluated: Mapping[str, float], key: str) -> record.Interval | None:
    """A figure of the prompts that decide when training ends; None if none are kept for that."""
    return record.interval(evaluated, key.replace("eval/", record.DECIDING))


@dataclass
class LearningSoFar:
    """Whether any step of the run had a gradient, and whether any two completions earned different rewards."""

    steps_watched: int = 0
    had_gradient: bool = False
    reward_varied: bool = False
    first_reward: float | None = None
    stands_still: str = ""  # the likely reason while nothing is learned, from the latest step

    def take_in(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of one more step."""
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
    """The progress of a training; a loop leaves at 0 the counts that it does not keep."""

    step: int = 0  # steps done
    updates: int = 0  # optimizer steps done
    nothing_selected: int = 0  # steps that had nothing to train on
    eval_before: dict[str, float] | None = None  # the evaluation before the first step
    eval_after: dict[str, float] | None = None  # the latest one after a step
    symptoms: list[str] = field(default_factory=list)  # names of the symptoms that were reported
    ended_early: str = ""  # why a watcher has ended the run
    ended_length: list[int | None] = field(default_factory=list)  # steps and epochs that it was to have then
    entropy: float | None = None  # of the last step that read a token
    entropy_coef: float | None = None  # as loss.entropy_target has adapted it


def check_measured(settings: HeldOutSettings, evaluated: Mapping[str, float]) -> None:
    """Raise DataError if eval.stop_at_accuracy is set and the environment measures no accuracy."""
    if settings.stop_at_accuracy is not None and record.ACCURACY not in evaluated:
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
        measured = "accuracy" if figure.is_share else "reward" if reward else "loss"
        how = "has not fallen" if measured == "loss" else "has not risen"
        return (
            f"the {measured} {where} {how} in {counted(progress.evaluations_since_best, 'evaluation')} since step "
            f"{progress.best_step} (eval.patience={patience})"
        )
    return ""


def evaluations_until(checkpoint: Path, step: int) -> list[dict[str, Any]]:
    """The evaluations up to `step` of the run of `checkpoint`, which was saved before its own evaluation."""
    rows, _ = record.read_metrics(checkpoint.resolve().parents[1] / "metrics.jsonl")
    return [row for row in rows if 0 < row["step"] <= step and record.has_evaluation(row)]


def check_enough_to_decide(held_out: HeldOutSettings, env: EnvSettings, prompts: int) -> None:
    """Raise DataError where that number of held-out `prompts` is too few to decide when training ends and to report."""
    played = min(held_out.limit or env.eval_limit, prompts)
    if held_out.stops and played // 2 < FEWEST_TO_DECIDE:
        raise DataError(
            f"{held_out.stops[0]} is decided on half of the held-out prompts, and the other half is reported: "
            f"{counted(played, 'prompt')} are too few, it takes {2 * FEWEST_TO_DECIDE}; "
            f"{more_held_out(env, is_limited=played < prompts)}, or leave it out"
        )


@dataclass(frozen=True)
class Closing:
    """The end of a training: notes, and how its model can be used next."""

    notes: Sequence[str] = ()
    talks: bool = False  # whether talking to it shows something
    reward_words: list[str] | None = None  # the settings with which replies can be scored, of a model tuned on rows
