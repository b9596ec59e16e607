"""A model's sizes before it is loaded, and the downloads of a training.

The sizes come from a config.json and the headers of the weights; for the models of rlpost's own options they are known
without them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rlpost.config.compose import environments_of
from rlpost.config.packaged import PACKAGED
from rlpost.config.paths import (
    GGUF,
    HUB_ID,
    adapter_base,
    cache_folder,
    folder_of_packaged,
    is_adapter_folder,
    is_made,
    looks_local,
    name_of_gguf,
    resolve_model_path,
)
from rlpost.errors import ConfigError
from rlpost.files import expanded, json_in
from rlpost.settings import EnvSettings, ModelSettings
from rlpost.text import readable

NAMES = {  # size -> its keys in the configurations of different families
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_attention_heads", "n_head"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
}

# families with norms behind attention and MLP too, and of queries and keys
TWICE_NORMED = ("gemma2", "gemma3_text")
QK_NORMED = ("qwen3", "gemma3_text")


@dataclass(frozen=True)
class Shape:
    """A model's sizes. `linear` maps a name to inputs plus outputs of all linear layers of that name; no head."""

    parameters: int
    hidden: int
    layers: int
    kv_width: int  # of the keys of one token in one layer
    intermediate: int
    vocab: int
    linear: Mapping[str, int]
    heads: int  # of queries
    q_width: int  # of the queries of one token in one layer
    norm_width: int  # of all norms of one layer together, for one token

    def kv_bytes(self, number: int) -> int:
        """Bytes of the keys and values of one token in all layers, each number of them in `number` bytes."""
        return 2 * self.layers * self.kv_width * number

    def adapter_parameters(self, rank: int, targets: Iterable[str] | None) -> int:
        """Parameters of A and B of a LoRA adapter of `rank` on the layers of these names; None: on all of them."""
        names = self.linear if targets is None else {target.rpartition(".")[2] for target in targets}
        return rank * sum(self.linear.get(name, 0) for name in names)


def shape_of_model(path: str, revision: str | None = None) -> Shape | None:
    """The shape of the model at `model.path`; None for a model of the hub that is neither known nor cached."""
    if path == "builtin:tiny":
        return shape_of_config(TINY)
    if path in PACKAGED_CONFIGS:
        return shape_of_config(PACKAGED_CONFIGS[path])
    folder = folder_here(path, revision)
    if folder is not None and is_adapter_folder(folder):
        return shape_of_model(adapter_base(folder))
    known = HUB_MODELS.get(path)
    found = shape_of_folder(folder) if folder is not None else None
    return found or (shape_of_config(known.config) if known else None)


def folder_here(path: str, revision: str | None = None) -> Path | None:
    """The folder of the model or adapter at `model.path`; None while it has to be built, converted or downloaded.

    Weights of a hub's snapshot may be missing. Raises ConfigError for a path without a model.
    """
    if ":" in path:
        return folder_of_packaged(path) if path in PACKAGED and is_made(path) else None
    if (hub_id := _hub_model(path)) is not None:
        return cached_snapshot("models", hub_id, revision)
    found = Path(resolve_model_path(path))
    if found.suffix == GGUF:
        found = cache_folder() / "models" / name_of_gguf(found)
    return found if found.is_dir() else None


def shape_of_folder(folder: Path) -> Shape | None:
    """The shape of the model in an HF folder, by its config alone if it has no weights yet.

    None without a config that says how large it is.
    """
    try:
        config = json_in(folder / "config.json")
    except (OSError, ValueError):
        return None
    return shape_of_config(config, tensors_of(folder)) if isinstance(config, dict) else None


def shape_of_config(config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]] | None = None) -> Shape | None:
    """The shape that a config.json describes; known `tensors` count instead of its sizes."""
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
    kind = text.get("model_type")
    norms = (4 if kind in TWICE_NORMED else 2) * hidden + (heads * width + kv_width if kind in QK_NORMED else 0)
    return Shape(parameters, hidden, layers, kv_width, intermediate, vocab, linear, heads, heads * width, norms)


def tensors_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in the safetensors files of a folder, from their headers; loading checks them."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with suppress(OSError, SafetensorError), safe_open(file, framework="numpy") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118  it has no __iter__
    return found


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
    return next((value for name in names if isinstance(value := config.get(name), int) and value), None)


# families that vLLM 0.32 on a CPU samples by other log-probs than the model's, without a word: seen by
# scripts/dev/families. With a family that it cannot run at all it ends by itself
WRONG_ON_CPU = ("deepseek_v2", "deepseek_v3", "doge", "gpt_oss", "lfm2", "lfm2_moe", "nemotron_h", "phimoe")


def check_served(path: str, revision: str | None) -> None:
    """Raise ConfigError if vLLM on a CPU samples wrongly from the model at `path`, where its config.json is here."""
    folder = folder_here(path, revision)
    while folder is not None and is_adapter_folder(folder):
        folder = folder_here(adapter_base(folder))
    if folder is None or not (folder / "config.json").is_file():
        return
    config = json_in(folder / "config.json")
    text = config.get("text_config") or config
    kind = text.get("model_type") or config.get("model_type")
    ties_head = kind == "gemma2" and text.get("tie_word_embeddings") is False  # though the model does not
    if kind in WRONG_ON_CPU or ties_head:
        raise ConfigError(f"vLLM on a CPU gives other log-probs than {path}, a {kind}: add policy=transformers")


# The hub: what a training downloads from it, and what is known of it without asking


@dataclass(frozen=True)
class HubModel:
    """A model of the hub: the part of its config.json with its size, and its bytes."""

    config: dict[str, Any]
    download_bytes: int


SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size"),
)


def _config(*sizes: int, **more: Any) -> dict[str, Any]:
    """The part of a config.json with the sizes named in `SIZES`: of Llama's kind, unless `more` says another."""
    return {**dict(zip(SIZES, sizes, strict=True)), "model_type": "llama", "tie_word_embeddings": True, **more}


def _qwen2(*sizes: int, tied: bool = True) -> dict[str, Any]:
    return _config(*sizes, model_type="qwen2", tie_word_embeddings=tied)


SMOLLM2 = _config(576, 30, 9, 3, 1536, 49152)
QWEN3 = _config(1024, 28, 16, 8, 3072, 151936, model_type="qwen3", head_dim=128)
# each option of conf/ that names a hub id has a line here or in HUB_DATASETS; bytes are those of all files downloaded
HUB_MODELS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": HubModel(SMOLLM2, 272_000_000),
    "Qwen/Qwen2.5-0.5B-Instruct": HubModel(_qwen2(896, 24, 14, 2, 4864, 151936), 1_000_000_000),
    "Qwen/Qwen2.5-1.5B-Instruct": HubModel(_qwen2(1536, 28, 12, 2, 8960, 151936), 3_099_000_000),
    "Qwen/Qwen2.5-3B-Instruct": HubModel(_qwen2(2048, 36, 16, 2, 11008, 151936), 6_183_000_000),
    "Qwen/Qwen2.5-7B-Instruct": HubModel(_qwen2(3584, 28, 28, 4, 18944, 152064, tied=False), 15_243_000_000),
    "Qwen/Qwen3-0.6B": HubModel(QWEN3, 1_519_000_000),
}
PACKAGED_CONFIGS = {
    "packaged:smollm2": SMOLLM2,
    "packaged:gemma3-270m": _config(640, 18, 4, 1, 2048, 262144, model_type="gemma3_text", head_dim=256),
}
TINY = _config(64, 2, 2, 1, 128, 259)  # builtin:tiny
HUB_DATASETS = {
    "openai/gsm8k": 2_726_000,
    "google/IFEval": 218_000,
    "allenai/IFBench_test": 130_000,
    "DigitalLearningGmbH/MATH-lighteval": 4_200_000,
}


@dataclass(frozen=True)
class Fetch:
    """A model or dataset of the hub; `bytes` None: unknown without asking the hub; `cached`: its folder if cached."""

    id: str
    bytes: int | None
    cached: Path | None

    @property
    def size(self) -> str:
        """The size of the download, in words."""
        return "size unknown while offline" if self.bytes is None else f"about {readable(self.bytes)}"

    @property
    def refusal(self) -> str:
        """The reason for which nothing is downloaded, to follow a download's line; empty without one."""
        from huggingface_hub import constants

        return ", which HF_HUB_OFFLINE forbids: unset it, or give a folder" if constants.HF_HUB_OFFLINE else ""


def parameters_text(count: int) -> str:
    """A number of parameters in three digits: 90.6k, 135M, 1.54B parameters."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit} parameters"
    return f"{count} parameters"


def fetches(model: ModelSettings, reference: str | None, env: EnvSettings) -> list[Fetch]:
    """Everything that a command takes from the hub: the model, the `reference` of its loss, then the rows."""
    found = []
    for path, revision in [(model.path, model.revision), (reference, None)]:
        if path is None or (hub_id := _hub_model(path)) is None:
            continue
        known = HUB_MODELS.get(hub_id)
        snapshot = cached_snapshot("models", hub_id, revision)
        whole = snapshot is not None and _has_weights(snapshot)
        found.append(Fetch(hub_id, known.download_bytes if known else None, snapshot if whole else None))
    for each in environments_of(env):
        rows = getattr(each, "path", None)
        if isinstance(rows, str) and is_hub_id(rows):
            found.append(Fetch(rows, HUB_DATASETS.get(rows), _cached_dataset(rows)))
    return found


def is_hub_id(path: str) -> bool:
    """Whether a user's path names something on the hub instead of a file or folder."""
    return not expanded(path).exists() and not looks_local(path) and HUB_ID.fullmatch(path) is not None


def cached_snapshot(kind: str, hub_id: str, revision: str | None = None) -> Path | None:
    """The cached snapshot of one of the hub's `models` or `datasets`; files may be missing in it."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"{kind}--{hub_id.replace('/', '--')}"
    wanted = revision or "main"
    refs = folder / "refs" / wanted
    found = folder / "snapshots" / (refs.read_text().strip() if refs.is_file() else wanted)
    return found if found.is_dir() else None


def _hub_model(path: str) -> str | None:
    """The hub id that a training would ask for; None for a model on this machine, or one that is made here."""
    if path in PACKAGED:
        packaged = PACKAGED[path]
        return None if packaged.pip or is_made(path) or packaged.parts() else packaged.hub_id
    if ":" in path:
        return None
    try:
        return path if is_hub_id(path) and resolve_model_path(path) == path else None
    except ConfigError:
        return None  # loading the model reports the error


def _has_weights(snapshot: Path) -> bool:
    """Whether every file of weights exists; a link into the cache may be dangling."""
    index = snapshot / "model.safetensors.index.json"
    named = set(json_in(index)["weight_map"].values()) if index.is_file() else None
    files = [snapshot / name for name in named] if named else list(snapshot.glob("*.safetensors"))
    return bool(files) and all(file.is_file() for file in files)


def _cached_dataset(hub_id: str) -> Path | None:
    from huggingface_hub import constants

    folder = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets"
    prepared = Path(folder) / hub_id.replace("/", "___")
    if prepared.is_dir():
        return prepared
    snapshot = cached_snapshot("datasets", hub_id)
    has_rows = snapshot and any(file.suffix in (".parquet", ".jsonl", ".json", ".csv") for file in snapshot.rglob("*"))
    return snapshot if has_rows else None
