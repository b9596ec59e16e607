"""Activation checkpointing (arXiv:1604.06174): each layer's inputs are kept, the rest is computed again backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from rlpost.errors import ConfigError
from rlpost.model.families import attending


def recompute_activations(model: Any) -> None:
    """Let every layer of `model` forget its activations after the forward pass and compute them again.

    transformers' own switch works in training mode only, which would turn dropout on. Without
    gradients (while sampling) nothing changes. Raises ConfigError for a model not made of layers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"model.activation_checkpointing=true: {type(model).__name__} names no layers that could be "
            "computed again; leave it out"
        )
    for layer in layers:
        layer.forward = _recomputed(layer.forward, model.config)


def _recomputed(forward: Callable[..., Any], config: Any) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        attention = config._attn_implementation

        def run(*args: Any, **kwargs: Any) -> Any:
            with attending(config, attention):  # the backward pass runs where that may have been another
                return forward(*args, **kwargs)

        # nothing in the model is random, so there is no generator to rewind
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return recomputed
