"""Supervised fine-tuning, from top to bottom: samples in a shuffled order, minibatches, update, held-out loss.

Samples are packed into microbatches without seeing each other, and the loss of a minibatch is
averaged over all its trained tokens, so neither packing nor the size of a microbatch changes the
gradient (`loss.aggregation=sequence_mean` lets every sample weigh the same instead).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlpost.data.demonstrations import Sample
from rlpost.data.encoding import Encoder
from rlpost.evaluation.statistics import ratio_interval
from rlpost.model.packing import Row
from rlpost.objectives.supervised import SFTObjective, sft_metrics
from rlpost.record import LOSS
from rlpost.settings import SFTSettings
from rlpost.settings.commands import RunRequest
from rlpost.train.rows import Kind, RowParts, assemble_rows, row_of
from rlpost.train.session import Session

SFTParts = RowParts[Sample, SFTObjective]
SFTSession = Session[SFTSettings, SFTParts]


def train(settings: SFTSettings, request: RunRequest) -> int:
    """Run or resume the training that `settings` describes; returns the process's exit code."""
    with SFTSession(settings, request) as session:
        session.load(assemble_sft)
        learn(session)
    return session.run.exit_code


def assemble_sft(settings: SFTSettings, checkpoint: Path | None = None) -> SFTParts:
    """The parts of `rlpost train sft`; see `assemble_rows`."""
    return assemble_rows(settings, checkpoint, SAMPLES, SFTObjective(settings.loss), held_out_loss)


def learn(session: SFTSession) -> None:
    """The loop: every step still to do, one minibatch each."""
    parts, ranks = session.parts, session.ranks.over(session.run.total_steps)
    stream = parts.stream(session)
    for step in session.steps():
        samples = parts.take(session, stream)
        session.collected(samples)
        rows = [row_of(sample) for sample in samples]
        ranks.fill_reference(rows)
        updated = session.update(rows, samples, step - 1)
        session.progress.position += len(samples)
        session.trained([updated])
        session.metrics |= sft_metrics(updated.outputs) | parts.step_metrics(session, updated, rows)
        session.finish()


SAMPLES = Kind[Sample]("sample", Encoder, lambda sample: [row_of(sample)])


def held_out_loss(session: Session[Any, Any], rows: Sequence[Row]) -> tuple[dict[str, float], list[float]]:
    """Loss per trained token of the held-out `rows`, with its interval; and the loss of each row, over its tokens."""
    phase = session.screen.phase
    read = session.ranks.read_log_probs(rows, progress=lambda done, total: phase("evaluating", "the loss", done, total))
    losses = [-log_probs.double().sum().item() for log_probs in read]
    counts = [row.num_trained for row in rows]
    metrics = {LOSS: sum(losses) / sum(counts)}
    if (ends := ratio_interval(losses, counts)) is not None:
        metrics |= {f"{LOSS}_low": max(0.0, ends[0]), f"{LOSS}_high": ends[1]}
    return metrics, losses
