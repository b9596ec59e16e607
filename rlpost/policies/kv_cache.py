"""How long a model's context is, and how large the KV cache of a sampler on a CPU: the tokens under way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlpost.errors import ConfigError
from rlpost.estimate.needs import BYTES, KV_BLOCK, LARGEST_KV_CACHE, kv_cache_bytes
from rlpost.estimate.shape import shape_of_config
from rlpost.files import json_in
from rlpost.settings import VLLMSettings

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
