"""vLLM engines on chosen devices: LLMOnDevice in a process of its own here, RayLLM in a Ray actor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rlpost.errors import ConfigError
from rlpost.imports import require_vllm
from rlpost.model.tokenizer import open_tokenizer
from rlpost.policies.vllm import engine_arguments
from rlpost.policies.vllm_engine import NamedWeights, OwnProcessEngine, environment, set_environment
from rlpost.remote.cluster import Actor, gpus_seen, has_gpus, joined
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
        self.devices = None if devices is None else check_devices(devices)
        settings = settings or VLLMSettings()
        arguments = engine_arguments(self.folder, settings, max_model_len=max_model_len, seed=0)
        if self.devices is not None:
            arguments["tensor_parallel_size"] = len(self.devices)
        set_environment()
        with _only(self.devices):
            super().__init__(arguments | engine, settings.timeout_seconds)

    def get_tokenizer(self) -> Any:
        """The tokenizer in the model's folder."""
        return open_tokenizer(self.folder)


def check_devices(devices: Sequence[int]) -> list[int]:
    """`devices` as numbers of GPUs that are there. Raises ConfigError for others."""
    numbers, there = list(devices), torch.cuda.device_count()
    missing = [number for number in numbers if not 0 <= number < there]
    if missing:
        raise ConfigError(
            f"there is no GPU {missing[0]}: this machine has {there}; leave devices out to use what there is"
        )
    return numbers


def _only(devices: Sequence[int] | None) -> AbstractContextManager[None]:
    """A block in which processes that start see these GPUs alone."""
    if devices is None:
        return nullcontext()
    seen = gpus_seen()
    return environment("CUDA_VISIBLE_DEVICES", ",".join(seen[number] for number in devices))


class RayLLM:
    """An `LLMOnDevice` in a Ray actor that holds `num_devices` GPUs (None: one where there are any).

    The calls of `vLLMWrapper` are sent there; every wait is at most `settings.timeout_seconds`. `folder` must
    exist on every node. Raises MissingExtraError without ray.
    """

    continuous = False  # whole batches are sent
    asleep: tuple[str, ...] = ()  # `rest` is for engines that were started here

    def __init__(
        self, folder: str | Path, *, num_devices: int | None = None, settings: VLLMSettings, **engine: Any
    ) -> None:
        ray = joined("make_ray_worker=True", None)
        self._timeout = settings.timeout_seconds
        self.folder = Path(folder)
        gpus = int(has_gpus(ray)) if num_devices is None else num_devices
        # Ray shows the actor its own GPUs as 0, 1, ...
        handle = ray.remote(num_gpus=gpus)(_Actor).remote(str(folder), list(range(gpus)) or None, settings, engine)
        self.actor = Actor(ray, handle, "the Ray actor of vLLM (policy.timeout_seconds sets the limit)")
        self.model_config = self.actor.call("config", seconds=self._timeout)

    def _call(self, method: str, *args: Any) -> Any:
        return self.actor.call("call", method, *args, seconds=self._timeout)

    def get_tokenizer(self) -> Any:
        """The tokenizer in the model's folder."""
        return open_tokenizer(self.folder)

    def generate(self, prompts: list[list[int]], params: list[Any]) -> list[Any]:
        """See `VLLMEngine`."""
        return self._call("generate", prompts, params)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """See `VLLMEngine`."""
        yield
        self.reset_prefix_cache()

    def load_folder(self, folder: Path) -> None:
        """See `VLLMEngine`; the folder has to be there on the actor's node."""
        self._call("load_folder", folder)

    def load_weights(self, weights: NamedWeights) -> None:
        """See `VLLMEngine`."""
        sent = [(name, weight.detach().to(self.model_config.dtype).cpu()) for name, weight in weights]
        self._call("load_weights", sent)

    def load_adapter(self, adapter: Any) -> None:
        """See `VLLMEngine`."""
        self._call("load_adapter", adapter)

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """See `VLLMEngine`."""
        return self._call("call_workers", method, *args)

    def reset_prefix_cache(self) -> None:
        """See `VLLMEngine`."""
        self._call("reset_prefix_cache")

    def close(self) -> None:
        """See `VLLMEngine`."""
        try:
            self._call("close")
        finally:
            self.actor.kill()


class _Actor:
    """The actor: the engine on its GPUs."""

    def __init__(self, folder: str, devices: list[int] | None, settings: VLLMSettings, engine: dict[str, Any]) -> None:
        self._llm = LLMOnDevice(folder, devices, settings=settings, **engine)

    def config(self) -> SimpleNamespace:
        """The part of vLLM's configuration that is read here and in `vLLMWrapper`: the whole cannot be pickled."""
        names = ("model", "dtype", "max_model_len", "logprobs_mode")
        return SimpleNamespace(**{name: getattr(self._llm.model_config, name) for name in names})

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._llm, method)(*args)


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
    are vLLM's. Raises ConfigError for devices that are not there, MissingExtraError without Ray.
    """
    chosen = settings or VLLMSettings()
    if enforce_eager is not None:
        chosen = replace(chosen, enforce_eager=enforce_eager)
    if make_ray_worker:
        number = len(devices) if devices is not None else num_devices
        return RayLLM(model_name, num_devices=number, settings=chosen, **engine)
    on = devices if num_devices is None else range(num_devices)
    return LLMOnDevice(model_name, on, settings=chosen, **engine)
