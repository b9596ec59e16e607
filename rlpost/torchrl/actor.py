"""What the public losses are given to train, and its reading of whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rlpost.data.ragged import padded
from rlpost.torchrl.token_sequences import read


def model_and_temperature(actor: Any, temperature: float | None) -> tuple[nn.Module, float]:
    """The model of an actor network, a causal LM of transformers or a wrapper around one, and its temperature, else 1.

    Raises TypeError for anything else, ValueError for a temperature that gives no probabilities.
    """
    model = actor if isinstance(actor, nn.Module) else getattr(actor, "model", None)
    if not isinstance(model, nn.Module) or not hasattr(model, "get_output_embeddings"):
        raise TypeError(
            f"actor_network is a {type(actor).__name__}: give a causal LM of transformers, or a TransformersWrapper"
        )
    sampling = None if model is actor else getattr(actor, "sampling", None)
    chosen = temperature if temperature is not None else 1.0 if sampling is None else float(sampling.temperature)
    if chosen <= 0:
        raise ValueError(f"temperature={chosen:g} gives no probabilities to train: it must be above 0")
    return model, chosen


def read_sequences(
    model: nn.Module, ids: Sequence[torch.Tensor], trained: Sequence[torch.Tensor], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """log π_θ and the entropy of the trained tokens, both (B, T) in the places of their ids, 0 elsewhere.

    Raises ValueError where no token is trained.
    """
    values = read(model, ids, trained, temperature)
    places = padded(trained).to(values[0].device)
    log_probs, entropy = (each.new_zeros(places.shape).masked_scatter(places, each) for each in values)
    return log_probs, entropy
