"""Sampling with vLLM: in this process, or as AsyncLLM with its engine in a process of its own.

The synchronous `LLM` over a separate engine process is not offered: it waits for ever when that
process dies. vLLM is imported when an engine starts, never before.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rlpost.data.conversation import Completion
from rlpost.errors import PolicyError
from rlpost.extras import require_vllm
from rlpost.policies.base import Policy, Request
from rlpost.settings import Engine, SamplingSettings, VLLMSettings

NamedWeights = Iterable[tuple[str, torch.Tensor]]
ADAPTER_NAME, ADAPTER_ID = "trained", 1  # of the one adapter that is ever loaded
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM makes room


class _Engine(Protocol):
    """What the wrapper asks of either way of running vLLM."""

    def generate(self, prompts: list[list[int]], params: list[Any], adapter: Any | None) -> list[Any]: ...

    def load_weights(self, weights: NamedWeights) -> None: ...

    def load_adapter(self, adapter: Any) -> None: ...

    def close(self) -> None: ...


class vLLMWrapper(Policy):
    """A policy sampled by vLLM.

    `folder` is a local HF folder; `max_model_len` the longest prompt plus completion. Log-probs are
    those of the distribution that was sampled from (`logprobs_mode="processed_logprobs"`), so they
    include the temperature and top-p. After a weight push that failed half-way the engine is closed,
    and sampling raises PolicyError: there is never a mixture of old and new weights.

    With an `adapter_rank` the engine keeps the weights of `folder` and applies a LoRA adapter of that
    rank: the one of the folder `adapter` once it has started, then what `load_adapter` brings.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Any,
        *,
        settings: VLLMSettings,
        sampling: SamplingSettings,
        max_model_len: int,
        seed: int = 0,
        adapter_rank: int | None = None,
        adapter: Path | None = None,
    ) -> None:
        super().__init__(sampling=sampling, seed=seed)
        self.folder = folder
        self.tokenizer = tokenizer
        self.settings = settings
        self.max_model_len = max_model_len
        self.adapter_rank = adapter_rank
        self.adapter = adapter
        self._applied: Any | None = None  # vLLM's request for the adapter that completions are sampled with
        self._engine: _Engine | None = None
        self._closed_because: str | None = None
        self._needed: set[str] = set()  # names that a complete weight push brings

    def start(self) -> None:
        """Start the engine: 7 to 25 s on a CPU. Raises MissingExtraError or PolicyError."""
        if self._engine is not None:
            return
        require_vllm()
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(self.settings.kv_cache_gb)))
        in_process = self.settings.engine is Engine.in_process
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
        threads = torch.get_num_threads()
        try:
            if in_process:
                self._engine = _InProcessEngine(self._engine_arguments())
            else:
                self._engine = _OwnProcessEngine(self._engine_arguments(), self.settings.timeout_seconds)
        except Exception as error:
            adapting = "; if it cannot apply an adapter to this model, leave lora.push=adapter out"
            raise PolicyError(
                f"vLLM could not start on {self.folder} ({_first_line(error)}); if memory ran out, lower "
                "policy.kv_cache_gb, policy.gpu_memory_utilization or policy.max_num_seqs"
                + (adapting if self.adapter_rank else "")
            ) from error
        finally:
            torch.set_num_threads(threads)  # starting vLLM in this process changes it
        self._closed_because = None
        self._applied = None
        self._needed = self._checkpoint_names()
        if self.adapter is not None:
            self.load_adapter(self.adapter)

    def close(self) -> None:
        """Stop the engine; a second call does nothing."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """See `Policy.generate`; `policy_version` is the one when the call began, weights never change inside it."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._running_engine()
        version = self.version
        params = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=request.max_tokens,
                seed=request.seed,
                logprobs=0,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for request in requests
        ]
        try:
            outputs = engine.generate([request.prompt_ids for request in requests], params, self._applied)
        except Exception as error:
            self._discard(f"sampling failed: {_first_line(error)}")
            raise PolicyError(
                f"vLLM failed while sampling {len(requests)} completions: {_first_line(error)}"
            ) from error
        completions = []
        for output in outputs:
            sample = output.outputs[0]
            if sample.finish_reason not in ("stop", "length"):
                raise PolicyError(
                    f"vLLM ended a completion for the reason {sample.finish_reason!r}, not stop or length"
                )
            ids = list(sample.token_ids)
            log_probs = [step[token].logprob for step, token in zip(sample.logprobs, ids, strict=True)]
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            completions.append(Completion(ids, log_probs, text, sample.finish_reason, version))
        return completions

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace every weight of the engine and clear its prefix cache, or leave no engine behind.

        Only a weight updater calls this; it also raises `version`. Raises PolicyError: before
        anything changed if a weight of the checkpoint is missing, otherwise after closing the engine.
        """
        engine = self._running_engine()
        missing = sorted(self._needed - weights.keys())
        if missing:
            raise PolicyError(
                f"a weight push lacks {len(missing)} weights, {missing[0]} among them; nothing was pushed"
            )
        try:
            engine.load_weights(weights.items())
        except Exception as error:
            self._discard(f"a weight push failed half-way: {_first_line(error)}")
            raise PolicyError(
                f"pushing weights to vLLM failed ({_first_line(error)}); the engine was closed, since it may hold "
                "a mixture of weights: resume the run from its last checkpoint"
            ) from error

    def load_adapter(self, folder: Path) -> None:
        """Sample with the peft adapter in `folder` from now on, and clear the prefix cache.

        Only a weight updater calls this; it also raises `version`. Raises PolicyError, after closing
        the engine, where vLLM does not take the adapter.
        """
        from vllm.lora.request import LoRARequest

        engine = self._running_engine()
        try:
            engine.load_adapter(LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(folder), load_inplace=True))
        except Exception as error:
            self._discard(f"loading an adapter failed: {_first_line(error)}")
            raise PolicyError(
                f"vLLM did not take the adapter ({_first_line(error)}); the engine was closed: go on from the last "
                "checkpoint, with lora.push=merged if vLLM cannot apply adapters to this model"
            ) from error
        # the adapter is loaded and its folder may go; a request that said load_inplace would read it again
        self._applied = LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(folder))

    def _running_engine(self) -> _Engine:
        if self._engine is None:
            raise PolicyError(f"vLLM is not running ({self._closed_because or 'it was not started'}): call start()")
        return self._engine

    def _discard(self, reason: str) -> None:
        self._closed_because = reason
        self.close()

    def _checkpoint_names(self) -> set[str]:
        """Names of the weights in the model folder: what a complete push has to bring."""
        names: set[str] = set()
        for file in self.folder.glob("*.safetensors"):
            with safe_open(file, framework="pt") as weights:
                names.update(weights.keys())
        return names

    def _engine_arguments(self) -> dict[str, Any]:
        on_gpu = torch.cuda.is_available()
        eager = self.settings.enforce_eager
        arguments: dict[str, Any] = {
            "model": str(self.folder),
            "tokenizer": str(self.folder),
            "dtype": self.settings.dtype.value,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.settings.max_num_seqs,
            "enforce_eager": (not on_gpu) if eager is None else eager,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "seed": self.seed % 2**31,
            "disable_log_stats": True,
        }
        if self.adapter_rank is not None:
            room = next(rank for rank in ADAPTER_RANKS if rank >= self.adapter_rank)
            arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
        if on_gpu:
            arguments["gpu_memory_utilization"] = self.settings.gpu_memory_utilization
        else:
            # a prompt read in chunks rewinds its seeded generator, which torch's CPU generator cannot do
            arguments["enable_chunked_prefill"] = False
            arguments["max_num_batched_tokens"] = max(4096, self.max_model_len or 0)
        return arguments


class _InProcessEngine:
    """`vllm.LLM` with its engine in this process; tensors are handed over as they are."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**arguments)

    def generate(self, prompts: list[list[int]], params: list[Any], adapter: Any | None) -> list[Any]:
        inputs: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
        return self._llm.generate(inputs, params, use_tqdm=False, lora_request=adapter)

    def load_weights(self, weights: NamedWeights) -> None:
        self._llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": iter(weights), "is_checkpoint_format": True}
        )
        self._reset_prefix_cache()

    def load_adapter(self, adapter: Any) -> None:
        if not self._llm.llm_engine.add_lora(adapter):
            raise RuntimeError("it was not loaded")
        self._reset_prefix_cache()

    def _reset_prefix_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset")

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class _OwnProcessEngine:
    """`AsyncLLM`, driven from an event loop in a thread; every wait has a deadline."""

    def __init__(self, arguments: dict[str, Any], timeout_seconds: float) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._timeout = timeout_seconds
        self._requests_sent = 0
        self._llm: Any = None  # the AsyncLLM, once it runs
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rlpost-vllm", daemon=True).start()

        async def start() -> AsyncLLM:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

        self._llm = self._wait(start(), "the engine to start")

    def _wait(self, work: Coroutine[Any, Any, Any], waited_for: str) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        deadline = time.monotonic() + self._timeout
        while not concurrent.futures.wait([future], timeout=1.0).done:
            if self._llm is not None and self._llm.errored:
                # a request sent to a process that has just died can be forgotten by vLLM, and never ends
                future.cancel()
                raise RuntimeError(f"the engine's process died during the wait for {waited_for}")
            if time.monotonic() > deadline:
                future.cancel()
                raise TimeoutError(
                    f"waited {self._timeout:.0f} s for {waited_for}; policy.timeout_seconds sets the limit"
                )
        return future.result()

    def generate(self, prompts: list[list[int]], params: list[Any], adapter: Any | None) -> list[Any]:
        async def one(ids: list[int], how: Any, name: str) -> Any:
            final = None
            async for output in self._llm.generate({"prompt_token_ids": ids}, how, name, lora_request=adapter):
                final = output
            return final

        async def all_of_them() -> list[Any]:
            names = [str(self._requests_sent + i) for i in range(len(prompts))]
            self._requests_sent += len(prompts)
            return await asyncio.gather(*map(one, prompts, params, names))

        return self._wait(all_of_them(), f"{len(prompts)} completions")

    def load_weights(self, weights: NamedWeights) -> None:
        # tensors cannot cross to the engine's process, a folder can; a file each, so that no two need be held at once
        with exchange_folder() as folder:
            for number, (name, weight) in enumerate(weights):
                save_file({name: weight.detach().contiguous().cpu()}, folder / f"{number:05d}.safetensors")
            self._wait(self._push_from(folder), "the weight push")

    async def _push_from(self, folder: Path) -> None:
        await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        await self._reset_prefix_cache()

    def load_adapter(self, adapter: Any) -> None:
        self._wait(self._add_lora(adapter), "the adapter to be loaded")

    async def _add_lora(self, adapter: Any) -> None:
        if not await self._llm.add_lora(adapter):
            raise RuntimeError("it was not loaded")
        await self._reset_prefix_cache()

    async def _reset_prefix_cache(self) -> None:
        if not await self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset")

    def close(self) -> None:
        self._llm.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)


@contextlib.contextmanager
def exchange_folder() -> Iterator[Path]:
    """A folder in memory where there is one, for what goes to an engine; removed afterwards."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="rlpost-weights-", dir=shared if shared.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
