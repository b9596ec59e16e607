"""Estimators of KL(π ‖ other) from the log-probabilities of sampled tokens."""

from __future__ import annotations

import torch

from rlpost.objectives.aggregation import check_choice, keep, sequence_sum
from rlpost.settings import KLEstimator

KL_ESTIMATORS = tuple(KLEstimator.__members__)


def k1(log_probs: torch.Tensor, other_log_probs: torch.Tensor) -> torch.Tensor:
    """log π − log other per token: unbiased for tokens drawn from π, of either sign.

    Its gradient is ∇log π, 0 on average: it says how far apart the two are and pulls nothing back,
    so it belongs in the reward and not in the loss.
    """
    return log_probs - other_log_probs


def k2(log_probs: torch.Tensor, other_log_probs: torch.Tensor) -> torch.Tensor:
    """(log π − log other)² / 2 per token: biased, but its gradient is on average the divergence's own."""
    return (log_probs - other_log_probs).square() / 2


def k3(log_probs: torch.Tensor, other_log_probs: torch.Tensor) -> torch.Tensor:
    """exp(d) − d − 1 per token, d = log other − log π: unbiased for tokens drawn from π and never negative.

    The three estimators and their names are those of http://joschu.net/blog/kl-approx.html; GRPO
    (arXiv:2402.03300, eq. 4) uses this one.
    """
    difference = other_log_probs - log_probs
    return torch.expm1(difference) - difference


def k3_k2grad(log_probs: torch.Tensor, other_log_probs: torch.Tensor) -> torch.Tensor:
    """k3's value with k2's gradient: unbiased in both, for tokens drawn from π."""
    through = k2(log_probs, other_log_probs)
    return through + (k3(log_probs, other_log_probs) - through).detach()


_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "k3_k2grad": k3_k2grad}


def kl_divergence(
    log_probs: torch.Tensor, other_log_probs: torch.Tensor, estimator: str = "k3", mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The estimate per token, of the shape of `log_probs`; 0 where `mask` is given and False.

    Raises ConfigError for an unknown estimator.
    """
    check_choice("KL estimator", estimator, KL_ESTIMATORS)
    if mask is not None:
        log_probs, other_log_probs = keep(log_probs, mask), keep(other_log_probs, mask)
    return _ESTIMATORS[estimator](log_probs, other_log_probs)


def sequence_kl_divergence(
    log_probs: torch.Tensor, other_log_probs: torch.Tensor, mask: torch.Tensor, estimator: str = "k1"
) -> torch.Tensor:
    """The estimate of a whole completion, Σ over its masked tokens, (B,): what a reward is reduced by."""
    return sequence_sum(kl_divergence(log_probs, other_log_probs, estimator, mask), mask)
