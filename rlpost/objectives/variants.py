"""The policy losses, one function a variant: a loss per token, and where the ratio was clipped.

Every function reads (B, T) tensors: log π_θ, log π_old, the advantage Â and the bool mask; what they
hold where the mask is False must be finite (`policy_terms` sees to it). ρ = π_θ / π_old of a token.
A variant's keyword arguments are its coefficients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, log, log1p
from typing import NamedTuple

import torch

from rlpost.objectives.aggregation import sequence_mean


class Surrogate(NamedTuple):
    """A variant's loss per token (B, T), and whether a bound cut its ratio from below or from above (bool)."""

    loss: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


def clipped_surrogate(
    log_ratio: torch.Tensor, advantage: torch.Tensor, clip_low: float, clip_high: float, ceiling: float = inf
) -> Surrogate:
    """−min(ρÂ, clip(ρ, 1−clip_low, 1+clip_high)Â), with ρ ≤ `ceiling` for a negative advantage.

    The minimum caps ρ at 1+clip_high for a positive advantage and holds it above 1−clip_low for a
    negative one. Capped before exp, since an infinite ratio would make the gradient 0·∞ = NaN; where
    nothing caps it (a negative advantage, no `ceiling`) the loss is then ∞, for a guard to see.
    PPO (arXiv:1707.06347, eq. 7).
    """
    negative = advantage < 0
    floor = torch.full_like(log_ratio, -inf).masked_fill(negative, _log(1 - clip_low))
    cap = torch.full_like(log_ratio, log1p(clip_high)).masked_fill(negative, log(ceiling))
    ratio = log_ratio.clamp(floor, cap).exp()
    cut = advantage != 0
    return Surrogate(-ratio * advantage, (log_ratio < floor) & cut, (log_ratio > cap) & cut)


def grpo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Surrogate:
    """−min(ρÂ, clip(ρ)Â), each completion's mean over its tokens. GRPO (arXiv:2402.03300, eq. 3)."""
    return clipped_surrogate(log_probs - old_log_probs, advantage, clip_low, clip_high)


def dapo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Surrogate:
    """GRPO's loss with more room above, averaged over all tokens. DAPO (arXiv:2503.14476)."""
    return clipped_surrogate(log_probs - old_log_probs, advantage, clip_low, clip_high)


def gspo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Surrogate:
    """−min(sÂ, clip(s)Â) with the completion's s = exp(mean_t log ρ), given to each of its tokens.

    GSPO (arXiv:2507.18071), and its bounds. Every token of a completion is clipped or none is.
    """
    log_ratio = sequence_mean(log_probs - old_log_probs, mask)[:, None]
    return clipped_surrogate(log_ratio.expand_as(log_probs), advantage, clip_low, clip_high)


def gspo_token(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Surrogate:
    """GSPO with s_t = sg[s] · π_θ/sg[π_θ], so that the tokens of a completion may differ in advantage.

    GSPO-token (arXiv:2507.18071); with one advantage a completion, value and gradient are GSPO's.
    """
    log_ratio = sequence_mean(log_probs - old_log_probs, mask)[:, None].detach()
    return clipped_surrogate(log_ratio + log_probs - log_probs.detach(), advantage, clip_low, clip_high)


def cispo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Surrogate:
    """−sg[clip(ρ, 1−clip_low, 1+clip_high)] Â log π_θ: a clipped token keeps its gradient, with a bounded weight.

    CISPO (MiniMax-M1, arXiv:2506.13585). As in the paper the bounds are 1±ε; some implementations
    give the largest weight itself, so that their 5 is clip_high=4 here. clip_low=1 is no lower bound,
    as the paper trains.
    """
    log_ratio = (log_probs - old_log_probs).detach()
    floor, cap = _log(1 - clip_low), log1p(clip_high)
    weight = log_ratio.clamp(floor, cap).exp()
    cut = advantage != 0
    return Surrogate(-weight * advantage * log_probs, (log_ratio < floor) & cut, (log_ratio > cap) & cut)


def two_sided(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float = 4.0,
) -> Surrogate:
    """−min(min(ρ, δ)Â, clip(ρ)Â): a bad token grown much likelier cannot take over the step.

    Two-sided GRPO clipping (INTELLECT-2, arXiv:2505.07291). δ must be above 1+clip_high.
    """
    if delta <= 1 + clip_high:
        raise ValueError(f"delta={delta:g} must be above 1 + clip_high = {1 + clip_high:g}")
    return clipped_surrogate(log_probs - old_log_probs, advantage, clip_low, clip_high, ceiling=delta)


def dual_clip(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    c: float = 3.0,
) -> Surrogate:
    """−max(min(ρÂ, clip(ρ)Â), cÂ) for a negative advantage, PPO's otherwise. Dual-clip PPO (arXiv:1912.09729).

    It caps ρ at c > 1, so that it is `two_sided` with δ = c wherever both are defined.
    """
    if c <= 1:
        raise ValueError(f"c={c:g} must be above 1")
    return clipped_surrogate(log_probs - old_log_probs, advantage, clip_low, clip_high, ceiling=c)


def reinforce(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantage: torch.Tensor, mask: torch.Tensor
) -> Surrogate:
    """−Â log π_θ, the plain policy gradient: exact only for tokens that π_θ itself sampled."""
    never = torch.zeros_like(mask)
    return Surrogate(-advantage * log_probs, never, never)


@dataclass(frozen=True, slots=True)
class Variant:
    """A loss per token, and how its paper averages it."""

    surrogate: Callable[..., Surrogate]
    aggregation: str

    @property
    def coefficients(self) -> dict[str, float]:
        """Its named coefficients with their defaults: the keyword arguments of `surrogate`."""
        return dict(self.surrogate.__kwdefaults__ or {})


VARIANTS = {
    "grpo": Variant(grpo, "sequence_mean"),
    "dr_grpo": Variant(grpo, "constant_length"),
    "dapo": Variant(dapo, "token_mean"),
    "gspo": Variant(gspo, "sequence_mean"),
    "gspo_token": Variant(gspo_token, "sequence_mean"),
    "cispo": Variant(cispo, "token_mean"),
    "two_sided": Variant(two_sided, "token_mean"),
    "dual_clip": Variant(dual_clip, "token_mean"),
    "reinforce": Variant(reinforce, "token_mean"),
}


def _log(x: float) -> float:
    """log x, −∞ for 0 and below: a bound that never binds."""
    return log(x) if x > 0 else -inf
