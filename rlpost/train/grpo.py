"""GRPO (arXiv:2402.03300), from top to bottom: sample groups, compare, update, push weights.

Departures from the paper, all by default: no KL term and no reference model (`loss.kl_coef`), the
loss is averaged over all tokens of a minibatch rather than per completion (DAPO, arXiv:2503.14476),
and one update a step, so the ratio to the old policy is 1 and the clip idle until `passes` or
`minibatch_size` ask for more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tensordict import TensorDict

from rlpost.model.optim import learning_rate_of
from rlpost.model.packing import Row, rows_of
from rlpost.objectives.advantage import give_advantages, mask_overlong, penalise_length, penalise_overlong
from rlpost.objectives.policy_loss import PolicyObjective, PolicyOutput
from rlpost.settings import GRPOSettings
from rlpost.settings.commands import RunRequest, SampledSettings
from rlpost.train.assemble import GRPOParts, assemble_grpo
from rlpost.train.progress import loss_metrics
from rlpost.train.ranks import Ranks
from rlpost.train.session import Session
from rlpost.train.update import Update

GRPOSession = Session[GRPOSettings, GRPOParts]


def train(settings: GRPOSettings, request: RunRequest) -> int:
    """Run or resume the training that `settings` describes; returns the process's exit code."""
    with GRPOSession(settings, request) as session:
        session.load(assemble_grpo)
        learn(session)
    return session.run.exit_code


def learn(session: GRPOSession) -> None:
    """The loop: every step still to do."""
    settings, parts = session.settings, session.parts
    ranks = session.ranks.over(settings.steps * updates_per_step(settings))
    for _ in session.steps():
        batch = parts.buffer.take(settings.prompts_per_step, settings.max_policy_lag)  # whole groups, each once
        penalise(settings, batch)
        session.collected(batch)

        rows = rows_of(batch)
        if settings.loss.right_nll_coef and batch["next", "accuracy_lenient"].isnan().all():
            session.note_step("no completion has an accuracy, so loss.right_nll_coef adds nothing")
        fill_log_probs(settings, parts.objective, ranks, rows)  # of the reference and the old policy, if they are read
        session.metrics |= fill_advantages(settings, batch, rows)
        if parts.objective.entropy_target is not None:
            adapt_entropy_coef(session)
        trained = leave_out_overlong(session, batch, rows) if settings.overlong.mask else rows
        updates: list[Update[PolicyOutput]] = []
        for minibatch in minibatches(settings, trained):
            updates.append(session.update(minibatch, batch))
            if not any(row.counts for row in minibatch):
                session.note_step("all rewards of a minibatch failed, so it changed no weight")
        session.metrics |= update_metrics(settings, parts, ranks, rows, updates)
        if not math.isnan(entropy := session.metrics["entropy"]):
            session.progress.entropy = entropy
        session.trained(updates)
        if (every := parts.objective.ref_sync_every) and session.step % every == 0:
            ranks.move_reference(parts.objective.ref_sync_share)

        if any(u.stepped for u in updates):
            parts.collector.update_policy_weights_(parts.model)  # and the policy's version rises
        session.finish(batch, rows)


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


def leave_out_overlong(session: GRPOSession, batch: TensorDict, rows: Sequence[Row]) -> list[Row]:
    """Mask truncated rows; warn if that leaves none."""
    trained = mask_overlong(batch, rows)
    cut = [row for row, left in zip(rows, trained, strict=True) if left is not row and row.counts]
    session.metrics["completion/masked_overlong"] = float(len(cut))
    if cut and len(cut) == sum(row.counts for row in rows):
        limit = session.settings.env.max_completion_tokens
        at_limit = sum(row.last_turn >= limit for row in cut)
        where, advice = f"at env.max_completion_tokens={limit}", "raise the limit"
        if at_limit < len(cut):
            room = session.parts.policy.max_model_len
            where = f"{len(cut) - at_limit} where the context of {room} tokens ran out and {at_limit} {where}"
            advice = "lower env.max_turns or env.max_completion_tokens, or take a model with a longer context"
        session.note_step(
            "nothing was trained on: all completions were truncated, and overlong.mask=true leaves those out",
            f" ({where}; {advice})",
        )
    return trained


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


def adapt_entropy_coef(session: GRPOSession) -> None:
    """Set the coefficient of the entropy bonus on every rank, by the entropy of the step before."""
    objective, progress = session.parts.objective, session.progress
    so_far = session.settings.loss.entropy_coef if progress.entropy_coef is None else progress.entropy_coef
    progress.entropy_coef = objective.adapt_entropy_coef(so_far, progress.entropy)
    session.metrics["entropy_coef"] = objective.entropy_coef
    session.ranks.share_objective()


def update_metrics(
    settings: GRPOSettings,
    parts: GRPOParts,
    ranks: Ranks,
    rows: list[Row],
    updates: list[Update[PolicyOutput]],
) -> dict[str, float]:
    """The metrics of the step's optimizer steps; the gap between sampler and trainer even without one."""
    outputs = [output for u in updates for output in u.outputs]
    metrics = loss_metrics([u.outputs for u in updates], corrected=parts.objective.sampler_correction != "none")
    norms = [u.grad_norm for u in updates if u.stepped]
    read = [row for row in rows if row.counts and row.num_trained]
    if not outputs and read:
        longest = max(read, key=lambda row: row.num_trained)
        temperature = parts.policy.sampling.temperature
        [log_probs] = ranks.read_log_probs([longest], temperature=temperature)
        difference = (log_probs - longest.sampler_log_probs)[longest.sampled]
        metrics["sampler/logprob_gap"] = difference.abs().mean().item()
    return metrics | {
        "grad_norm": sum(norms) / len(norms) if norms else 0.0,
        "lr": learning_rate_of(parts.optimizer),
        "tokens/trained": float(sum(output.num_tokens for output in outputs)),
    }
