"""What a training takes of this machine, by estimate, just before it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlpost.estimate.hub import shape_of_model
from rlpost.estimate.machine import Room
from rlpost.estimate.report import Needs, needs_of
from rlpost.estimate.shape import shape_of_folder
from rlpost.model.load import locate_tokenizer, pick_device


def needs_here(settings: Any, folder: Path) -> Needs | None:
    """The needs of a training with `settings` in the run folder `folder`; None where the model's size is not known.

    Of a model of the hub whose size is not known, the configuration is fetched for it.
    """
    model = settings.model
    shape = shape_of_model(model.path, model.revision)
    shape = shape or shape_of_folder(locate_tokenizer(model.path, model.revision))
    device = pick_device(model.device)
    gpu = Room(*torch.cuda.mem_get_info(device)) if device.type == "cuda" else None
    return needs_of(settings, shape, folder, gpu)
