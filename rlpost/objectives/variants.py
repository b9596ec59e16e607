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
    `log_ratio` (B, T) is log ρ; None: of each token. PPO (arXiv:1707.06347, eq. 7). With
    `max_ratio` > 1 it is both two-sided clipping (INTELLECT-2) and dual-clip PPO, which are the same loss: for a
    negative advantage it is at most max_ratio·|Â|, so that a bad token that grew much likelier cannot dominate the
    step.
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


def reinforce(tokens: Tokens) -> Surrogate:
    """−Â log π_θ, the plain policy gradient: exact only for tokens that π_θ itself sampled."""
    never = torch.zeros_like(tokens.mask)
    return Surrogate(-tokens.advantage * tokens.log_probs, never, never)


def sapo(tokens: Tokens, tau_good: float, tau_bad: float) -> Surrogate:
    """−(4/τ) σ(τ(ρ−1)) Â with τ = tau_good where Â > 0, else tau_bad: a soft trust region, 1 at ρ = 1 in slope."""
    log_ratio = tokens.log_probs - tokens.old_log_probs
    tau = torch.full_like(log_ratio, tau_bad).masked_fill(tokens.advantage > 0, tau_good)
    # beyond e^5 the sigmoid is 1 to float64's precision, and an infinite ratio would give 0·∞
    gate = torch.sigmoid(tau * torch.expm1(log_ratio.clamp(max=5.0)))
    never = torch.zeros_like(tokens.mask)
    return Surrogate(-4 / tau * gate * tokens.advantage, never, never)


def gmpo(tokens: Tokens, clip_low: float, clip_high: float) -> Surrogate:
    """−sÂ, s = exp of the mean over the completion of log ρ, at most clip_high where Â > 0, at least −clip_low else."""
    log_ratio, negative = tokens.log_probs - tokens.old_log_probs, tokens.advantage < 0
    floor = torch.full_like(log_ratio, -inf).masked_fill(negative, -clip_low)
    cap = torch.full_like(log_ratio, clip_high).masked_fill(negative, inf)
    mean = sequence_mean(log_ratio.clamp(floor, cap), tokens.mask)[:, None].expand_as(log_ratio)
    cut = tokens.advantage != 0
    return Surrogate(-mean.exp() * tokens.advantage, (log_ratio < floor) & cut, (log_ratio > cap) & cut)


def dppo_tv(tokens: Tokens, max_ratio: float, max_fall: float, max_rise: float) -> Surrogate:
    """−sg[min(ρ, max_ratio)] Â log π_θ, without tokens that have moved far the way that Â pushes them.

    Dropped are those with Â < 0 and π_old − π_θ > max_fall, and those with Â > 0 and π_θ − π_old > max_rise.

    arXiv:2602.04879, eq. 12: the total variation of sampling the token or not is the difference of its
    probabilities. A rare token may grow many times likelier before it is dropped.
    """
    rise = (tokens.log_probs.exp() - tokens.old_log_probs.exp()).detach()
    return _dropped(tokens, max_ratio, low=-rise > max_fall, high=rise > max_rise)


def dppo_kl(tokens: Tokens, max_ratio: float, max_kl: float) -> Surrogate:
    """`dppo_tv` with the bound on p log(p/q) + (1−p) log((1−p)/(1−q)), p = π_old and q = π_θ (eq. 14)."""
    least = torch.finfo(tokens.log_probs.dtype).eps
    old, new = (x.detach().exp().clamp(least, 1 - least) for x in (tokens.old_log_probs, tokens.log_probs))
    divergence = old * (old / new).log() + (1 - old) * ((1 - old) / (1 - new)).log()
    far = divergence > max_kl
    return _dropped(tokens, max_ratio, low=far & (new < old), high=far & (new > old))


def _dropped(tokens: Tokens, max_ratio: float, *, low: torch.Tensor, high: torch.Tensor) -> Surrogate:
    """The bounded policy gradient without the tokens that have moved too far down (`low`) or up in their direction."""
    low, high = low & (tokens.advantage < 0), high & (tokens.advantage > 0)
    weight = (tokens.log_probs - tokens.old_log_probs).detach().clamp(max=log(max_ratio)).exp()
    loss = -weight * tokens.advantage * tokens.log_probs
    return Surrogate(loss.masked_fill(low | high, 0.0), low, high)


def _log(x: float) -> float:
    """log x, −∞ for 0 and below: a bound that never binds."""
    return log(x) if x > 0 else -inf
