"""Direct preference optimisation, from top to bottom: pairs in a shuffled order, minibatches, update, figures.

A pair is two neighbouring rows with one prompt, which is computed once. The reference is the starting model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from rlpost.data.demonstrations import Pair
from rlpost.data.encoding import PairEncoder
from rlpost.data.ragged import padded
from rlpost.evaluation.statistics import ratio_interval, reward_interval
from rlpost.model.packing import Row
from rlpost.objectives.preference import PreferenceObjective, pair_loss
from rlpost.record import LOSS, MARGIN, PAIR_ACCURACY
from rlpost.settings import DPOSettings
from rlpost.train.ranks import Ranks
from rlpost.train.rows import Kind, RowParts, assemble_rows, row_of
from rlpost.train.run import Run

DPOParts = RowParts[Pair, PreferenceObjective]


def assemble(settings: DPOSettings, checkpoint: Path | None = None) -> DPOParts:
    """The parts of `rlpost train dpo`; see `assemble_rows`."""
    return assemble_rows(settings, checkpoint, PAIRS, PreferenceObjective(settings.loss), held_out_figures)


def learn(run: Run[DPOSettings, DPOParts], parts: DPOParts) -> None:
    """The loop: every step still to do, one minibatch each."""
    ranks, stream = run.ranks.over(run.total_steps), parts.stream(run.screen.note)
    for step in run.steps():
        rows = [row for pair in parts.take(stream) for row in rows_of(pair)]
        ranks.fill_reference(rows)
        updated = step.update(rows, step.number - 1)
        step.metrics |= parts.objective.metrics([output.terms for output in updated.outputs])
        step.metrics["tokens/trained"] = float(sum(row.num_trained for row in rows))
        step.metrics |= parts.reading(rows)


def rows_of(pair: Pair) -> list[Row]:
    """A pair as two neighbouring rows, the chosen one first, with one prompt."""
    return [row_of(sample, pair.prompt_length) for sample in pair.samples]


PAIRS = Kind[Pair]("pair", PairEncoder, rows_of, lambda env: env.paired())


def held_out_figures(
    ranks: Ranks, rows: Sequence[Row], progress: Callable[[int, int], None]
) -> tuple[dict[str, float], list[float]]:
    """Loss, reward margin and accuracy of the held-out pairs, each with its interval.

    Pairs of one prompt are not independent of each other: a figure is the mean over prompts of that of its pairs.
    """
    objective = ranks.own.objective
    assert isinstance(objective, PreferenceObjective)
    if rows[0].ref_log_probs is None:
        ranks.fill_reference(rows)
    read = ranks.read_log_probs(rows, progress=progress)
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
