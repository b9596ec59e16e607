"""vLLM engines on chosen devices: LLMOnDevice in a process of its own here, RayLLM in a Ray actor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlpost.errors import ConfigError
from rlpost.imports import require_vllm
from rlpost.model.tokenizer import open_tokenizer
from rlpost.policies.vllm import engine_arguments
from rlpost.policies.vllm_engine import NamedWeights, OwnProcessEngine, environment, set_environment
from rlpost.remote.cluster import Actor, gpus_seen, has_gpus, joined
from rlpost.settings import VLLMSettings

CALLED_THERE = ("generate", "load_folder", "load_adapter", "call_workers", "reset_prefix_cache")


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

    def __getattr__(self, name: str) -> Any:
        """The methods of `VLLMEngine` that the engine in the actor carries out."""
        if name not in CALLED_THERE:
            raise AttributeError(name)
        return partial(self.actor.call, "call", name, seconds=self._timeout)

    def get_tokenizer(self) -> Any:
        """The tokenizer in the model's folder."""
        return open_tokenizer(self.folder)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """See `VLLMEngine`."""
        yield
        self.reset_prefix_cache()

    def load_weights(self, weights: NamedWeights) -> None:
        """See `VLLMEngine`."""
        sent = [(name, weight.detach().to(self.model_config.dtype).cpu()) for name, weight in weights]
        self.actor.call("call", "load_weights", sent, seconds=self._timeout)

    def close(self) -> None:
        """See `VLLMEngine`."""
        try:
            self.actor.call("call", "close", seconds=self._timeout)
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
