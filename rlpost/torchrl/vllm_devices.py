"""vLLM engines on chosen devices: in a process of their own here, or in a Ray actor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from rlpost.errors import ConfigError
from rlpost.extras import require_vllm
from rlpost.policies.vllm_arguments import engine_arguments
from rlpost.policies.vllm_engines import OwnProcessEngine
from rlpost.policies.vllm_process import environment, set_environment, tokenizer_of
from rlpost.settings import VLLMSettings

VISIBLE = "CUDA_VISIBLE_DEVICES"


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
        self.devices = None if devices is None else check_devices(devices)
        settings = settings or VLLMSettings()
        arguments = engine_arguments(self.folder, settings, max_model_len=max_model_len, seed=0)
        if self.devices is not None:
            arguments["tensor_parallel_size"] = len(self.devices)
        set_environment(in_process=False)
        with _only(self.devices):
            super().__init__(arguments | engine, settings.timeout_seconds)

    def get_tokenizer(self) -> Any:
        """The tokenizer in the model's folder."""
        return tokenizer_of(self.folder)


def check_devices(devices: Sequence[int]) -> list[int]:
    """`devices` as numbers of GPUs that are there. Raises ConfigError for others, none, or one named twice."""
    numbers, there = list(devices), torch.cuda.device_count()
    if not numbers or len(set(numbers)) < len(numbers):
        raise ConfigError(f"devices={numbers} must name at least one GPU, and none twice")
    missing = [number for number in numbers if not 0 <= number < there]
    if missing:
        raise ConfigError(
            f"there is no GPU {missing[0]}: this machine has {there}; leave devices out to use what there is"
        )
    return numbers


def _only(devices: Sequence[int] | None) -> AbstractContextManager[None]:
    """Processes that start meanwhile see these GPUs alone."""
    if devices is None:
        return nullcontext()
    seen = os.environ.get(VISIBLE)
    numbers = [str(number) for number in devices]
    if seen:  # what `devices` counts, where this process sees a part itself
        numbers = [seen.split(",")[number] for number in devices]
    return environment(VISIBLE, ",".join(numbers))
