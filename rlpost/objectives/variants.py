"""The policy losses: each gives a loss per token, and where it clips the ratio.

ρ = π_θ / π_old of a token, Â its advantage. Their coefficients, and how each is averaged, stand in
rlpost/settings/loss.py.
"""

from __future__ import annotations

from math import inf, log, log1p
from typing import NamedTuple

import torch

from rlpost.objectives.aggregation import sequence_mean


class Tokens(NamedTuple):
    """The inputs of a variant for B completions, (B, T) each; all values are finite, also where `mask` is False."""

    log_probs: torch.Tensor  # log π_θ, with gradient
    old_log_probs: torch.Tensor  # log π_old
    advantage: torch.Tensor
    mask: torch.Tensor  # bool


class Surrogate(NamedTuple):
    """A variant's loss per token (B, T), and whether a bound cut its ratio from below or from above (bool)."""

    loss: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


def clipped(
    tokens: Tokens, clip_low: float, clip_high: float, max_ratio: float = inf, log_ratio: torch.Tensor | None = None
) -> Surrogate:
    """−min(ρÂ, clip(ρ, 1−clip_low, 1+clip_high)Â), with ρ ≤ `max_ratio` for a negative advantage.

    The minimum caps ρ at 1+clip_high for a positive advantage and holds it above 1−clip_low for a
    negative one. Capped before exp, since an infinite ratio would make the gradient 0·∞ = NaN; where
    nothing caps it (a negative advantage, no `max_ratio`) the loss is then ∞, for a guard to see.
    `log_ratio` (B, T) is log ρ; None: of each token. PPO (arXiv:1707.06347, eq. 7).
    """
    log_ratio = tokens.log_probs - tokens.old_log_probs if log_ratio is None else log_ratio
    advantage = tokens.advantage
    negative = advantage < 0
    floor = torch.full_like(log_ratio, -inf).masked_fill(negative, _log(1 - clip_low))
    cap = torch.full_like(log_ratio, log1p(clip_high)).masked_fill(negative, log(max_ratio))
    ratio = log_ratio.clamp(floor, cap).exp()
    cut = advantage != 0
    return Surrogate(-ratio * advantage, (log_ratio < floor) & cut, (log_ratio > cap) & cut)


def gspo(tokens: Tokens, clip_low: float, clip_high: float) -> Surrogate:
    """−min(sÂ, clip(s)Â) with the completion's s = exp(mean_t log ρ): all of its tokens are clipped or none is."""
    log_ratio = sequence_mean(tokens.log_probs - tokens.old_log_probs, tokens.mask)[:, None]
    return clipped(tokens, clip_low, clip_high, log_ratio=log_ratio.expand_as(tokens.mask))


def gspo_token(tokens: Tokens, clip_low: float, clip_high: float) -> Surrogate:
    """GSPO with s_t = sg[s] · π_θ/sg[π_θ], so that the tokens of a completion may differ in advantage.

    With one advantage a completion, value and gradient are GSPO's.
    """
    x = tokens.log_probs
    log_ratio = sequence_mean(x - tokens.old_log_probs, tokens.mask)[:, None].detach()
    return clipped(tokens, clip_low, clip_high, log_ratio=log_ratio + x - x.detach())


def cispo(tokens: Tokens, clip_low: float, clip_high: float) -> Surrogate:
    """−sg[clip(ρ, 1−clip_low, 1+clip_high)] Â log π_θ: a clipped token keeps its gradient, with a bounded weight."""
    log_ratio = (tokens.log_probs - tokens.old_log_probs).detach()
    floor, cap = _log(1 - clip_low), log1p(clip_high)
    weight = log_ratio.clamp(floor, cap).exp()
    cut = tokens.advantage != 0
    return Surrogate(-weight * tokens.advantage * tokens.log_probs, (log_ratio < floor) & cut, (log_ratio > cap) & cut)


def two_sided(tokens: Tokens, clip_low: float, clip_high: float, max_ratio: float) -> Surrogate:
    """−min(min(ρ, max_ratio)Â, clip(ρ)Â): a bad token grown much likelier cannot take over the step."""
    return clipped(tokens, clip_low, clip_high, max_ratio)


def dual_clip(tokens: Tokens, clip_low: float, clip_high: float, max_ratio: float) -> Surrogate:
    """−max(min(ρÂ, clip(ρ)Â), max_ratio·Â) for a negative advantage, PPO's otherwise.

    It caps ρ at `max_ratio` > 1, so that it is `two_sided` wherever both are defined.
    """
    return clipped(tokens, clip_low, clip_high, max_ratio)


def reinforce(tokens: Tokens) -> Surrogate:
    """−Â log π_θ, the plain policy gradient: exact only for tokens that π_θ itself sampled."""
    never = torch.zeros_like(tokens.mask)
    return Surrogate(-tokens.advantage * tokens.log_probs, never, never)


def _log(x: float) -> float:
    """log x, −∞ for 0 and below: a bound that never binds."""
    return log(x) if x > 0 else -inf
