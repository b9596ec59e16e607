"""Values that a command's settings leave open, chosen once before anything is loaded: precision, lag, memory.

Apart from `assemble`, which needs the parts of a training, so that a session can ask too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from typing import TypeVar

import torch

from rlpost.estimate.machine import Room, chosen_policy
from rlpost.estimate.shape import Shape, shape_of_folder, shape_of_model
from rlpost.model.device import pick_device
from rlpost.model.locate import locate_config
from rlpost.model.precision import Precision, choose_precision
from rlpost.settings import EvalSettings, FineTuningSettings, ModelSettings, VLLMSettings
from rlpost.settings.commands import SampledSettings

DAY = "model.day"  # its place among the values that a run keeps
S = TypeVar("S", bound=SampledSettings | FineTuningSettings | EvalSettings)


def size_and_room(model: ModelSettings) -> tuple[Shape | None, Room | None]:
    """The shape of a model, and the memory of the GPU that it computes on, if any.

    Of a model of the hub whose size is not known, the configuration is fetched for it.
    """
    shape = shape_of_model(model.path, model.revision)
    shape = shape or shape_of_folder(locate_config(model.path, model.revision))
    device = pick_device(model.device)
    return shape, Room(*torch.cuda.mem_get_info(device)) if device.type == "cuda" else None


def resolve_precision(settings: S, kept: Mapping[str, str] | None = None) -> tuple[S, Precision]:
    """`settings` with no `auto` left in model.autocast and policy.dtype, and the reasons; the lag and the day too.

    Every command calls this once, before it assembles anything. A run that goes on, or is done
    again, keeps the formats and the day that it recorded: `kept`.
    """
    policy = chosen_policy(settings.policy)
    precision = choose_precision(
        settings.model,
        policy,
        pick_device(settings.model.device),
        kept=kept,
        trains=settings.trains,
        samples=settings.uses_policy and policy.is_model,
    )
    if settings.learns_from_own:
        settings = replace(settings, max_policy_lag=settings.lag)  # type: ignore[attr-defined]
    if isinstance(policy, VLLMSettings):
        settings = replace(settings, policy=replace(policy, dtype=precision.sampler))
    day = settings.model.day or (kept or {}).get(DAY) or today()
    return replace(settings, model=replace(settings.model, autocast=precision.autocast, day=day)), precision


def today() -> str:
    """The current day."""
    return date.today().isoformat()
