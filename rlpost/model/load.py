"""Find, build, convert and load models and tokenizers."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.integrations.gguf import read_gguf_metadata
from transformers.utils import logging as hf_logging

from rlpost.config import paths
from rlpost.config.packaged import PACKAGED, Packaged
from rlpost.config.paths import made_once
from rlpost.data.chat import stop_ids
from rlpost.errors import ConfigError, DataError
from rlpost.files import remembered
from rlpost.model.device import pick_device
from rlpost.model.tokenizer import adapters_tokenizer, open_tokenizer, save_tokenizer, tokenizer_files
from rlpost.model.weights import is_adapted, is_sharded
from rlpost.settings import ModelSettings
from rlpost.text import first_line

hf_logging.disable_progress_bar()  # rlpost has its own screen

LARGE_FILE = 10**9  # bytes of weights that are read for NaN only once

CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def locate_model(path: str, revision: str | None = None, key: str = "model.path") -> Path:
    """The local HF folder of `path`, the value of `key`: built, converted or downloaded if needed, and checked.

    For a peft adapter this is its model with the adapter merged. Raises ConfigError for a folder that
    holds no model or a broken one, CheckpointError for a checkpoint that has changed since it was written,
    DataError if the hub has no such model and for weights that are not finite.
    """
    if path == "builtin:tiny":
        return _made("tiny-v1", build_tiny)
    path = paths.resolve_model_path(path, key)
    if (packaged := PACKAGED.get(path)) is not None:
        if paths.is_made(path) or packaged.parts():
            return _made(packaged.made, lambda folder: _convert_packaged(packaged, folder))
        path = packaged.hub_id
    if path.endswith(paths.GGUF):
        folder = _locate_gguf(Path(path))
    else:
        folder = Path(path) if Path(path).exists() else _fetch(path, revision, key)
    paths.verify_model(folder)
    if paths.is_adapter_folder(folder):
        paths.check_weights_file(folder / paths.ADAPTER_WEIGHTS)
        _check_finite(folder / paths.ADAPTER_WEIGHTS)
        return locate_merged(locate_model(paths.adapter_base(folder)), folder)
    paths.check_model_folder(folder)
    for file in paths.weight_files(folder):
        _check_finite(file)
    return folder


def locate_config(path: str, revision: str | None = None, key: str = "model.path") -> Path:
    """The local folder with the config.json of the model at `path`; downloads no weights.

    Raises what `locate_model` raises.
    """
    path = paths.resolve_model_path(path, key)
    if ":" in path or path.endswith(paths.GGUF):  # built here, with tokenizer and weights together
        return locate_model(path, revision, key)
    folder = Path(path)
    if not folder.exists():
        return _fetch(path, revision, key, with_weights=False)
    return locate_config(paths.adapter_base(folder)) if paths.is_adapter_folder(folder) else folder


def locate_tokenizer(
    path: str, revision: str | None = None, key: str = "model.path", adapter: str | None = None
) -> Path:
    """The local folder of the tokenizer of the model at `path`; downloads no weights.

    An adapter's own comes before that of its model: of `path`, or of the setting lora.path, `adapter`. Raises what
    `locate_model` raises.
    """
    with_its_own = paths.resolve_model_path(path, key) if adapter is None else str(paths.resolve_adapter_path(adapter))
    own = adapters_tokenizer(Path(with_its_own))
    return own or locate_config(path, revision, key)


def _locate_gguf(file: Path) -> Path:
    """The HF folder that a .gguf file is converted to, once for each path, size and modification time.

    Raises ConfigError for a file that transformers cannot read.
    """
    name = paths.name_of_gguf(file)
    return _made(name, lambda folder: _convert_gguf(file.resolve(), folder))


def _check_finite(file: Path) -> None:
    """Raise DataError if a tensor of a safetensors file is not finite.

    A large file is read for it once for each path, size and modification time: that takes minutes on a shared disk.
    """
    facts = file.stat()
    if facts.st_size < LARGE_FILE:
        _read_for_nan(file)
        return
    digest = hashlib.sha256(f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:24]

    def read_once() -> dict[str, Any]:
        _read_for_nan(file)
        return {"file": str(file)}

    known = paths.cache_folder() / "finite" / f"{digest}.json"
    remembered(known, read_once, lambda _: None, "the weights are read for NaN")


def _read_for_nan(file: Path) -> None:
    try:
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
            bad = next((name for name in names if not _is_finite(tensors.get_tensor(name))), None)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): download or save it again") from error
    if bad is not None:
        raise DataError(f"{bad} in {file} holds NaN or infinity: the weights are broken, take another copy of them")


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.element_size() < 2 or not tensor.numel():
        return True
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(tensor))  # both are NaN if any element is


def locate_merged(base: Path, adapter: Path) -> Path:
    """The HF folder of `base` with the peft adapter merged into it, in the dtype of its weights; made once.

    It has the tokenizer that was saved with the adapter, if any. Raises ConfigError for an adapter that does not fit.
    """
    described = adapters_tokenizer(adapter)
    content = hashlib.sha256(f"{base.resolve()} {described}".encode())
    for file in [adapter / paths.ADAPTER_CONFIG, adapter / paths.ADAPTER_WEIGHTS, *tokenizer_files(described or base)]:
        content.update(file.read_bytes())
    for file in sorted(base.glob("*.safetensors")):
        content.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}".encode())

    def make(folder: Path) -> None:
        from rlpost.model.lora import merged_with

        tokenizer = open_tokenizer(described or base)
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto", use_safetensors=True)
        stored = model.dtype
        merged = merged_with(model.float(), adapter, len(tokenizer)).to(stored)
        save_model(merged, tokenizer, folder)

    return _made(f"merged-{content.hexdigest()[:16]}", make)


def _made(name: str, make: Callable[[Path], None]) -> Path:
    """The cached model folder `name`, filled by `make` the first time."""
    return made_once("models", name, "config.json", make)


def load_model(folder: Path, settings: ModelSettings | None = None) -> PreTrainedModel:
    """The model of a local folder, from safetensors only, on `settings.device`, in eval mode.

    Eval mode turns dropout off: with it the trainer's log-probs would never match the sampler's.
    Raises ConfigError if the weights do not fit the configuration.
    """
    settings = settings or ModelSettings()
    device = pick_device(settings.device)
    try:
        model, found = _from_pretrained(
            folder,
            dtype=getattr(torch, settings.dtype.value),
            use_safetensors=True,
            trust_remote_code=False,
        )
    except Exception as error:
        raise ConfigError(f"the model in {folder} cannot be loaded: {first_line(error)}") from error
    _check_complete(folder, found["missing_keys"])
    return model.to(device).eval()


def _from_pretrained(*arguments: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The model, and the names of missing weights: transformers initializes those at random."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(*arguments, output_loading_info=True, **options)
    return loaded


def _check_complete(source: Path, missing: Any) -> None:
    if names := sorted(missing):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ConfigError(f"{source} lacks the weights {names[0]}{more}, which its model has: take a whole copy of it")


def save_model(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Write `model` as a plain HF folder; an adapter is merged into the written weights, not into `model`.

    The folder's generation_config.json and config.json name every id at which rlpost stops, the end of turn first, so
    that other programs stop there too.
    """
    ends = list(dict.fromkeys([*stop_ids(tokenizer), *ends_of(model.generation_config)]))
    for config in (model.generation_config, model.config, model.config.get_text_config()):
        if config is not None and ends:
            config.eos_token_id = ends if len(ends) > 1 else ends[0]
    if is_sharded(model):
        from rlpost.model.sharding import export

        export(model, folder)
    elif is_adapted(model):
        from rlpost.model.lora import MergedWeights

        model.save_pretrained(folder, state_dict=dict(MergedWeights(model)))
    else:
        model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def ends_of(generation: Any) -> list[int]:
    """The ids at which a model's generation config, if it has one, ends a text."""
    ends = getattr(generation, "eos_token_id", None)
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def context_length(folder: Path) -> int | None:
    """The context length of the model in a local folder, in tokens; None if its config has none."""
    config = AutoConfig.from_pretrained(folder).get_text_config()
    return getattr(config, "max_position_embeddings", None)


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


def _convert_gguf(gguf: Path, folder: Path) -> None:
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


def _convert_packaged(packaged: Packaged, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        _convert_gguf(packaged.gguf(Path(scratch)), folder)


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
            model, found = _from_pretrained(alone, gguf_file=gguf.name, config=config, dtype=torch.float32)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{gguf} cannot be converted: {error}; take the model as a HF folder") from error
        tokenizer: Any = AutoTokenizer.from_pretrained(alone, gguf_file=gguf.name)
        metadata, _ = read_gguf_metadata(str(Path(alone) / gguf.name))
    if metadata.get("tokenizer.ggml.add_bos_token"):  # transformers does not read it, and Gemma fails without <bos>
        tokenizer.add_bos_token = True
    _check_complete(gguf, found["missing_keys"])
    return model, tokenizer


def _fetch(hub_id: str, revision: str | None, key: str, *, with_weights: bool = True) -> Path:
    """Find in the hub's cache, or download. Raises DataError within seconds if neither works."""
    from huggingface_hub import HfApi, snapshot_download

    patterns = ["*.json", "*.txt", "*.model", "*.jinja", *(["*.safetensors"] if with_weights else [])]
    try:
        cached = Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns, local_files_only=True))
        if with_weights:
            paths.weight_files(cached)
        return cached
    except (OSError, ValueError):
        pass  # not cached, only the tokenizer, or an incomplete download: ask the hub
    try:
        HfApi().model_info(hub_id, revision=revision, timeout=10)  # one request, so an unreachable hub fails fast
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except Exception as error:
        raise DataError(
            f"{key}={hub_id} is neither a local folder nor to be had from the hub ({first_line(error)}): "
            "give a local HF folder, or connect and try again"
        ) from error


def describe(folder: Path) -> str:
    """Architecture and size in one phrase, from config.json and the weights' headers."""
    config = json.loads((folder / "config.json").read_text())
    name = (config.get("architectures") or ["unknown architecture"])[0]
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    return f"{name}, {size / 1e6:.0f} MB of weights" if size >= 1e6 else f"{name}, {size / 1e3:.0f} kB of weights"
