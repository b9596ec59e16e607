"""Expert iteration, from top to bottom: sample, keep each prompt's best, fine-tune on them, push weights.

ReST-EM (arXiv:2312.06585) samples anew in each round and fine-tunes on what a reward lets through,
as STaR (arXiv:2203.14465) does. Departures from both: a round is one step of a few prompts rather
than a whole data set, and each round goes on from the last one's weights rather than from the
starting model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path

import torch
from tensordict import TensorDict

from rlpost.data.batch import best_of_groups
from rlpost.model.packing import Row, rows_of
from rlpost.objectives.supervised import SFTObjective, sft_metrics
from rlpost.settings import ExpertIterationSettings
from rlpost.train.assemble import assemble_sampling
from rlpost.train.run import Run
from rlpost.train.sampling import SamplingParts, look_at_completions
from rlpost.train.step import Step

ExpertIterationParts = SamplingParts[SFTObjective]


def assemble(settings: ExpertIterationSettings, checkpoint: Path | None = None) -> ExpertIterationParts:
    """The parts of `rlpost train expert-iteration`; see `assemble_grpo`."""
    return assemble_sampling(settings, checkpoint, SFTObjective(settings.loss))


def learn(run: Run[ExpertIterationSettings, ExpertIterationParts], parts: ExpertIterationParts) -> None:
    """The loop: every step still to do."""
    settings, progress = run.settings, run.progress
    prompts, size, passes = settings.prompts_per_step, settings.minibatch_size, settings.passes
    most = prompts * settings.topk_size  # completions selected from a step
    updates = passes * ceil(most / (size or most))  # at most; the schedule of the learning rate counts these
    ranks = run.ranks.over(settings.steps * updates)
    for step in run.steps():
        step.metrics |= parts.collector.fill(prompts)  # sample until the buffer has whole groups, none too old
        sampled = parts.buffer.take(prompts)  # each group once
        look_at_completions(step, parts.policy, sampled, settings.max_failed_share)

        completions, selected = rows_of(sampled), best_of_groups(sampled, settings.topk_size, settings.min_reward)
        rows = [completions[place] for place in selected]
        for place, row in enumerate(completions):
            row.advantage = float(place in selected)  # in the rollouts; the loss does not read it
        step.metrics |= selection_metrics(sampled, selected)
        ranks.fill_reference(rows)
        for number, minibatch in enumerate(minibatches(rows, size, passes), start=(step.number - 1) * updates):
            step.update(minibatch, number)
        if not rows:
            progress.nothing_selected += 1
            step.note("no completion was selected, so nothing was learned from the step")
            least = settings.min_reward
            wanted = "better than its prompt's median" if least is None else f"worth at least {least:g}"
            step.explanation = f"no completion was {wanted}"
        step.metrics |= update_metrics(step) | {"selected/empty_steps": float(progress.nothing_selected)}

        step.push(parts.collector)  # and the policy's version rises
        step.trained_on(sampled, completions)


def selection_metrics(sampled: TensorDict, selected: Sequence[int]) -> dict[str, float]:
    """Figures of the rows `selected` from a step, by index."""
    places = torch.tensor(selected, dtype=torch.int64)
    return {
        "selected/share": len(selected) / sampled.batch_size[0],
        "selected/reward_mean": sampled["next", "reward"][places].mean().item(),  # NaN where nothing is selected
        "selected/prompts": float(sampled["group_id"][places].unique().numel()),
    }


def minibatches(rows: Sequence[Row], size: int | None, passes: int) -> Iterator[Sequence[Row]]:
    """The rows of each optimizer step: as few parts as `size` (None: all) allows, of nearly equal size."""
    parts = ceil(len(rows) / (size or max(1, len(rows))))
    for _ in range(passes):
        for part in range(parts):
            yield rows[len(rows) * part // parts : len(rows) * (part + 1) // parts]


def update_metrics(step: Step) -> dict[str, float]:
    """The metrics of the step's optimizer steps: losses are means, tokens a sum."""
    each = [sft_metrics(update.outputs) for update in step.updates]
    means = {name: sum(metrics[name] for metrics in each) / len(each) for name in (each[0] if each else {})}
    return {"loss/sft": 0.0} | means | {"tokens/trained": sum(metrics["tokens/trained"] for metrics in each)}
