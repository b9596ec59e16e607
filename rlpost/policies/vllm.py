"""Sampling with vLLM: in this process, as AsyncLLM with its engine in a process of its own, or in a given `vllm.LLM`.

vLLM is imported when an engine starts, never before.

What vLLM is started with, and what it is asked of a completion.

vLLM is imported when it is asked, never before.

What vLLM's outputs say.

Requests that vLLM works on at once, each with the future of its completion.

How long a model's context is, and how large the KV cache of a sampler on a CPU: the tokens under way.
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
from rlpost.errors import ConfigError, DataError, PolicyError
from rlpost.estimate.needs import BYTES, KV_BLOCK, LARGEST_KV_CACHE, kv_cache_bytes, shape_of_config
from rlpost.files import json_in
from rlpost.imports import require_vllm
from rlpost.model.precision import bfloat16_is_fast
from rlpost.model.weights import EngineSums, SavedWeights, as_engine_sums
from rlpost.policies.base import Batching, Face, Policy, Request, check_whole
from rlpost.policies.vllm_engine import (
    VLLMEngine,
    engine_around,
    first_line,
    in_thread,
    small_memory,
    start_engine,
    tokenizer_of,
    wait_for,
    with_head,
)
from rlpost.policies.vllm_worker import EXTENSION, WeightGroup
from rlpost.settings import DType, SamplingSettings, VLLMSettings


def completion_of(
    output: Any, tokenizer: Any, labels: Mapping[str, PolicyVersionLabel], version: PolicyVersionLabel
) -> Completion:
    """A completion with the versions it was sampled under: `version`, and those that the engine's `labels` stand for.

    Raises PolicyError for one that was neither finished nor cut.
    """
    sample = output.outputs[0]
    if sample.finish_reason not in ("stop", "length"):
        raise PolicyError(f"vLLM ended a completion for the reason {sample.finish_reason!r}, not stop or length")
    ids = list(sample.token_ids)
    log_probs = [step[token].logprob for step, token in zip(sample.logprobs, ids, strict=True)]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    spans = [(span.start, labels.get(span.version, version)) for span in sample.weight_versions or []]
    (_, first), *changes = spans or [(0, version)]
    return Completion(ids, log_probs, text, sample.finish_reason, first, changes)


def log_probs_of(output: Any, ids: Sequence[int]) -> torch.Tensor:
    """log π of each of the `ids` that were read, (len(ids),) float32; 0 for the first, which nothing predicts."""
    known = zip(output.prompt_logprobs[1:], ids[1:], strict=True)
    return torch.tensor([0.0, *(step[token].logprob for step, token in known)])


LOOK_EVERY = 0.5  # seconds


class RequestsUnderWay:
    """Those of one engine. Each future is ended once: by what vLLM answered, or by `end`, together with all others.

    A thread looks after them while there are any: it calls `failed`, which is to `end` them, once the engine
    has died, for vLLM can forget a request then, or where nothing came of any of them for `timeout_seconds`.
    """

    def __init__(self, timeout_seconds: float, failed: Callable[[BaseException], None]) -> None:
        self._timeout = timeout_seconds
        self._failed = failed
        self._lock = threading.Lock()  # of all that follows
        self._asked: dict[Future[Completion], Future[Any]] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._look = threading.Event()  # set: now, rather than in a while

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestsUnderWay, (self._timeout, self._failed)

    def __len__(self) -> int:
        return len(self._asked)

    def add(self, engine: VLLMEngine, asked: Future[Any], completed: Callable[[Any], Completion]) -> Future[Completion]:
        """The future of what `completed` makes of the answer to `asked`, which is cancelled where that future is."""
        future: Future[Completion] = Future()
        with self._lock:
            self._asked[future] = asked
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._look_after, args=(engine,), name="rlpost-vllm-requests", daemon=True
                )
                self._thread.start()
        future.add_done_callback(lambda done: done.cancelled() and asked.cancel())
        asked.add_done_callback(lambda answer: self._answered(future, answer, completed))
        return future

    def end(self, error: PolicyError) -> None:
        """End every future that has not ended with `error`, and abort its request."""
        with self._lock:
            left, self._asked = self._asked, {}
        for future, asked in left.items():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            asked.cancel()

    def _answered(
        self, future: Future[Completion], answer: Future[Any], completed: Callable[[Any], Completion]
    ) -> None:
        error = None if answer.cancelled() else answer.exception()
        if type(error).__name__ == "EngineDeadError":
            self._failure = error
            self._look.set()  # and all end by one error
            return
        with self._lock:
            if self._asked.pop(future, None) is None:
                return
        if not future.set_running_or_notify_cancel():
            return
        try:
            if answer.cancelled():
                raise PolicyError("vLLM's thread ended before this completion was sampled")
            if error is not None:
                raise PolicyError(f"vLLM failed at a completion: {first_line(error)}") from error
            future.set_result(completed(answer.result()))
        except Exception as failure:  # noqa: BLE001  raised again in the thread that waits
            future.set_exception(failure)

    def _look_after(self, engine: VLLMEngine) -> None:
        seen, since = None, time.monotonic()
        while True:
            self._look.wait(LOOK_EVERY)
            self._look.clear()
            with self._lock:
                if not self._asked:
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


# parts of a configuration's names whose layers keep something else than keys and values of every token
RECURRENT = ("mamba", "ssm", "linear_", "conv", "rwkv", "state_size", "recurrent")
OTHER_STATE = (*RECURRENT, "kv_lora")


def kv_bytes_per_token(config: dict[str, Any], dtype: str) -> int | None:
    """Bytes of one token's keys and values in all layers; None for a model whose layers keep other things as well.

    `config` is a model's config.json, or its `text_config`. SmolLM2-135M in bfloat16, with 30 layers of 3 heads of 64
    numbers: 2 (keys, values) x 30 x 3 x 64 x 2 bytes = 23,040.
    """
    shape = None if _names(config, OTHER_STATE) else shape_of_config(config)
    return None if shape is None else shape.kv_bytes(BYTES.get(dtype, 4))


def kv_cache_arguments(folder: Path, settings: VLLMSettings, max_model_len: int) -> dict[str, int]:
    """vLLM's arguments for its KV cache on a CPU: `policy.kv_cache_gb`, or what its conversations fill, at most 1 GB.

    Raises ConfigError for a cache that has no room for one conversation.
    """
    config = _config(folder)
    each = kv_bytes_per_token(config, settings.dtype.value)
    if each is None:
        asked = LARGEST_KV_CACHE if settings.kv_cache_gb is None else round(settings.kv_cache_gb * 10**9)
        # vLLM keeps the prefixes of a recurrent layer only where prompts are read in chunks
        without_prefixes = {"enable_prefix_caching": False} if _names(config, RECURRENT) else {}
        return {"kv_cache_memory_bytes": asked, **without_prefixes}
    given, least = kv_cache_bytes(settings, each, max_model_len)
    if given < least:
        raise ConfigError(
            f"policy.kv_cache_gb={settings.kv_cache_gb:g} has no room for one conversation of {max_model_len} tokens, "
            f"which takes {least / 1e9:.2g} GB: raise it, or leave it out"
        )
    return {"kv_cache_memory_bytes": given, "block_size": KV_BLOCK}


def longest_context(folder: Path) -> int | None:
    """Tokens that the model of an HF folder was made for, None where its config does not say.

    Raises ConfigError where there is no readable config.
    """
    config = _config(folder)
    return config.get("max_position_embeddings") or config.get("n_positions")


def _config(folder: Path) -> dict[str, Any]:
    """The config.json of an HF folder, that of its text model if apart. Raises ConfigError where it is unreadable."""
    try:
        config = json_in(folder / "config.json")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is no model folder: it has no readable config.json") from error
    return config.get("text_config") or config


def _names(config: dict[str, Any], parts: Sequence[str]) -> bool:
    return any(part in name for name in config for part in parts)


ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM makes room
SAMPLER_LOG_PROBS = "processed_logprobs"  # vLLM's name for log-probs under temperature and filters


def engine_arguments(
    folder: Path,
    settings: VLLMSettings,
    *,
    max_model_len: int | None,
    seed: int,
    adapter_rank: int | None = None,
) -> dict[str, Any]:
    """What vLLM is started with. Raises ConfigError for a folder that holds no model."""
    on_gpu = torch.cuda.is_available()
    settings = replace(settings, dtype=_format_of(settings, on_gpu))
    eager = settings.enforce_eager
    longest = max_model_len if max_model_len is not None else longest_context(folder)
    arguments: dict[str, Any] = {
        "model": str(folder),
        "tokenizer": str(folder),
        "dtype": settings.dtype.value,
        "max_model_len": longest,
        "max_num_seqs": settings.max_num_seqs,
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
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
        arguments["enable_sleep_mode"] = settings.sleep
    else:
        # a prompt read in chunks rewinds its seeded generator, which torch's CPU generator cannot do
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(4096, longest or 0)
        arguments |= kv_cache_arguments(folder, settings, longest or 4096)
    return arguments


def _format_of(settings: VLLMSettings, on_gpu: bool) -> DType:
    """The format of the engine's weights: vLLM's own `auto` is that of the folder, ours what is fast here."""
    if settings.dtype is not DType.auto:
        return settings.dtype
    fast, _ = bfloat16_is_fast(torch.device("cuda" if on_gpu else "cpu"))
    return DType.bfloat16 if fast else DType.float32


def folder_of(model: str) -> Path:
    """The local folder of what vLLM was given: a folder, or a hub id that it has downloaded."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True, allow_patterns=["*.safetensors", "*.json"]))


def checkpoint_names(folder: Path) -> set[str]:
    """Names of the weights in a model folder: what a complete push has to bring."""
    return set(SavedWeights(folder)) if any(folder.glob("*.safetensors")) else set()


def sampling_params(requests: Sequence[Request], sampling: SamplingSettings, end_of_turn: int | None) -> list[Any]:
    """vLLM's SamplingParams for each request, with the log-prob of each sampled id.

    `end_of_turn` is the tokenizer's, which may be told another than the folder that the engine reads.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return [
        SamplingParams(
            **asdict(sampling),
            max_tokens=request.max_tokens,
            seed=request.seed,
            logprobs=0,
            stop_token_ids=None if end_of_turn is None else [end_of_turn],
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for request in requests
    ]


def reading_params(sequences: Sequence[Sequence[int]], sampling: SamplingSettings, longest: int | None) -> list[Any]:
    """vLLM's SamplingParams to read each whole sequence, which may have fewer than `longest` tokens.

    Raises ConfigError for another temperature than 1, DataError for a sequence that is too long.
    """
    from vllm import SamplingParams

    if sampling.temperature not in (0, 1):
        raise ConfigError(
            f"vLLM gives the log-probs of a whole sequence at temperature 1 and not at {sampling.temperature:g}: "
            "read them with a TransformersWrapper, or set temperature to 1"
        )
    length = max(map(len, sequences))
    if longest is not None and length >= longest:
        raise DataError(f"a sequence has {length} tokens and vLLM reads at most {longest - 1} of them: cut it")
    return [SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)] * len(sequences)


def check_log_probs_mode(mode: str, sampling: SamplingSettings) -> None:
    """Raise ConfigError where an engine's log-probs in this mode are not those of what `sampling` draws from."""
    as_the_model_says = sampling.temperature == 0 or (sampling.temperature == 1 and not sampling.filters)
    if mode != SAMPLER_LOG_PROBS and not as_the_model_says:
        raise ConfigError(
            f"this vllm.LLM gives {mode}, which are not those of {sampling}: build it with "
            f"logprobs_mode={SAMPLER_LOG_PROBS!r}"
        )


ADAPTER_NAME, ADAPTER_ID = "trained", 1  # of the one adapter that is ever loaded
PUSH = ("taking new weights", ", since it may hold a mixture of weights: resume the run from its last checkpoint")
WAKING = "; if memory ran out, lower policy.gpu_memory_utilization or tokens_per_microbatch"
ADAPTING = (
    "loading an adapter",
    ": go on from the last checkpoint, with lora.push=merged if vLLM cannot apply adapters to this model",
)

log = logging.getLogger("rlpost")


class vLLMWrapper(Policy):
    """A policy sampled by vLLM.

    `model` is a local HF folder, whose engine `start` starts; a `vllm.LLM` that runs already, which
    its caller closes; or another engine that does what `VLLMEngine` says (`LLMOnDevice` does). The
    tokenizer may be left out: it is the engine's, or the folder's. `max_model_len` is the longest
    prompt plus completion; None: what the model was made for.

    Log-probs are those of the distribution that was sampled from
    (`logprobs_mode="processed_logprobs"`), so they include the temperature and filters such as top-p; a given
    `vllm.LLM` that was built otherwise is refused where that makes a difference. After a weight push
    that failed half-way the engine is closed, or let go of where it was given, and sampling raises PolicyError:
    there is never a mixture of old and new weights.

    With an `adapter_rank` the engine keeps the weights of `model` and applies a LoRA adapter of that
    rank: the one of the folder `adapter` once it has started, then what `load_adapter` brings.

    Other keyword arguments say how the policy is called on a TensorDict: see `Face`.
    """

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
        chosen = Face(**face)
        super().__init__(sampling=chosen.sampling(sampling), seed=seed, face=chosen)
        self.settings = settings or VLLMSettings()
        self.max_model_len = max_model_len
        self.adapter_rank = adapter_rank
        self.adapter = adapter
        self._engine: VLLMEngine | None = None
        self._given: Any = None  # an engine that somebody else built, and closes
        self._closed_because: str | None = None
        self.max_restarts = self.settings.max_restarts
        self.restarts = 0  # of an engine that has failed
        self._needed: set[str] = set()  # names that a complete weight push brings
        self._under_way = RequestsUnderWay(self.settings.timeout_seconds, self._engine_failed)
        self._labels: dict[str, PolicyVersionLabel] = {}  # the version of earlier weights, by the engine's label
        self._log_probs_mode = SAMPLER_LOG_PROBS
        if isinstance(model, str | Path):
            self.folder = Path(model)
        else:
            self._take_over(model)
        self.tokenizer = chosen.with_template(self._tokenizer_of(model) if tokenizer is None else tokenizer)

    @classmethod
    def of(
        cls, settings: VLLMSettings, folder: Path, tokenizer: Any, *, model: Any, model_settings: Any, **more: Any
    ) -> Self:
        """The policy that `settings` describe, on the weights of `folder`."""
        return cls(folder, tokenizer, settings=settings, **more)

    def _take_over(self, model: Any) -> None:
        """Sample with an engine that somebody else built. Raises TypeError for what is none."""
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
        self.folder = folder_of(config.model)
        self.max_model_len = min(self.max_model_len or config.max_model_len, config.max_model_len)
        self._needed = checkpoint_names(self.folder)

    def _tokenizer_of(self, model: Any) -> Any:
        if hasattr(model, "get_tokenizer"):
            return model.get_tokenizer()
        return tokenizer_of(self.folder)

    def start(self) -> None:
        """Start the engine: 7 to 25 s on a CPU. Raises MissingExtraError, ConfigError or PolicyError."""
        if self._engine is not None:
            return
        if self._given is not None:
            raise PolicyError(f"this policy let go of the engine it was given ({self._closed_because}): build another")
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
        self._closed_because = None
        self.batching, self._labels = Batching(), {}
        self._needed = checkpoint_names(self.folder)
        if self.adapter is not None:
            self.load_adapter(self.adapter)
        self.rest()  # vLLM has filled its cache with zeros

    def rest(self) -> None:
        """See `Policy.rest`: on a CPU the pages of the KV cache; on a GPU weights and cache, with `policy.sleep`."""
        if self._engine is not None and self._given is None and not self._under_way:
            with self._closed_at_failure("giving its memory back"):
                self._engine.rest(sleeps=self.settings.sleep)

    def close(self) -> None:
        """Stop the engine, or let go of one that was given; a second call does nothing."""
        engine, self._engine = self._engine, None
        because = self._closed_because or "vLLM was closed"
        self._under_way.end(PolicyError(f"a completion was not sampled to its end: {because}"))
        super().close()
        if engine is not None and self._given is None:
            engine.close()

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """See `Policy.generate`; weights change inside it in an engine of its own process alone.

        Each completion has the version its first id was sampled under, and where that changed. An engine that fails is
        started anew where somebody can bring it the present weights (`reload`), `policy.max_restarts` times in all,
        and asked again for all of them: seeds are those of the requests, so none is lost and none is another one.
        """
        while True:
            try:
                return self._generate(requests, sampling)
            except PolicyError as error:
                self._start_again(error)

    def _start_again(self, error: PolicyError) -> None:
        """Start an engine that has failed with the weights as they are now. Raises `error` where it may not be."""
        restarts = self.max_restarts
        if self.reload is None or self._engine is not None or self._given is not None or self.restarts >= restarts:
            raise error
        self.restarts += 1
        log.warning("%s; starting it again (%d of %d)", error, self.restarts, restarts)
        self.start()
        self.reload()

    def _generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        self._running_engine()
        check_log_probs_mode(self._log_probs_mode, sampling)
        params = sampling_params(requests, sampling, self.tokenizer.eos_token_id)
        prompts = [request.prompt_ids for request in requests]
        counted, on_ended = 0, self.on_ended

        def told(ended: int, tokens: int) -> None:
            nonlocal counted
            self._count(tokens - counted)
            counted = tokens
            if on_ended is not None:
                on_ended(ended)

        with self._turn():
            outputs = self._ask(f"sampling {len(prompts)} completions", prompts, params, told if on_ended else None)
            self._count(sum(len(output.outputs[0].token_ids) for output in outputs) - counted)
            return [self._completion(output) for output in outputs]

    def submit(self, request: Request, sampling: SamplingSettings | None = None) -> Future[Completion]:
        """See `Policy.submit`; an engine of its own process gets each request as it comes."""
        engine = self._running_engine()
        if not engine.continuous:
            return super().submit(request, sampling)
        sampling = sampling or self.sampling
        check_log_probs_mode(self._log_probs_mode, sampling)
        [params] = sampling_params([request], sampling, self.tokenizer.eos_token_id)
        try:
            asked = engine.submit(request.prompt_ids, params)
        except RuntimeError as error:  # closed by another thread just now
            raise PolicyError(f"vLLM takes no request ({self._closed_because or error}): call start()") from error

        def completed(output: Any) -> Completion:
            completion = self._completion(output)
            self._count(len(completion.token_ids))
            return completion

        return self._under_way.add(engine, asked, completed)

    def _completion(self, output: Any) -> Completion:
        return completion_of(output, self.tokenizer, self._labels, self.version)

    def _count(self, tokens: int) -> None:
        with self.batching.lock:  # several threads do
            self.tokens_sampled += tokens

    def _engine_failed(self, error: BaseException) -> None:
        """Called where nothing more is to be had of requests under way."""
        self._closed_because = f"vLLM failed while sampling: {first_line(error)}"
        self.close()

    def _turn(self) -> AbstractContextManager[Any]:
        """Nobody samples or brings weights meanwhile; with requests that come one by one, both may."""
        return nullcontext() if self._running_engine().continuous else self.batching.lock

    def token_log_probs(self, sequences: Sequence[Sequence[int]], sampling: SamplingSettings) -> list[torch.Tensor]:
        """See `Policy.token_log_probs`; vLLM reads a sequence at temperature 1 alone."""
        check_whole(sampling)
        params = reading_params(sequences, sampling, self.max_model_len)
        prompts = [list(ids) for ids in sequences]
        with self._turn():
            outputs = self._ask(f"reading {len(prompts)} sequences", prompts, params)
        return [log_probs_of(output, ids) for output, ids in zip(outputs, prompts, strict=True)]

    def _ask(
        self, doing: str, prompts: list[list[int]], params: list[Any], told: Callable[[int, int], None] | None = None
    ) -> list[Any]:
        """What vLLM makes of `prompts`; an engine that fails is closed. Raises PolicyError."""
        engine = self._running_engine()
        engine.told = told
        with self._closed_at_failure(doing):
            return engine.generate(prompts, params)

    @property
    def model(self) -> Any:
        """What samples: a `vllm.LLM`, vLLM's AsyncLLM or the engine that was given; None where none runs."""
        if self._engine is None or self._given is not None:
            return self._engine and self._given
        return self._engine.llm

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the engine's workers, such as those of `vLLMWorker`; what each returned.

        Raises PolicyError for what one of them raised.
        """
        engine = self._running_engine()
        try:
            return engine.call_workers(method, *args)
        except Exception as error:
            raise PolicyError(f"a worker of vLLM failed in {method}: {first_line(error)}") from error

    def weight_sums(self, names: Sequence[str] | None = None) -> dict[int, EngineSums]:
        """See `Policy.weight_sums`; of weights with an adapter beside them, or divided, none are told."""
        if self.adapter_rank is not None or self._given is not None:
            return {}
        told = self.call_workers("sum_weights", names)
        return {0: as_engine_sums(told[0])} if len(told) == 1 else {}

    def receive_weights(self, weights: Mapping[str, torch.Tensor], group: WeightGroup) -> None:
        """Like `load_weights`, but each weight is sent through `group`, whose rank 0 this process is.

        The engine's workers have joined it, as `vLLMWorker` lets them.
        """
        engine = self._running_engine()
        self._check_complete(weights)
        sent = [(name, weights[name]) for name in weights]
        metadata = [(name, str(w.dtype).removeprefix("torch."), list(w.shape)) for name, w in sent]
        with self._changing(*PUSH):
            receiving = in_thread(lambda: engine.call_workers("update_weights_broadcast", metadata))
            for _, weight in sent:
                if receiving.done():
                    break  # for what it failed with is raised below
                group.broadcast(weight.detach().contiguous(), src=0)
            wait_for(receiving, self.settings.timeout_seconds, "the workers to load the weights")

    def _check_complete(self, weights: Mapping[str, torch.Tensor]) -> None:
        missing = sorted(self._needed - weights.keys())
        if missing:
            raise PolicyError(
                f"a weight push lacks {len(missing)} weights, {missing[0]} among them; nothing was pushed"
            )

    @contextmanager
    def _closed_at_failure(self, doing: str, advice: str = "") -> Iterator[None]:
        """Close the engine where the block fails. Raises PolicyError then, which says what it was `doing`."""
        try:
            yield
        except Exception as error:
            self._closed_because = f"vLLM failed while {doing}: {first_line(error)}"
            self.close()
            ended = "the engine was closed" if self._given is None else "the engine, which was given, is let go of"
            raise PolicyError(f"{self._closed_because}; {ended}{advice}") from error

    @contextmanager
    def _changing(self, doing: str, advice: str) -> Iterator[VLLMEngine]:
        """Weights change in the block. Raises PolicyError where it fails, after closing the engine."""
        with self._turn(), self._closed_at_failure(doing, advice):
            engine = self._running_engine()
            with engine.changing():
                if engine.continuous:  # ids that were sampled until now are told apart by it
                    self._labels[engine.weights_label] = self.version
                yield engine

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace every weight of the engine and forget its prefixes, or leave no engine behind.

        Only a weight updater calls this; it also raises `version`. Raises PolicyError: before
        anything changed if a weight of the checkpoint is missing, otherwise after closing the engine.
        """
        self._running_engine()
        self._check_complete(weights)
        with self._changing(*PUSH) as engine:
            engine.load_weights(weights.items())

    def load_folder(self, folder: Path, version: PolicyVersionLabel) -> None:
        """See `Policy.load_folder`: vLLM reads the folder itself; of its weights a tied head alone is copied.

        Completions under way in an engine of its own process are kept: their later ids are sampled with the new
        weights, after the keys and values that the earlier ones have. Raises as `load_weights`.
        """
        self._running_engine()
        weights = SavedWeights(folder)
        self._check_complete(weights)
        with with_head(folder, weights) as whole, self._changing(*PUSH) as engine:
            engine.load_folder(whole)
            self.become(version)  # before anything is sampled with them

    def load_adapter(self, folder: Path, version: PolicyVersionLabel | None = None) -> None:
        """Sample with the peft adapter in `folder` from now on, as `version` if given, and forget the prefixes.

        Only a weight updater calls this; it also raises `version`. Raises PolicyError, after closing
        the engine, where vLLM does not take the adapter.
        """
        from vllm.lora.request import LoRARequest

        with self._changing(*ADAPTING) as engine:
            engine.load_adapter(LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(folder), load_inplace=True))
            if version is not None:
                self.become(version)

    def load_adapter_folder(self, folder: Path, version: PolicyVersionLabel) -> None:
        """See `Policy.load_adapter_folder`. Raises PolicyError for an engine that has no room for an adapter."""
        if self.adapter_rank is None:
            raise PolicyError("this vLLM was started without room for an adapter: give it adapter_rank, or load_folder")
        self.load_adapter(folder, version)

    def _running_engine(self) -> VLLMEngine:
        if self._engine is None:
            raise PolicyError(f"vLLM is not running ({self._closed_because or 'it was not started'}): call start()")
        if self._engine.asleep:
            with self._closed_at_failure("waking up", WAKING):
                self._engine.wake()
        return self._engine
