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
from rlpost.settings import AdvantageSettings, GRPOSettings, OverlongSettings, PolicyLossSettings
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
    settings, objective, buffer = run.settings, parts.objective, parts.buffer
    prompts, size, passes = settings.prompts_per_step, settings.minibatch_size, settings.passes
    updates = updates_per_step(prompts * settings.group_size, size, passes)
    ranks = run.ranks.over(settings.steps * updates)
    longest = settings.env.max_completion_tokens
    rules = rules_of(settings.loss, settings.overlong.mask, parts, run.progress, longest)
    for step in run.steps():
        step.metrics |= parts.collector.fill(prompts)  # sample until the buffer has whole groups, none too old
        batch = buffer.take(prompts)  # each group once
        penalise(batch, settings.overlong, longest)
        look_at_completions(step, parts.policy, batch, settings.max_failed_share)

        rows = trained = rows_of(batch)
        fill_log_probs(rows, ranks, objective, settings.loss, updates)  # of the reference and the old policy, if read
        step.metrics |= fill_advantages(batch, rows, settings.advantage, settings.loss, settings.seed)
        for rule in rules:
            trained = rule.before_updates(step, batch, trained)
        for minibatch in minibatches(trained, size, passes):
            step.update(minibatch)
        step.metrics |= update_metrics(step, parts, rows)
        for rule in rules:
            rule.after_updates(step)

        step.push(parts.collector)  # and the policy's version rises
        step.trained_on(batch, rows)


def minibatches(rows: Sequence[Row], size: int | None, passes: int) -> Iterator[Sequence[Row]]:
    """The rows of each optimizer step: `size` in whole groups (None: all), in the order drawn, `passes` times."""
    size = size or len(rows)
    for _ in range(passes):
        for start in range(0, len(rows), size):
            yield rows[start : start + size]


def updates_per_step(completions: int, size: int | None, passes: int) -> int:
    """Optimizer steps that one step's completions are used for; see `minibatches`."""
    return passes * (completions // (size or completions))


def fill_log_probs(
    rows: Sequence[Row], ranks: Ranks, objective: PolicyObjective, loss: PolicyLossSettings, updates: int
) -> None:
    """Give `rows` the log-probs of the reference, and of the model before the first of `updates`, if those are read."""
    temperature = objective.temperature
    ranks.fill_reference(rows, temperature)
    is_moved = updates > 1 and not objective.ratio_to_sampler
    if is_moved or loss.reward_kl_coef:
        read = ranks.read_log_probs(rows, temperature=temperature)
        for row, log_probs in zip(rows, read, strict=True):
            row.old_log_probs = log_probs


def penalise(batch: TensorDict, overlong: OverlongSettings, longest: int) -> None:
    """Take from the rewards what `overlong` asks for; a turn has at most `longest` tokens."""
    if overlong.penalty_tokens:
        penalise_overlong(batch, longest, overlong.penalty_tokens)
    if overlong.length_penalty:
        penalise_length(batch, overlong.length_penalty)


def fill_advantages(
    batch: TensorDict, rows: Sequence[Row], advantage: AdvantageSettings, loss: PolicyLossSettings, seed: int
) -> dict[str, float]:
    """Give `rows` what each completion is worth; see `give_advantages`."""
    return give_advantages(
        batch,
        rows,
        advantage.estimator,
        kl_coef=loss.reward_kl_coef,
        kl_estimator=loss.kl_estimator.name,
        shuffle_seed=seed if advantage.shuffle_rewards else None,
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
