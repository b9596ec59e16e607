"""The first update of a recorded step of a training that samples, as it was and as other settings would have made it.

The weights come from the checkpoint of the step before, the completions from the run's rollouts, and everything else
from the training's own loop, which goes through that one step. Nothing is sampled, and nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict

from rlpost.config.schema import flat
from rlpost.data.batch import batch_from_conversations
from rlpost.data.conversation import Conversation
from rlpost.errors import ConfigError
from rlpost.model.device import compute_deterministically
from rlpost.model.packing import Row, pack
from rlpost.model.precision import this_device
from rlpost.model.trainable import Trainable, load_trainable
from rlpost.model.weights import device_of
from rlpost.objectives.advantage import LENGTH_PART, PART
from rlpost.objectives.policy_loss import PolicyObjective
from rlpost.objectives.supervised import SFTObjective
from rlpost.record import PRECISION
from rlpost.runs.checkpoint import verify
from rlpost.runs.reader import RunRecord, step_of
from rlpost.settings import Autocast, ExpertIterationSettings, GRPOSettings, SamplerCorrection
from rlpost.text import shortened
from rlpost.train import expert_iteration, grpo
from rlpost.train.assemble import policy_objective
from rlpost.train.progress import CORRECTION_METRICS, Progress
from rlpost.train.ranks import Rank, Ranks
from rlpost.train.resolve import resolve
from rlpost.train.step import Step
from rlpost.train.update import Microbatches, Update, gradient_of, of_each_row

EXACT, ROUNDED = 1e-6, 1e-3  # how far a loss may be from the recorded one, without autocast and with
ONE_MICROBATCH = 1 << 62  # more tokens than any minibatch has
Replayable = GRPOSettings | ExpertIterationSettings
# how the names of an update's figures begin, among the metrics of its step
FIGURES = ("loss/", "ratio/", "ess", "kl/", "sampler/", "entropy", "grad_norm", "tokens/trained")
Completion = dict[str, Any]  # under the names of rlpost.runs.rollouts.SCHEMA


@dataclass
class Computed:
    """The first update of a step under one set of settings.

    `figures` have the names of metrics.jsonl. `weights` say how strongly the update raises each token: -d loss /
    d log-prob, by the row's place in the step, 0 on ids not sampled; a row that it does not read is missing.
    """

    figures: dict[str, float]
    updates: int  # that the step makes
    rows: Sequence[Row]  # of the step; the update has given the rows it read the trainer's log-probs
    weights: dict[int, torch.Tensor]
    gradient: list[torch.Tensor] = field(default_factory=list)  # of each parameter

    @property
    def finite(self) -> dict[str, float | None]:
        """The figures; a figure that is not finite is None."""
        return {name: value if math.isfinite(value) else None for name, value in self.figures.items()}


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
    moved: int = 0  # how many tokens have another weight in the gradient

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


def check_step(record: RunRecord, step: int | None) -> int:
    """`step`, or the last replayable one. Raises ConfigError for any other, and names the replayable ones.

    A step is replayable while the weights before it and its completions are kept.
    """
    recorded = {row["step"] for row in record.metrics}
    kept = {1, *(step_of(each) + 1 for each in record.checkpoints)} & recorded
    steps = sorted(kept & set(record.rollout_steps))
    if not steps:
        raise ConfigError(
            f"no step of {record.folder} can be replayed: it has none whose weights and completions are kept"
        )
    if step is None:
        return steps[-1]
    if step in steps:
        return step
    lost = step not in record.rollout_steps
    why = "its completions are not kept" if lost else f"no checkpoint of step {step - 1} is kept"
    raise ConfigError(f"step {step} cannot be replayed: {why}; these can be: {shortened(str(steps)[1:-1], 60)}")


def replay(
    record: RunRecord,
    step: int,
    settings: Replayable,
    other: Replayable | None = None,
    *,
    tell: Callable[[str], None] = lambda doing: None,
) -> Replay:
    """Replay `step` of a run as its `settings` made it, and as `other` settings would have; writes nothing.

    The two may differ in the loss, the advantage, in which rows count and in the precision; whatever else they say is
    that of `settings`. Raises DataError for rollouts that cannot be read, CheckpointError for a damaged checkpoint.
    """
    recorded = next(row for row in record.metrics if row["step"] == step)
    checkpoint = next((each for each in record.checkpoints if step_of(each) == step - 1), None)
    if checkpoint is not None:
        verify(checkpoint)
    compute_deterministically(settings.deterministic)
    torch.manual_seed(settings.seed)
    device = this_device(settings.model.device)
    kept = {**flat(record.config), **(record.environment.get(PRECISION) or {})}
    given_both = [each for each in (settings, other) if each is not None]
    both = [resolve(each, device, None, kept)[0] for each in given_both]
    leaves_open = [getattr(each.loss, "sampler_correction", "") is None for each in given_both]
    trials = [Trial(each, recorded, is_open) for each, is_open in zip(both, leaves_open, strict=True)]
    table = record.rollouts(step)
    given = trials[0].batch(table)
    tell("loading the model")
    trainable = load_trainable(both[0], checkpoint, with_reference=any(each.needs_reference for each in both))
    computed = []
    for trial in trials:
        tell(f"computing the update{'' if trial is trials[0] else ' with the other settings'}")
        computed.append(trial.first_update(trainable, given))
        if len(both) > 1:
            parameters = trainable.model.parameters()
            computed[-1].gradient = [torch.zeros(()) if p.grad is None else p.grad.detach().cpu() for p in parameters]
        trainable.optimizer.zero_grad(set_to_none=True)
    was, becomes = computed[0], computed[1] if len(computed) > 1 else None
    replayed = Replay(
        step=step,
        weights_of=checkpoint,
        recorded=recorded,
        was=was,
        tolerance=EXACT if both[0].model.autocast is Autocast.none else ROUNDED,
        log_probs_apart=_apart(was, table),
        other=becomes,
    )
    if becomes is not None:
        replayed.cosine, replayed.norm_ratio = _compared(was.gradient, becomes.gradient)
        replayed.moved = _moved(was, becomes)
    return replayed


# What a step trained on


def batch_of(table: Sequence[Completion], penalties: Sequence[str] = ()) -> TensorDict:
    """The completions of a step, in their order, as a loop takes them from its buffer.

    Their rewards are without the parts `penalties`, which the loop adds.
    """
    conversations = []
    for row in table:
        known = {name: value for name, value in row.items() if name in Conversation.__dataclass_fields__}
        each = Conversation(task={}, messages=[], group_id=row["group"], response_ids=row["token_ids"], **known)
        parts = row["reward_parts"]
        each.reward_parts = {name: value for name, value in parts.items() if name not in penalties}
        each.part_weights = dict.fromkeys(parts, 1.0) | row["part_weights"]  # older runs have none
        if each.reward is not None:
            each.reward -= sum(parts.get(name, 0.0) for name in penalties)
        conversations.append(each)
    return batch_from_conversations(conversations)


# One update


class StillRank(Rank):
    """A rank whose weights stay as they are: an update computes a gradient and leaves it in the parameters."""

    def update(self, rows: Sequence[Row], number: int, total_updates: int) -> Update[Any]:
        """See `gradient_of`."""
        return gradient_of(self, self.microbatches, rows)

    def move_reference(self, share: float) -> None:
        """Leave the reference as it is, for the other settings."""


@dataclass
class ReplayedStep(Step):
    """A step that makes only its first update; the later ones, which begin at other weights, are counted."""

    num_updates: int = 0  # the calls of `update` so far

    def update(self, minibatch: Sequence[Row], number: int | None = None) -> Update[Any]:
        """Make the first update, and keep it in `updates`; a later one is empty."""
        self.num_updates += 1
        return super().update(minibatch, number) if self.num_updates == 1 else Update([], 0.0, stepped=False)

    def push(self, collector: Any) -> None:
        """Push nothing: no policy samples."""


@dataclass
class Trial:
    """The first update of a `recorded` step, made by the loop of `settings`."""

    settings: Replayable
    recorded: Mapping[str, Any]
    may_be_corrected: bool  # whether the gate may have switched on a correction for the sampler

    def batch(self, table: Sequence[Completion]) -> TensorDict:
        """The completions of the step; see `batch_of`."""
        if not isinstance(self.settings, GRPOSettings):
            return batch_of(table)
        overlong = self.settings.overlong
        are_on = {PART: overlong.penalty_tokens, LENGTH_PART: overlong.length_penalty}
        return batch_of(table, [name for name, is_on in are_on.items() if is_on])

    def objective(self) -> Any:
        """The loss, corrected for the sampler if the gate had switched that on by then."""
        settings = self.settings
        if not isinstance(settings, GRPOSettings):
            return SFTObjective(settings.loss)
        objective = policy_objective(settings.loss, settings.sampling, settings.env)
        was_corrected = any(name in self.recorded for name in CORRECTION_METRICS.values())
        if objective.sampler_correction == "none" and was_corrected and self.may_be_corrected:
            objective.sampler_correction = SamplerCorrection.tis_token.name
        return objective

    def first_update(self, trainable: Trainable, given: TensorDict) -> Computed:
        """The update that the completions `given` lead to; its gradient stays in the parameters."""
        settings, recorded, objective = self.settings, self.recorded, self.objective()
        model, optimizer = trainable.model, trainable.optimizer
        microbatches = Microbatches(settings.microbatch_tokens, device_of(model), settings.model.autocast)
        reference = trainable.reference if settings.needs_reference else None
        rank = StillRank(model, optimizer, objective, settings.optim, reference, microbatches)
        ranks = Ranks()
        ranks.begin(rank, None)
        step = ReplayedStep(recorded["step"], recorded["step"], ranks)
        progress = Progress(entropy_coef=recorded.get("entropy_coef"))  # not adapted again, since it has no entropy
        run: Any = SimpleNamespace(settings=settings, ranks=ranks, progress=progress, total_steps=1)
        run.steps, run.screen = lambda: [step], step  # which keeps notes
        parts: Any = SimpleNamespace(settings=settings, model=model, optimizer=optimizer, objective=objective)
        parts.collector = SimpleNamespace(fill=lambda count: {})
        parts.buffer = SimpleNamespace(take=lambda count: given.copy())
        parts.env = SimpleNamespace(weighed=None)
        parts.policy = SimpleNamespace(version=None, max_model_len=None, rest=lambda: None)
        parts.policy.sampling = objective  # which has the temperature
        loop = grpo if isinstance(settings, GRPOSettings) else expert_iteration
        loop.learn(run, parts)
        step.metrics |= step.gradient()
        outputs = [output for update in step.updates for output in update.outputs]
        figures = {name: value for name, value in step.metrics.items() if name.startswith(FIGURES)}
        if len([name for name in figures if name.startswith("loss/")]) > 1:
            figures = {"loss": sum(output.loss.item() for output in outputs), **figures}
        weights = _token_weights(objective, step, outputs)
        tokens = sum(int(each.count_nonzero()) for each in weights.values())
        figures |= {"completions": float(len(weights)), "tokens": float(tokens)}
        return Computed(figures, max(1, step.num_updates), step.rows or step.minibatch, weights)


def _token_weights(objective: Any, step: Step, outputs: Sequence[Any]) -> dict[int, torch.Tensor]:
    """-d loss / d log-prob of the tokens of each row that the update has read, by the row's place in the step."""
    read = [row for row in step.minibatch if row.trainer_log_probs is not None]
    if not read:
        return {}
    [whole] = pack(read, ONE_MICROBATCH, torch.device("cpu"))
    given = [torch.cat([output.log_probs for output in outputs]).float().cpu().requires_grad_()]
    if isinstance(objective, PolicyObjective):
        given.append(torch.cat([output.entropy for output in outputs]).float().cpu())
    [gradient] = torch.autograd.grad(objective.of(whole, objective.normaliser(step.minibatch), *given).loss, given[0])
    places = {id(row): place for place, row in enumerate(step.rows or step.minibatch)}
    return {places[id(row)]: each for row, each in zip(read, of_each_row(-gradient, read), strict=True)}


# Comparing


def _apart(was: Computed, table: Sequence[Completion]) -> float | None:
    """The most by which a token's log-prob, as the update read it, differs from the one recorded then."""
    found = [
        (row.trainer_log_probs - torch.tensor(kept["trainer_log_probs"])).abs().max().item()
        for row, kept in zip(was.rows, table, strict=True)
        if row.trainer_log_probs is not None and kept["trainer_log_probs"]
    ]
    return max(found, default=None)


def _compared(was: Sequence[torch.Tensor], becomes: Sequence[torch.Tensor]) -> tuple[float | None, float | None]:
    """The cosine of two gradients and the second's norm divided by the first's; None where a norm is 0."""
    first, second = (math.sqrt(sum(each.double().square().sum().item() for each in side)) for side in (was, becomes))
    if not first:
        return None, None
    dot = sum((a.double() * b.double()).sum().item() for a, b in zip(was, becomes, strict=True))
    return dot / (first * second) if second else None, second / first


def _moved(was: Computed, becomes: Computed) -> int:
    """How many tokens have different weights under the two settings."""
    moved = 0
    for place, row in enumerate(was.rows):
        unread = torch.zeros(row.response.numel())
        before, after = (each.weights.get(place, unread) for each in (was, becomes))
        moved += int((before != after).sum())
    return moved
