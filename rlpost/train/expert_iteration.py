"""Expert iteration, from top to bottom: sample, keep each prompt's best, fine-tune on them, push weights.

ReST-EM (arXiv:2312.06585) samples anew in each round and fine-tunes on what a reward lets through,
as STaR (arXiv:2203.14465) does. Departures from both: a round is one step of a few prompts rather
than a whole data set, and each round goes on from the last one's weights rather than from the
starting model.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

import torch
from tensordict import TensorDict

from rlpost.assemble import ExpertIterationParts, assemble_expert_iteration, build_tracker, resolve_numbers
from rlpost.batching import Row, rows_of
from rlpost.data.topk import best_of_groups
from rlpost.evaluate import EvalResult
from rlpost.memory import keep_freed_memory
from rlpost.objectives.sft_objective import SFTOutput, sft_metrics
from rlpost.optim import learning_rate_of
from rlpost.output import output_into
from rlpost.rollouts import write_rollouts
from rlpost.run import Run
from rlpost.screen import Screen
from rlpost.settings import ExpertIterationSettings
from rlpost.settings.run import RunRequest
from rlpost.text import counted
from rlpost.train.metrics import batch_metrics, time_metrics
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
from rlpost.train.update import Learner, Microbatches, Update, diverged, fill_reference, update


@dataclass
class Progress(SampledProgress):
    """How far a training is."""

    nothing_selected: int = 0  # steps that had nothing to train on


def train(settings: ExpertIterationSettings, request: RunRequest) -> int:
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
                parts = opened.enter_context(contextlib.closing(assemble_expert_iteration(settings, checkpoint)))
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


def learn(
    settings: ExpertIterationSettings, parts: ExpertIterationParts, run: Run, progress: Progress
) -> EvalResult | None:
    """The loop: every step still to do. Returns the evaluation after the last, if there was one."""
    after = owed_evaluation(settings, parts, run, progress)
    screen = run.screen
    learner = Learner(
        parts.model,
        parts.optimizer,
        parts.objective,
        settings.optim,
        settings.model.autocast,
        total_updates=settings.steps * most_updates(settings),
    )
    microbatches = Microbatches.shown_on(screen, settings.tokens_per_microbatch, parts.device)
    for step in run.steps(done=progress.step):
        started = time.perf_counter()
        sampled = parts.buffer.take(settings.prompts_per_step)
        selected = best_of_groups(sampled, settings.topk_size, settings.min_reward)
        metrics = batch_metrics(sampled, settings.group_size, parts.collector.policy_version)
        check_failed(settings, step, metrics)
        metrics |= selection_metrics(sampled, selected)
        metrics["groups/evicted"] = parts.buffer.take_counts()["groups/evicted"]
        collected = time.perf_counter()
        parts.policy.rest()

        screen.phase("training")
        completions = rows_of(sampled)
        rows = [completions[place] for place in selected]
        fill_reference(parts.reference, microbatches, rows, kind=settings.model.autocast)
        updates: list[Update[SFTOutput]] = []
        for number, minibatch in enumerate(minibatches(settings, rows), start=(step - 1) * most_updates(settings)):
            try:
                updates.append(update(learner, microbatches, minibatch, number))
            except FloatingPointError as error:
                folder = run.folder / f"diverged-step-{step:06d}"
                write_rollouts(folder / "rollouts.parquet", step, sampled)
                raise diverged(parts.model, parts.tokenizer, folder, f"step {step}: {error}") from error
        if not updates:
            progress.nothing_selected += 1
            count = f"{progress.nothing_selected} of {counted(step, 'step')} so far"
            screen.note(f"step {step}: no completion was selected, so nothing was learned from it ({count})")
        metrics |= update_metrics(parts, updates) | {"selected/empty_steps": float(progress.nothing_selected)}
        updated = time.perf_counter()

        if updates:
            screen.phase("pushing weights")
            parts.collector.update_policy_weights_(parts.model)
        metrics |= parts.collector.take_seconds()
        metrics |= time_metrics(started, collected, updated, time.perf_counter())
        after = finish_step(settings, parts, run, progress, step, metrics, sampled) or after
    return after


def selection_metrics(sampled: TensorDict, selected: Sequence[int]) -> dict[str, float]:
    """What a step selected of what it sampled, by its places.

    Gives `sampled` the key `advantage`: 1 for what is trained on, else 0.
    """
    places = torch.tensor(selected, dtype=torch.int64)
    sampled["advantage"] = torch.zeros(sampled.batch_size).index_fill(0, places, 1.0)
    return {
        "selected/share": len(selected) / sampled.batch_size[0],
        "selected/reward_mean": sampled["next", "reward"][places].mean().item(),  # NaN where nothing is selected
        "selected/prompts": float(sampled["group_id"][places].unique().numel()),
    }


def most_updates(settings: ExpertIterationSettings) -> int:
    """Optimizer steps of a step that selects as much as it can; the schedule of the learning rate counts these."""
    selected = settings.prompts_per_step * settings.topk_size
    return settings.passes * ceil(selected / (settings.minibatch_size or selected))


def minibatches(settings: ExpertIterationSettings, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """The rows of each optimizer step: as few parts as `minibatch_size` allows, of nearly equal size."""
    parts = ceil(len(rows) / (settings.minibatch_size or max(1, len(rows))))
    for _ in range(settings.passes):
        for part in range(parts):
            yield rows[len(rows) * part // parts : len(rows) * (part + 1) // parts]


def update_metrics(parts: ExpertIterationParts, updates: Sequence[Update[SFTOutput]]) -> dict[str, float]:
    """What the step's optimizer steps did: losses are their means, tokens their sum."""
    each = [sft_metrics(u.outputs) for u in updates]
    means = {name: sum(metrics[name] for metrics in each) / len(each) for name in (each[0] if each else {})}
    return (
        {"loss/sft": 0.0}
        | means
        | {
            "grad_norm": sum(u.grad_norm for u in updates) / max(1, len(updates)),
            "lr": learning_rate_of(parts.optimizer),
            "tokens/trained": sum(metrics["tokens/trained"] for metrics in each),
        }
    )
