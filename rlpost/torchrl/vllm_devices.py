"""vLLM engines on chosen devices, each in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlpost.errors import ConfigError
from rlpost.imports import require_vllm
from rlpost.model.tokenizer import open_tokenizer
from rlpost.policies.vllm import engine_arguments
from rlpost.policies.vllm_engine import OwnProcessEngine, environment, set_environment
from rlpost.remote.cluster import gpus_seen
from rlpost.settings import VLLMSettings


class LLMOnDevice(OwnProcessEngine):
    """A vLLM engine on `devices`, GPUs by their numbers on this machine, for a `vLLMWrapper` to sample with.

    It runs in a process of its own, which sees no other GPU; several devices share the model
    (tensor parallelism). None: on the first GPU, or, on a machine without any, on the CPU. `folder`
    is a local HF folder, and `engine` any of vLLM's own arguments, which replace rlpost's. Building
    one starts it. Raises MissingExtraError, ConfigError for a device that is not there, or what vLLM
    raises.
    """

    def __init__(
        self,
        folder: str | Path,
        devices: Sequence[int] | None = None,
        *,
        settings: VLLMSettings | None = None,
        max_model_len: int | None = None,
        **engine: Any,
    ) -> None:
        require_vllm()
        self.folder = Path(folder)
        self.devices = None if devices is None else list(devices)
        settings = settings or VLLMSettings()
        arguments = engine_arguments(self.folder, settings, max_model_len=max_model_len, seed=0)
        if self.devices:
            arguments["tensor_parallel_size"] = len(self.devices)
        set_environment()
        sees = nullcontext() if devices is None else environment("CUDA_VISIBLE_DEVICES", cuda_visible(devices))
        with sees:
            super().__init__(arguments | engine, settings.timeout_seconds)

    def get_tokenizer(self) -> Any:
        """The tokenizer in the model's folder."""
        return open_tokenizer(self.folder)


def cuda_visible(devices: Sequence[int]) -> str:
    """The value of CUDA_VISIBLE_DEVICES that shows these GPUs alone. Raises ConfigError for one that is not there."""
    seen = gpus_seen()
    missing = [number for number in devices if not 0 <= number < len(seen)]
    if missing:
        raise ConfigError(
            f"there is no GPU {missing[0]}: this machine has {len(seen)}; leave devices out to use what there is"
        )
    return ",".join(seen[number] for number in devices)


def make_vllm_worker(
    model_name: str | Path,
    devices: Sequence[int] | None = None,
    num_devices: int | None = None,
    *,
    make_ray_worker: bool = False,
    enforce_eager: bool | None = None,
    settings: VLLMSettings | None = None,
    **engine: Any,
) -> LLMOnDevice:
    """A running vLLM engine that `vLLMWrapper` takes.

    It is on `devices`, or on the first `num_devices` GPUs; with neither, on one GPU or the CPU. Other keyword
    arguments are vLLM's. Raises ConfigError for devices that are not there, and for `make_ray_worker=True`.
    """
    if make_ray_worker:
        raise ConfigError(
            "make_ray_worker=True: an engine is not put into a Ray actor by itself; give RayLLMCollector a "
            "policy_factory that makes a vLLMWrapper, and each of its workers has one"
        )
    chosen = settings or VLLMSettings()
    if enforce_eager is not None:
        chosen = replace(chosen, enforce_eager=enforce_eager)
    on = devices if num_devices is None else range(num_devices)
    return LLMOnDevice(model_name, on, settings=chosen, **engine)
