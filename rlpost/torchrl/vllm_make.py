"""A vLLM engine that runs: here, or in a Ray actor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlpost.errors import ConfigError
from rlpost.settings import VLLMSettings
from rlpost.torchrl.vllm_devices import LLMOnDevice
from rlpost.torchrl.vllm_ray import RayLLM


def make_vllm_worker(
    model_name: str | Path,
    devices: Sequence[int] | None = None,
    num_devices: int | None = None,
    *,
    make_ray_worker: bool = False,
    enforce_eager: bool | None = None,
    settings: VLLMSettings | None = None,
    **engine: Any,
) -> Any:
    """A running vLLM engine that `vLLMWrapper` takes: an `LLMOnDevice` here, or one in a Ray actor.

    It is on `devices`, or on the first `num_devices` GPUs; with neither, on one GPU or the CPU. Ray
    chooses the GPUs of its actors itself, so there only their number counts. Other keyword arguments
    are vLLM's. Raises ConfigError for both or for devices that are not there, MissingExtraError for
    Ray where it is not installed.
    """
    if devices is not None and num_devices is not None:
        raise ConfigError(f"devices={list(devices)} and num_devices={num_devices} are two answers: give one of them")
    if num_devices is not None and num_devices < 1:
        raise ConfigError(f"num_devices={num_devices} must be at least 1")
    chosen = settings or VLLMSettings()
    if enforce_eager is not None:
        chosen = replace(chosen, enforce_eager=enforce_eager)
    if make_ray_worker:
        number = len(devices) if devices is not None else num_devices
        return RayLLM(model_name, num_devices=number, settings=chosen, **engine)
    on = devices if num_devices is None else range(num_devices)
    return LLMOnDevice(model_name, on, settings=chosen, **engine)
