"""Whether a model's folder is whole, told from its files in milliseconds: before anything heavy is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rlpost.errors import ConfigError

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
GGUF = ".gguf"
# one of these holds the vocabulary of any tokenizer that transformers reads
VOCABULARIES = ("tokenizer.json", "*.model", "*vocab*", "*.tiktoken", "tekken.json")
_LONGEST_HEADER = 100_000_000  # bytes; what safetensors itself allows
_GGUF_HEADER = 24  # bytes
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_NOT_WEIGHTS = (
    (b"version https://git-lfs", "is a git-lfs pointer, not what it points to: run git lfs pull in the folder"),
    (b"<!doctype", "is a web page: download the file itself"),
    (b"<html", "is a web page: download the file itself"),
)


def check_model_folder(folder: Path) -> None:
    """Raise ConfigError where a file that loading the model in `folder` reads is missing, cut short or another thing.

    A folder whose model runs code that it ships is refused too.
    """
    config = read_json(folder / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{folder / 'config.json'} names no model_type: it is not the configuration of a model")
    check_ships_no_code(folder, config)
    for file in weight_files(folder):
        check_weights_file(file)
    if not any(next(folder.glob(pattern), None) for pattern in VOCABULARIES):
        raise ConfigError(
            f"{folder} holds no tokenizer: copy tokenizer.json and tokenizer_config.json of the model into it"
        )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (folder / name).is_file():
            check_ships_no_code(folder, read_json(folder / name))


def weight_files(folder: Path) -> list[Path]:
    """The files that the weights in `folder` are read from. Raises ConfigError where one is missing."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / WEIGHTS_INDEX
    if index.is_file():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
            raise ConfigError(f"{index} has no weight_map: download it again")
        files = [folder / name for name in sorted(set(places.values()))]
        for file in files:
            if not file.is_file():
                raise ConfigError(f"{file} is missing, and {index.name} names it: download it")
        return files
    found = sorted(folder.glob("*.safetensors"))
    if shard := next(filter(None, (_SHARD.fullmatch(file.name) for file in found)), None):
        raise ConfigError(
            f"{index} is missing: {shard[0]} is one of {int(shard[3])} files that it tells of; download it"
        )
    held = f"{found[0].name}, which is not the" if found else "no"
    raise ConfigError(f"{folder} holds {held} {WEIGHTS}: rlpost reads weights from that file or those of an index")


def check_ships_no_code(folder: Path, config: dict[str, Any]) -> None:
    """Raise ConfigError where a model's or a tokenizer's configuration names Python code to load it with."""
    if config.get("auto_map"):
        raise ConfigError(
            f"the model in {folder} is loaded with code that it ships (auto_map), which rlpost never runs: take a "
            "model that transformers reads by itself; if it reads this one, take auto_map out of the .json files there"
        )


def check_gguf(file: Path) -> None:
    """Raise ConfigError for a file that is no GGUF file by its first bytes: those four, version, tensors, entries."""
    if _head(file, 4) != b"GGUF":
        raise ConfigError(f"{file} is no GGUF file: it does not begin with GGUF; download it again")
    if (size := file.stat().st_size) < _GGUF_HEADER:
        raise ConfigError(f"{file} has {size} bytes, less than a GGUF file begins with: download it again")


def read_json(file: Path) -> dict[str, Any]:
    """What a JSON file of a model holds. Raises ConfigError where that is no object."""
    head = _head(file, 30) if file.is_file() else b""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file} is missing: copy or download it") from None
    except (OSError, ValueError, RecursionError) as error:
        said = next((what for start, what in _NOT_WEIGHTS if head.lower().startswith(start)), None)
        raise ConfigError(f"{file} {said or f'cannot be read as JSON ({error}): download it again'}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no JSON object: download it again")
    return content


def check_weights_file(file: Path) -> None:
    """Raise ConfigError unless the header of a safetensors file can be read and the file is as long as it says."""
    head = _head(file, 8)
    size, length = file.stat().st_size, int.from_bytes(head, "little")
    if size == 0:
        raise ConfigError(f"{file} is empty: download it again")
    damaged = f"{file} is no whole safetensors file: its header cannot be read; download or save it again"
    if len(head) < 8 or not 0 < length <= min(size - 8, _LONGEST_HEADER):
        raise ConfigError(damaged)
    try:
        with file.open("rb") as stream:
            stream.seek(8)
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        end = 8 + length + max(ends, default=0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(damaged) from error
    if not ends:
        raise ConfigError(f"{file} holds no tensor: download or save it again")
    if end != size:
        raise ConfigError(f"{file} has {size} bytes, and its header tells of {end}: download or save it again")


def _head(file: Path, count: int) -> bytes:
    """The first bytes of a file. Raises ConfigError where they show that it is no file of a model."""
    try:
        with file.open("rb") as stream:
            head = stream.read(30)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    for start, what in _NOT_WEIGHTS:
        if head.lower().startswith(start):
            raise ConfigError(f"{file} {what}")
    return head[:count]
