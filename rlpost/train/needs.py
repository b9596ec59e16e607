"""The first lines of a training: whether memory and disk suffice, before anything is loaded."""

from __future__ import annotations

import torch

from rlpost.estimate.hub import shape_of_model
from rlpost.estimate.machine import Room
from rlpost.estimate.needs import TrainingSettings
from rlpost.estimate.report import needs_of
from rlpost.estimate.shape import shape_of_folder
from rlpost.model.load import locate_tokenizer, pick_device
from rlpost.runs.writer import Run


def check_needs(settings: TrainingSettings, run: Run) -> None:
    """Say what the training takes, by estimate. Raises ResourceError where the machine cannot hold it at all.

    Of a model of the hub whose size is not known, the configuration is fetched for it.
    """
    path, revision = settings.model.path, settings.model.revision
    shape = shape_of_model(path, revision) or shape_of_folder(locate_tokenizer(path, revision))
    needs = needs_of(settings, shape, run.folder, gpu_room(settings.model.device))
    if needs is None:
        return
    needs.check(path)
    for line in needs.lines():
        run.screen.line(line)


def gpu_room(device: str) -> Room | None:
    """The memory of the GPU that `model.device` means; None where it means none."""
    chosen = pick_device(device)
    return Room(*torch.cuda.mem_get_info(chosen)) if chosen.type == "cuda" else None
