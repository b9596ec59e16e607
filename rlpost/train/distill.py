"""On-policy distillation, from top to bottom: sample, compare with the teacher, update, push weights.

The model learns from a teacher's probabilities of its own completions (GKD, arXiv:2306.13649). The teacher is another
model, or the model itself with a hint in its prompt, which it learns to do without. Rewards are shown and not learned
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from rlpost.model.load import locate_tokenizer
from rlpost.model.optim import learning_rate_of
from rlpost.model.packing import Row, rows_of
from rlpost.model.tokenizer import check_same_ids
from rlpost.model.trainable import starting_tokenizer
from rlpost.objectives.distillation import DistillationObjective, DistillationOutput, distillation_metrics
from rlpost.policies.drawing import training_sampling
from rlpost.settings import DistillSettings
from rlpost.settings.commands import RunRequest
from rlpost.train.assemble import assemble_sampling
from rlpost.train.grpo import minibatches, updates_per_step
from rlpost.train.sampling import SamplingParts
from rlpost.train.session import Session
from rlpost.train.update import Update

DistillParts = SamplingParts[DistillationObjective]
DistillSession = Session[DistillSettings, DistillParts]


def train(settings: DistillSettings, request: RunRequest) -> int:
    """Run or resume the training that `settings` describes; returns the process's exit code."""
    with DistillSession(settings, request) as session:
        session.load(assemble_distill)
        learn(session)
    return session.run.exit_code


def assemble_distill(settings: DistillSettings, checkpoint: Path | None = None) -> DistillParts:
    """The parts of `rlpost train distill`; see `assemble_grpo`. Raises ConfigError for a teacher of other tokens."""
    if settings.teacher is not None:
        tokenizer, _ = starting_tokenizer(settings, checkpoint)
        check_same_ids(tokenizer, locate_tokenizer(settings.teacher, key="teacher"), f"teacher={settings.teacher}")
    objective = DistillationObjective(settings.loss, temperature=training_sampling(settings).temperature)
    with ExitStack() as opened:
        parts = opened.enter_context(closing(assemble_sampling(settings, checkpoint, objective)))
        objective.check(parts.model, parts.reference)
        opened.pop_all()
    return parts


def learn(session: DistillSession) -> None:
    """The loop: every step still to do."""
    settings, parts = session.settings, session.parts
    ranks = session.ranks.over(settings.steps * updates_per_step(settings))
    reads = not settings.loss.whole_vocabulary  # whether the loss needs the teacher's log-probs
    changes = settings.hint is not None  # whether the teacher is the model, which changes with each update
    for _ in session.steps():
        batch = parts.buffer.take(settings.prompts_per_step, settings.max_policy_lag)  # whole groups, each once
        session.collected(batch)

        rows = rows_of(batch)
        if reads and not changes:
            ranks.fill_reference(rows, parts.objective.temperature)
        updates: list[Update[DistillationOutput]] = []
        for minibatch in minibatches(settings, rows):
            if reads and changes:
                ranks.fill_reference(minibatch, parts.objective.temperature)
            updates.append(session.update(minibatch, batch))
        session.metrics |= update_metrics(parts, rows, updates)
        session.trained(updates)

        if any(u.stepped for u in updates):
            parts.collector.update_policy_weights_(parts.model)  # and the policy's version rises
        session.finish(batch, rows)


def update_metrics(
    parts: DistillParts, rows: Sequence[Row], updates: Sequence[Update[DistillationOutput]]
) -> dict[str, float]:
    """The metrics of the step's optimizer steps; the gap is between the sampler and the model as it first read."""
    norms = [u.grad_norm for u in updates if u.stepped]
    gaps = [
        (row.trainer_log_probs - row.sampler_log_probs)[row.sampled].abs()
        for row in rows
        if row.trainer_log_probs is not None
    ]
    return distillation_metrics([u.outputs for u in updates]) | {
        "grad_norm": sum(norms) / len(norms) if norms else 0.0,
        "lr": learning_rate_of(parts.optimizer),
        "sampler/logprob_gap": torch.cat([torch.empty(0), *gaps]).mean().item(),
    }
