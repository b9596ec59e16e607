"""On-policy distillation, from top to bottom: sample, compare with the teacher, update, push weights.

The model learns from a teacher's probabilities of its own completions (GKD, arXiv:2306.13649). The teacher is another
model, or the model itself with a hint in its prompt, which it learns to do without. Rewards are shown and not learned
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rlpost.model.locate import locate_tokenizer
from rlpost.model.packing import Row, rows_of
from rlpost.model.tokenizer import check_same_ids
from rlpost.model.trainable import starting_tokenizer
from rlpost.objectives.distillation import DistillationObjective, distillation_metrics
from rlpost.policies.drawing import training_sampling
from rlpost.settings import DistillSettings
from rlpost.train.assemble import assemble_sampling
from rlpost.train.grpo import minibatches, updates_per_step
from rlpost.train.run import Run
from rlpost.train.sampling import SamplingParts, look_at_completions
from rlpost.train.step import Step

DistillParts = SamplingParts[DistillationObjective]


def assemble(settings: DistillSettings, checkpoint: Path | None = None) -> DistillParts:
    """The parts of `rlpost train distill`; see `assemble_grpo`. Raises ConfigError for a teacher of other tokens."""
    if settings.teacher is not None:
        tokenizer, _ = starting_tokenizer(settings.model, settings.lora.path, checkpoint)
        check_same_ids(tokenizer, locate_tokenizer(settings.teacher, key="teacher"), f"teacher={settings.teacher}")
    temperature = training_sampling(settings.sampling, settings.env).temperature
    objective = DistillationObjective(settings.loss, temperature=temperature)
    parts = assemble_sampling(settings, checkpoint, objective)
    with parts.opened as opened:
        objective.check(parts.model, parts.reference)
        parts.opened = opened.pop_all()
    return parts


def learn(run: Run[DistillSettings, DistillParts], parts: DistillParts) -> None:
    """The loop: every step still to do."""
    settings, temperature = run.settings, parts.objective.temperature
    prompts, size, passes = settings.prompts_per_step, settings.minibatch_size, settings.passes
    ranks = run.ranks.over(settings.steps * updates_per_step(prompts * settings.group_size, size, passes))
    reads = not settings.loss.whole_vocabulary  # whether the loss needs the teacher's log-probs
    changes = settings.hint is not None  # whether the teacher is the model, which changes with each update
    for step in run.steps():
        step.metrics |= parts.collector.fill(prompts)  # sample until the buffer has whole groups, none too old
        batch = parts.buffer.take(prompts)  # each group once
        look_at_completions(step, parts.policy, batch, settings.max_failed_share, learns_from_rewards=False)

        rows = rows_of(batch)
        if reads and not changes:
            ranks.fill_reference(rows, temperature)
        for minibatch in minibatches(rows, size, passes):
            if reads and changes:
                ranks.fill_reference(minibatch, temperature)
            step.update(minibatch)
        step.metrics |= update_metrics(step, rows)
        if step.metrics.get("kl/teacher") == 0:
            step.explanation = "the teacher gives every sampled token the model's own probability, as a copy would"

        step.push(parts.collector)  # and the policy's version rises
        step.trained_on(batch, rows)


def update_metrics(step: Step, rows: Sequence[Row]) -> dict[str, float]:
    """The metrics of the step's optimizer steps; the gap is between the sampler and the model as it first read."""
    gaps = [
        (row.trainer_log_probs - row.sampler_log_probs)[row.sampled].abs()
        for row in rows
        if row.trainer_log_probs is not None
    ]
    return distillation_metrics([u.outputs for u in step.updates]) | {
        "sampler/logprob_gap": torch.cat([torch.empty(0), *gaps]).mean().item(),
    }
