"""Losses and divergences as pure functions of per-token tensors; any shape, means left to the caller."""

from __future__ import annotations

import torch


def clipped_policy_loss(
    log_ratio: torch.Tensor, advantage: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """−min(ρÂ, clip(ρ, 1−clip_low, 1+clip_high)Â) per token, ρ = exp(log_ratio).

    PPO (arXiv:1707.06347, eq. 7) with the group-relative advantage of GRPO (arXiv:2402.03300, eq. 3)
    and the two bounds of DAPO (arXiv:2503.14476, eq. 10).
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantage, clipped * advantage)


def k3(log_probs: torch.Tensor, other_log_probs: torch.Tensor) -> torch.Tensor:
    """exp(d) − d − 1 per token, d = other − own: unbiased and never negative for tokens drawn from π_own.

    The estimator k3 of KL(own ‖ other) in http://joschu.net/blog/kl-approx.html.
    """
    difference = other_log_probs - log_probs
    return torch.expm1(difference) - difference


def effective_sample_size(log_ratio: torch.Tensor) -> torch.Tensor:
    """(Σρ)² / (N Σρ²) over all elements, in (0, 1]; 1 when every weight is equal."""
    numerator = 2 * log_ratio.logsumexp(0) - (2 * log_ratio).logsumexp(0)
    return numerator.exp() / log_ratio.numel()


def group_advantage(rewards: torch.Tensor, valid: torch.Tensor, *, normalise_std: bool) -> torch.Tensor:
    """r − mean over one group's valid rewards (G,), divided by their unbiased standard deviation.

    GRPO (arXiv:2402.03300, sec. 4.1.2); without the division Dr. GRPO (arXiv:2503.20783). Invalid
    samples get 0, and so does a group whose rewards are equal up to rounding.
    """
    kept = rewards[valid].double()
    advantage = torch.zeros_like(rewards)
    if kept.numel() < 2 or (kept.max() - kept.min()) <= 1e-6 * kept.abs().max().clamp(min=1.0):
        return advantage
    centred = kept - kept.mean()
    if normalise_std:
        centred = centred / centred.square().sum().div(kept.numel() - 1).sqrt().clamp(min=1e-6)
    advantage[valid] = centred.to(rewards.dtype)
    return advantage
