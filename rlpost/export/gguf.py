"""GGUF, the file that llama.cpp and Ollama read: weights, shape, tokenizer and chat template of a checkpoint.

The metadata have llama.cpp's names for each family. Here the file is only written:
`rlpost.export.export` reads it back and compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Stored
from gguf.constants import TokenType
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlpost.config.paths import read_json
from rlpost.data.chat import stop_ids
from rlpost.errors import ConfigError
from rlpost.model.conversion import read_gguf
from rlpost.model.weights import SavedWeights
from rlpost.text import readable

# model_type in config.json -> llama.cpp's name of the architecture
FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
STORED = {"float32": Stored.F32, "float16": Stored.F16, "q8_0": Stored.Q8_0}
_FILE_TYPES = {Stored.F32: 0, Stored.F16: 1, Stored.Q8_0: 7}
_LLAMA3 = "llama3"  # the one scaling of rope that is written, as factors of its frequencies

# how byte-level tokenizers split text into words -> llama.cpp's name for it
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {_WORDS + r"\p{N}" + _REST: "qwen2", _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe"}
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_SPACE = "\u2581"  # stands for a space in SentencePiece's tokens


def write_gguf(
    source: Path,
    tokenizer: Any,
    file: Path,
    stored: Stored,
    name: str,
    licence: str | None,
    show: Callable[..., None] = lambda *_: None,
) -> None:
    """Write the model in the HF folder `source` as one GGUF file, its matrices in the format `stored`.

    Vectors stay float32, and a matrix whose rows are not whole blocks of q8_0 is written in float16. `show` is called
    with the work in progress, and how much of it is done. Raises ConfigError for a family, a rope scaling or a
    tokenizer that is not covered.
    """
    config: Any = AutoConfig.from_pretrained(source)
    arch = _architecture(config)
    weights = SavedWeights(source)
    writer = gguf.GGUFWriter(file, arch)
    writer.add_type("model")
    writer.add_name(name)
    if licence is not None:
        writer.add_license(licence)
    writer.add_file_type(_FILE_TYPES[stored])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_shape(writer, config, arch)
    _add_tokenizer(writer, tokenizer, source, config.vocab_size)
    rope = _rope(config)
    if rope["rope_type"] == _LLAMA3:
        writer.add_tensor("rope_freqs.weight", _frequency_factors(config))
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    size = 0
    for done, own in enumerate(weights):
        show("converting tensors", done, len(weights))
        if own == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = names.get_name(own, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise ConfigError(f"GGUF has no place for the weight {own} of {source}: export it with --to hf")
        values = _packed(_converted(weights[own].float(), theirs, config, arch).numpy(), stored)
        writer.add_tensor(theirs, *values)
        size += values[0].nbytes
    show(f"writing {readable(size)}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_back(file: Path, source: Path) -> tuple[Any, Any]:
    """The model of a written file in float32, and its tokenizer, as transformers reads them.

    transformers reads no factors of rope frequencies: under Llama 3's scaling the checkpoint's own are taken.
    """
    rope = _rope(AutoConfig.from_pretrained(source))
    return read_gguf(file, rope if rope["rope_type"] == _LLAMA3 else None)


def check_covered(source: Path) -> None:
    """Raise ConfigError unless the model in `source` is of a family that can be written."""
    _architecture(AutoConfig.from_pretrained(source))


def licence_of(file: Path) -> str | None:
    """The licence that a GGUF file names, if any."""
    field = gguf.GGUFReader(file).get_field(gguf.Keys.General.LICENSE)
    return None if field is None else str(field.contents())


# Shape and weights


def _architecture(config: Any) -> str:
    arch = FAMILIES.get(config.model_type)
    if arch is None:
        raise ConfigError(
            f"--to gguf does not cover {config.model_type}: it writes {', '.join(FAMILIES)}; use --to hf, and "
            "convert_hf_to_gguf.py of llama.cpp on that folder"
        )
    rope = _rope(config)
    if rope["rope_type"] not in ("default", _LLAMA3):
        raise ConfigError(f"--to gguf does not cover rope scaling {rope['rope_type']}: use --to hf")
    if not arch.startswith("gemma") and getattr(config, "sliding_window", None):
        raise ConfigError(f"--to gguf does not cover the sliding window of this {config.model_type}: use --to hf")
    if arch.startswith("gemma") and config.query_pre_attn_scalar != config.head_dim:  # llama.cpp scales by head_dim
        raise ConfigError(f"--to gguf does not cover query_pre_attn_scalar={config.query_pre_attn_scalar}: use --to hf")
    return arch


def _rope(config: Any) -> dict[str, Any]:
    """The parameters of rope; of Gemma 3 those of full attention, as llama.cpp knows the others."""
    return config.rope_parameters.get("full_attention") or config.rope_parameters


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _add_shape(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    size = _head_size(config)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(_rope(config)["rope_theta"])
    writer.add_rope_dimension_count(size)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_vocab_size(config.vocab_size)
    if arch.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _converted(weight: torch.Tensor, name: str, config: Any, arch: str) -> torch.Tensor:
    """A weight as llama.cpp wants it: for its rope, the halves of each head's q and k are interleaved; Gemma's norms

    hold what the model multiplies by, which is 1 more than the weight.
    """
    if arch == "llama" and ".attn_q." in name:
        return _interleaved(weight, config.num_attention_heads)
    if arch == "llama" and ".attn_k." in name:
        return _interleaved(weight, config.num_key_value_heads)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return weight + 1
    return weight


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _packed(values: np.ndarray[Any, Any], stored: Stored) -> tuple[Any, ...]:
    """The values in the format `stored`, then what GGUFWriter.add_tensor takes behind them."""
    if values.ndim == 1:
        return (values,)
    if stored is Stored.Q8_0 and values.shape[-1] % gguf.GGML_QUANT_SIZES[stored][0]:
        stored = Stored.F16
    return gguf.quants.quantize(values, stored), None, stored


def _frequency_factors(config: Any) -> np.ndarray[Any, Any]:
    """The divisors of rope's frequencies under Llama 3's scaling."""
    scaled, _ = ROPE_INIT_FUNCTIONS[_LLAMA3](config, device="cpu")
    size = _head_size(config)
    plain = _rope(config)["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    return (plain / scaled).numpy()


# The tokenizer


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any, source: Path, size: int) -> None:
    """Add the vocabulary, padded to `size` ids, its merges, special tokens and the chat template."""
    described = read_json(source / "tokenizer.json")
    model, added = described["model"], {token["id"]: token for token in described.get("added_tokens", [])}
    if model["type"] != "BPE":
        raise ConfigError(f"--to gguf does not cover a {model['type']} tokenizer: use --to hf")
    pieces = bool(model.get("byte_fallback"))
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    own = {number: token for token, number in tokenizer.get_vocab().items()}
    tokens = [own.get(number, f"[PAD{number}]") for number in range(size)]
    types = [_type(token, number in own, added.get(number), model) for number, token in enumerate(tokens)]
    if pieces:
        whole = TokenType.USER_DEFINED  # matched in the text itself, where a space is a space
        tokens = [t.replace(_SPACE, " ") if kind is whole else t for t, kind in zip(tokens, types, strict=True)]
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(tokens, merges))
        writer.add_add_space_prefix(tokenizer.tokenize("a")[0].startswith(_SPACE))
    else:
        if not merges:
            raise ConfigError("--to gguf needs a tokenizer with merges, since llama.cpp reads no other: use --to hf")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split(described.get("pre_tokenizer") or {}))
        writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    begun = tokenizer("a")["input_ids"]
    for kind in ("bos", "eos", "unk", "pad"):
        if (number := getattr(tokenizer, f"{kind}_token_id")) is not None:
            getattr(writer, f"add_{kind}_token_id")(number)
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and begun[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(len(begun) > 1 and begun[-1] == tokenizer.eos_token_id)
    others = [number for number in stop_ids(tokenizer) if number != tokenizer.eos_token_id]
    if others:
        writer.add_eot_token_id(others[0])
    writer.add_chat_template(tokenizer.chat_template)


def _type(token: str, known: bool, added: dict[str, Any] | None, model: dict[str, Any]) -> TokenType:
    """The type of a token for llama.cpp: matched whole in a text, never printed, a byte, or merged from parts."""
    if not known:
        return TokenType.UNUSED
    if token == model.get("unk_token"):
        return TokenType.UNKNOWN
    if added is not None:
        return TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    return TokenType.BYTE if model.get("byte_fallback") and _BYTE.fullmatch(token) else TokenType.NORMAL


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """For each token minus the place of its first merge: llama.cpp merges what scores highest first."""
    places: dict[str, int] = {}
    for place, (left, right) in enumerate(merges):
        places.setdefault(left + right, place)
    return [-float(places.get(token, len(merges))) for token in tokens]


def _split(described: dict[str, Any]) -> str:
    """llama.cpp's name for how a byte-level tokenizer splits text. Raises ConfigError for one that is not known."""
    steps = described.get("pretokenizers", [described])
    kinds = [step.get("type") for step in steps]
    last = steps[-1]
    if kinds[-1:] == ["ByteLevel"] and not last.get("add_prefix_space"):
        if kinds == ["ByteLevel"] and last.get("use_regex", True):
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and last.get("use_regex", True):
            return "smollm"
        name = _SPLITS.get(steps[0].get("pattern", {}).get("Regex")) if kinds == ["Split", "ByteLevel"] else None
        if name is not None and steps[0].get("behavior") == "Isolated":
            return name
    raise ConfigError(
        "--to gguf does not cover how this tokenizer splits text into words: it knows those of GPT-2, SmolLM2, Qwen2 "
        "and Llama 3; use --to hf"
    )
