"""What the terminal says before and after every training.

The figures of a step, under the names of metrics.jsonl.

What a training takes of this machine, by estimate, just before it begins.

How far a training is, which of its evaluations was best, and whether it learns anything.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from transformers import PreTrainedModel

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.code import is_code
from rlpost.config.overrides import Override
from rlpost.config.paths import BEST, as_model, newest_checkpoint, step_of
from rlpost.data.conversation import CUT, PolicyVersionLabel
from rlpost.data.template_choice import thinking_cut_short
from rlpost.errors import DataError
from rlpost.estimate.machine import Room
from rlpost.estimate.needs import Needs, needs_of, shape_of_folder, shape_of_model
from rlpost.evaluation.statistics import FEWEST_PROMPTS, Share
from rlpost.model.families import explain
from rlpost.model.load import describe, locate_tokenizer, pick_device
from rlpost.model.logprobs import verdict_of
from rlpost.model.precision import Numbers
from rlpost.objectives.advantage import equal_up_to_rounding
from rlpost.objectives.policy_loss import PolicyOutput, policy_metrics
from rlpost.record import (
    ACCURACY,
    DECIDING,
    LOSS,
    MEANS_STRICT,
    REWARD,
    STRICT,
    Interval,
    has_evaluation,
    interval,
    main_figure,
    main_figures,
    read_metrics,
    says_more,
)
from rlpost.runs.checkpoint import point_best
from rlpost.runs.writer import Run
from rlpost.settings import EnvSettings, MixSettings, ModelSettings, SampledSettings, SFTSettings
from rlpost.settings.commands import HeldOutSettings, says_where
from rlpost.text import counted

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


def batch_metrics(batch: TensorDictBase, group_size: int, version: PolicyVersionLabel | None) -> dict[str, float]:
    """What a step's completions say: (B,) rows in whole groups; `version` is the policy's at their training."""
    reward = batch["next", "reward"].squeeze(-1)
    valid = batch["valid"]
    groups = zip(reward.split(group_size), valid.split(group_size), strict=True)
    no_spread = [equal_up_to_rounding(rewards[counts]) for rewards, counts in groups]
    lengths = torch.tensor([float(mask.sum()) for mask in batch["masks", "all_assistant_mask"].unbind()])
    metrics = {
        "reward/mean": reward[valid].mean().item(),
        "reward/std": reward[valid].std().item(),
        "reward/failed": float((~valid).sum()),
        "groups/zero_std": sum(no_spread) / len(no_spread),
        "completion/tokens_mean": lengths.mean().item(),
        "completion/truncated": sum(r in CUT for r in batch["finish_reason"]) / len(lengths),
        "tokens/generated": lengths.sum().item(),
    }
    if int(batch["turns"].max()) > 1:
        ran_out = batch["next", "truncated"].squeeze(-1).tolist()
        metrics |= {
            "turns/mean": batch["turns"].float().mean().item(),
            "turns/ran_out": sum(t and r not in CUT for t, r in zip(ran_out, batch["finish_reason"], strict=True))
            / len(lengths),
            "tools/calls_mean": batch["tools", "calls"].float().mean().item(),
            "tools/errors_mean": batch["tools", "errors"].float().mean().item(),
        }
    for name, values in batch["next", "reward_parts"].items():
        metrics[f"reward/{name}"] = values.nanmean().item()
    for name in ("strict", "lenient"):
        metrics[f"accuracy/{name}"] = batch["next", f"accuracy_{name}"].nanmean().item()
    metrics |= _by_source(batch, group_size)
    if isinstance(version, int):
        lag = version - batch["policy_version"].float()
        metrics |= {
            "policy/version": float(version),
            "policy/lag_mean": lag.mean().item(),
            "policy/lag_max": lag.max().item(),
        }
    return metrics


def _by_source(batch: TensorDictBase, group_size: int) -> dict[str, float]:
    """The same figures of each source of a mix of environments, under `source/NAME/`; none where it is one.

    Those that are counts add up to the step's, and so do means, each times the completions it is of.
    """
    sources = list(batch["source"])
    metrics: dict[str, float] = {}
    for name in sorted({source for source in sources if source}):
        rows = torch.tensor([source == name for source in sources])
        reward, valid = batch["next", "reward"].squeeze(-1)[rows], batch["valid"][rows]
        sampled = batch["masks", "all_assistant_mask"].unbind()
        lengths = [int(mask.sum()) for mask, source in zip(sampled, sources, strict=True) if source == name]
        groups = zip(reward.split(group_size), valid.split(group_size), strict=True)
        no_spread = [equal_up_to_rounding(rewards[counts]) for rewards, counts in groups]
        own = {
            "completions": float(len(reward)),
            "reward": reward[valid].mean().item(),
            "failed": float((~valid).sum()),
            "zero_std": sum(no_spread) / len(no_spread),
            "tokens_mean": sum(lengths) / len(lengths),
        }
        for kind in ("strict", "lenient"):
            own[f"accuracy_{kind}"] = batch["next", f"accuracy_{kind}"].squeeze(-1)[rows].nanmean().item()
        metrics |= {f"source/{name}/{key}": value for key, value in own.items()}
    return metrics


def loss_metrics(updates: Sequence[Sequence[PolicyOutput]], *, corrected: bool) -> dict[str, float]:
    """What a step's optimizer steps say, each given by its microbatches' outputs.

    Losses are means over the optimizer steps, all else over every token that was read, however it was
    split. Where nothing was read the loss is 0 and the means are NaN: nothing was trained on, which is
    not the same as 0. `corrected` adds the weights that correct for the sampler.
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


def needs_here(settings: Any, folder: Path) -> Needs | None:
    """The needs of a training with `settings` in the run folder `folder`; None where the model's size is not known.

    Of a model of the hub whose size is not known, the configuration is fetched for it.
    """
    model = settings.model
    shape = shape_of_model(model.path, model.revision)
    shape = shape or shape_of_folder(locate_tokenizer(model.path, model.revision))
    device = pick_device(model.device)
    gpu = Room(*torch.cuda.mem_get_info(device)) if device.type == "cuda" else None
    return needs_of(settings, shape, folder, gpu)


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


FEWEST_TO_DECIDE = 10  # held-out prompts on which training can be ended early, and as many to report


def open_screen(run: Run, numbers: Numbers, lines: Sequence[str], notes: Sequence[str | None], about: str) -> None:
    """Say `lines`, where the run leaves its record, and `notes`; then begin to show the steps."""
    follows = f", and {run.tracker.name} follows" if run.tracker else ""
    for line in [*lines, f"writes  {run.folder}{follows}"]:
        run.screen.line(line)
    if numbers.warning is not None:
        run.warn(numbers.warning)
    for note in filter(None, notes):
        run.screen.note(note)
    run.screen.open(title=run.folder.name, about=about, total_steps=run.total_steps, log=run.folder / "log.txt")


def thinking_note(env: EnvSettings, tokenizer: Any) -> str | None:
    """What to say where a completion has no room for the thinking that the model begins with."""
    return thinking_cut_short(tokenizer, env.max_completion_tokens, "env.max_completion_tokens")


def model_line(settings: ModelSettings, folder: Path, model: PreTrainedModel) -> str:
    """The model that is trained."""
    size = _short(sum(p.numel() for p in model.parameters()))
    return f"model   {settings.path}: {describe(folder)}, {size} parameters, {model.device}"


def reading_lines(model: PreTrainedModel, completions_a_prompt: int = 1) -> list[str]:
    """What training `model` in another way than packed costs; none for one that is read packed."""
    line = explain(model, verdict_of(model), completions_a_prompt)
    return [f"reads   {line}"] if line else []


def name_of_data(env: EnvSettings) -> str:
    """The environment, and where its rows come from where it has rows, `GSM8K from data/gsm8k`; a mix's sources."""
    if isinstance(env, MixSettings):
        return f"Mix of {', '.join(env.sources)}"
    source = getattr(env, "path", None)
    return type(env).__name__.removesuffix("Settings") + (f" from {source}" if source else "")


def _short(count: int) -> str:
    """Three digits of a large number: 90.6k, 135M, 1.54B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def say_stopped(run: Run) -> None:
    """Print after which step a signal has ended the run, and the command that goes on from there."""
    saved = newest_checkpoint(run.folder)
    where = "" if says_where(run.request.command) else f" --out {shlex.quote(str(run.folder))}"
    again = f"the same command with --resume auto{where}"
    if saved is not None:  # the checkpoint's run keeps all settings except those that name code
        code = [word for word in run.request.overrides if is_code(Override(*word.split("=", 1)))]
        verb = " ".join(run.request.command[:3])
        again = f"{verb} --resume {shlex.join([str(run.folder), *code])}"
    after = "before the first step" if saved is None else f"after step {step_of(saved)}"
    run.screen.note(f"stopped {after}; to go on: {again}")


def say_evaluate(run: Run, settings: SampledSettings | SFTSettings, *more: str) -> None:
    """Print the command that plays the run's own environment; it names the user's code again, and `more`."""
    words = [word for word in run.request.overrides if word.startswith(("env.", "tools.", "plugin="))]
    code = [word for word in words if is_code(Override(*word.split("=", 1)))]
    has_test = settings.eval.enabled or getattr(settings.env, "held_out", 1.0) > 0
    _say_command(run, "evaluate it:", "eval", *code, *more, *([] if has_test else ["env.split=train"]))


def say_train_on(run: Run, *more: str) -> None:
    """Print the command that trains the run's model with GRPO on the same environment, and `more`."""
    words = [word for word in run.request.overrides if word.startswith(("env=", "env.", "plugin="))]
    taken = [word for word in words if word.partition("=")[0] not in TRAIN_GRPO.without]
    _say_command(run, "train on:", "train grpo", *taken, *more)


def _say_command(run: Run, label: str, verb: str, *words: str) -> None:
    run.screen.line(f"{label:<13} rlpost {verb} {shlex.join([f'model={as_model(run.folder)}', *words])}")


def say_best(run: Run, progress: Progress) -> None:
    """Which step was best, its figure, and where its checkpoint is; nothing where neither measure is there."""
    rows, _ = read_metrics(run.folder / "metrics.jsonl")
    row = next((row for row in rows if row["step"] == progress.best_step), {})
    figure = main_figures([progress.eval_before or {}, row])[-1]
    chosen_by, at_first = decisive(row), decisive(progress.eval_before or {})
    if figure is None or chosen_by is None:
        return
    more = "" if at_first is None or at_first.value <= chosen_by.value else "; the starting model had more"
    name = "" if figure.is_share else "reward "
    place = f"{run.folder}/checkpoints/{BEST}"
    run.screen.line(f"best: after step {progress.best_step}, {name}{figure.told()}, in {place}{more}")


MEASURES = {"loss per token": LOSS, "accuracy": ACCURACY, "accuracy, strict": STRICT, "reward": REWARD}


def say_before_and_after(run: Run, progress: Progress) -> None:
    """Print the held-out figures before and after training, and the number of prompts.

    Strict accuracy and reward are printed only if they differ from the accuracy.
    """
    both = progress.eval_before, progress.eval_after
    if None in both:
        return
    found = {label: [interval(metrics or {}, key) for metrics in both] for label, key in MEASURES.items()}
    values = {label: [figure and figure.value for figure in figures] for label, figures in found.items()}
    rows = {label: figures for label, figures in found.items() if None not in figures}
    if not says_more(values["accuracy, strict"], values["accuracy"]):
        rows.pop("accuracy, strict", None)
    if values["reward"] == values["accuracy"]:
        rows.pop("reward", None)
    counts = [figure.prompts for key, figures in rows.items() if MEASURES[key] != LOSS for figure in figures if figure]
    said = counts[-1] if counts else None
    on = "" if said is None else f" on {counted(said, 'held-out prompt')}"
    run.screen.line("")
    run.screen.line(f"before and after training{on or ', held out'}, 95% intervals", "bold")
    for label, figures in rows.items():
        unit = "row" if MEASURES[label] == LOSS else "prompt"
        told = [figure.told(unit, said=said) for figure in figures if figure]
        run.screen.line(f"  {label:<18}{'  ->  '.join(told)}", "bold")
    if "accuracy, strict" in rows:
        run.screen.line(f"  {MEANS_STRICT}")


def held_out_told(settings: HeldOutSettings, env: EnvSettings, played: int, available: int) -> tuple[list[str], str]:
    """How the held-out prompts that are `played` divide, where some decide; and what to say where they are few.

    `available` are there to be played. Raises DataError where they are too few to decide and to report.
    """
    more = _more_held_out(env, is_limited=played < available)
    decide = played // 2 if settings.stops else 0
    if settings.stops and decide < FEWEST_TO_DECIDE:
        raise DataError(
            f"{settings.stops[0]} is decided on half of the held-out prompts, and the other half is reported: "
            f"{counted(played, 'prompt')} are too few, it takes {2 * FEWEST_TO_DECIDE}; {more}, or leave it out"
        )
    lines = []
    if settings.stops:
        asked = ", ".join(f"{key}={getattr(settings, key.partition('.')[2]):g}" for key in settings.stops)
        lines = [f"ends    early by {asked}: {decide} held-out prompts decide, {played - decide} others are reported"]
    reported = played - decide
    if reported >= FEWEST_PROMPTS:
        return lines, ""
    half = Share.of([1.0] * (reported // 2) + [0.0] * (reported - reported // 2))
    return lines, (
        f"held-out figures will rest on {counted(reported, 'prompt')}, which is few: where half are right, the 95% "
        f"interval goes from {half.low:.0%} to {half.high:.0%}; {more}"
    )


def few_rows_note(env: EnvSettings, rows: int, *, is_limited: bool) -> str:
    """What to say of a held-out loss of few rows."""
    more = _more_held_out(env, is_limited=is_limited)
    return (
        f"the held-out loss will rest on {counted(rows, 'row')}, which is few; {more}" if rows < FEWEST_PROMPTS else ""
    )


def _more_held_out(env: EnvSettings, *, is_limited: bool) -> str:
    if is_limited:
        return "raise eval.limit"
    if hasattr(env, "test_path"):
        return "hold out more with env.test_path=FILE, or a larger env.held_out"
    return "hold out more with a larger env.held_out" if hasattr(env, "held_out") else "hold out more"
