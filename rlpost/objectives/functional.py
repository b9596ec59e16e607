"""The public door to every loss, divergence and weight: pure functions, tensors in, tensors out."""

from __future__ import annotations

import torch

from rlpost.objectives.aggregation import AGGREGATIONS as AGGREGATIONS
from rlpost.objectives.aggregation import aggregate as aggregate
from rlpost.objectives.aggregation import default_normaliser as default_normaliser
from rlpost.objectives.aggregation import masked_mean as masked_mean
from rlpost.objectives.aggregation import token_weights as token_weights
from rlpost.objectives.kl import KL_ESTIMATORS as KL_ESTIMATORS
from rlpost.objectives.kl import k1 as k1
from rlpost.objectives.kl import k2 as k2
from rlpost.objectives.kl import k3 as k3
from rlpost.objectives.kl import k3_k2grad as k3_k2grad
from rlpost.objectives.kl import kl_divergence as kl_divergence
from rlpost.objectives.kl import sequence_kl_divergence as sequence_kl_divergence
from rlpost.objectives.mismatch import SAMPLER_CORRECTIONS as SAMPLER_CORRECTIONS
from rlpost.objectives.mismatch import sampler_weights as sampler_weights
from rlpost.objectives.policy import PolicyTerms as PolicyTerms
from rlpost.objectives.policy import effective_sample_size as effective_sample_size
from rlpost.objectives.policy import policy_loss as policy_loss
from rlpost.objectives.policy import policy_metrics as policy_metrics
from rlpost.objectives.policy import policy_terms as policy_terms
from rlpost.objectives.supervised import minor_sft_loss as minor_sft_loss
from rlpost.objectives.supervised import minor_sft_terms as minor_sft_terms
from rlpost.objectives.supervised import sft_loss as sft_loss
from rlpost.objectives.supervised import sft_terms as sft_terms
from rlpost.objectives.variants import VARIANTS as VARIANTS
from rlpost.objectives.variants import clipped_surrogate


def clipped_policy_loss(
    log_ratio: torch.Tensor, advantage: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """−min(ρÂ, clip(ρ, 1−clip_low, 1+clip_high)Â) per token, ρ = exp(log_ratio); any shape."""
    return clipped_surrogate(log_ratio, advantage, clip_low, clip_high).loss


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
