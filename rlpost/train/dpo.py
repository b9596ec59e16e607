"""Direct preference optimisation, from top to bottom: pairs in a shuffled order, minibatches, update, figures.

A pair is two neighbouring rows with one prompt, which is computed once. The reference is the starting model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rlpost.data.demonstrations import Pair
from rlpost.data.encoding import PairEncoder
from rlpost.data.ragged import padded
from rlpost.evaluation.statistics import ratio_interval, reward_interval
from rlpost.model.packing import Row
from rlpost.objectives.preference import PreferenceObjective, pair_loss
from rlpost.record import LOSS, MARGIN, PAIR_ACCURACY
from rlpost.settings import DPOSettings
from rlpost.settings.commands import RunRequest
from rlpost.train.rows import Kind, RowParts, assemble_rows, row_of
from rlpost.train.session import Session

DPOParts = RowParts[Pair, PreferenceObjective]
DPOSession = Session[DPOSettings, DPOParts]


def train(settings: DPOSettings, request: RunRequest) -> int:
    """Run or resume the training that `settings` describes; returns the process's exit code."""
    with DPOSession(settings, request) as session:
        session.load(assemble_dpo)
        learn(session)
    return session.run.exit_code


def assemble_dpo(settings: DPOSettings, checkpoint: Path | None = None) -> DPOParts:
    """The parts of `rlpost train dpo`; see `assemble_rows`."""
    return assemble_rows(settings, checkpoint, PAIRS, PreferenceObjective(settings.loss), held_out_figures)


def learn(session: DPOSession) -> None:
    """The loop: every step still to do, one minibatch each."""
    parts, ranks = session.parts, session.ranks.over(session.run.total_steps)
    stream = parts.stream(session)
    for step in session.steps():
        pairs = parts.take(session, stream)
        session.collected(pairs)
        rows = [row for pair in pairs for row in rows_of(pair)]
        ranks.fill_reference(rows)
        updated = session.update(rows, pairs, step - 1)
        session.progress.position += len(pairs)
        session.trained([updated])
        session.metrics |= parts.objective.metrics([output.terms for output in updated.outputs])
        session.metrics["tokens/trained"] = float(sum(row.num_trained for row in rows))
        session.metrics |= parts.step_metrics(session, updated, rows)
        session.finish()


def rows_of(pair: Pair) -> list[Row]:
    """A pair as two neighbouring rows, the chosen one first, with one prompt."""
    return [row_of(sample, pair.prompt_length) for sample in pair.samples]


PAIRS = Kind[Pair]("pair", PairEncoder, rows_of)


def held_out_figures(session: Session[Any, Any], rows: Sequence[Row]) -> tuple[dict[str, float], list[float]]:
    """Loss, reward margin and accuracy of the held-out pairs, each with its interval.

    Pairs of one prompt are not independent of each other: a figure is the mean over prompts of that of its pairs.
    """
    phase, objective = session.screen.phase, session.parts.objective
    if rows[0].ref_log_probs is None:
        session.ranks.fill_reference(rows)
    read = session.ranks.read_log_probs(rows, progress=lambda done, total: phase("evaluating", "the loss", done, total))
    reference = padded([row.ref_log_probs.double() for row in rows if row.ref_log_probs is not None])
    own, mask = padded([log_probs.double() for log_probs in read]), padded([row.sampled for row in rows])
    _, terms = pair_loss(objective.name, own, reference, mask, **objective.coefficients)
    losses = terms.loss + objective.sft_coef * terms.sft
    prompts: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, row in enumerate(rows[::2]):
        prompts[tuple(row.prompt.tolist())].append(place)
    metrics: dict[str, float] = {}
    for key, values in ((LOSS, losses), (MARGIN, terms.margin), (PAIR_ACCURACY, terms.right)):
        by_prompt = [values[places].tolist() for places in prompts.values()]
        means = list(map(fmean, by_prompt))
        metrics[key] = fmean(means)
        ends = reward_interval(by_prompt) if key == PAIR_ACCURACY else ratio_interval(means, [1] * len(means))
        if ends is not None:
            metrics |= {f"{key}_low": max(0.0, ends[0]) if key == LOSS else ends[0], f"{key}_high": ends[1]}
    return metrics, []
