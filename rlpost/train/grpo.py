"""GRPO (arXiv:2402.03300), from top to bottom: sample groups, compare, update, push weights.

Departures from the paper, all by default: no KL term and no reference model (`loss.kl_coef`), the
loss is averaged over all tokens of a minibatch rather than per completion (DAPO, arXiv:2503.14476),
and one update a step, so the ratio to the old policy is 1 and the clip idle until `passes` or
`minibatch_size` ask for more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rlpost.assemble import GRPOParts, assemble_grpo, build_tracker, resolve_numbers
from rlpost.batching import Row, rows_of
from rlpost.evaluate import EvalResult
from rlpost.memory import keep_freed_memory
from rlpost.objectives.advantage import give_advantages, has_spread, kl_in_reward
from rlpost.objectives.overlong import mask_overlong, penalise_overlong
from rlpost.objectives.policy_objective import PolicyOutput
from rlpost.optim import learning_rate_of
from rlpost.output import output_into
from rlpost.rollouts import write_rollouts
from rlpost.run import Run
from rlpost.screen import Screen
from rlpost.settings import GRPOSettings
from rlpost.settings.run import RunRequest
from rlpost.train.metrics import batch_metrics, loss_metrics, time_metrics
from rlpost.train.narration import announce, conclude
from rlpost.train.needs import check_needs
from rlpost.train.sampled import (
    SampledProgress,
    begin,
    check_failed,
    finish_step,
    owed_evaluation,
    resume,
    show_sampling,
)
from rlpost.train.standstill import say_at_end
from rlpost.train.update import Learner, Microbatches, Update, diverged, fill_reference, read_log_probs, update


@dataclass
class Progress(SampledProgress):
    """How far a training is."""

    updates: int = 0  # optimizer steps done


def train(settings: GRPOSettings, request: RunRequest) -> int:
    """Run or resume the training that `settings` describes; returns the process's exit code."""
    screen = Screen(plain=request.plain)
    tracker = build_tracker(settings.tracking, request)
    with Run(request, seed=settings.seed, total_steps=settings.steps, screen=screen, tracker=tracker) as run:
        keep_freed_memory()
        torch.manual_seed(settings.seed)
        torch.use_deterministic_algorithms(settings.deterministic)
        checkpoint = run.resume_from
        run.catch_signals()
        check_needs(settings, run)
        with screen, contextlib.ExitStack() as opened:  # what an engine says while it closes is not for the terminal
            with screen.waiting("loading the model, starting the policy"), output_into(run.folder / "log.txt"):
                settings, numbers = resolve_numbers(settings, checkpoint)
                run.keep_numbers(numbers.record())
                parts = opened.enter_context(contextlib.closing(assemble_grpo(settings, checkpoint)))
                parts.policy.start()
            announce(settings, parts, numbers, run)
            show_sampling(parts, screen)
            if checkpoint:
                progress = resume(settings, parts, run, checkpoint, Progress)
            else:
                progress = begin(settings, parts, run, Progress())
            after = learn(settings, parts, run, progress)
            screen.phase("closing", "the policy")
        conclude(run, progress.step, progress.eval_before, after, progress)
        say_at_end(run, progress)
    return run.exit_code


def learn(settings: GRPOSettings, parts: GRPOParts, run: Run, progress: Progress) -> EvalResult | None:
    """The loop: every step still to do. Returns the evaluation after the last, if there was one."""
    after = owed_evaluation(settings, parts, run, progress)
    screen = run.screen
    accept = has_spread if settings.dynamic.enabled else None
    learner = Learner(
        parts.model,
        parts.optimizer,
        parts.objective,
        settings.optim,
        settings.model.autocast,
        total_updates=settings.steps * updates_per_step(settings),
    )
    microbatches = Microbatches.shown_on(screen, settings.tokens_per_microbatch, parts.device)
    for step in run.steps(done=progress.step):
        started = time.perf_counter()
        batch = parts.buffer.take(settings.prompts_per_step, settings.max_policy_lag, accept)
        if settings.overlong.penalty_tokens:
            penalise_overlong(batch, settings.env.max_completion_tokens, settings.overlong.penalty_tokens)
        metrics = batch_metrics(batch, settings.group_size, parts.collector.policy_version)
        check_failed(settings, step, metrics)
        metrics |= parts.buffer.take_counts()
        collected = time.perf_counter()
        parts.policy.rest()

        screen.phase("training")
        rows = rows_of(batch)
        fill_log_probs(settings, parts, microbatches, rows)
        metrics |= give_advantages(settings, batch, rows)
        trained = rows
        if settings.overlong.mask:
            trained = mask_overlong(batch, rows)
            metrics["completion/masked_overlong"] = tell_masked(settings, run, step, trained)
        updates: list[Update[PolicyOutput]] = []
        for minibatch in minibatches(settings, trained):
            try:
                updates.append(update(learner, microbatches, minibatch, progress.updates))
            except FloatingPointError as error:
                folder = run.folder / f"diverged-step-{step:06d}"
                write_rollouts(folder / "rollouts.parquet", step, batch)
                raise diverged(parts.model, parts.tokenizer, folder, f"step {step}: {error}") from error
            progress.updates += 1
        metrics |= update_metrics(settings, parts, microbatches, rows, updates)
        updated = time.perf_counter()

        if any(u.stepped for u in updates):
            screen.phase("pushing weights")
            parts.collector.update_policy_weights_(parts.model)
        metrics |= parts.collector.take_seconds()
        metrics |= time_metrics(started, collected, updated, time.perf_counter())
        after = finish_step(settings, parts, run, progress, step, metrics, batch) or after
    return after


def minibatches(settings: GRPOSettings, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """The rows of each optimizer step: whole groups, in the order they were drawn, `passes` times."""
    size = settings.minibatch_size or len(rows)
    for _ in range(settings.passes):
        for start in range(0, len(rows), size):
            yield rows[start : start + size]


def updates_per_step(settings: GRPOSettings) -> int:
    """Optimizer steps that one step's completions are used for."""
    completions = settings.prompts_per_step * settings.group_size
    return settings.passes * (completions // (settings.minibatch_size or completions))


def tell_masked(settings: GRPOSettings, run: Run, step: int, rows: Sequence[Row]) -> float:
    """How many of `rows` have nothing to train on; says so where that is all of them."""
    masked = sum(row.num_trained == 0 for row in rows)
    if masked == len(rows):
        run.screen.note(
            f"step {step} trains on nothing: all completions were cut at env.max_completion_tokens="
            f"{settings.env.max_completion_tokens}, and overlong.mask=true leaves those out; raise the limit"
        )
    return float(masked)


def fill_log_probs(settings: GRPOSettings, parts: GRPOParts, microbatches: Microbatches, rows: Sequence[Row]) -> None:
    """Give `rows` the log-probs of the reference, and of the model before the first update, where those are read."""
    fill_reference(
        parts.reference,
        microbatches,
        rows,
        kind=settings.model.autocast,
        temperature=settings.sampling.temperature,
    )
    if updates_per_step(settings) > 1 or kl_in_reward(settings):
        for row, log_probs in zip(rows, log_probs_of(settings, parts.model, microbatches, rows), strict=True):
            row.old_log_probs = log_probs


def log_probs_of(
    settings: GRPOSettings, model: nn.Module, microbatches: Microbatches, rows: Sequence[Row]
) -> list[torch.Tensor]:
    """log π of `model` for each row, at the sampling temperature."""
    return read_log_probs(
        model, microbatches, rows, kind=settings.model.autocast, temperature=settings.sampling.temperature
    )


def update_metrics(
    settings: GRPOSettings,
    parts: GRPOParts,
    microbatches: Microbatches,
    rows: list[Row],
    updates: list[Update[PolicyOutput]],
) -> dict[str, float]:
    """What the step's optimizer steps did; the gap between sampler and trainer even where they did nothing."""
    outputs = [output for u in updates for output in u.outputs]
    metrics = loss_metrics([u.outputs for u in updates], corrected=parts.objective.sampler_correction != "none")
    norms = [u.grad_norm for u in updates if u.stepped]
    if not outputs:
        longest = max(rows, key=lambda row: row.num_trained)
        [log_probs] = log_probs_of(settings, parts.model, microbatches, [longest])
        difference = (log_probs - longest.sampler_log_probs)[longest.sampled]
        metrics["sampler/logprob_gap"] = difference.abs().mean().item()
    return metrics | {
        "grad_norm": sum(norms) / len(norms) if norms else 0.0,
        "lr": learning_rate_of(parts.optimizer),
        "tokens/trained": float(sum(output.num_tokens for output in outputs)),
    }
