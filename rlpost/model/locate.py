"""Find a model: in a local folder, in the hub's cache or at the hub; converted or merged first where it has to be."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM

from rlpost.config import paths
from rlpost.config.packaged import PACKAGED, Packaged
from rlpost.errors import CheckpointError, ConfigError, DataError
from rlpost.estimate.shape import Shape, shape_of_folder, shape_of_model
from rlpost.files import MANIFEST, check_listed, made_once, read_manifest, remembered, sha256
from rlpost.model.load import save_model
from rlpost.model.tokenizer import adapters_tokenizer, open_tokenizer, tokenizer_files
from rlpost.text import first_line

LARGE_FILE = 10**9  # bytes of weights that are read for NaN only once


def locate_model(path: str, revision: str | None = None, key: str = "model.path") -> Path:
    """The local HF folder of `path`, the value of `key`: built, converted or downloaded if needed, and checked.

    For a peft adapter this is its model with the adapter merged. Raises ConfigError for a folder that
    holds no model or a broken one, CheckpointError for a checkpoint that has changed since it was written,
    DataError if the hub has no such model and for weights that are not finite.
    """
    if path == "builtin:tiny":
        from rlpost.model.conversion import build_tiny

        return _made("tiny-v1", build_tiny)
    path = paths.resolve_model_path(path, key)
    if (packaged := PACKAGED.get(path)) is not None:
        if paths.is_made(path) or packaged.parts():
            return _made(packaged.made, partial(_convert_packaged, packaged))
        path = packaged.hub_id
    if path.endswith(paths.GGUF):
        from rlpost.model.conversion import convert_gguf

        folder = _made(paths.name_of_gguf(Path(path)), partial(convert_gguf, Path(path).resolve()))
    else:
        folder = Path(path) if Path(path).exists() else _fetch(path, revision, key)
    verify_model(folder)
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


def shape_of(path: str, revision: str | None = None) -> Shape | None:
    """The shape of the model at `path`; of one of the hub whose size is not known, its configuration is fetched."""
    return shape_of_model(path, revision) or shape_of_folder(locate_config(path, revision))


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


def verify_model(folder: Path) -> None:
    """Raise CheckpointError if `folder` is a checkpoint's model or adapter, and not as it was written.

    Files beside it, such as the optimizer's state, are not checked: a model is loaded without them.
    """
    parts = ("model", "adapter")
    whole = folder.resolve()
    checkpoint = whole.parent
    advice = "give another one as the model"
    if whole.name not in parts or not (checkpoint / MANIFEST).is_file():
        if whole.name in parts and checkpoint.name.startswith("step-") and checkpoint.parent.name == "checkpoints":
            raise CheckpointError(f"{checkpoint} is not a complete checkpoint: it has no {MANIFEST}; {advice}")
        return
    expected = read_manifest(checkpoint, advice)
    written = [file for file in expected if whole in file.parents]
    for file in dict.fromkeys([*written, *whole.glob("*.safetensors"), *whole.glob("*.json")]):
        check_listed(file, expected.get(file), advice)


def _convert_packaged(packaged: Packaged, folder: Path) -> None:
    from rlpost.model.conversion import convert_gguf

    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        convert_gguf(joined(packaged, Path(scratch)), folder)


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


def joined(packaged: Packaged, scratch: Path) -> Path:
    """The whole GGUF file of a packaged model; parts are joined in the folder `scratch`.

    Raises DataError for a file that is not the expected one.
    """
    whole, *others = packaged.parts()
    if others:
        first, whole = whole, scratch / "whole.gguf"
        with whole.open("wb") as target:
            for part in (first, *others):
                with part.open("rb") as source:
                    shutil.copyfileobj(source, target)
    if packaged.sha256 and (found := sha256(whole)) != packaged.sha256:
        raise DataError(
            f"the files of {', '.join(packaged.packages)} are damaged (SHA-256 {found[:8]}, not "
            f"{packaged.sha256[:8]}): pip install --force-reinstall {packaged.pip}"
        )
    return whole


def _made(name: str, make: Callable[[Path], None]) -> Path:
    """The cached model folder `name`, filled by `make` the first time."""
    return made_once(paths.cache_folder() / "models" / name, "config.json", make)


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
