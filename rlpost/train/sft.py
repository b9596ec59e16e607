"""Supervised fine-tuning, from top to bottom: samples in a shuffled order, minibatches, update, held-out loss.

Samples are packed into microbatches without seeing each other, and the loss of a minibatch is
averaged over all its trained tokens, so neither packing nor the size of a microbatch changes the
gradient (`loss.aggregation=sequence_mean` lets every sample weigh the same instead).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rlpost.data.demonstrations import Sample
from rlpost.data.encoding import Encoder
from rlpost.evaluation.statistics import ratio_interval
from rlpost.model.packing import Row
from rlpost.objectives.supervised import SFTObjective, sft_metrics
from rlpost.record import LOSS
from rlpost.settings import SFTSettings
from rlpost.train.ranks import Ranks
from rlpost.train.rows import Kind, RowParts, assemble_rows, row_of
from rlpost.train.run import Run

SFTParts = RowParts[Sample, SFTObjective]


def assemble(settings: SFTSettings, checkpoint: Path | None = None) -> SFTParts:
    """The parts of `rlpost train sft`; see `assemble_rows`."""
    return assemble_rows(settings, checkpoint, SAMPLES, SFTObjective(settings.loss), held_out_loss)


def learn(run: Run[SFTSettings, SFTParts], parts: SFTParts) -> None:
    """The loop: every step still to do, one minibatch each."""
    ranks, stream = run.ranks.over(run.total_steps), parts.stream(run.screen.note)
    for step in run.steps():
        rows = [row_of(sample) for sample in parts.take(stream)]
        ranks.fill_reference(rows)
        updated = step.update(rows, step.number - 1)
        step.metrics |= sft_metrics(updated.outputs) | parts.reading(rows)


SAMPLES = Kind[Sample]("sample", Encoder, lambda sample: [row_of(sample)], lambda env: env.demonstrated())


def held_out_loss(
    ranks: Ranks, rows: Sequence[Row], progress: Callable[[int, int], None]
) -> tuple[dict[str, float], list[float]]:
    """Loss per trained token of the held-out `rows`, with its interval; and the loss of each row, over its tokens."""
    read = ranks.read_log_probs(rows, progress=progress)
    losses = [-log_probs.double().sum().item() for log_probs in read]
    counts = [row.num_trained for row in rows]
    metrics = {LOSS: sum(losses) / sum(counts)}
    if (ends := ratio_interval(losses, counts)) is not None:
        metrics |= {f"{LOSS}_low": max(0.0, ends[0]), f"{LOSS}_high": ends[1]}
    return metrics, losses
