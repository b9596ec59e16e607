"""What a checkpoint keeps of a training, and how a training takes it up again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from rlpost.errors import ConfigError
from rlpost.model.load import save_model
from rlpost.model.lora import save_adapter
from rlpost.model.optim import learning_rate_of, optimizer_tensors, set_learning_rate
from rlpost.model.shards import is_adapted
from rlpost.model.trainable import Reference
from rlpost.runs.checkpoint import load_checkpoint, restore_moments, save_checkpoint
from rlpost.settings import ExpertIterationSettings, GRPOSettings, SFTSettings
from rlpost.train.progress import Progress
from rlpost.train.ranks import Ranks
from rlpost.train.update import Objective


class Parts(Protocol):
    """What every training works with."""

    model: PreTrainedModel
    tokenizer: Any
    optimizer: torch.optim.Optimizer
    reference: Reference | None

    @property
    def objective(self) -> Objective[Any]:
        """What is minimised."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the model is trained."""
        ...

    def start(self) -> None:
        """Start what was only built."""

    def close(self) -> None:
        """Close what was started."""


Settings = GRPOSettings | ExpertIterationSettings | SFTSettings


def checkpoint_writer(
    run_folder: Path,
    settings: Settings,
    parts: Parts,
    ranks: Ranks,
    progress: Progress,
    tokenizer: Any,
    state: Mapping[str, Any],
) -> Callable[[], Path]:
    """What writes the last finished step: weights, `tokenizer`, optimizer, RNG, and `state` as JSON.

    An adapter is saved on its own as well as merged: training goes on from the one, all else reads the other.
    """
    model, optimizer = parts.model, parts.optimizer
    return partial(
        save_checkpoint,
        run_folder / "checkpoints",
        progress.step,
        write_model=partial(save_model, model, tokenizer),
        write_adapter=partial(save_adapter, model) if is_adapted(model) else None,
        write_moments=ranks.save_moments(),
        tensors=optimizer_tensors(model, optimizer),
        state={
            **state,
            "progress": asdict(progress),
            "must_stay": {key: getattr(settings, key) for key in settings.must_stay},
            "optimizer": type(optimizer).__name__,
            "lr": learning_rate_of(optimizer),
        },
        keep_last=settings.checkpoint.keep_last,
        every=settings.checkpoint.every,
        best=progress.best_step,
    )


def restore_trainer(checkpoint: Path, settings: Settings, parts: Parts) -> dict[str, Any]:
    """Bring the optimizer and the RNG to where they were at `checkpoint`, whose weights the model holds; its state.

    Raises ConfigError for settings that would read the saved data position as another one.
    """
    _, state = load_checkpoint(checkpoint)
    optimizer, own = parts.optimizer, type(parts.optimizer).__name__
    for key, saved in state["must_stay"].items():
        if (now := getattr(settings, key)) != saved:
            raise ConfigError(f"--resume: the run began with {key}={saved}, not {now}; keep it")
    if state["optimizer"] != own:
        raise ConfigError(f"--resume: the run began with {state['optimizer']}, not {own}; keep its optim")
    restore_moments(parts.model, optimizer, checkpoint)
    if "lr" in state:  # a step without a gradient tells that of the last update
        set_learning_rate(optimizer, state["lr"])
    return state
