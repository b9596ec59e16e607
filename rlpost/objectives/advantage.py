"""Advantages: how much more a completion earned than expected; and completions at the length limit.

`give_advantages` is the step of the loop; the functions that it calls are pure functions of tensors. To add an
estimator: a function here, and its row in `ESTIMATORS` of rlpost/settings/loss.py.

Everywhere: a sample is compared if it is `valid` and its reward is finite. The others get 0 and are
outside every mean and deviation, so a NaN never spreads. Standard deviations are unbiased (N - 1),
and values that differ by rounding alone have none.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from tensordict import TensorDictBase

from rlpost.data.conversation import CUT, Conversation
from rlpost.data.ragged import padded
from rlpost.data.replay_buffer import valid_rewards
from rlpost.model.packing import Row
from rlpost.objectives.aggregation import kl_divergence
from rlpost.settings.loss import ESTIMATORS

TOLERANCE = 1e-6  # relative: further apart than sums of float32 rewards in another order can be
SMALLEST_STD = 1e-6  # a smaller one is not divided by


def give_advantages(
    batch: TensorDictBase,
    rows: Sequence[Row],
    estimator: str,
    *,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3_k2grad",
    shuffle_seed: int | None = None,
) -> dict[str, float]:
    """Write what each completion of a step is worth into `rows`, which are those of `batch` (B,).

    With a `shuffle_seed` rewards are permuted within each group. With a `kl_coef`, which needs the
    log-probs of `rows`, a completion's reward is r - kl_coef * sum of its tokens' KL
    (arXiv:1909.08593, eq. 2); for `reinforce_pp` each token has its own return and advantage. The rewards
    of `batch` stay as they are. `gdpo` reads the parts of the reward and their weights. Returns the mean
    penalty of a completion as `reward/kl_penalty`, if any.
    """
    rewards, groups, valid = batch["next", "reward"].squeeze(-1), batch["group_id"], batch["valid"]
    weights = None
    if estimator == "gdpo" and (names := list(batch["next", "reward_parts"].keys())):
        rewards, weights = (
            torch.cat([batch["next", column, name] for name in names], -1)  # (B, K)
            for column in ("reward_parts", "part_weights")
        )
    if shuffle_seed is not None:
        rewards = shuffled(rewards, groups, valid, shuffle_seed)
    if not kl_coef:
        _give(rows, advantages(estimator, rewards, groups, valid, weights))
        return {}
    mask = padded([row.sampled for row in rows])  # (B, T)
    penalties = kl_coef * _kl_per_token(rows, mask, kl_estimator)  # (B, T)
    if estimator == "reinforce_pp":
        of_tokens = token_advantages(rewards, penalties, mask, valid)  # (B, T)
        for row, own in zip(rows, of_tokens, strict=True):
            row.advantage = own[: row.response.numel()]
    else:
        _give(rows, advantages(estimator, rewards - penalties.sum(-1), groups, valid))
    return {"reward/kl_penalty": penalties.sum(-1)[valid].mean().item()}


def has_spread(group: Sequence[Conversation]) -> bool:
    """Whether the valid completions of a group were rewarded differently: else there is nothing to learn.

    The rule of dynamic sampling, the condition under eq. 11 of DAPO (arXiv:2503.14476), for rewards
    of any value.
    """
    return not equal_up_to_rounding(torch.tensor(valid_rewards(group)))


def advantages(
    estimator: str,
    rewards: torch.Tensor,
    groups: torch.Tensor,
    valid: torch.Tensor,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The advantage of each completion, (B,) in the dtype of `rewards`.

    `rewards` (B,), `groups` (B,) numbers the group of each, `valid` (B,) bool. A group with fewer
    than two samples that are compared, or with equal rewards, gives 0 where the estimator compares within
    groups. For `gdpo` `rewards` may be the parts of each reward, (B, K), NaN where a completion lacks one, and
    `weights`, (B, K) or (K,), theirs. Raises ValueError for an unknown `estimator`: `ESTIMATORS` has the names.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"advantage estimator {estimator!r} is unknown: it must be one of {', '.join(ESTIMATORS)}")
    scored = valid & (rewards.isfinite() if rewards.ndim == 1 else rewards.isfinite().any(-1))
    computed = rewards.new_zeros(len(rewards))
    given = [rewards[scored].double(), groups[scored]]
    if weights is not None:
        given.append(weights.expand_as(rewards)[scored].double())
    computed[scored] = ESTIMATORS[estimator].build(*given).to(rewards.dtype)
    return computed


def grpo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(r - mean) / std of the group. GRPO (arXiv:2402.03300, section 4.1.2)."""
    return _within_groups(rewards, groups, lambda own: (own - own.mean()) / _std(own))


def dr_grpo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r - mean of the group. Dr. GRPO (arXiv:2503.20783, section 3.2)."""
    return _within_groups(rewards, groups, lambda own: own - own.mean())


def rloo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r - mean of the others in the group. RLOO (arXiv:2402.14740, section 3)."""
    return _within_groups(rewards, groups, _leave_one_out)


def rloo_batch(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r - mean of the others in the batch, groups aside. RLOO (arXiv:2402.14740, section 3) over a batch."""
    return torch.zeros_like(rewards) if equal_up_to_rounding(rewards) else _leave_one_out(rewards)


def maxrl(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(r - mean) / mean of the group, 0 where the mean is not above 0. MaxRL (arXiv:2602.02710).

    Of rewards 0 and 1 it weighs a prompt by 1 / its share of right completions: hard prompts count most.
    """

    def of_group(own: torch.Tensor) -> torch.Tensor:
        mean = own.mean()
        return (own - mean) / mean if mean > 0 else torch.zeros_like(own)

    return _within_groups(rewards, groups, of_group)


def gdpo(rewards: torch.Tensor, groups: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Each part of the reward (r - mean) / std of its group; their weighted sum is whitened. GDPO (arXiv:2601.05242).

    `rewards` are the parts, (N, K), NaN where a completion lacks one, or one part, (N,); `weights` are theirs,
    (N, K) or (K,), or 1 each.
    """
    parts = rewards if rewards.ndim == 2 else rewards[:, None]
    weights = torch.ones_like(parts) if weights is None else weights.expand_as(parts)
    total = torch.zeros(len(parts), dtype=parts.dtype)
    for part, weight in zip(parts.unbind(-1), weights.unbind(-1), strict=True):
        has = part.isfinite()
        total[has] += weight[has] * grpo(part[has], groups[has])
    return _whitened(total)


def reinforce_pp(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(r - mean) / std of the batch, groups aside. REINFORCE++ (arXiv:2501.03262) without a KL term.

    `token_advantages` is the form with one.
    """
    return _whitened(rewards)


def reinforce_pp_baseline(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r - mean of the group, divided by the batch's std of that. REINFORCE++-baseline (arXiv:2501.03262).

    What is centred in each group has mean 0 over the batch, so whitening is the division alone.
    """
    centred = dr_grpo(rewards, groups)
    return centred if equal_up_to_rounding(centred) else centred / _std(centred)


def lite_ppo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r - mean of the group, divided by the std of the batch's rewards. Lite PPO (arXiv:2508.08221)."""
    centred = dr_grpo(rewards, groups)
    return centred if equal_up_to_rounding(rewards) else centred / _std(rewards)


GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "maxrl")  # read nothing beyond a completion's own group


def token_advantages(
    rewards: torch.Tensor, penalties: torch.Tensor, mask: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """The advantage of each token under a penalty per token, (B, T); 0 where `mask` (B, T) is.

    A completion's `rewards` (B,) comes with its last token and `penalties` (B, T) with each; the
    return at a token sums what comes from it on (gamma 1), and all returns are whitened over the
    batch's tokens. REINFORCE++ (arXiv:2501.03262), whose penalty is kl_coef times the KL per token.
    """
    scored = (valid & rewards.isfinite()).unsqueeze(-1) & mask  # (B, T)
    spent = torch.where(mask, penalties, 0.0).double()
    to_come = spent.flip(-1).cumsum(-1).flip(-1)  # (B, T) the token's own and all after it
    returns = rewards.double().unsqueeze(-1) - to_come
    computed = torch.zeros_like(penalties)
    computed[scored] = _whitened(returns[scored]).to(penalties.dtype)
    return computed


def equal_up_to_rounding(values: torch.Tensor) -> bool:
    """Whether `values` (N,) are fewer than two, or differ by no more than rounding explains."""
    if values.numel() < 2:
        return True
    spread = values.max() - values.min()
    return bool(spread <= TOLERANCE * values.abs().max().clamp(min=1.0))


def shuffled(rewards: torch.Tensor, groups: torch.Tensor, valid: torch.Tensor, seed: int) -> torch.Tensor:
    """`rewards` (B,) permuted within each group among the valid, by `seed` and the group's number alone."""
    permuted = rewards.clone()
    for group in groups.unique().tolist():
        [places] = (valid & (groups == group)).nonzero(as_tuple=True)
        digest = hashlib.blake2b(f"{seed}/shuffle/{group}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        permuted[places] = rewards[places[torch.randperm(places.numel(), generator=generator)]]
    return permuted


def _within_groups(
    rewards: torch.Tensor, groups: torch.Tensor, of_group: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`of_group` of each group's rewards; exactly 0 for a group that has nothing to tell."""
    computed = torch.zeros_like(rewards)
    for group in groups.unique():
        own = groups == group
        if not equal_up_to_rounding(rewards[own]):
            computed[own] = of_group(rewards[own])
    return computed


def _leave_one_out(own: torch.Tensor) -> torch.Tensor:
    """r - mean of the others."""
    return own - (own.sum() - own) / (own.numel() - 1)


def _whitened(values: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(values) if equal_up_to_rounding(values) else (values - values.mean()) / _std(values)


def _std(values: torch.Tensor) -> torch.Tensor:
    return values.std().clamp(min=SMALLEST_STD)


def _kl_per_token(rows: Sequence[Row], mask: torch.Tensor, estimator: str) -> torch.Tensor:
    """The estimate of KL(old policy || reference) at each trained token, (B, T); 0 elsewhere."""
    old = [row.old_log_probs for row in rows if row.old_log_probs is not None]
    reference = [row.ref_log_probs for row in rows if row.ref_log_probs is not None]
    assert len(old) == len(reference) == len(rows), "a KL penalty needs the log-probs of both, of every row"
    return kl_divergence(padded(old), padded(reference), estimator, mask)


def _give(rows: Sequence[Row], values: torch.Tensor) -> None:
    for row, value in zip(rows, values.tolist(), strict=True):
        row.advantage = value


PART, LENGTH_PART = "overlong", "length_penalty"  # the names of the penalties among the parts of a reward


def soft_overlong_penalty(lengths: torch.Tensor, max_tokens: int, penalty_tokens: int) -> torch.Tensor:
    """The penalty for a completion's length, float32 of the shape of `lengths`: from 0 down to -1.

    0 up to `max_tokens - penalty_tokens` tokens, from there on a straight line down to -1 at
    `max_tokens`, and -1 beyond. DAPO (arXiv:2503.14476, eq. 13).
    """
    beyond = lengths.float() - (max_tokens - penalty_tokens)
    return -(beyond / penalty_tokens).clamp(0.0, 1.0)


def penalise_overlong(batch: TensorDictBase, max_tokens: int, penalty_tokens: int) -> None:
    """Add the penalty to each reward of `batch` (B,), as its part `overlong`.

    A completion is as long as what its model sampled. Accuracies stay as they are, and a reward that
    failed stays without a value.
    """
    _add_part(batch, PART, soft_overlong_penalty(_lengths(batch), max_tokens, penalty_tokens))


def length_penalty(rewards: torch.Tensor, lengths: torch.Tensor, groups: torch.Tensor, share: float) -> torch.Tensor:
    """Minus `share` of the group's mean reward for its longest completion, less in proportion for a shorter one; (B,).

    Where the mean is below 0 the penalty is 0. A NaN among `rewards` (B,) is outside the mean and the longest. The
    linear penalty of prime-rl, for output tokens.
    """
    penalty = torch.zeros_like(rewards)
    for group in groups.unique():
        own = groups == group
        scored = own & rewards.isfinite()
        if scored.any():
            most = share * rewards[scored].mean().clamp(min=0)
            penalty[own] = -most * lengths[own] / lengths[scored].max().clamp(min=1)
    return penalty


def penalise_length(batch: TensorDictBase, share: float) -> None:
    """Add `length_penalty` to each reward of `batch` (B,), as its part `length_penalty`; see `penalise_overlong`."""
    rewards = batch["next", "reward"].squeeze(-1).masked_fill(~batch["valid"], math.nan)
    penalty = length_penalty(rewards, _lengths(batch), batch["group_id"], share)
    _add_part(batch, LENGTH_PART, penalty, weight=share)


def _lengths(batch: TensorDictBase) -> torch.Tensor:
    """How many ids the model sampled for each completion, (B,)."""
    return torch.tensor([int(mask.sum()) for mask in batch["masks", "all_assistant_mask"].unbind()])


def _add_part(batch: TensorDictBase, name: str, penalty: torch.Tensor, weight: float = 1.0) -> None:
    """Add `penalty` (B,) to the rewards of `batch`, as their part `name`, which `gdpo` weighs by `weight`."""
    penalty = penalty.unsqueeze(-1)  # (B, 1)
    batch["next", "reward"] = batch["next", "reward"] + penalty
    batch["next", "reward_parts", name] = penalty
    batch["next", "part_weights", name] = torch.full_like(penalty, weight)


def mask_overlong(batch: TensorDictBase, rows: Sequence[Row]) -> list[Row]:
    """Mask the truncated ones of `rows`; the others are returned as they are.

    A truncated row ended at the length limit of a turn, or where the context had no room for more.
    Their rewards count in the baseline all the same. Overlong filtering of DAPO (arXiv:2503.14476,
    section 3.4).
    """
    return [
        replace(row, sampled=torch.zeros_like(row.sampled)) if reason in CUT else row
        for row, reason in zip(rows, batch["finish_reason"], strict=True)
    ]
