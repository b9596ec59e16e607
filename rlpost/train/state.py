"""What resuming needs beside the weights, as tensors and JSON: nothing is pickled."""

from __future__ import annotations

from typing import Any

import torch

from rlpost.assemble import GRPOParts
from rlpost.errors import CheckpointError


def trainer_state(parts: GRPOParts) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Optimizer moments by name and the RNG; data cursor, conversations under way, buffer, version."""
    tensors = {"rng": torch.get_rng_state()}
    for name, parameter in parts.model.named_parameters():
        for key, value in parts.optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{key}/{name}"] = value
    return tensors, {
        "collector": parts.collector.state_dict(),
        "buffer": parts.buffer.state_dict(),
        "policy_version": parts.policy.version,
    }


def restore_state(parts: GRPOParts, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
    """Put back what `trainer_state` took. Raises CheckpointError if it is of another model."""
    parameters = dict(parts.model.named_parameters())
    for key, value in tensors.items():
        if key == "rng":
            continue
        _, moment, name = key.split("/", 2)
        parameter = parameters.get(name)
        if parameter is None or (value.ndim and value.shape != parameter.shape):
            raise CheckpointError(f"the checkpoint's optimizer state {key} does not fit the model: another model's?")
        # AdamW keeps its step count on the CPU in float32, unless it is fused on a GPU
        device = parameter.device if value.ndim else torch.device("cpu")
        if not value.ndim and parameter.device.type == "cuda":
            device = parameter.device
        parts.optimizer.state[parameter][moment] = value.to(device)
    torch.set_rng_state(tensors["rng"])
    parts.collector.load_state_dict(state["collector"])
    parts.buffer.load_state_dict(state["buffer"])
    assert parts.collector.weight_updater is not None
    parts.collector.weight_updater.restore_version(state["policy_version"])
