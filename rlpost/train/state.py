"""What resuming needs beside the weights, as tensors and JSON: nothing is pickled."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlpost.assemble import SamplingParts
from rlpost.errors import CheckpointError, ConfigError
from rlpost.model.load import save_model
from rlpost.model.lora import is_adapted, save_adapter
from rlpost.model.optim import OTHER_SHAPES, SHARED_STATE, learning_rate_of, set_learning_rate
from rlpost.runs.checkpoint import NUMBERS, load_checkpoint, save_checkpoint
from rlpost.runs.writer import Run
from rlpost.settings import CheckpointSettings, ExpertIterationSettings, GRPOSettings, SFTSettings

TrainingSettings = GRPOSettings | SFTSettings | ExpertIterationSettings

log = logging.getLogger("rlpost")


def save_run(
    run: Run,
    step: int,
    model: PreTrainedModel,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    settings: CheckpointSettings,
    state: Mapping[str, Any],
    best: int | None = None,
) -> None:
    """Write the checkpoint of `step`: weights, optimizer, RNG, and the loop's own `state` as JSON.

    `best` is the step of the best checkpoint so far.
    An adapter is saved on its own as well as merged: training goes on from the one, all else reads the other.
    """
    run.screen.phase("saving checkpoint")

    path = save_checkpoint(
        run.folder / "checkpoints",
        step,
        write_model=partial(save_model, model, tokenizer),
        write_adapter=partial(save_adapter, model) if is_adapted(model) else None,
        tensors=optimizer_tensors(model, optimizer),
        state={**state, "optimizer": type(optimizer).__name__, "lr": learning_rate_of(optimizer), NUMBERS: run.numbers},
        keep_last=settings.keep_last,
        best=best,
    )
    log.info("saved %s", path)
    run.saved()


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


def must_stay(settings: TrainingSettings) -> dict[str, Any]:
    """The settings that a run keeps while it goes on, for its checkpoint's state."""
    return {key: getattr(settings, key) for key in settings.must_stay}


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


def collection_state(parts: SamplingParts) -> dict[str, Any]:
    """Data cursor, conversations under way, buffer and version."""
    return {
        "collector": parts.collector.state_dict(),
        "buffer": parts.buffer.state_dict(),
        "policy_version": parts.policy.version,
    }


def restore_collection(parts: SamplingParts, state: Mapping[str, Any]) -> None:
    """Put back what `collection_state` took."""
    parts.collector.load_state_dict(state["collector"])
    parts.buffer.load_state_dict(state["buffer"])
    assert parts.collector.weight_updater is not None
    parts.collector.weight_updater.restore_version(state["policy_version"])
