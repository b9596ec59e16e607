"""GRPO (arXiv:2402.03300), from top to bottom: sample groups, compare, update, push weights.

Departures from the paper, all by default: no KL term and no reference model (`loss.kl_coef`), the
loss is averaged over all tokens of a minibatch rather than per completion (DAPO, arXiv:2503.14476),
and one update a step, so the ratio to the old policy is 1 and the clip idle until `passes` or
`minibatch_size` ask for more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensordict import TensorDict

from rlpost.model.packing import Row, rows_of
from rlpost.objectives.advantage import give_advantages, penalise_length, penalise_overlong
from rlpost.objectives.policy_loss import PolicyObjective
from rlpost.settings import GRPOSettings
from rlpost.settings.commands import SampledSettings
from rlpost.train.assemble import GRPOParts, assemble_grpo
from rlpost.train.progress import loss_metrics
from rlpost.train.ranks import Ranks
from rlpost.train.rules import rules_of
from rlpost.train.run import Run
from rlpost.train.sampling import look_at_completions
from rlpost.train.step import Step

assemble = assemble_grpo


def learn(run: Run[GRPOSettings, GRPOParts], parts: GRPOParts) -> None:
    """The loop: every step still to do."""
    settings, objective = run.settings, parts.objective
    ranks = run.ranks.over(settings.steps * updates_per_step(settings))
    rules = rules_of(settings, objective, run.progress, parts.policy.max_model_len)
    for step in run.steps():
        batch = parts.buffer.take(settings.prompts_per_step, settings.max_policy_lag)  # whole groups, each once
        penalise(settings, batch)
        look_at_completions(step, parts, batch)

        rows = trained = rows_of(batch)
        fill_log_probs(settings, objective, ranks, rows)  # of the reference and the old policy, if they are read
        step.metrics |= fill_advantages(settings, batch, rows)
        for rule in rules:
            trained = rule.before_updates(step, batch, trained)
        for minibatch in minibatches(settings, trained):
            step.update(minibatch)
        step.metrics |= update_metrics(step, parts, rows)
        for rule in rules:
            rule.after_updates(step)

        step.push(parts.collector)  # and the policy's version rises
        step.trained_on(batch, rows)


def minibatches(settings: SampledSettings, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """The rows of each optimizer step: whole groups, in the order they were drawn, `passes` times."""
    size = settings.minibatch_size or len(rows)
    for _ in range(settings.passes):
        for start in range(0, len(rows), size):
            yield rows[start : start + size]


def updates_per_step(settings: SampledSettings) -> int:
    """Optimizer steps that one step's completions are used for."""
    completions = settings.prompts_per_step * settings.group_size
    return settings.passes * (completions // (settings.minibatch_size or completions))


def fill_log_probs(settings: GRPOSettings, objective: PolicyObjective, ranks: Ranks, rows: Sequence[Row]) -> None:
    """Give `rows` the log-probs of the reference, and of the model before the first update, where those are read."""
    temperature = objective.temperature
    ranks.fill_reference(rows, temperature)
    is_moved = updates_per_step(settings) > 1 and not objective.ratio_to_sampler
    if is_moved or settings.loss.reward_kl_coef:
        read = ranks.read_log_probs(rows, temperature=temperature)
        for row, log_probs in zip(rows, read, strict=True):
            row.old_log_probs = log_probs


def penalise(settings: GRPOSettings, batch: TensorDict) -> None:
    """Take from the rewards what `overlong` asks for."""
    overlong = settings.overlong
    if overlong.penalty_tokens:
        penalise_overlong(batch, settings.env.max_completion_tokens, overlong.penalty_tokens)
    if overlong.length_penalty:
        penalise_length(batch, overlong.length_penalty)


def fill_advantages(settings: GRPOSettings, batch: TensorDict, rows: Sequence[Row]) -> dict[str, float]:
    """Give `rows` and `batch` what each completion is worth; see `give_advantages`."""
    return give_advantages(
        batch,
        rows,
        settings.advantage.estimator,
        kl_coef=settings.loss.reward_kl_coef,
        kl_estimator=settings.loss.kl_estimator.name,
        shuffle_seed=settings.seed if settings.advantage.shuffle_rewards else None,
    )


def update_metrics(step: Step, parts: GRPOParts, rows: Sequence[Row]) -> dict[str, float]:
    """The metrics of the step's optimizer steps; the gap between sampler and trainer even without one."""
    updates = step.updates
    outputs = [output for u in updates for output in u.outputs]
    metrics = loss_metrics([u.outputs for u in updates], corrected=parts.objective.sampler_correction != "none")
    read = [row for row in rows if row.valid and row.num_trained]
    if not outputs and read:
        longest = max(read, key=lambda row: row.num_trained)
        temperature = parts.policy.sampling.temperature
        [log_probs] = step.ranks.read_log_probs([longest], temperature=temperature)
        difference = (log_probs - longest.sampler_log_probs)[longest.sampled]
        metrics["sampler/logprob_gap"] = difference.abs().mean().item()
    return metrics | {"tokens/trained": float(sum(output.num_tokens for output in outputs))}
