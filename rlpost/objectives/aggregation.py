"""Building blocks of the losses: sums over tokens, estimators of a KL divergence, and weights for the sampler's tokens.

Every loss is Σ_bt weight_bt · value_bt / normaliser. Only the weights depend on a row's own length, so rows can be
split over microbatches and ranks as long as all shares use one normaliser.

The engine samples from µ, which is not quite the trainer's π_old. A correction weighs each token with w = π_old / µ,
of the token or of the whole completion (the product of its tokens'), a constant to the gradient. Truncation caps w;
masking drops what lies outside its bounds. A product grows or shrinks with the length of a completion, a geometric mean
does not: `geo_mask` drops completions by that.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import torch

from rlpost.errors import ConfigError
from rlpost.settings import Aggregation, KLEstimator, SamplerCorrection
from rlpost.text import did_you_mean, nearest

AGGREGATIONS = tuple(Aggregation.__members__)


def check_choice(what: str, word: str, known: tuple[str, ...]) -> None:
    """Raise ConfigError (a ValueError) unless `word` is one of `known`; names the nearest."""
    if word not in known:
        hint = did_you_mean(nearest(word, known), f"it is one of {', '.join(known)}")
        raise ConfigError(f"there is no {what} {word!r}{hint}")


def token_weights(mask: torch.Tensor, aggregation: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Weight of every token (B, T): 0 where `mask` is False; 1, or 1/|o_i| for sequence_mean, where it is True."""
    check_choice("aggregation", aggregation, AGGREGATIONS)
    weights = mask.to(dtype)
    if aggregation == "sequence_mean":
        return weights / weights.sum(-1, keepdim=True).clamp(min=1)
    return weights


def default_normaliser(mask: torch.Tensor, aggregation: str) -> torch.Tensor:
    """The divisor of the sum over these tensors alone; at least 1.

    token_mean: the masked tokens. sequence_mean: B. constant_length: B·T, so that a token weighs the
    same whatever the length of its completion (Dr. GRPO, arXiv:2503.20783).
    """
    check_choice("aggregation", aggregation, AGGREGATIONS)
    if aggregation == "token_mean":
        return mask.sum().clamp(min=1)
    count = mask.shape[0] if aggregation == "sequence_mean" else mask.numel()
    return torch.tensor(max(count, 1), device=mask.device)


def aggregate(
    values: torch.Tensor, mask: torch.Tensor, aggregation: str, normaliser: float | torch.Tensor | None = None
) -> torch.Tensor:
    """Σ over the masked tokens of weight · value, divided by `normaliser`; a scalar.

    `values` and `mask` (bool) are (B, T). What `values` holds where `mask` is False is never read.
    Raises ConfigError for an unknown aggregation.
    """
    if normaliser is None:
        normaliser = default_normaliser(mask, aggregation)
    weights = token_weights(mask, aggregation, values.dtype)
    return (weights * keep(values, mask)).sum() / normaliser


def keep(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` where `mask` is True and 0 elsewhere, even where they are NaN; nor does a gradient come from there."""
    return torch.where(mask, values, torch.zeros_like(values))


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the masked tokens; NaN when there is none, which is not the same as 0."""
    return keep(values, mask).sum() / mask.sum()


def sequence_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Σ over each row's masked tokens, (B,); 0 for an empty row."""
    return keep(values, mask).sum(-1)


def sequence_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over each row's masked tokens, (B,); 0 for an empty row."""
    return sequence_sum(values, mask) / mask.sum(-1).clamp(min=1)


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


def k3_rho(
    log_probs: torch.Tensor, other_log_probs: torch.Tensor, drawn_log_probs: torch.Tensor | None = None
) -> torch.Tensor:
    """ρ·k3, ρ = π / the policy that drew the tokens: value and gradient unbiased after several updates too.

    Where `drawn_log_probs` is None the tokens were drawn from π: ρ is 1, and still has its gradient. It is the term of
    DeepSeek-V3.2 (arXiv:2512.02556, section 3.1).
    """
    drawn = log_probs if drawn_log_probs is None else drawn_log_probs
    return (log_probs - drawn.detach()).exp() * k3(log_probs, other_log_probs)


_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "k3_k2grad": k3_k2grad, "k3_rho": k3_rho}


def kl_divergence(
    log_probs: torch.Tensor,
    other_log_probs: torch.Tensor,
    estimator: str = "k3",
    mask: torch.Tensor | None = None,
    *,
    drawn_log_probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """The estimate per token, of the shape of `log_probs`; 0 where `mask` is given and False.

    `drawn_log_probs`, of the policy that drew the tokens, are read by k3_rho alone; None: `log_probs`.
    Raises ConfigError for an unknown estimator.
    """
    check_choice("KL estimator", estimator, KL_ESTIMATORS)
    if mask is not None:
        log_probs, other_log_probs = keep(log_probs, mask), keep(other_log_probs, mask)
    if estimator == "k3_rho":
        return k3_rho(log_probs, other_log_probs, drawn_log_probs)
    return _ESTIMATORS[estimator](log_probs, other_log_probs)


def sequence_kl_divergence(
    log_probs: torch.Tensor, other_log_probs: torch.Tensor, mask: torch.Tensor, estimator: str = "k1"
) -> torch.Tensor:
    """The estimate of a whole completion, Σ over its masked tokens, (B,), to subtract from its reward."""
    return sequence_sum(kl_divergence(log_probs, other_log_probs, estimator, mask), mask)


@dataclass(frozen=True, slots=True)
class Correction:
    """One way to weigh: per token or per completion, cut or dropped outside bounds that may be overridden."""

    per_sequence: bool
    drops: bool  # outside the bounds the weight is 0; otherwise it is cut to `high`
    low: float  # read only by what drops
    high: float
    token_high: float | None = None  # of a geometric mean: inside the bounds a token weighs w up to this; None: 1


# Truncated: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al., 2025).
# Masked, by a geometric mean too: "When Speed Kills Stability" (Liu et al., 2025). IcePop: arXiv:2510.18855.
CORRECTIONS = {
    "tis_token": Correction(per_sequence=False, drops=False, low=0.0, high=2.0),
    "tis_sequence": Correction(per_sequence=True, drops=False, low=0.0, high=2.0),
    "mis_token": Correction(per_sequence=False, drops=True, low=0.0, high=3.0),
    "mis_sequence": Correction(per_sequence=True, drops=True, low=0.0, high=3.0),
    "icepop": Correction(per_sequence=False, drops=True, low=0.5, high=5.0),
    "geo_mask": Correction(per_sequence=True, drops=True, low=0.99, high=1.01),
    "geo_mask_tis": Correction(per_sequence=True, drops=True, low=0.99, high=1.01, token_high=2.0),
}
GEOMETRIC = ("geo_mask", "geo_mask_tis")  # drop a completion by the geometric mean of its tokens' w
SAMPLER_CORRECTIONS = tuple(SamplerCorrection.__members__)


def sampler_weights(
    old_log_probs: torch.Tensor,
    sampler_log_probs: torch.Tensor,
    mask: torch.Tensor,
    correction: str,
    *,
    low: float | None = None,
    high: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight, cut), both (B, T) and without gradient: w, and where a bound changed it to `high` or to 0.

    `low` and `high` are the correction's own where None; `low` is read by the masking ones only. With
    `geo_mask` a token weighs 1 where its completion's mean is within the bounds, with `geo_mask_tis` its own w,
    at most 2. With "none" every weight is 1. Raises ConfigError for an unknown correction, bounds that exclude
    1 or are not in order, and a bound that the correction does not read.
    """
    bounds = correction_bounds(correction, low, high)
    if bounds is None:
        return torch.ones_like(old_log_probs), torch.zeros_like(mask)
    chosen, (least, most) = CORRECTIONS[correction], bounds
    with torch.no_grad():
        log_weight = keep(old_log_probs, mask) - keep(sampler_log_probs, mask)
        if correction in GEOMETRIC:
            mean = sequence_mean(log_weight, mask).exp()[:, None]
            dropped = ((mean < least) | (mean > most)).expand_as(mask)
            if chosen.token_high is None:
                return torch.where(dropped, 0, torch.ones_like(log_weight)), dropped & mask
            cap = log(chosen.token_high)
            return torch.where(dropped, 0, log_weight.clamp(max=cap).exp()), (dropped | (log_weight > cap)) & mask
        if chosen.per_sequence:
            log_weight = sequence_sum(log_weight, mask)[:, None].expand_as(mask)
        weight = log_weight.clamp(max=log(most)).exp()  # cut before exp, which would overflow
        cut = log_weight > log(most)
        if chosen.drops:
            cut = cut | (weight < least)
            weight = torch.where(cut, 0, weight)
    return weight, cut & mask


def correction_bounds(correction: str, low: float | None, high: float | None) -> tuple[float, float] | None:
    """The bounds in force, those of the correction itself where None; None for "none", which has none.

    Raises ConfigError as `sampler_weights` does.
    """
    check_choice("sampler correction", correction, SAMPLER_CORRECTIONS)
    if correction == "none":
        return None
    chosen = CORRECTIONS[correction]
    least, most = chosen.low if low is None else low, chosen.high if high is None else high
    if not 0 <= least <= 1 <= most:
        raise ConfigError(f"sampler ratio bounds [{least:g}, {most:g}] must hold 1, the weight of an exact sampler")
    return least, most
