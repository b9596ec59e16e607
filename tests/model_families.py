"""The families of docs/models.md, each tiny: `python tests/model_families.py` writes its table anew."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlpost.model.families import REFUSED, Verdict, attending
from rlpost.model.logprobs import verdict_of
from rlpost.model.packing import Row

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
WORDS = 259  # of `rlpost.model.load.tiny_tokenizer`
IDS = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 2}
SMALL = {
    **IDS,
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MIXED = {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_expand": 2, "mamba_chunk_size": 16}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
DEEPSEEK = {**LATENT, **MIXED, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
DEEPSEEK |= {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1}

# the type in config.json -> what its tiny configuration has beside SMALL
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 6},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "sliding_window": 6},
    "gemma3_text": {"head_dim": 32, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_text": {"head_dim": 32, "sliding_window": 6, "hidden_size_per_layer_input": 8, "global_head_dim": 32},
    "phi": {},
    "phi3": {},
    "phimoe": {**LOCAL_EXPERTS, "sliding_window": 6},
    "gpt2": {"n_positions": 512},
    "gpt_neo": {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 2, "rotary_dim": 16},
    "gpt_neox": {},
    "gpt_bigcode": {"n_positions": 512},
    "gpt_oss": {**LOCAL_EXPERTS, "head_dim": 32, "sliding_window": 6},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 2, "n_head": 2},
    "mpt": {"d_model": 64, "n_heads": 2, "n_layers": 2},
    "falcon": {},
    "starcoder2": {"sliding_window": 6},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 6},
    "olmoe": {**EXPERTS},
    "granite": {"logits_scaling": 8.0},
    "granitemoe": {**LOCAL_EXPERTS},
    "smollm3": {},
    "glm": {"head_dim": 32},
    "glm4": {"head_dim": 32},
    "exaone4": {"sliding_window": 6},
    "ernie4_5": {"head_dim": 32},
    "helium": {"head_dim": 32},
    "bitnet": {},
    "persimmon": {},
    "biogpt": {},
    "hunyuan_v1_dense": {"head_dim": 32},
    "apertus": {},
    "arcee": {},
    "seed_oss": {"head_dim": 32},
    "ministral": {"sliding_window": 6, "head_dim": 32},
    "cwm": {"head_dim": 32, "sliding_window": 6, "bos_token_id": 1},
    "jetmoe": {"kv_channels": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "diffllama": {**MIXED},
    "mixtral": {**LOCAL_EXPERTS},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**EXPERTS, "head_dim": 32},
    "deepseek_v2": {**DEEPSEEK},
    "deepseek_v3": {**DEEPSEEK},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 6},
    "stablelm": {},
    "nemotron": {},
    "llama4_text": {**LOCAL_EXPERTS, "head_dim": 32, "intermediate_size_mlp": 96, "attention_chunk_size": 6},
    "doge": {"keep_window_size": 6},
    "qwen3_5_text": {**LINEAR, "head_dim": 32, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {
        **EXPERTS,
        **LINEAR,
        "head_dim": 32,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **MAMBA,
        **LOCAL_EXPERTS,
        "shared_intermediate_size": 32,
        "layer_types": ["mamba", "attention"],
    },
    "jamba": {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe"],
        "num_hidden_layers": 3,
        "head_dim": 32,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo_hybrid": {**LINEAR, "layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": {
        **LATENT,
        **MIXED,
        **EXPERTS,
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 2,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    },
    "minimax": {**LOCAL_EXPERTS, "head_dim": 32, "layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 6, "head_dim": 32},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "falcon_mamba": {"state_size": 8},
    "rwkv": {"attention_hidden_size": 64},
}


def tiny_config(kind: str) -> Any:
    """The configuration of the family, small."""
    return AutoConfig.for_model(kind, **{**SMALL, **FAMILIES[kind]})


def tiny_model(kind: str) -> PreTrainedModel:
    """A random model of the family, with weights wide enough that all of its parts count."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(tiny_config(kind))
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


def own_log_probs(model: PreTrainedModel, row: Row, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the sampled tokens by the model's own forward, eager, of the sequence alone."""
    with attending(model.config, "eager"):
        logits = model(torch.cat([row.prompt, row.response])[None], use_cache=False).logits[0] / temperature
    log_probs = logits.log_softmax(-1)[len(row.prompt) - 1 : -1]
    chosen = log_probs.gather(-1, row.response[:, None]).squeeze(-1)
    return chosen[row.sampled], -(log_probs.exp() * log_probs).sum(-1)[row.sampled]


def row(kind: str, verdict: Verdict) -> str:
    """The family's line of the table."""
    read = "refused" if verdict.reading == REFUSED else "exact and fast" if verdict.reads_packed else "exact and plain"
    sampled = {"padded": "fast", "alike": "prompts of one length", "anew": "without a cache"}[verdict.sampling]
    why = re.split(r" by [\d.]|: ", verdict.reason)[0]  # without what differs from machine to machine
    return f"| `{kind}` | {read} | {sampled} | {why} |"


def table_rows() -> dict[str, str]:
    """The lines of the table in docs/models.md, by family."""
    return dict(re.findall(r"^(?=\| `(\w+)` )(.*)$", PAGE.read_text(), re.MULTILINE))


def write_table() -> None:
    """Put the table of every family in the place of the one in docs/models.md."""
    rows = [row(kind, verdict_of(tiny_model(kind))) for kind in FAMILIES]
    head, separator = "| model_type | trained | sampled with transformers | why |", "|---|---|---|---|"
    before, _, after = PAGE.read_text().partition(head)
    rest = re.sub(r"\A\n\|---.*\n(\|.*\n)*", "", after)
    PAGE.write_text(before + "\n".join([head, separator, *rows]) + "\n" + rest)


if __name__ == "__main__":
    write_table()
