"""The first update of a recorded step once more, as it was and as other settings would have made it.

The weights come from the checkpoint of the step before, the completions from the run's rollouts, and the loss, the
advantages and the choice of rows from the functions that the loops call. Nothing is sampled, and nothing is written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from rlpost.config.paths import checkpoints, step_of
from rlpost.data.batch import best_of_groups
from rlpost.data.demonstrations import Sample
from rlpost.data.encoding import Encoder
from rlpost.data.ragged import one_each, ragged, strings, token_fields
from rlpost.envs.build import build_env
from rlpost.errors import ConfigError, DataError
from rlpost.model.device import compute_deterministically
from rlpost.model.packing import Row, pack, rows_of
from rlpost.model.trainable import load_trainable, starting_tokenizer
from rlpost.model.weights import device_of
from rlpost.objectives.advantage import LENGTH_PART, PART, mask_overlong
from rlpost.objectives.policy_loss import PolicyObjective
from rlpost.objectives.supervised import SFTObjective, sft_metrics
from rlpost.record import PRECISION, read_metrics
from rlpost.runs.checkpoint import verify
from rlpost.runs.reader import read_run
from rlpost.runs.rollouts import read_rollouts, rollout_steps
from rlpost.settings import Autocast, ExpertIterationSettings, GRPOSettings, SamplerCorrection, SFTSettings
from rlpost.train import expert_iteration, grpo, sft
from rlpost.train.assemble import policy_objective
from rlpost.train.progress import CORRECTION_METRICS, loss_metrics
from rlpost.train.ranks import Rank, Ranks
from rlpost.train.resolve import resolve_precision
from rlpost.train.rows import read_samples, samples_from
from rlpost.train.update import Learner, Microbatches, gradient_of, of_each_row

EXACT, ROUNDED = 1e-6, 1e-3  # how far a loss may be from the recorded one, without autocast and with
MOST_TOKENS = 10  # that are listed
ONE_MICROBATCH = 1 << 62  # more tokens than any minibatch has
Replayable = GRPOSettings | ExpertIterationSettings | SFTSettings
Completion = dict[str, Any]  # under the names of rlpost.runs.rollouts.SCHEMA


@dataclass
class Computed:
    """The first update of a step under one set of settings.

    `figures` have the names of metrics.jsonl. `weights` say how strongly the update raises each token: -d loss /
    d log-prob, by the row's place in the step, 0 on ids not sampled; a row that it does not read is missing.
    """

    figures: dict[str, float]
    updates: int  # that the step makes
    weights: dict[int, torch.Tensor] = field(default_factory=dict)
    log_probs: dict[int, torch.Tensor] = field(default_factory=dict)  # log π_θ, likewise
    ids: dict[int, torch.Tensor] = field(default_factory=dict)  # of the responses, likewise
    gradient: list[torch.Tensor | None] = field(default_factory=list)  # of each parameter


@dataclass
class MovedToken:
    """A token whose weight in the gradient differs between two settings."""

    completion: str  # "group 3, sample 1", or the sample's place in the data
    place: int  # in the completion, from 0
    text: str
    probability: float
    was: float
    becomes: float


@dataclass
class Replay:
    """A step's first update as it was and, where other settings are given, as they would have made it."""

    step: int
    weights_of: Path | None  # the checkpoint; None: the starting model
    recorded: dict[str, float | None]  # the step's figures in metrics.jsonl
    was: Computed
    tolerance: float
    log_probs_apart: float | None  # most by which a token's log-prob differs from the recorded; None: none recorded
    other: Computed | None = None
    cosine: float | None = None  # of both gradients; None where one is 0
    norm_ratio: float | None = None
    tokens: list[MovedToken] = field(default_factory=list)  # the largest differences first

    @property
    def losses(self) -> dict[str, tuple[float, float | None]]:
        """Each part of the loss: as replayed, and as recorded."""
        named = [name for name in self.was.figures if name.startswith("loss/")]
        return {name: (self.was.figures[name], self.recorded.get(name)) for name in named}

    @property
    def agrees(self) -> bool | None:
        """Whether the replayed loss is the recorded one; None where the step's several updates were averaged."""
        if self.was.updates > 1:
            return None
        return all(
            recorded is not None and abs(replayed - recorded) <= self.tolerance * max(1.0, abs(recorded))
            for replayed, recorded in self.losses.values()
        )


def replayable_steps(run: Path, *, sampled: bool) -> list[int]:
    """The recorded steps before which the weights are kept, and whose completions are, if they were `sampled`."""
    rows, _ = read_metrics(run / "metrics.jsonl")
    recorded = {row["step"] for row in rows}
    kept = {1, *(step_of(each) + 1 for each in checkpoints(run / "checkpoints"))} & recorded
    return sorted(kept & set(rollout_steps(run)) if sampled else kept)


def check_step(run: Path, step: int | None, *, sampled: bool) -> int:
    """`step`, or the last replayable one. Raises ConfigError for any other, and names the replayable ones."""
    steps = replayable_steps(run, sampled=sampled)
    if step is None and steps:
        return steps[-1]
    if step in steps:
        return step
    if not steps:
        raise ConfigError(f"no step of {run} can be replayed: it has none whose weights and completions are kept")
    shown = [str(each) for each in (steps if len(steps) <= 8 else [*steps[:3], "...", *steps[-3:]])]
    named = f"steps {', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else f"step {shown[0]}"
    near = min(steps, key=lambda each: abs(each - (step or 0)))
    rows, _ = read_metrics(run / "metrics.jsonl")
    if step not in {row["step"] for row in rows}:
        why, more = "metrics.jsonl does not have it", ""
    elif sampled and step not in rollout_steps(run):
        why, more = "its completions are not kept", ""
    else:
        why, more = f"no checkpoint of step {(step or 0) - 1} is kept", "; checkpoint.every=10 keeps more"
    raise ConfigError(
        f"step {step} cannot be replayed: {why}; {named} can: rlpost runs replay {run} --step {near}{more}"
    )


def replay(
    run: Path,
    step: int,
    settings: Replayable,
    other: Replayable | None = None,
    *,
    tell: Callable[[str], None] = lambda doing: None,
) -> Replay:
    """Replay `step` of `run` as its `settings` made it, and as `other` settings would have; writes nothing.

    The two may differ in the loss, the advantage, in which rows count and in the precision; whatever else they say is
    that of `settings`. Raises DataError for rollouts that cannot be read, CheckpointError for a damaged checkpoint.
    """
    recorded = next(row for row in read_metrics(run / "metrics.jsonl")[0] if row["step"] == step)
    checkpoint = next((each for each in checkpoints(run / "checkpoints") if step_of(each) == step - 1), None)
    if checkpoint is not None:
        verify(checkpoint)
    compute_deterministically(settings.deterministic)
    torch.manual_seed(settings.seed)
    precision = read_run(run).environment.get(PRECISION)
    both = [resolve_precision(each, precision)[0] for each in (settings, other) if each is not None]
    tokenizer, _ = starting_tokenizer(settings, checkpoint)
    given: Sequence[Any]
    if isinstance(settings, SFTSettings):
        tell("reading the data")
        given = samples_of(run, step, settings, recorded, tokenizer)
    else:
        given = read_rollouts(run, step)
    tell("loading the model")
    trainable = load_trainable(both[0], checkpoint, with_reference=any(each.needs_reference for each in both))
    model, computed = trainable.model, []
    for own in both:
        tell(f"computing the update{'' if own is both[0] else ' with the other settings'}")
        objective = objective_of(own, recorded)
        microbatches = Microbatches(both[0].microbatch_tokens, device_of(model), own.model.autocast)
        reference = trainable.reference if own.needs_reference else None
        ranks = Ranks()
        ranks.begin(Rank(model, trainable.optimizer, reference, objective, own.optim, microbatches), None)
        minibatches, places = minibatches_of(own, both[0], objective, ranks, given)
        computed.append(_compute(ranks.own, minibatches, places, keep_gradient=len(both) > 1))
    was, becomes = computed[0], computed[1] if len(computed) > 1 else None
    replayed = Replay(
        step=step,
        weights_of=checkpoint,
        recorded=recorded,
        was=was,
        tolerance=EXACT if both[0].model.autocast is Autocast.none else ROUNDED,
        log_probs_apart=None if isinstance(settings, SFTSettings) else _apart(was, given),
        other=becomes,
    )
    if becomes is not None:
        replayed.cosine, replayed.norm_ratio = _compared(was.gradient, becomes.gradient)
        replayed.tokens = _moved(was, becomes, given, tokenizer)
    return replayed


# What a step trained on


def samples_of(
    run: Path, step: int, settings: SFTSettings, recorded: Mapping[str, Any], tokenizer: Any
) -> list[Sample]:
    """The demonstrations of a step of fine-tuning, by its place in the order of the data."""
    env = build_env(settings.env, num_prompts=1, group_size=1, seed=settings.seed)
    samples, _, _ = read_samples(env, env.demonstrated(), settings, Encoder(tokenizer, settings.max_tokens))
    before = next((row for row in read_metrics(run / "metrics.jsonl")[0] if row["step"] == step - 1), {})
    first = (step - 1) * settings.minibatch_size
    if "epoch" in before:  # exact, also where the last minibatch of an earlier attempt was smaller
        first = round(before["epoch"] * samples.count())
    last = max(first, round(recorded["epoch"] * samples.count()))
    found = list(itertools.islice(samples_from(samples, 0, lambda note: None), first, last))
    if not found:
        raise DataError(f"{settings.env} has other rows than the run began with: replay it with its own data")
    return found


def batch_of(table: Sequence[Completion]) -> TensorDict:
    """The completions of a step, in their order, as far as the loops read them: see rlpost/data/batch.py."""
    prompts, responses = ([row[name] for row in table] for name in ("prompt_ids", "token_ids"))
    unsampled = [[0.0] * len(ids) for ids in prompts]
    parts = sorted({name for row in table for name in row["reward_parts"]})
    return TensorDict(
        {
            "tokens": token_fields(prompts, responses, torch.int64)
            | {"restarts": ragged([torch.tensor(row["restarts"], dtype=torch.int64) for row in table])},
            "masks": {
                "all_assistant_mask": token_fields(unsampled, [row["mask"] for row in table], torch.bool)["full"]
            },
            "log_probs": {
                "response": token_fields(unsampled, [r["log_probs"] for r in table], torch.float32)["response"]
            },
            "group_id": torch.tensor([row["group"] for row in table]),
            "valid": torch.tensor([row["valid"] for row in table]),
            "finish_reason": strings([row["finish_reason"] for row in table]),
            "next": {
                "reward": one_each([row["reward"] for row in table]),
                "accuracy_lenient": one_each([row["accuracy_lenient"] for row in table]),
                "reward_parts": {name: one_each([row["reward_parts"].get(name) for row in table]) for name in parts},
                "part_weights": {
                    name: one_each([row["part_weights"].get(name, 1.0) for row in table]) for name in parts
                },
            },
        },
        batch_size=[len(table)],
    )


def objective_of(settings: Replayable, recorded: Mapping[str, Any]) -> PolicyObjective | SFTObjective:
    """The loss of `settings`, corrected for the sampler if the gate had switched that on by then."""
    if not isinstance(settings, GRPOSettings):
        return SFTObjective(settings.loss)
    objective = policy_objective(settings)
    if settings.loss.entropy_target is not None:
        objective.entropy_coef = recorded.get("entropy_coef", settings.loss.entropy_coef)
    was_corrected = any(name in recorded for name in CORRECTION_METRICS.values())
    if was_corrected and settings.loss.sampler_correction is None and objective.sampler_correction == "none":
        objective.sampler_correction = SamplerCorrection.tis_token.name
    return objective


def minibatches_of(
    settings: Replayable, began: Replayable, objective: Any, ranks: Ranks, given: Sequence[Any]
) -> tuple[list[Sequence[Row]], list[int]]:
    """The minibatches of a step under `settings`, and the place in `given` of each row of the first.

    `given` are the completions, whose rewards are those of the settings the run `began` with, or the samples.
    """
    if isinstance(settings, SFTSettings):
        rows = [sft.row_of(sample) for sample in given]
        ranks.fill_reference(rows)
        return [rows], list(range(len(rows)))
    batch = batch_of(given)
    rows = rows_of(batch)
    if isinstance(settings, ExpertIterationSettings):
        places = best_of_groups(batch, settings.topk_size, settings.min_reward)
        selected = [rows[place] for place in places]
        ranks.fill_reference(selected)
        return list(expert_iteration.minibatches(settings, selected)), places
    assert isinstance(began, GRPOSettings)
    if settings.overlong != began.overlong:  # the recorded penalties are in
        parts = batch["next", "reward_parts"]
        for name in {PART, LENGTH_PART} & set(parts.keys()):
            batch["next", "reward"] = batch["next", "reward"] - parts.pop(name)
            batch["next", "part_weights"].pop(name)
        grpo.penalise(settings, batch)
    grpo.fill_log_probs(settings, objective, ranks, rows)
    grpo.fill_advantages(settings, batch, rows)
    trained = mask_overlong(batch, rows) if settings.overlong.mask else rows
    return list(grpo.minibatches(settings, trained)), list(range(len(rows)))


# One update


def _compute(
    rank: Rank, minibatches: Sequence[Sequence[Row]], places: Sequence[int], *, keep_gradient: bool
) -> Computed:
    """The gradient of the first of `minibatches`, whose rows have these `places`, and what it consists of."""
    objective, model = rank.objective, rank.model
    learner = Learner(model, rank.optimizer, objective, rank.optim, total_updates=1)
    first = minibatches[0] if minibatches else []
    update = gradient_of(learner, rank.microbatches, first)
    if isinstance(objective, PolicyObjective):
        figures = loss_metrics([update.outputs], corrected=objective.sampler_correction != "none")
    else:
        figures = {"loss/sft": 0.0} | (sft_metrics(update.outputs) if update.outputs else {})
    if len([name for name in figures if name.startswith("loss/")]) > 1:
        figures = {"loss": sum(output.loss.item() for output in update.outputs), **figures}
    needed = [row for row in first if objective.needs(row)]
    figures |= {"grad_norm": update.grad_norm, "completions": float(len(needed))}
    computed = Computed(figures, updates=max(1, len(minibatches)))
    if update.stepped:
        values = _token_weights(objective, needed, update.outputs, objective.normaliser(first))
        for row, place, log_probs in zip(first, places, update.log_probs, strict=False):
            if log_probs is not None:
                computed.log_probs[place], computed.ids[place] = log_probs, row.response
                computed.weights[place] = next(values)
    figures["tokens"] = float(sum(int(weights.count_nonzero()) for weights in computed.weights.values()))
    if keep_gradient:
        computed.gradient = [None if p.grad is None else p.grad.detach().cpu() for p in model.parameters()]
    rank.optimizer.zero_grad(set_to_none=True)
    return computed


def _token_weights(objective: Any, rows: Sequence[Row], outputs: Sequence[Any], normaliser: float) -> Any:
    """-d loss / d log-prob of each row's tokens, in order, from the log-probs that the update has read."""
    [whole] = pack(rows, ONE_MICROBATCH, torch.device("cpu"))
    log_probs = torch.cat([output.log_probs for output in outputs]).float().cpu().requires_grad_()
    if isinstance(objective, PolicyObjective):
        entropy = torch.cat([output.entropy for output in outputs]).float().cpu()
        loss = objective.of(whole, normaliser, log_probs, entropy).loss
    else:
        loss = objective.of(whole, normaliser, log_probs).loss
    [gradient] = torch.autograd.grad(loss, log_probs)
    return of_each_row(-gradient, rows)


# Comparing


def _apart(was: Computed, table: Sequence[Any]) -> float | None:
    """The most by which a token's log-prob, as the update read it, differs from the one recorded then."""
    found = [
        (was.log_probs[place] - torch.tensor(table[place]["trainer_log_probs"])).abs().max().item()
        for place in was.log_probs
        if table[place]["trainer_log_probs"]
    ]
    return max(found, default=None)


def _compared(
    was: Sequence[torch.Tensor | None], becomes: Sequence[torch.Tensor | None]
) -> tuple[float | None, float | None]:
    """The cosine of two gradients and the second's norm divided by the first's; None where a norm is 0."""
    dot = first = second = 0.0
    for a, b in zip(was, becomes, strict=True):
        first += 0.0 if a is None else a.double().square().sum().item()
        second += 0.0 if b is None else b.double().square().sum().item()
        if a is not None and b is not None:
            dot += (a.double() * b.double()).sum().item()
    if not first:
        return None, None
    return dot / math.sqrt(first * second) if second else None, math.sqrt(second / first)


def _moved(was: Computed, becomes: Computed, given: Sequence[Any], tokenizer: Any) -> list[MovedToken]:
    """The tokens whose weights differ most between two settings, at most `MOST_TOKENS`."""
    found: list[tuple[float, int, int]] = []
    for place in sorted(was.weights.keys() | becomes.weights.keys()):
        before, after = was.weights.get(place), becomes.weights.get(place)
        change = after - before if before is not None and after is not None else after if before is None else -before
        assert change is not None
        most = change.abs().topk(min(MOST_TOKENS, change.numel()))
        found += [
            (size, place, at) for size, at in zip(most.values.tolist(), most.indices.tolist(), strict=True) if size
        ]
    moved = []
    for _, place, at in sorted(found, key=lambda each: -each[0])[:MOST_TOKENS]:
        side = was if place in was.ids else becomes
        row = given[place]
        named = f"group {row['group']}, sample {row['sample']}" if isinstance(row, dict) else row.where
        weights = [float(each.weights[place][at]) if place in each.weights else 0.0 for each in (was, becomes)]
        text = tokenizer.decode([int(side.ids[place][at])])
        moved.append(MovedToken(named, at, text, math.exp(side.log_probs[place][at]), *weights))
    return moved
