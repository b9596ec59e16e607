"""What vLLM is started with, and what it is asked of a completion.

vLLM is imported when it is asked, never before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from rlpost.errors import ConfigError, DataError
from rlpost.model.precision import bfloat16_is_fast
from rlpost.model.weights import SavedWeights
from rlpost.policies.batching import Request
from rlpost.policies.kv_cache import kv_cache_arguments, longest_context
from rlpost.policies.vllm_worker import EXTENSION
from rlpost.settings import DType, SamplingSettings, VLLMSettings

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
