"""A vLLM engine in a Ray actor, anywhere in the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlpost.extras import require
from rlpost.policies.vllm_process import NamedWeights, tokenizer_of
from rlpost.settings import VLLMSettings
from rlpost.torchrl.vllm_devices import LLMOnDevice


class RayLLM:
    """An `LLMOnDevice` in a Ray actor that holds `num_devices` GPUs (None: one where there are any).

    What `vLLMWrapper` asks of it is sent there; every wait has `settings.timeout_seconds` as its
    limit. `folder` has to be there on every node. Raises MissingExtraError without ray.
    """

    continuous = False  # whole batches are sent
    asleep = False  # `rest` is for engines that were started here

    def __init__(
        self, folder: str | Path, *, num_devices: int | None = None, settings: VLLMSettings, **engine: Any
    ) -> None:
        require("ray", "ray", "make_ray_worker=True")
        import ray  # pyright: ignore[reportMissingImports]

        self._ray: Any = ray
        self._timeout = settings.timeout_seconds
        self.folder = Path(folder)
        if not ray.is_initialized():  # type: ignore[attr-defined]
            self._ray.init()
        gpus = num_devices if num_devices is not None else int(self._ray.cluster_resources().get("GPU", 0) > 0)
        # Ray shows the actor its own GPUs as 0, 1, ...
        on = list(range(gpus)) or None
        self.actor = self._ray.remote(num_gpus=gpus)(_Actor).remote(str(folder), on, settings, engine)
        self.model_config = self._call("config", waited_for="the engine to start")

    def _call(self, method: str, *args: Any, waited_for: str) -> Any:
        try:
            return self._ray.get(getattr(self.actor, method).remote(*args), timeout=self._timeout)
        except self._ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(
                f"waited {self._timeout:.0f} s for {waited_for} in a Ray actor; policy.timeout_seconds sets the limit"
            ) from error

    def get_tokenizer(self) -> Any:
        """The tokenizer in the model's folder."""
        return tokenizer_of(self.folder)

    def generate(self, prompts: list[list[int]], params: list[Any]) -> list[Any]:
        """See `VLLMEngine`."""
        return self._call("call", "generate", prompts, params, waited_for=f"{len(prompts)} completions")

    @contextmanager
    def changing(self) -> Iterator[None]:
        """See `VLLMEngine`."""
        yield
        self.reset_prefix_cache()

    def load_folder(self, folder: Path) -> None:
        """See `VLLMEngine`; the folder has to be there on the actor's node."""
        self._call("call", "load_folder", folder, waited_for="the weight push")

    def load_weights(self, weights: NamedWeights) -> None:
        """See `VLLMEngine`."""
        sent = [(name, weight.detach().cpu()) for name, weight in weights]
        self._call("call", "load_weights", sent, waited_for="the weight push")

    def load_adapter(self, adapter: Any) -> None:
        """See `VLLMEngine`."""
        self._call("call", "load_adapter", adapter, waited_for="the adapter to be loaded")

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """See `VLLMEngine`."""
        return self._call("call", "call_workers", method, *args, waited_for=f"the workers' {method}")

    def reset_prefix_cache(self) -> None:
        """See `VLLMEngine`."""
        self._call("call", "reset_prefix_cache", waited_for="the prefix cache to be reset")

    def close(self) -> None:
        """See `VLLMEngine`."""
        try:
            self._call("call", "close", waited_for="the engine to stop")
        finally:
            self._ray.kill(self.actor)


class _Config:
    """Of vLLM's configuration what `vLLMWrapper` reads: the whole of it does not travel."""

    def __init__(self, whole: Any) -> None:
        self.model: str = whole.model
        self.max_model_len: int = whole.max_model_len
        self.logprobs_mode: str = whole.logprobs_mode


class _Actor:
    """What runs in the actor's process."""

    def __init__(self, folder: str, devices: list[int] | None, settings: VLLMSettings, engine: dict[str, Any]) -> None:
        self._llm = LLMOnDevice(folder, devices, settings=settings, **engine)

    def config(self) -> _Config:
        return _Config(self._llm.model_config)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._llm, method)(*args)
