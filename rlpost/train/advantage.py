"""What a step's completions are worth, where that takes more than the rewards of each group.

`MCAdvantage` gives a group its advantages as soon as it is complete. Two things have to wait for
the batch: estimators that compare with all of it, and a KL penalty in the reward, which needs the
log-probs of the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from tensordict import TensorDictBase
from torch.nn.utils.rnn import pad_sequence

from rlpost.batching import Row
from rlpost.objectives.advantage import GROUP_ESTIMATORS, advantages, shuffled, token_advantages
from rlpost.objectives.kl import kl_divergence
from rlpost.settings import Estimator, GRPOSettings, KLPlace


def kl_in_reward(settings: GRPOSettings) -> bool:
    """Whether the KL to the reference lowers the reward, for which each row needs both log-probs."""
    return settings.loss.kl_coef > 0 and settings.loss.kl_in is KLPlace.reward


def complete_advantages(settings: GRPOSettings, batch: TensorDictBase, rows: Sequence[Row]) -> dict[str, float]:
    """Write the advantages that had to wait into `rows` and `batch`, (B,) each; none where none had to.

    With the KL in the reward a completion's reward is r - kl_coef * sum of its tokens' KL
    (arXiv:1909.08593, eq. 2), or for `reinforce_pp` each token has its own return and advantage, and
    the batch holds the mean over the completion's tokens. The rewards of `batch` stay the task's. Returns
    the mean penalty of a completion as `reward/kl_penalty`, where there is one.
    """
    estimator = settings.advantage.estimator
    if estimator.value in GROUP_ESTIMATORS and not kl_in_reward(settings):
        return {}
    rewards, groups, valid = batch["next", "reward"].squeeze(-1), batch["group_id"], batch["valid"]
    if settings.advantage.shuffle_rewards:
        rewards = shuffled(rewards, groups, valid, settings.seed)
    if not kl_in_reward(settings):
        batch["advantage"] = advantages(estimator.value, rewards, groups, valid)
        _assign(rows, batch["advantage"].tolist())
        return {}
    mask = pad_sequence([row.sampled for row in rows], batch_first=True)  # (B, T)
    penalties = settings.loss.kl_coef * kl_per_token(rows, mask, settings.loss.kl_estimator.value)  # (B, T)
    if estimator is Estimator.reinforce_pp:
        per_token = token_advantages(rewards, penalties, mask, valid)
        batch["advantage"] = per_token.sum(-1) / mask.sum(-1).clamp(min=1)
        _assign(rows, [values[: row.response.numel()] for values, row in zip(per_token, rows, strict=True)])
    else:
        batch["advantage"] = advantages(estimator.value, rewards - penalties.sum(-1), groups, valid)
        _assign(rows, batch["advantage"].tolist())
    return {"reward/kl_penalty": penalties.sum(-1).mean().item()}


def kl_per_token(rows: Sequence[Row], mask: torch.Tensor, estimator: str) -> torch.Tensor:
    """The estimate of KL(old policy || reference) at each trained token, (B, T); 0 elsewhere."""
    old = [row.old_log_probs for row in rows if row.old_log_probs is not None]
    reference = [row.ref_log_probs for row in rows if row.ref_log_probs is not None]
    assert len(old) == len(reference) == len(rows), "a KL penalty needs the log-probs of both, of every row"
    return kl_divergence(
        pad_sequence(old, batch_first=True), pad_sequence(reference, batch_first=True), estimator, mask
    )


def mask_overlong(batch: TensorDictBase, rows: Sequence[Row]) -> list[Row]:
    """`rows` with nothing to train on in those that were cut at their length limit; the others are the same objects.

    Their rewards count in the baseline all the same. Overlong filtering of DAPO (arXiv:2503.14476,
    section 3.4).
    """
    return [
        replace(row, sampled=torch.zeros_like(row.sampled)) if reason == "length" else row
        for row, reason in zip(rows, batch["finish_reason"], strict=True)
    ]


def _assign(rows: Sequence[Row], values: Sequence[float | torch.Tensor]) -> None:
    for row, value in zip(rows, values, strict=True):
        row.advantage = value
