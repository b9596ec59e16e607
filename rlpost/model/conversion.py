"""Models that are made on this machine: a tiny one with random weights, and HF folders of GGUF files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.integrations.gguf import read_gguf_metadata

from rlpost.errors import ConfigError
from rlpost.model.load import check_complete, from_pretrained, save_model

CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer(size: int = 0) -> Any:
    """A byte-level tokenizer with ChatML turns: 256 bytes and three special tokens, no merges.

    It is padded to `size` ids with words that no text encodes to, for a random model that samples any id.
    """
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    vocabulary |= {f"w{i}": i for i in range(len(vocabulary), size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHATML_TEMPLATE
    return fast


def build_tiny(folder: Path) -> None:
    """Write a random two-layer Llama with `tiny_tokenizer`, for tests and for trying out commands."""
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # head_dim 32: the smallest vLLM's CPU attention takes
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the GGUF model as a plain float32 HF folder that transformers and vLLM load.

    Raises ConfigError for a file that transformers cannot read.
    """
    print(f"converting {gguf.name}, once (about 20 s for 100 MB) ...", flush=True)
    model, tokenizer = read_gguf(gguf)
    # without these, save_pretrained would write a quantized model
    model.hf_quantizer = None
    model._is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    save_model(model, tokenizer, folder)


def read_gguf(gguf: Path, rope: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """The model of a GGUF file in float32, and its tokenizer, both as transformers reads them.

    `rope` replaces the rope parameters of its configuration: transformers does not read all of them from the file.
    Raises ConfigError for a file that transformers cannot read or that lacks weights.
    """
    with tempfile.TemporaryDirectory() as alone:  # its neighbours could be taken for parts of it
        (Path(alone) / gguf.name).symlink_to(gguf.resolve())
        try:
            config = AutoConfig.from_pretrained(alone, gguf_file=gguf.name)
            if rope is not None:
                config.rope_parameters = rope
            model, found = from_pretrained(alone, gguf_file=gguf.name, config=config, dtype=torch.float32)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{gguf} cannot be converted: {error}; take the model as a HF folder") from error
        tokenizer: Any = AutoTokenizer.from_pretrained(alone, gguf_file=gguf.name)
        metadata, _ = read_gguf_metadata(str(Path(alone) / gguf.name))
    if metadata.get("tokenizer.ggml.add_bos_token"):  # transformers does not read it, and Gemma fails without <bos>
        tokenizer.add_bos_token = True
    check_complete(gguf, found["missing_keys"])
    return model, tokenizer
