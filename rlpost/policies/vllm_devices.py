"""vLLM engines on chosen devices: in a process of their own here, or in a Ray actor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlpost.errors import ConfigError
from rlpost.extras import require_vllm
from rlpost.policies.vllm import engine_arguments, start_engine
from rlpost.policies.vllm_engines import NamedWeights, OwnProcessEngine, environment
from rlpost.settings import Engine, VLLMSettings

VISIBLE = "CUDA_VISIBLE_DEVICES"


class LLMOnDevice:
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
        self.devices = None if devices is None else check_devices(devices)
        settings = replace(settings or VLLMSettings(), engine=Engine.own_process)
        arguments = engine_arguments(Path(folder), settings, max_model_len=max_model_len, seed=0)
        if self.devices is not None:
            arguments["tensor_parallel_size"] = len(self.devices)
        with _only(self.devices):
            started = start_engine(arguments | engine, settings)
        assert isinstance(started, OwnProcessEngine)
        self._engine = started
        self.folder = Path(folder)

    @property
    def model_config(self) -> Any:
        """vLLM's configuration of the model that runs."""
        return self._engine.model_config

    def get_tokenizer(self) -> Any:
        """The tokenizer in the model's folder."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)

    def generate(self, prompts: list[list[int]], params: list[Any], adapter: Any | None) -> list[Any]:
        """See `VLLMEngine`."""
        return self._engine.generate(prompts, params, adapter)

    def load_weights(self, weights: NamedWeights) -> None:
        """See `VLLMEngine`."""
        self._engine.load_weights(weights)

    def load_adapter(self, adapter: Any) -> None:
        """See `VLLMEngine`."""
        self._engine.load_adapter(adapter)

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """See `VLLMEngine`."""
        return self._engine.call_workers(method, *args)

    def reset_prefix_cache(self) -> None:
        """See `VLLMEngine`."""
        self._engine.reset_prefix_cache()

    def close(self) -> None:
        """See `VLLMEngine`."""
        self._engine.close()


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
