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
WORDS = 259  # of `rlpost.model.conversion.tiny_tokenizer`
VOCABULARY = 328  # more than the tokenizer has, as in real models, and no multiple of 64, to which engines pad it
IDS = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 2}
# no two widths are equal, as in real models: whatever takes one for another fails; heads of 32 fill the hidden size
SMALL = {
    **IDS,
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 224,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
HEAD = {"head_dim": 64}  # 6 heads of 64 are twice the hidden size
MIXED = {"num_key_value_heads": 6}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {"mamba_d_state": 16, "mamba_n_heads": 6, "mamba_d_head": 64, "mamba_expand": 2, "mamba_chunk_size": 16}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
LATENT = {"kv_lora_rank": 48, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
DEEPSEEK = {**LATENT, **MIXED, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
DEEPSEEK |= {"moe_intermediate_size": 96, "first_k_dense_replace": 1, "n_shared_experts": 1}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.05,
    "logits_scaling": 8.0,
}
GEMMA = {**HEAD, "query_pre_attn_scalar": 64}
WINDOW = {"sliding_window": 6}
WINDOW_AND_ALL = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR_AND_ALL = {"layer_types": ["linear_attention", "full_attention"]}

# the type in config.json -> what its tiny configuration has beside SMALL
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
    "qwen3": {**HEAD},
    "mistral": {**HEAD, **WINDOW},
    "gemma": {**HEAD},
    "gemma2": {**GEMMA, **WINDOW_AND_ALL, "attn_logit_softcapping": 10.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {**GEMMA, **WINDOW_AND_ALL},
    "gemma4_text": {
        **HEAD,
        **WINDOW_AND_ALL,
        "global_head_dim": 128,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
        "final_logit_softcapping": 5.0,
    },
    "phi": {},
    "phi3": {},
    "phimoe": {**LOCAL_EXPERTS, **WINDOW},
    "gpt2": {"n_positions": 512, "n_inner": 224},
    "gpt_neo": {"num_layers": 2, "num_heads": 6, "attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gptj": {"n_embd": 192, "n_layer": 2, "n_head": 6, "n_inner": 224, "rotary_dim": 16},
    "gpt_neox": {},
    "gpt_bigcode": {"n_positions": 512, "n_inner": 224, "num_key_value_heads": 1},
    "gpt_oss": {**LOCAL_EXPERTS, **HEAD, **WINDOW_AND_ALL},
    "opt": {"ffn_dim": 224, "word_embed_proj_dim": 128},
    "bloom": {"n_layer": 2, "n_head": 6},
    "mpt": {"d_model": 192, "n_heads": 6, "n_layers": 2},
    "falcon": {"ffn_hidden_size": 224},
    "starcoder2": {**WINDOW},
    "olmo": {"clip_qkv": 2.0},
    "olmo2": {},
    "olmo3": {**WINDOW_AND_ALL},
    "olmoe": {**EXPERTS},
    "granite": {**GRANITE},
    "granitemoe": {**LOCAL_EXPERTS, **GRANITE},
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm": {**HEAD},
    "glm4": {**HEAD},
    "exaone4": {**WINDOW_AND_ALL},
    "ernie4_5": {**HEAD},
    "helium": {"head_dim": 32},  # transformers' own needs heads that fill the hidden size
    "bitnet": {},
    "persimmon": {},
    "biogpt": {},
    "hunyuan_v1_dense": {**HEAD},
    "apertus": {},
    "arcee": {**HEAD},
    "seed_oss": {**HEAD},
    "ministral": {**HEAD, **WINDOW_AND_ALL},
    "cwm": {**HEAD, **WINDOW_AND_ALL, "bos_token_id": 1},
    "jetmoe": {**LOCAL_EXPERTS, "kv_channels": 64},
    "diffllama": {},
    "mixtral": {**LOCAL_EXPERTS, **HEAD},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 128},
    "qwen3_moe": {**EXPERTS, **HEAD},
    "deepseek_v2": {**DEEPSEEK, "routed_scaling_factor": 2.0},
    "deepseek_v3": {**DEEPSEEK, "q_lora_rank": 80},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, **WINDOW_AND_ALL},
    "stablelm": {},
    "nemotron": {**HEAD},
    "llama4_text": {
        **LOCAL_EXPERTS,
        **HEAD,
        "intermediate_size_mlp": 160,
        "attention_chunk_size": 6,
        "no_rope_layers": [1, 0],
    },
    "doge": {"keep_window_size": 6},
    "qwen3_5_text": {**LINEAR, **HEAD, **LINEAR_AND_ALL},
    "qwen3_next": {**EXPERTS, **LINEAR, **HEAD, **LINEAR_AND_ALL, "shared_expert_intermediate_size": 128},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {
        **EXPERTS,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.5,
    },
    "falcon_h1": {
        **MAMBA,
        "mamba_n_heads": 4,
        "mamba_d_ssm": 256,
        "embedding_multiplier": 5.0,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 0.4,
        "attention_out_multiplier": 0.9,
        "ssm_multipliers": [0.4, 0.25, 0.2, 0.5, 0.4],
        "mlp_multipliers": [0.9, 0.6],
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **MAMBA,
        **LOCAL_EXPERTS,
        **GRANITE,
        "shared_intermediate_size": 128,
        "layer_types": ["mamba", "attention"],
    },
    "jamba": {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe"],
        "num_hidden_layers": 3,
        **HEAD,
        "mamba_num_heads": 5,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 16,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "moe_shared_expert_intermediate_size": 128,
        "routed_scaling_factor": 2.5,
    },
    "olmo_hybrid": {
        **LINEAR_AND_ALL,
        "linear_num_key_heads": 6,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 48,
    },
    "kimi_linear": {
        **LATENT,
        **MIXED,
        **EXPERTS,
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
    },
    "minimax": {
        **LOCAL_EXPERTS,
        **HEAD,
        **LINEAR_AND_ALL,
        "full_attn_alpha_factor": 3.5,
        "linear_attn_alpha_factor": 3.5,
        "mlp_alpha_factor": 3.5,
    },
    "recurrent_gemma": {
        **HEAD,
        "num_hidden_layers": 3,
        "lru_width": 240,
        "attention_window_size": 6,
        "logits_soft_cap": 5.0,
    },
    "mamba": {"state_size": 16},
    "mamba2": {
        "intermediate_size": 384,
        "num_heads": 6,
        "head_dim": 64,
        "state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "falcon_mamba": {"state_size": 16},
    "rwkv": {"attention_hidden_size": 160},
}


def tiny_config(kind: str, **more: Any) -> Any:
    """The configuration of the family, small; `more` replaces fields of it."""
    shape = {**SMALL, **FAMILIES[kind], **more}
    if not hasattr(AutoConfig.for_model(kind), "num_key_value_heads"):
        del shape["num_key_value_heads"]  # vLLM reads it whether the family has it or not
    return AutoConfig.for_model(kind, **shape)


def tiny_model(kind: str, **more: Any) -> PreTrainedModel:
    """A random model of the family, with weights wide enough that all of its parts count."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(tiny_config(kind, **more))
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


def talking_model(kind: str, **more: Any) -> PreTrainedModel:
    """The same with small embeddings: a tied head answers with the token it has read if they are wide."""
    model = tiny_model(kind, **more)
    embedding: Any = model.get_input_embeddings()
    embedding.weight.data *= 0.25
    return model


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


HEADER = (
    "| model_type | trained | sampled with transformers | why | under vLLM | exported |\n|---|---|---|---|---|---|\n"
)
LINE = re.compile(r"^(\| `(\w+)` \|(?: [^|]* \|){3})(.*)\n", re.MULTILINE)


def table_rows() -> dict[str, str]:
    """What `row` makes, of the lines in docs/models.md, by family."""
    return {kind: found for found, kind, _ in LINE.findall(PAGE.read_text().partition(HEADER)[2])}


def write_table(rows: dict[str, str], measured: dict[str, str]) -> None:
    """Replace lines of the table in docs/models.md: `rows` by what `row` makes, `measured` by the columns behind."""
    before, _, after = PAGE.read_text().partition(HEADER)
    known = {kind: (found, behind) for found, kind, behind in LINE.findall(after)}
    rest = after[sum(len(line[0]) for line in re.findall(r"(^\|.*\n)()", after, re.MULTILINE)) :]
    lines = []
    for kind in FAMILIES:
        found, behind = known.get(kind, (f"| `{kind}` |  |  |  |", "  |  |"))
        lines.append(f"{rows.get(kind, found)}{measured.get(kind, behind)}\n")
    PAGE.write_text(before + HEADER + "".join(lines) + rest)


def write_measured(measured: dict[str, tuple[str, str]]) -> None:
    """Write what a family did under vLLM, and how it is exported: see scripts/dev/families.py."""
    write_table({}, {kind: f" {vllm} | {exported} |" for kind, (vllm, exported) in measured.items()})


if __name__ == "__main__":
    write_table({kind: row(kind, verdict_of(tiny_model(kind))) for kind in FAMILIES}, {})
