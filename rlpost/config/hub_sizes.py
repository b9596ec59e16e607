"""How large the models and datasets are that rlpost's own options name: what is known of a hub without asking it.

For a model: the part of its config.json that its size follows from, and the bytes of its weights and tokenizer. For
a dataset: the bytes of the files that are fetched. A new option of conf/ that names a hub id gets its line here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HubModel:
    """A model of the hub: the option of conf/model that names it, its configuration, and what fetching it takes."""

    option: str
    config: dict[str, Any]
    download_bytes: int


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
    }


def _qwen2(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int = 151936, *, tied: bool = True
) -> dict[str, Any]:
    shape = _llama(hidden, layers, heads, kv_heads, intermediate, vocab)
    return {**shape, "model_type": "qwen2", "tie_word_embeddings": tied}


HUB_MODELS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": HubModel("smollm2", _llama(576, 30, 9, 3, 1536, 49152), 272_000_000),
    "Qwen/Qwen2.5-0.5B-Instruct": HubModel("qwen", _qwen2(896, 24, 14, 2, 4864), 1_000_000_000),
    "Qwen/Qwen2.5-1.5B-Instruct": HubModel("qwen-1.5b", _qwen2(1536, 28, 12, 2, 8960), 3_099_000_000),
    "Qwen/Qwen2.5-3B-Instruct": HubModel("qwen-3b", _qwen2(2048, 36, 16, 2, 11008), 6_183_000_000),
    "Qwen/Qwen2.5-7B-Instruct": HubModel(
        "qwen-7b", _qwen2(3584, 28, 28, 4, 18944, vocab=152064, tied=False), 15_243_000_000
    ),
}
PACKAGED_SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"  # what packaged:smollm2 is
TINY = _llama(64, 2, 2, 1, 128, 259)  # builtin:tiny
HUB_DATASETS = {
    "openai/gsm8k": 2_726_000,
    "google/IFEval": 218_000,
    "allenai/IFBench_test": 130_000,
    "DigitalLearningGmbH/MATH-lighteval": 4_200_000,
}
