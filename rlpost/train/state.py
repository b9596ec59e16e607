"""What resuming needs beside the weights, as tensors and JSON: nothing is pickled."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlpost.errors import CheckpointError, ConfigError
from rlpost.model.optim import OTHER_SHAPES, SHARED_STATE, set_learning_rate
from rlpost.runs.checkpoint import load_checkpoint
from rlpost.settings import ExpertIterationSettings, GRPOSettings, SFTSettings

TrainingSettings = GRPOSettings | SFTSettings | ExpertIterationSettings

log = logging.getLogger("rlpost")


def load_run(
    checkpoint: Path, settings: TrainingSettings, model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Put the optimizer and the RNG back as they were at `checkpoint`; returns the loop's own state.

    The model holds the checkpoint's weights already. Raises ConfigError for settings that would read
    the saved data position as another one, CheckpointError for the state of another model.
    """
    tensors, state = load_checkpoint(checkpoint)
    for key, saved in state["must_stay"].items():
        if getattr(settings, key) != saved:
            raise ConfigError(f"--resume: the run began with {key}={saved}, not {getattr(settings, key)}; keep it")
    own = type(optimizer).__name__
    if state["optimizer"] != own:
        raise ConfigError(f"--resume: the run began with {state['optimizer']}, not {own}; keep its optim")
    restore_optimizer(model, optimizer, tensors)
    if "lr" in state:  # a step without a gradient tells that of the last update
        set_learning_rate(optimizer, state["lr"])
    return state


def optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The RNG, and the optimizer's moments by the names of their parameters."""
    tensors = {"rng": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            saved = torch.as_tensor(value)  # a count may be an int
            # what all parameters share is written for each of them: a file takes no tensor twice
            tensors[f"optimizer/{key}/{name}"] = saved.clone() if key in SHARED_STATE else saved
    return tensors


def restore_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Put back what `optimizer_tensors` took. Raises CheckpointError if it is of another model."""
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        if key == "rng":
            continue
        _, moment, name = key.split("/", 2)
        parameter = parameters.get(name)
        if parameter is None or (value.ndim and moment not in OTHER_SHAPES and value.shape != parameter.shape):
            raise CheckpointError(f"the checkpoint's optimizer state {key} does not fit the model: another model's?")
        # AdamW keeps its step count on the CPU in float32, unless it is fused on a GPU
        device = parameter.device if value.ndim else torch.device("cpu")
        if not value.ndim and parameter.device.type == "cuda":
            device = parameter.device
        optimizer.state[parameter][moment] = value.item() if value.dtype is torch.int64 else value.to(device)
    torch.set_rng_state(tensors["rng"])
