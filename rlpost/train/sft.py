"""Supervised fine-tuning, from top to bottom: samples in a shuffled order, minibatches, update, held-out loss.

Samples are packed into microbatches without seeing each other, and the loss of a minibatch is
averaged over all its trained tokens, so neither packing nor the size of a microbatch changes the
gradient (`loss.aggregation=sequence_mean` lets every sample weigh the same instead).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rlpost.assemble_sft import SFTParts, assemble_sft
from rlpost.model.optim import learning_rate_of
from rlpost.model.packing import Row
from rlpost.objectives.sft_objective import SFTOutput, sft_metrics
from rlpost.settings import SFTSettings
from rlpost.settings.run import RunRequest
from rlpost.train.progress import Progress
from rlpost.train.sft_session import SFTSession, row_of
from rlpost.train.update import Update


def train(settings: SFTSettings, request: RunRequest) -> int:
    """Run or resume the training that `settings` describes; returns the process's exit code."""
    with SFTSession(settings, request) as session:
        session.load(assemble_sft)
        learn(session)
    return session.run.exit_code


def learn(session: SFTSession) -> None:
    """The loop: every step still to do, one minibatch each."""
    settings, parts = session.settings, session.parts
    ranks = session.ranks.over(session.run.total_steps)
    stream = session.stream()
    for step in session.steps():
        samples = list(itertools.islice(stream, min(settings.minibatch_size, session.samples_left())))
        session.screen.phase("training")
        rows = [row_of(sample) for sample in samples]
        ranks.fill_reference(rows)
        with session.diverging(samples):
            updated = ranks.update(rows, step - 1)
        session.progress.position += len(samples)
        session.metrics |= step_metrics(parts, updated, rows, session.progress)
        session.finish()


def step_metrics(
    parts: SFTParts, updated: Update[SFTOutput], rows: Sequence[Row], progress: Progress
) -> dict[str, float]:
    """What the step did; `epoch` counts the passes over all samples so far."""
    return {
        **sft_metrics(updated.outputs),
        "tokens/read": float(sum(row.prompt.numel() + row.response.numel() for row in rows)),
        "grad_norm": updated.grad_norm,
        "lr": learning_rate_of(parts.optimizer),
        "epoch": progress.position / parts.samples.count(),
    }
