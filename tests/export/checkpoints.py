"""Runs with one checkpoint of a small random model, written without a training."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from rlpost.model.conversion import CHATML_TEMPLATE
from rlpost.model.load import save_model
from rlpost.model.lora import save_adapter
from rlpost.model.weights import is_adapted
from rlpost.runs.checkpoint import save_checkpoint, write_readme
from tests.model_families import SMALL
from tests.run_folders import make_run

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = ["the cat sat on the mat, and the other cats sat there too", "what is 17 + 25 and what is it for? it's 42"]
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def byte_level(words: str | None = None) -> Any:
    """A byte-level tokenizer with merges; it splits text by the expression `words`, or as GPT-2 does."""
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    split = [pre_tokenizers.Split(Regex(words), "isolated")] if words else []
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, bytes_only]) if split else bytes_only
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(["<think>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHATML_TEMPLATE
    return fast


@cache
def pieces() -> Any:
    """A tokenizer of pieces that falls back to bytes and begins with <bos>, as Gemma's does."""
    first = ["<pad>", "<eos>", "<bos>", "<unk>", *SPECIAL]
    in_bytes = [f"<0x{number:02X}>" for number in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    learned = Tokenizer(models.BPE())
    learned.normalizer, learned.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=[*first, *in_bytes], show_progress=False)
    learned.train_from_iterator(TEXTS, trainer)
    model = json.loads(learned.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer.model = models.BPE(
        vocab=model["vocab"], merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in first])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>", bos_token="<bos>", unk_token="<unk>"
    )
    fast.chat_template = CHATML_TEMPLATE
    return fast


def run_with_a_checkpoint(folder: Path, family: str = "llama", tokenizer: Any = None, **config: Any) -> Path:
    """A run folder with a checkpoint of step 2: a random model of `family`, its figures on 50 held-out prompts."""
    tokenizer = tokenizer or byte_level()
    rows = [
        {"step": 0, "eval/prompts": 50.0, **figure("accuracy_lenient", 0.1, 0.05, 0.2), **figure("reward", 0.1)},
        {"step": 2, "eval/prompts": 50.0, **figure("accuracy_lenient", 0.5, 0.4, 0.6), **figure("reward", 0.5)},
    ]
    run = make_run(folder, rows)
    ids = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id", "bos_token_id")}
    made = AutoConfig.for_model(family, **{**SMALL, **ids, "vocab_size": len(tokenizer) + 5, **config})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(made)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    add_checkpoint(run, model, tokenizer)
    return run


def add_checkpoint(run: Path, model: Any, tokenizer: Any, step: int = 2) -> None:
    """Write a checkpoint of `model` into a run."""

    def write_model(folder: Path) -> None:
        save_model(model, tokenizer, folder)
        write_readme(folder, run, step, "builtin:tiny")

    save_checkpoint(
        run / "checkpoints",
        step,
        write_model=write_model,
        write_adapter=partial(save_adapter, model) if is_adapted(model) else None,
        tensors={"a": torch.ones(1)},
        state={},
        keep_last=9,
    )


def figure(name: str, value: float, low: float | None = None, high: float | None = None) -> dict[str, float | None]:
    """A held-out figure of a metrics row."""
    return {f"eval/{name}": value, f"eval/{name}_low": low, f"eval/{name}_high": high}
