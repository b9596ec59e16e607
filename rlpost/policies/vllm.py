"""Sampling with vLLM: in this process, as AsyncLLM with its engine in a process of its own, or in a given `vllm.LLM`.

The engines themselves are in `rlpost.policies.vllm_engine`. vLLM is imported when an engine starts, never before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import torch

from rlpost.data.conversation import Completion, PolicyVersionLabel
from rlpost.data.habits import reply_text
from rlpost.errors import ConfigError, PolicyError
from rlpost.estimate.needs import BYTES, KV_BLOCK, LARGEST_KV_CACHE, USUAL_SHARE, kv_cache_bytes
from rlpost.estimate.shape import shape_of_config
from rlpost.files import json_in
from rlpost.imports import require_vllm
from rlpost.model.precision import bfloat16_is_fast
from rlpost.model.tokenizer import engine_folder, open_tokenizer
from rlpost.model.weight_sums import EngineSums, as_engine_sums
from rlpost.model.weights import NamedAsSaved, SavedWeights
from rlpost.policies.base import Batching, Policy, Request
from rlpost.policies.drawing import check_whole, stops_at_special
from rlpost.policies.vllm_engine import (
    HEAD,
    VLLMEngine,
    engine_around,
    first_line,
    in_thread,
    small_memory,
    start_engine,
    wait_for,
    with_head,
)
from rlpost.policies.vllm_worker import EXTENSION, WeightGroup
from rlpost.settings import DType, SamplingSettings, VLLMSettings

SAMPLER_LOG_PROBS = "processed_logprobs"  # vLLM's name for log-probs under temperature and filters
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM takes for max_lora_rank
LARGE_GPU = 70e9  # bytes of memory, from which on vLLM itself reads more tokens at once
WITHOUT_HEAD = ("gemma2",)  # model types whose engine uses the embedding for a head, and refuses a head of its own
PUSH = ("taking new weights", ", since it may hold a mixture of weights: resume the run from its last checkpoint")

log = logging.getLogger("rlpost")


class vLLMWrapper(Policy):
    """A policy sampled by vLLM.

    `model` is a local HF folder, whose engine `start` starts; a running `vllm.LLM`, which its caller
    closes; or another engine with the interface of `VLLMEngine`, such as `LLMOnDevice`. The tokenizer
    defaults to the engine's or the folder's. `max_model_len` is the longest prompt plus completion;
    None: the model's own context.

    Log-probs are those of the distribution that was sampled from
    (`logprobs_mode="processed_logprobs"`), so they include the temperature and filters such as top-p; a given
    `vllm.LLM` that was built otherwise is refused where that makes a difference. After a weight push
    that failed half-way, the engine is closed (a given one is released) and sampling raises PolicyError:
    there is never a mixture of old and new weights.

    With an `adapter_rank` the engine keeps the weights of `model` and applies a LoRA adapter of that
    rank: first that of the folder `adapter`, then the one that a push brings. Other keyword arguments are
    `Policy`'s.
    """

    name = "vllm"
    shares_weights = False
    pushes = "weight_sync.vllm:updater_of"

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        settings: VLLMSettings | None = None,
        sampling: SamplingSettings | None = None,
        max_model_len: int | None = None,
        seed: int = 0,
        adapter_rank: int | None = None,
        adapter: Path | None = None,
        **face: Any,
    ) -> None:
        super().__init__(sampling=sampling, seed=seed, **face)
        self.settings = settings or VLLMSettings()
        self.max_model_len = max_model_len
        self.adapter_rank = adapter_rank
        self.adapter = adapter
        self._engine: VLLMEngine | None = None
        self._given: Any = None  # an engine that somebody else built, and closes
        self._closed_because: str | None = None
        self._is_hollow = False  # its engine dropped its weights to sleep, and no push has come since
        self.max_restarts = self.settings.max_restarts
        self._needed: set[str] = set()  # names of all weights: a push must contain each
        self._has_head = True  # whether the engine has an output head, which may be tied
        self._in_flight = RequestsInFlight(self.settings.timeout_seconds, self._engine_failed)
        self._labels: dict[str, PolicyVersionLabel] = {}  # the engine's label of earlier weights -> their version
        self._log_probs_mode = SAMPLER_LOG_PROBS
        if isinstance(model, str | Path):
            self.folder = Path(model)
        else:
            self._take_over(model)
        if tokenizer is None:
            of_engine = getattr(model, "get_tokenizer", None)
            tokenizer = of_engine() if of_engine is not None else open_tokenizer(self.folder)
        self.tokenizer = self.templated(tokenizer)

    @classmethod
    def of(
        cls, settings: VLLMSettings, folder: Path, tokenizer: Any, *, model: Any, model_settings: Any, **more: Any
    ) -> Self:
        """The policy that `settings` describe, on the weights of `folder`."""
        return cls(folder, tokenizer, settings=settings, **more)

    def start(self) -> None:
        """Start the engine: 7 to 25 s on a CPU. Raises MissingExtraError, ConfigError or PolicyError."""
        if self._engine is not None:
            return
        require_vllm()
        arguments = engine_arguments(
            self.folder, self.settings, max_model_len=self.max_model_len, seed=self.seed, adapter_rank=self.adapter_rank
        )
        self.max_model_len = arguments["max_model_len"]
        threads = torch.get_num_threads()
        try:
            self._engine = start_engine(arguments, self.settings)
        except Exception as error:
            adapting = "; if it cannot apply an adapter to this model, leave lora.push=adapter out"
            raise PolicyError(
                f"vLLM could not start on {self.folder} ({first_line(error)}){small_memory()}; if memory ran out, "
                "lower policy.kv_cache_gb, policy.gpu_memory_utilization or policy.max_num_seqs; if vLLM does not know "
                "the model, policy=transformers samples from it" + (adapting if self.adapter_rank else "")
            ) from error
        finally:
            torch.set_num_threads(threads)  # starting vLLM in this process changes it
        self._closed_because, self._is_hollow = None, False
        self.batching, self._labels = Batching(), {}
        self._needed = checkpoint_names(self.folder)
        self._has_head = HEAD in self._needed or _config(self.folder).get("model_type") not in WITHOUT_HEAD
        if self.adapter is not None:
            self.load_adapter_folder(self.adapter, None)
        self.rest()  # vLLM has filled its cache with zeros

    def rest(self) -> None:
        """See `Policy.rest`: frees the KV cache's pages on a CPU; with `policy.sleep` weights and cache on a GPU."""
        if self._engine is not None and self._given is None and not self._in_flight:
            with self._closed_at_failure("giving its memory back"):
                # an adapter's push does not bring the weights under it
                drops = bool(self.settings.sleep) and self.reload is not None and self.adapter_rank is None
                self._engine.rest(sleeps=bool(self.settings.sleep), drops_weights=drops)
                self._is_hollow = drops and bool(self._engine.asleep)

    def close(self) -> None:
        """Stop the engine, or release a given one; a second call does nothing."""
        engine, self._engine = self._engine, None
        because = self._closed_because or "vLLM was closed"
        self._in_flight.end(PolicyError(f"a completion was not sampled to its end: {because}"))
        super().close()
        if engine is not None and self._given is None:
            engine.close()

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """See `Policy.generate`; only an engine in its own process can change weights meanwhile.

        Each completion has the version its first id was sampled under, and where that changed. An engine that fails is
        restarted if `reload` can push the current weights to it, `policy.max_restarts` times in all, and samples all
        requests again: each has its own seed, so the completions are the same.
        """
        while True:
            try:
                return self._generate(requests, sampling)
            except PolicyError as error:
                self._start_again(error)

    def submit(self, request: Request, sampling: SamplingSettings | None = None) -> Future[Completion]:
        """See `Policy.submit`; an engine in its own process gets each request at once."""
        engine = self._awake_engine()
        if not engine.continuous:
            return super().submit(request, sampling)
        sampling = sampling or self.sampling
        _check_log_probs_mode(self._log_probs_mode, sampling)
        [params] = sampling_params([request], sampling, self.tokenizer, self.stop_ids)
        try:
            pending = engine.submit(request.prompt_ids, params)
        except RuntimeError as error:  # another thread has just closed it
            raise PolicyError(f"vLLM takes no request ({self._closed_because or error}): call start()") from error

        def completed(output: Any) -> Completion:
            completion = self._completion(output)
            self._count(len(completion.token_ids))
            return completion

        return self._in_flight.add(engine, pending, completed)

    def token_log_probs(self, sequences: Sequence[Sequence[int]], sampling: SamplingSettings) -> list[torch.Tensor]:
        """See `Policy.token_log_probs`. Raises ConfigError for a temperature other than 1."""
        from vllm import SamplingParams

        check_whole(sampling)
        if sampling.temperature not in (0, 1):
            raise ConfigError(
                f"vLLM gives the log-probs of a whole sequence at temperature 1 and not at {sampling.temperature:g}: "
                "read them with a TransformersWrapper, or set temperature to 1"
            )
        params = [SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)] * len(sequences)
        prompts = [list(ids) for ids in sequences]
        with self._turn():
            outputs = self._ask(f"reading {len(prompts)} sequences", prompts, params)
        return [_log_probs_of(output, ids) for output, ids in zip(outputs, prompts, strict=True)]

    def load_folder(self, folder: Path, version: PolicyVersionLabel) -> None:
        """See `Policy.load_folder`: vLLM reads the folder itself; only a tied head is copied.

        Completions in flight in an engine of its own process are kept: their later ids are sampled with the new
        weights, on top of the keys and values of the earlier ones. Raises what `load_weights` raises.
        """
        self._running_engine()
        weights = SavedWeights(folder)
        named = self._as_needed(weights)
        as_it_is = named is weights and (self._has_head or HEAD not in weights)
        completed = with_head(folder, weights) if self._has_head else nullcontext(folder)
        with completed as whole, self._changing(*PUSH) as engine:
            self._pack_experts_again()
            if as_it_is:
                engine.load_folder(whole)
            else:
                engine.load_weights(self._sent(named))
            self.become(version)  # before anything is sampled with them

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace every weight of the engine and forget cached prefixes.

        Only a weight updater calls this; it also sets `version`. Raises PolicyError: before anything changed if a
        weight of the checkpoint is missing, otherwise after closing the engine.
        """
        self._running_engine()
        named = self._as_needed(weights)
        with self._changing(*PUSH) as engine:
            self._pack_experts_again()
            engine.load_weights(self._sent(named))

    def load_adapter_folder(self, folder: Path, version: PolicyVersionLabel | None) -> None:
        """See `Policy.load_adapter_folder`; without a `version` the caller sets it. Forgets cached prefixes.

        Raises PolicyError, after closing the engine, if vLLM cannot load the adapter.
        """
        from vllm.lora.request import LoRARequest

        advice = ": go on from the last checkpoint, with lora.push=merged if vLLM cannot apply adapters to this model"
        with self._changing("loading an adapter", advice) as engine:
            engine.load_adapter(LoRARequest("trained", 1, str(folder), load_inplace=True))
            if version is not None:
                self.become(version)

    def receive_weights(self, weights: Mapping[str, torch.Tensor], group: WeightGroup) -> None:
        """Like `load_weights`, but sends each weight through `group`; this process is its rank 0.

        The engine's workers must have joined the group (see `vLLMWorker`).
        """
        engine = self._running_engine()
        named = self._as_needed(weights)
        dtype = engine.model_config.dtype  # fewer bytes than the trainer's, and nothing to cast there
        sent = list(self._sent(named))
        metadata = [(name, str(dtype).removeprefix("torch."), list(weight.shape)) for name, weight in sent]
        with self._changing(*PUSH):
            self._pack_experts_again()
            receiving = in_thread(lambda: engine.call_workers("update_weights_broadcast", metadata))
            for _, weight in sent:
                if receiving.done():
                    break  # it failed; `wait_for` raises its error
                group.broadcast(weight.detach().to(dtype).contiguous(), src=0)
            wait_for(receiving, self.settings.timeout_seconds, "the workers to load the weights")

    def weight_sums(self, names: Sequence[str] | None = None) -> dict[int, EngineSums]:
        """See `Policy.weight_sums`; empty with an adapter, or with weights divided among workers."""
        if self.adapter_rank is not None or self._given is not None:
            return {}
        sums = self.call_workers("sum_weights", names)
        return {0: as_engine_sums(sums[0])} if len(sums) == 1 else {}

    @property
    def model(self) -> Any:
        """The object that samples: a `vllm.LLM`, vLLM's AsyncLLM or the given engine; None if none runs."""
        if self._engine is None or self._given is not None:
            return self._engine and self._given
        return self._engine.llm

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the engine's workers, such as those of `vLLMWorker`; returns each worker's result.

        Raises PolicyError if a worker raises.
        """
        engine = self._awake_engine()
        try:
            return engine.call_workers(method, *args)
        except Exception as error:
            raise PolicyError(f"a worker of vLLM failed in {method}: {first_line(error)}") from error

    # The engine

    def _take_over(self, model: Any) -> None:
        """Sample with an engine that somebody else built. Raises TypeError if `model` is not an engine."""
        if hasattr(model, "llm_engine"):
            self._engine = engine_around(model, self.settings.timeout_seconds)
            config = model.llm_engine.model_config
        elif hasattr(model, "call_workers"):
            self._engine, config = model, model.model_config
        else:
            raise TypeError(
                f"vLLMWrapper was given a {type(model).__name__}: give it a folder, a vllm.LLM or what "
                "make_vllm_worker returns"
            )
        self._given = model
        self._log_probs_mode = config.logprobs_mode
        self.folder = _folder_of(config.model)
        self.max_model_len = min(self.max_model_len or config.max_model_len, config.max_model_len)
        self._needed = checkpoint_names(self.folder)

    def _running_engine(self) -> VLLMEngine:
        if self._engine is None:
            raise PolicyError(f"vLLM is not running ({self._closed_because or 'it was not started'}): call start()")
        return self._engine

    def _awake_engine(self) -> VLLMEngine:
        """The running engine, ready to sample: with its weights and its cache on the GPU."""
        engine = self._running_engine()
        if self._is_hollow and self.reload is not None:  # the step had no update, and so no push
            self.reload()
        if engine.asleep:
            with self._waking():
                engine.wake()
        return engine

    def _waking(self) -> AbstractContextManager[None]:
        advice = "; if memory ran out, lower policy.gpu_memory_utilization or tokens_per_microbatch"
        return self._closed_at_failure("waking up", advice)

    def _start_again(self, error: PolicyError) -> None:
        """Restart an engine that failed, with the current weights. Raises `error` if that is not allowed."""
        restarts = self.max_restarts
        if self.reload is None or self._engine is not None or self._given is not None or self.restarts >= restarts:
            raise error
        self.restarts += 1
        log.warning("%s; starting it again (%d of %d)", error, self.restarts, restarts)
        self.start()
        self.reload()

    def _engine_failed(self, error: BaseException) -> None:
        """Close the engine, from which requests in flight can get no more answers."""
        self._closed_because = f"vLLM failed while sampling: {first_line(error)}"
        self.close()

    @contextmanager
    def _closed_at_failure(self, doing: str, advice: str = "") -> Iterator[None]:
        """Close the engine if the block fails, and raise PolicyError saying what it was `doing`."""
        try:
            yield
        except Exception as error:
            self._closed_because = f"vLLM failed while {doing}: {first_line(error)}"
            self.close()
            ended = "the engine was closed" if self._given is None else "the engine it was given is released"
            raise PolicyError(f"{self._closed_because}; {ended}{advice}") from error

    # Sampling

    def _generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        self._awake_engine()
        _check_log_probs_mode(self._log_probs_mode, sampling)
        params = sampling_params(requests, sampling, self.tokenizer, self.stop_ids)
        prompts = [request.prompt_ids for request in requests]
        counted, on_ended = 0, self.on_ended

        def report(ended: int, tokens: int) -> None:
            nonlocal counted
            self._count(tokens - counted)
            counted = tokens
            if on_ended is not None:
                on_ended(ended)

        with self._turn():
            outputs = self._ask(f"sampling {len(prompts)} completions", prompts, params, report if on_ended else None)
            self._count(sum(len(output.outputs[0].token_ids) for output in outputs) - counted)
            return [self._completion(output) for output in outputs]

    def _ask(
        self,
        doing: str,
        prompts: list[list[int]],
        params: list[Any],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Any]:
        """Run `prompts` through vLLM. Closes an engine that fails, and raises PolicyError."""
        engine = self._awake_engine()
        engine.on_progress = on_progress
        with self._closed_at_failure(doing):
            return engine.generate(prompts, params)

    def _completion(self, output: Any) -> Completion:
        """The completion of vLLM's `output`, with the versions it was sampled under.

        Raises PolicyError if vLLM neither finished nor truncated it.
        """
        sample = output.outputs[0]
        if sample.finish_reason not in ("stop", "length"):
            raise PolicyError(f"vLLM ended a completion for the reason {sample.finish_reason!r}, not stop or length")
        ids = list(sample.token_ids)
        log_probs = [step[token].logprob for step, token in zip(sample.logprobs, ids, strict=True)]
        text = reply_text(self.tokenizer, ids)
        spans = [(span.start, self._labels.get(span.version, self.version)) for span in sample.weight_versions or []]
        (_, first), *changes = spans or [(0, self.version)]
        return Completion(ids, log_probs, text, sample.finish_reason, first, changes)

    def _count(self, tokens: int) -> None:
        with self.batching.lock:  # several threads count
            self.tokens_sampled += tokens

    def _turn(self) -> AbstractContextManager[Any]:
        """Keeps sampling and weight changes apart; an engine that takes requests one by one does so by itself."""
        return nullcontext() if self._running_engine().continuous else self.batching.lock

    # Changing weights

    @contextmanager
    def _changing(self, doing: str, advice: str) -> Iterator[VLLMEngine]:
        """A block in which weights change. If it fails, closes the engine and raises PolicyError."""
        with self._turn(), self._closed_at_failure(doing, advice):
            engine = self._running_engine()
            if engine.asleep:
                with self._waking():
                    engine.wake("weights")  # the cache comes when the new weights are there
            with engine.changing():
                if engine.continuous:  # marks the ids that were sampled until now
                    self._labels[engine.weights_label] = self.version
                yield engine
                self._is_hollow = False
                if engine.asleep:
                    engine.wake()

    def _as_needed(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """`weights` under the names of the engine's folder. Raises PolicyError if some are missing."""
        named = NamedAsSaved(weights, self.folder) if self._needed - weights.keys() else weights
        missing = sorted(self._needed - named.keys())
        if missing:
            raise PolicyError(
                f"a weight push lacks {len(missing)} weights, {missing[0]} among them; nothing was pushed"
            )
        return named

    def _pack_experts_again(self) -> None:
        """Prepare the workers of an engine with experts for a push: see `vLLMWorker.pack_experts_again`."""
        if self._given is None and _names(_config(self.folder), ("expert",)):
            self._running_engine().call_workers("pack_experts_again")

    def _sent(self, named: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights to send: all but a tied head that the engine has no place for."""
        return ((name, named[name]) for name in named if self._has_head or name != HEAD)


# Requests in flight

LOOK_EVERY = 0.5  # seconds between two looks at an engine with requests in flight


class RequestsInFlight:
    """The requests in flight of one engine. Each future ends once: with vLLM's answer, or by `end` with all others.

    A thread watches them while there are any: it calls `failed`, which must `end` them, once the engine has died
    (vLLM can forget requests then), or if none of them made progress for `timeout_seconds`.
    """

    def __init__(self, timeout_seconds: float, failed: Callable[[BaseException], None]) -> None:
        self._timeout = timeout_seconds
        self._failed = failed
        self._lock = threading.Lock()  # guards the requests and the thread
        self._pending: dict[Future[Completion], Future[Any]] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._look = threading.Event()  # set: look now

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestsInFlight, (self._timeout, self._failed)

    def __len__(self) -> int:
        return len(self._pending)

    def add(
        self, engine: VLLMEngine, pending: Future[Any], completed: Callable[[Any], Completion]
    ) -> Future[Completion]:
        """A future of `completed(answer to pending)`; cancelling it cancels `pending`."""
        future: Future[Completion] = Future()
        with self._lock:
            self._pending[future] = pending
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._look_after, args=(engine,), name="rlpost-vllm-requests", daemon=True
                )
                self._thread.start()
        future.add_done_callback(lambda done: done.cancelled() and pending.cancel())
        pending.add_done_callback(lambda answer: self._answered(future, answer, completed))
        return future

    def end(self, error: PolicyError) -> None:
        """Fail every future that has not ended with `error`, and abort its request."""
        with self._lock:
            left, self._pending = self._pending, {}
        for future, pending in left.items():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            pending.cancel()

    def _answered(
        self, future: Future[Completion], answer: Future[Any], completed: Callable[[Any], Completion]
    ) -> None:
        error = None if answer.cancelled() else answer.exception()
        if type(error).__name__ == "EngineDeadError":
            self._failure = error
            self._look.set()  # `_look_after` ends all with one error
            return
        with self._lock:
            if self._pending.pop(future, None) is None:
                return
        if not future.set_running_or_notify_cancel():
            return
        try:
            if answer.cancelled():
                raise PolicyError("vLLM's thread ended before this completion was sampled")
            if error is not None:
                raise PolicyError(f"vLLM failed at a completion: {first_line(error)}") from error
            future.set_result(completed(answer.result()))
        except Exception as failure:  # noqa: BLE001  raised again in the waiting thread
            future.set_exception(failure)

    def _look_after(self, engine: VLLMEngine) -> None:
        seen, since = None, time.monotonic()
        while True:
            self._look.wait(LOOK_EVERY)
            self._look.clear()
            with self._lock:
                if not self._pending:
                    self._thread = None
                    return
            failure = self._failure
            if failure is None and engine.died():
                failure = RuntimeError("the engine's process died")
            progress = engine.progress()
            if progress != seen:
                seen, since = progress, time.monotonic()
            elif time.monotonic() - since > self._timeout:
                failure = TimeoutError(
                    f"nothing came of {len(self)} requests for {self._timeout:.0f} s; policy.timeout_seconds sets the "
                    "limit"
                )
            if failure is not None:
                with self._lock:
                    self._thread, self._failure = None, None
                self._failed(failure)
                return


# What vLLM is started with


def engine_arguments(
    folder: Path,
    settings: VLLMSettings,
    *,
    max_model_len: int | None,
    seed: int,
    adapter_rank: int | None = None,
) -> dict[str, Any]:
    """The keyword arguments that vLLM is started with. Raises ConfigError for a folder that holds no model."""
    on_gpu = torch.cuda.is_available()
    dtype, eager, longest = settings.dtype, settings.enforce_eager, max_model_len
    if dtype is DType.auto:  # vLLM's own `auto` is the folder's dtype, ours is the fastest here
        fast, _ = bfloat16_is_fast(torch.device("cuda" if on_gpu else "cpu"))
        dtype = DType.bfloat16 if fast else DType.float32
    if longest is None:  # and None if the model's config does not say either
        config = _config(folder)
        longest = config.get("max_position_embeddings") or config.get("n_positions")
    arguments: dict[str, Any] = {
        "model": str(folder),
        "tokenizer": str(engine_folder(folder)),
        "dtype": dtype.value,
        "max_model_len": longest,
        "max_num_seqs": settings.at_once,
        "enforce_eager": (not on_gpu) if eager is None else eager,
        "logprobs_mode": SAMPLER_LOG_PROBS,
        "enable_prefix_caching": True,
        "seed": seed % 2**31,
        "disable_log_stats": True,
        "worker_extension_cls": EXTENSION,
    }
    if settings.tensor_parallel_size > 1:
        arguments["tensor_parallel_size"] = settings.tensor_parallel_size
    if adapter_rank is not None:
        room = next(rank for rank in ADAPTER_RANKS if rank >= adapter_rank)
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
    if on_gpu:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization or USUAL_SHARE
        arguments["enable_sleep_mode"] = bool(settings.sleep)
        large = torch.cuda.get_device_properties(0).total_memory >= LARGE_GPU
        arguments["max_num_batched_tokens"] = max(16384 if large else 8192, longest or 0)  # an AsyncLLM takes 2048
        if settings.kv_cache_gb is not None:
            # and nothing is profiled: that reads the memory of the whole GPU, which a trainer changes meanwhile
            arguments["kv_cache_memory_bytes"] = round(settings.kv_cache_gb * 10**9)
    else:
        # a prompt read in chunks rewinds its seeded generator, which torch's CPU generator cannot do
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(4096, longest or 0)
        arguments |= kv_cache_arguments(folder, replace(settings, dtype=dtype), longest or 4096)
    return arguments


# parts of names in the config of a model whose layers keep more than the keys and values of every token
RECURRENT = ("mamba", "ssm", "linear_", "conv", "rwkv", "state_size", "recurrent")
OTHER_STATE = (*RECURRENT, "kv_lora")


def kv_cache_arguments(folder: Path, settings: VLLMSettings, max_model_len: int) -> dict[str, int]:
    """vLLM's arguments for its KV cache on a CPU: `policy.kv_cache_gb`, or room for its conversations, up to 1 GB.

    Raises ConfigError if the cache has no room for one conversation.
    """
    config = _config(folder)
    each = kv_bytes_per_token(config, settings.dtype.value)
    if each is None:
        size = LARGEST_KV_CACHE if settings.kv_cache_gb is None else round(settings.kv_cache_gb * 10**9)
        # vLLM keeps the prefixes of a recurrent layer only where prompts are read in chunks
        without_prefixes = {"enable_prefix_caching": False} if _names(config, RECURRENT) else {}
        return {"kv_cache_memory_bytes": size, **without_prefixes}
    given, least = kv_cache_bytes(settings, each, max_model_len)
    if given < least:
        raise ConfigError(
            f"policy.kv_cache_gb={settings.kv_cache_gb:g} has no room for one conversation of {max_model_len} tokens, "
            f"which takes {least / 1e9:.2g} GB: raise it, or leave it out"
        )
    return {"kv_cache_memory_bytes": given, "block_size": KV_BLOCK}


def kv_bytes_per_token(config: dict[str, Any], dtype: str) -> int | None:
    """Bytes of one token's keys and values in all layers; None for a model whose layers keep other state too.

    `config` is a model's config.json, or its `text_config`. SmolLM2-135M in bfloat16, with 30 layers of 3 heads of 64
    numbers: 2 (keys, values) x 30 x 3 x 64 x 2 bytes = 23,040.
    """
    shape = None if _names(config, OTHER_STATE) else shape_of_config(config)
    return None if shape is None else shape.kv_bytes(BYTES.get(dtype, 4))


def _config(folder: Path) -> dict[str, Any]:
    """The text model's part of an HF folder's config.json. Raises ConfigError if it is unreadable."""
    config = json_in(folder / "config.json")
    return config.get("text_config") or config


def _names(config: dict[str, Any], parts: Sequence[str]) -> bool:
    return any(part in name for name in config for part in parts)


def _folder_of(model: str) -> Path:
    """The local folder of vLLM's `model`: a folder, or a hub id that vLLM has downloaded."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True, allow_patterns=["*.safetensors", "*.json"]))


def checkpoint_names(folder: Path) -> set[str]:
    """Names of the weights in a model folder; a push must contain all of them."""
    return set(SavedWeights(folder)) if any(folder.glob("*.safetensors")) else set()


# What vLLM is asked of a completion, and what its outputs say


def sampling_params(
    requests: Sequence[Request], sampling: SamplingSettings, tokenizer: Any, ends: Sequence[int]
) -> list[Any]:
    """vLLM's SamplingParams for each request, with the log-prob of each sampled id.

    `ends` are the ids that end a completion, besides those of the folder that the engine reads.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    special = stops_at_special(tokenizer, sampling.stop)
    return [
        SamplingParams(
            **asdict(sampling),
            max_tokens=request.max_tokens,
            seed=request.seed,
            logprobs=0,
            detokenize=bool(sampling.stop),  # `_completion` decodes all ids at once
            skip_special_tokens=not special,  # in the text that is searched for stop strings
            stop_token_ids=list(ends) or None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for request in requests
    ]


def _check_log_probs_mode(mode: str, sampling: SamplingSettings) -> None:
    """Raise ConfigError if log-probs in this mode are not those of the distribution that `sampling` draws from."""
    as_the_model_says = sampling.temperature == 0 or (sampling.temperature == 1 and not sampling.filters)
    if mode != SAMPLER_LOG_PROBS and not as_the_model_says:
        raise ConfigError(
            f"this vllm.LLM gives {mode}, which are not those of {sampling}: build it with "
            f"logprobs_mode={SAMPLER_LOG_PROBS!r}"
        )


def _log_probs_of(output: Any, ids: Sequence[int]) -> torch.Tensor:
    """log π of each of `ids`, (len(ids),) float32; 0 for the first, which nothing predicts."""
    known = zip(output.prompt_logprobs[1:], ids[1:], strict=True)
    return torch.tensor([0.0, *(step[token].logprob for step, token in known)])
