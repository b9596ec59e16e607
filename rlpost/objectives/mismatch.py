"""Weights for tokens that an engine sampled from µ, which is not quite the trainer's π_old.

The weight is w = π_old / µ, of a token or of a whole completion (the product of its tokens'), a
constant to the gradient. Truncation caps it; masking drops what lies outside its bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import torch

from rlpost.errors import ConfigError
from rlpost.objectives.aggregation import check_choice, keep, sequence_sum
from rlpost.settings import SamplerCorrection


@dataclass(frozen=True, slots=True)
class Correction:
    """One way to weigh: per token or per completion, cut or dropped outside bounds that may be overridden."""

    per_sequence: bool
    drops: bool  # outside the bounds the weight is 0; otherwise it is cut to `high`
    low: float  # read only by what drops
    high: float


# Truncated: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al., 2025).
# Masked: "When Speed Kills Stability" (Liu et al., 2025). IcePop: arXiv:2510.18855.
CORRECTIONS = {
    "tis_token": Correction(per_sequence=False, drops=False, low=0.0, high=2.0),
    "tis_sequence": Correction(per_sequence=True, drops=False, low=0.0, high=2.0),
    "mis_token": Correction(per_sequence=False, drops=True, low=0.0, high=3.0),
    "mis_sequence": Correction(per_sequence=True, drops=True, low=0.0, high=3.0),
    "icepop": Correction(per_sequence=False, drops=True, low=0.5, high=5.0),
}
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

    `low` and `high` are the correction's own where None; `low` is read by the masking ones only.
    With "none" every weight is 1. Raises ConfigError for an unknown correction, bounds that exclude
    1 or are not in order, and a bound that the correction does not read.
    """
    bounds = correction_bounds(correction, low, high)
    if bounds is None:
        return torch.ones_like(old_log_probs), torch.zeros_like(mask)
    chosen, (least, most) = CORRECTIONS[correction], bounds
    with torch.no_grad():
        log_weight = keep(old_log_probs, mask) - keep(sampler_log_probs, mask)
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
        if low is not None or high is not None:
            raise ConfigError("sampler_ratio_low and sampler_ratio_high are read only with a sampler_correction")
        return None
    chosen = CORRECTIONS[correction]
    if low is not None and not chosen.drops:
        raise ConfigError(f"{correction} has no lower bound: leave sampler_ratio_low out")
    least, most = chosen.low if low is None else low, chosen.high if high is None else high
    if not 0 <= least <= 1 <= most:
        raise ConfigError(f"sampler ratio bounds [{least:g}, {most:g}] must hold 1, the weight of an exact sampler")
    return least, most
