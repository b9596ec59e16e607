"""The size of a model, from its config.json and the headers of its weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rlpost.files import json_in

HEADER_LENGTH = 8  # bytes in front of a safetensors header, its length in little endian
LARGEST_HEADER = 100_000_000  # as the format has it
LARGEST = 2**40  # of a size; a larger one is no size of a model, and no float either
MOST_DIMENSIONS = 8  # of a tensor; a product of very many sizes takes long to count
NAMES = {  # of one and the same size in the configurations of different families
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_attention_heads", "n_head"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
}


@dataclass(frozen=True)
class Shape:
    """What memory depends on. `linear` is inputs plus outputs of all linear layers of one name, the head left out."""

    parameters: int
    hidden: int
    layers: int
    kv_width: int  # of the keys of one token in one layer
    intermediate: int
    vocab: int
    linear: Mapping[str, int]

    def kv_bytes(self, number: int) -> int:
        """Bytes of the keys and values of one token in all layers, each number of them in `number` bytes."""
        return 2 * self.layers * self.kv_width * number

    def adapter_parameters(self, rank: int, targets: Iterable[str] | None) -> int:
        """A and B of a LoRA adapter of `rank` beside the layers of these names; None: beside all of them."""
        names = self.linear if targets is None else {target.rpartition(".")[2] for target in targets}
        return rank * sum(self.linear.get(name, 0) for name in names)


def shape_of_folder(folder: Path) -> Shape | None:
    """The shape of the model in an HF folder; by its config alone where the weights are not there yet.

    None where there is no config that says how large it is.
    """
    try:
        config = json_in(folder / "config.json")
    except (OSError, ValueError):
        return None
    return shape_of_config(config, tensors_of(folder)) if isinstance(config, dict) else None


def shape_of_config(config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]] | None = None) -> Shape | None:
    """The shape that a config.json describes; what the `tensors` are, where they are known, counts instead."""
    text = config.get("text_config")
    text = {**config, **text} if isinstance(text, Mapping) else config
    size = {name: _first(text, keys) for name, keys in NAMES.items()}
    hidden, layers, heads = size["hidden"], size["layers"], size["heads"]
    if not hidden or not layers or not heads:
        return None
    vocab = _first(text, ("vocab_size",)) or 0
    intermediate = size["intermediate"] or 4 * hidden
    width = _first(text, ("head_dim",)) or hidden // heads
    kv_width = (size["kv_heads"] or heads) * width
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    if tensors:
        counted = {name: shape for name, shape in tensors.items() if not (tied and name == "lm_head.weight")}
        linear = _linear_layers(counted)
        parameters = sum(map(prod, counted.values()))
    else:
        experts = size["experts"] or 1
        inner = experts * (_first(text, ("moe_intermediate_size",)) or intermediate) if experts > 1 else intermediate
        attention = heads * width
        biases = attention + 2 * kv_width if text.get("model_type") == "qwen2" else 0
        linear = {
            "q_proj": layers * (hidden + attention),
            "k_proj": layers * (hidden + kv_width),
            "v_proj": layers * (hidden + kv_width),
            "o_proj": layers * (attention + hidden),
            **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), layers * (hidden + inner)),
        }
        a_layer = hidden * (2 * attention + 2 * kv_width + 3 * inner + 2) + biases
        parameters = layers * a_layer + hidden + vocab * hidden * (1 if tied else 2)
    return Shape(parameters, hidden, layers, kv_width, intermediate, vocab, linear)


def tensors_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in the safetensors files of a folder, from their headers."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(file).items():
            shape = entry.get("shape") if name != "__metadata__" and isinstance(entry, dict) else None
            if isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS and all(map(_is_size, shape)):
                found[name] = tuple(shape)  # of what has none, loading says so
    return found


def _header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file; empty where it has none, which loading it will say."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(HEADER_LENGTH), "little")
            header = json.loads(stream.read(length)) if length <= LARGEST_HEADER else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


def _linear_layers(tensors: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    widths: Counter[str] = Counter()
    for name, shape in tensors.items():
        layer, _, kind = name.rpartition(".")
        last = layer.rpartition(".")[2]
        if kind == "weight" and len(shape) == 2 and "embed" not in last and last not in ("lm_head", "wte", "wpe"):
            widths[last] += sum(shape)
    return dict(widths)


def _first(config: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """The first of these keys that holds a size."""
    values = (config.get(name) for name in names)
    return next((value for value in values if value and _is_size(value)), None)


def _is_size(value: object) -> bool:
    """Whether a value of JSON is a number that a size can be."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST
