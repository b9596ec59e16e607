"""How large vLLM's KV cache is on a CPU, in numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpost.errors import ConfigError
from rlpost.policies.vllm import engine_arguments, kv_bytes_per_token, kv_cache_arguments
from rlpost.settings import DType, VLLMSettings

SMOLLM2 = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768}
QWEN3 = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 1024}


@pytest.fixture
def smollm2(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "dtype", "size"),
    [
        (SMOLLM2, "bfloat16", 2 * 30 * 3 * 64 * 2),
        (SMOLLM2, "float32", 2 * 30 * 3 * 64 * 4),
        (GPT2, "bfloat16", 2 * 12 * 12 * 64 * 2),  # every head has its own keys and values
        ({**QWEN3, "head_dim": 128}, "float16", 2 * 28 * 8 * 128 * 2),  # not 1024 / 16
        ({**SMOLLM2, "mamba_d_state": 16}, "bfloat16", None),
        ({**SMOLLM2, "kv_lora_rank": 512}, "bfloat16", None),
        ({"vocab_size": 32000}, "bfloat16", None),
    ],
)
def test_a_token_takes_its_keys_and_values_in_every_layer(config: dict[str, int], dtype: str, size: int | None) -> None:
    assert kv_bytes_per_token(config, dtype) == size


@pytest.mark.parametrize(
    ("settings", "longest", "size"),
    [
        # 176 tokens are 6 blocks of 32, and one block more is vLLM's own
        (VLLMSettings(dtype=DType.bfloat16), 176, (128 * 6 + 1) * 32 * 23_040),
        (VLLMSettings(dtype=DType.bfloat16, max_num_seqs=1), 32, (1 + 1) * 32 * 23_040),
        (VLLMSettings(dtype=DType.float32), 176, 1_000_000_000),  # 1.13e9 otherwise
        (VLLMSettings(dtype=DType.float32), 32_000, (1000 + 1) * 32 * 46_080),  # more than 1 GB: it has to fit
        (VLLMSettings(dtype=DType.bfloat16, kv_cache_gb=0.25), 176, 250_000_000),
        (VLLMSettings(dtype=DType.bfloat16, kv_cache_gb=3.5), 176, 3_500_000_000),
    ],
)
def test_the_cache_holds_the_conversations_or_what_was_asked(
    settings: VLLMSettings, longest: int, size: int, smollm2: Path
) -> None:
    assert kv_cache_arguments(smollm2, settings, longest) == {"kv_cache_memory_bytes": size, "block_size": 32}


def test_a_model_with_other_state_gets_1_gb_or_what_was_asked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {**SMOLLM2, "linear_num_key_heads": 16}}))
    recurrent = {"enable_prefix_caching": False}
    found = [kv_cache_arguments(tmp_path, VLLMSettings(kv_cache_gb=asked), 176) for asked in (None, 0.5)]
    assert found == [{"kv_cache_memory_bytes": size, **recurrent} for size in (1_000_000_000, 500_000_000)]


def test_a_model_with_latent_attention_keeps_its_prefixes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMOLLM2, "kv_lora_rank": 512}))
    assert kv_cache_arguments(tmp_path, VLLMSettings(), 176) == {"kv_cache_memory_bytes": 1_000_000_000}


def test_a_cache_without_room_for_a_conversation_is_refused(smollm2: Path) -> None:
    settings = VLLMSettings(dtype=DType.bfloat16, kv_cache_gb=0.005)
    with pytest.raises(ConfigError, match=r"policy\.kv_cache_gb=0\.005 .* 176 .*0\.0052"):
        kv_cache_arguments(smollm2, settings, 176)


def test_the_engine_is_given_the_size_that_was_asked(smollm2: Path) -> None:
    settings = VLLMSettings(dtype=DType.bfloat16, kv_cache_gb=0.5)
    arguments = engine_arguments(smollm2, settings, max_model_len=176, seed=0)
    assert arguments["kv_cache_memory_bytes"] == 500_000_000


def test_a_format_left_to_the_machine_is_the_cache_s_too(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for fast, number_bytes in ((True, 2), (False, 4)):
        monkeypatch.setattr("rlpost.policies.vllm.bfloat16_is_fast", lambda device, fast=fast: (fast, ""))
        arguments = engine_arguments(smollm2, VLLMSettings(max_num_seqs=1), max_model_len=32, seed=0)
        assert arguments["kv_cache_memory_bytes"] == (1 + 1) * 32 * 2 * 30 * 3 * 64 * number_bytes
