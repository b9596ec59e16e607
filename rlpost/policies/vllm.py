"""Sampling with vLLM: in this process, as AsyncLLM with its engine in a process of its own, or in a given `vllm.LLM`.

vLLM is imported when an engine starts, never before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open

from rlpost.data.conversation import Completion
from rlpost.errors import ConfigError, DataError, PolicyError
from rlpost.extras import require_vllm
from rlpost.model.precision import bfloat16_is_fast
from rlpost.policies.base import Policy, Request
from rlpost.policies.face import Face
from rlpost.policies.kv_cache import kv_cache_arguments, longest_context
from rlpost.policies.sampling import check_whole
from rlpost.policies.vllm_engines import VLLMEngine, engine_around, in_thread, start_engine, tokenizer_of, wait_for
from rlpost.policies.vllm_worker import EXTENSION, WeightGroup
from rlpost.settings import DType, SamplingSettings, VLLMSettings

ADAPTER_NAME, ADAPTER_ID = "trained", 1  # of the one adapter that is ever loaded
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM makes room
PUSH = ("taking new weights", ", since it may hold a mixture of weights: resume the run from its last checkpoint")
SAMPLER_LOG_PROBS = "processed_logprobs"  # vLLM's name for log-probs under temperature and filters


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
        self._applied: Any | None = None  # vLLM's request for the adapter that completions are sampled with
        self._engine: VLLMEngine | None = None
        self._given: Any = None  # an engine that somebody else built, and closes
        self._closed_because: str | None = None
        self._needed: set[str] = set()  # names that a complete weight push brings
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
        self.folder = _folder_of(config.model)
        self.max_model_len = min(self.max_model_len or config.max_model_len, config.max_model_len)
        self._needed = self._checkpoint_names()

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
                f"vLLM could not start on {self.folder} ({_first_line(error)}); if memory ran out, lower "
                "policy.kv_cache_gb, policy.gpu_memory_utilization or policy.max_num_seqs; if vLLM does not know the "
                "model, policy=transformers samples from it" + (adapting if self.adapter_rank else "")
            ) from error
        finally:
            torch.set_num_threads(threads)  # starting vLLM in this process changes it
        self._closed_because = None
        self._applied = None
        self._needed = self._checkpoint_names()
        if self.adapter is not None:
            self.load_adapter(self.adapter)
        self.rest()  # vLLM has filled its cache with zeros

    def rest(self) -> None:
        """See `Policy.rest`: the pages of the KV cache, on a CPU, and the prefixes that lie there."""
        if self._engine is not None and self._given is None and not torch.cuda.is_available():
            self._engine.reset_prefix_cache()
            self._engine.call_workers("give_back_kv_cache")

    def close(self) -> None:
        """Stop the engine, or let go of one that was given; a second call does nothing."""
        engine, self._engine = self._engine, None
        if engine is not None and self._given is None:
            engine.close()

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """See `Policy.generate`; `policy_version` is the one when the call began, weights never change inside it."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._running_engine()
        self._check_log_probs_mode(sampling)
        version = self.version
        # the tokenizer may be told another end of turn than the folder that the engine reads
        stops = None if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        params = [
            SamplingParams(
                **asdict(sampling),
                max_tokens=request.max_tokens,
                seed=request.seed,
                logprobs=0,
                stop_token_ids=stops,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for request in requests
        ]
        prompts = [request.prompt_ids for request in requests]
        before, on_ended = self.tokens_sampled, self.on_ended

        def told(ended: int, tokens: int) -> None:
            self.tokens_sampled = before + tokens
            if on_ended is not None:
                on_ended(ended)

        outputs = self._ask(f"sampling {len(prompts)} completions", prompts, params, told if on_ended else None)
        self.tokens_sampled = before + sum(len(output.outputs[0].token_ids) for output in outputs)
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

    def token_log_probs(self, sequences: Sequence[Sequence[int]], sampling: SamplingSettings) -> list[torch.Tensor]:
        """See `Policy.token_log_probs`; vLLM reads a sequence at temperature 1 alone."""
        from vllm import SamplingParams

        check_whole(sampling)
        if sampling.temperature not in (0, 1):
            raise ConfigError(
                f"vLLM gives the log-probs of a whole sequence at temperature 1 and not at {sampling.temperature:g}: "
                "read them with a TransformersWrapper, or set temperature to 1"
            )
        longest = max(map(len, sequences))
        if self.max_model_len is not None and longest >= self.max_model_len:
            raise DataError(
                f"a sequence has {longest} tokens and vLLM reads at most {self.max_model_len - 1} of them: cut it"
            )
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        prompts = [list(ids) for ids in sequences]
        outputs = self._ask(f"reading {len(prompts)} sequences", prompts, [params] * len(prompts))
        read = []
        for output, ids in zip(outputs, prompts, strict=True):
            known = zip(output.prompt_logprobs[1:], ids[1:], strict=True)  # nothing predicts the first
            read.append(torch.tensor([0.0, *(step[token].logprob for step, token in known)]))
        return read

    def _ask(
        self, doing: str, prompts: list[list[int]], params: list[Any], told: Callable[[int, int], None] | None = None
    ) -> list[Any]:
        """What vLLM makes of `prompts`; an engine that fails is closed. Raises PolicyError."""
        engine = self._running_engine()
        engine.told = told
        with self._closed_at_failure(doing):
            return engine.generate(prompts, params, self._applied)

    def _check_log_probs_mode(self, sampling: SamplingSettings) -> None:
        """Raise ConfigError where the engine's log-probs are not those of what `sampling` draws from."""
        as_the_model_says = sampling.temperature == 0 or (sampling.temperature == 1 and not sampling.filters)
        if self._log_probs_mode != SAMPLER_LOG_PROBS and not as_the_model_says:
            raise ConfigError(
                f"this vllm.LLM gives {self._log_probs_mode}, which are not those of {sampling}: build it with "
                f"logprobs_mode={SAMPLER_LOG_PROBS!r}"
            )

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
            raise PolicyError(f"a worker of vLLM failed in {method}: {_first_line(error)}") from error

    def receive_weights(self, weights: Mapping[str, torch.Tensor], group: WeightGroup) -> None:
        """Like `load_weights`, but each weight is sent through `group`, whose rank 0 this process is.

        The engine's workers have joined it, as `vLLMWorker` lets them.
        """
        engine = self._running_engine()
        self._check_complete(weights)
        sent = [(name, weights[name]) for name in weights]
        metadata = [(name, str(w.dtype).removeprefix("torch."), list(w.shape)) for name, w in sent]
        with self._closed_at_failure(*PUSH):
            receiving = in_thread(lambda: engine.call_workers("update_weights_broadcast", metadata))
            for _, weight in sent:
                if receiving.done():
                    break  # for what it failed with is raised below
                group.broadcast(weight.detach().contiguous(), src=0)
            wait_for(receiving, self.settings.timeout_seconds, "the workers to load the weights")
            engine.reset_prefix_cache()

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
            self._closed_because = f"vLLM failed while {doing}: {_first_line(error)}"
            self.close()
            ended = "the engine was closed" if self._given is None else "the engine, which was given, is let go of"
            raise PolicyError(f"{self._closed_because}; {ended}{advice}") from error

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace every weight of the engine and clear its prefix cache, or leave no engine behind.

        Only a weight updater calls this; it also raises `version`. Raises PolicyError: before
        anything changed if a weight of the checkpoint is missing, otherwise after closing the engine.
        """
        engine = self._running_engine()
        self._check_complete(weights)
        with self._closed_at_failure(*PUSH):
            engine.load_weights(weights.items())

    def load_adapter(self, folder: Path) -> None:
        """Sample with the peft adapter in `folder` from now on, and clear the prefix cache.

        Only a weight updater calls this; it also raises `version`. Raises PolicyError, after closing
        the engine, where vLLM does not take the adapter.
        """
        from vllm.lora.request import LoRARequest

        engine = self._running_engine()
        advice = ": go on from the last checkpoint, with lora.push=merged if vLLM cannot apply adapters to this model"
        with self._closed_at_failure("loading an adapter", advice):
            engine.load_adapter(LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(folder), load_inplace=True))
        # the adapter is loaded and its folder may go; a request that said load_inplace would read it again
        self._applied = LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(folder))

    def _running_engine(self) -> VLLMEngine:
        if self._engine is None:
            raise PolicyError(f"vLLM is not running ({self._closed_because or 'it was not started'}): call start()")
        return self._engine

    def _checkpoint_names(self) -> set[str]:
        """Names of the weights in the model folder: what a complete push has to bring."""
        names: set[str] = set()
        for file in self.folder.glob("*.safetensors"):
            with safe_open(file, framework="pt") as weights:
                names.update(weights.keys())
        return names


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
    if adapter_rank is not None:
        room = next(rank for rank in ADAPTER_RANKS if rank >= adapter_rank)
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
    if on_gpu:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
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


def _folder_of(model: str) -> Path:
    """The local folder of what vLLM was given: a folder, or a hub id that it has downloaded."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True, allow_patterns=["*.safetensors", "*.json"]))


def _first_line(error: Any) -> str:
    """Why vLLM failed; of pydantic's errors, whose own first line is the number of them, what the first one says."""
    text = str(error.errors()[0]["msg"] if hasattr(error, "errors") else error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
