"""Words of other tools (TRL, verl, torchtune, prime-rl, OpenRLHF, axolotl), and the same in words of rlpost."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from rlpost.config.schema import read_yaml

NOT_HERE = "not here: "  # begins an answer that says why rlpost has nothing of the kind
# a model of a family to begin with -> the beginning of its models' names; the longest that fits counts
_MODELS = {
    "Qwen/Qwen3-0.6B": "qwen3",
    "meta-llama/Llama-3.2-1B-Instruct": "llama",
    "google/gemma-3-1b-it": "gemma",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral",
    "HuggingFaceTB/SmolLM3-3B": "smollm3",
    "microsoft/Phi-4-mini-instruct": "phi",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": "deepseek",
}
PREFERENCES = ("kto", "orpo", "simpo", "cpo", "bco", "xpo", "rpo", "preference")
FOR_PREFERENCES = "rlpost train dpo trains on pairs of a better and a worse reply"
_OPTIONS = {
    "qwen": "qwen2 qwen2.5 qwen2.5-0.5b",
    "qwen-1.5b": "qwen2.5-1.5b",
    "qwen-3b": "qwen2.5-3b",
    "qwen-7b": "qwen2.5-7b",
    "qwen3": "qwen3-0.6b",
    "grpo": "ppo",
    "sft": "cross_entropy ce nll",
    "jsd": "gkd generalized_jsd reverse_kl forward_kl",
    "opd": "ref_kl on_policy_distillation",
    "transformers": "hf huggingface native",
    "vllm": "sglang",
    "adamw": "adam adamw_torch adamw_torch_fused",
    "adamw_8bit": "adamw_bnb_8bit paged_adamw_8bit adam_8bit",
    "tensorboard": "tb",
    "none": "off false no disabled",
}
_VERBS = {  # verb of rlpost, or of a group of verbs -> its names in other tools
    "--help": "help",
    "--version": "version",
    "list": "ls",
    "tail": "follow",
    "info": "doctor",
    "eval": "evaluate test benchmark bench score",
    "chat": "generate sample infer inference predict",
    "train sft": "finetune fine-tune tune",
    "train expert-iteration": "rft raft star",
    "train distill": "distillation gkd opd opsd sdft kd",
    "train grpo": "rl rlhf rlvr ppo",
    "train grpo --dry-run": "validate check dryrun",
    "data preview": "preprocess",
    "config init FILE.yaml": "cp init",
}
_FOLDER = "{run}/checkpoints/latest/model"  # {run} is the run named behind the verb
_SERVE = f"python -m vllm.entrypoints.openai.api_server --model {_FOLDER}"  # `vllm serve` fails in the CPU's wheel
SENTENCES = {
    "resume": "a run goes on with: rlpost {verb} --resume {run}",
    "merge": f"checkpoints hold the merged weights, of an adapter too: {_FOLDER}",
    "merge-lora": f"checkpoints hold the merged weights, of an adapter too: {_FOLDER}",
    "serve": f"write {_SERVE}",
    "vllm-serve": f"a training starts vLLM itself, policy=vllm; a trained model: {_SERVE}",
    "download": "a model or data set of the hub is fetched where it is named, as in model.path=OWNER/NAME",
}
OTHER_FLAGS = {
    "-V": "--version",
    "-v": "--version",
    "--config": "recipe=FILE.yaml",
    "--config-name": "recipe=NAME",
    "--recipe": "recipe=NAME",
    "--checkpoint": "--resume",
    "--quiet": "--plain",
}


def _turned(table: dict[str, str]) -> dict[str, str]:
    return {word: meant for meant, words in table.items() for word in words.split()}


MODELS, OPTIONS, VERBS = _turned(_MODELS), _turned(_OPTIONS), _turned(_VERBS)


@cache
def answers() -> dict[str, str]:
    """Key of another tool -> what rlpost says to it, as other_words.yaml explains."""
    return _turned(read_yaml(Path(__file__).with_suffix(".yaml")))


def meant_by(key: str) -> str | None:
    """The answer to a key of another tool: by its longest known end, else by a part that rlpost has nothing for."""
    known = answers()
    by_end = next((known[end] for end in ends_of(key) if end in known), None)
    return by_end or next((known[p] for p in key.lower().split(".") if known.get(p, "").startswith(NOT_HERE)), None)


def ends_of(key: str) -> list[str]:
    """`data.train_files` and `train_files`, of a key in upper or lower case, with - or _."""
    parts = key.lower().replace("-", "_").split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]
