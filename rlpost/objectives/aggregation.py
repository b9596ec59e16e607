"""From a value per token to one number: which tokens weigh how much, and what their sum is divided by.

Every loss is Σ_bt weight_bt · value_bt / normaliser. Only the weights depend on a row's own length,
so rows can be split over microbatches and ranks as long as all shares use one normaliser.
"""

from __future__ import annotations

import torch

from rlpost.errors import ConfigError
from rlpost.nearest import did_you_mean, nearest
from rlpost.settings import Aggregation

AGGREGATIONS = tuple(Aggregation.__members__)


def check_choice(what: str, word: str, known: tuple[str, ...]) -> None:
    """Raise ConfigError (a ValueError) unless `word` is one of `known`; names the nearest."""
    if word not in known:
        hint = did_you_mean(nearest(word, known), f"it is one of {', '.join(known)}")
        raise ConfigError(f"there is no {what} {word!r}{hint}")


def check_coefficients(**coefficients: float) -> None:
    """Raise ConfigError (a ValueError) unless every coefficient is 0 or above."""
    for name, value in coefficients.items():
        if not value >= 0:  # nor NaN
            raise ConfigError(f"{name}={value:g} must be 0 or above")


def check_shapes(log_probs: torch.Tensor, mask: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise ValueError unless `log_probs` is (B, T), `mask` bool, and every tensor given of that shape."""
    shape = tuple(log_probs.shape)
    if len(shape) != 2:
        raise ValueError(f"log_probs has shape {shape}: it must be (B, T), completions by tokens")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask is {mask.dtype}: it must be torch.bool")
    for name, tensor in {**others, "mask": mask}.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: it must be that of log_probs, {shape}")


def token_weights(mask: torch.Tensor, aggregation: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Weight of every token (B, T): 0 where `mask` is False; 1, or 1/|o_i| for sequence_mean, where it is True."""
    check_choice("aggregation", aggregation, AGGREGATIONS)
    weights = mask.to(dtype)
    if aggregation == "sequence_mean":
        return weights / weights.sum(-1, keepdim=True).clamp(min=1)
    return weights


def default_normaliser(mask: torch.Tensor, aggregation: str) -> torch.Tensor:
    """What the sum over these tensors alone is divided by; at least 1.

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
    Raises ConfigError for an unknown aggregation, ValueError for a normaliser that is not positive.
    """
    if normaliser is None:
        normaliser = default_normaliser(mask, aggregation)
    elif normaliser <= 0:
        raise ValueError(f"normaliser={float(normaliser)} must be positive: count the whole minibatch")
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
