"""Paths of models, runs, checkpoints and data: found, and checked in milliseconds before anything heavy is loaded.

A model's folder is checked by its files. Checkpoints are checked in rlpost/model/locate.py and rlpost/runs.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rlpost.config.packaged import PACKAGED
from rlpost.errors import ConfigError, DataError
from rlpost.files import expanded, json_in, paths_in
from rlpost.settings.base import BUILT_IN_REWARDS, REWARDS
from rlpost.text import did_you_mean, nearest, one_typo_away, shortened

RUNS, EVALS = Path("runs"), Path("evals")
SWEEP_FILE = "sweep.json"  # in the folder of a sweep, beside a folder for each job
RESULT, SAMPLES = "result.json", "samples.parquet"  # in the folder of an evaluation
PAGE = "report.html"  # in the folder of a run
HELD_OUT = "held-out"  # in the folder of a run: a table of samples for each of its evaluations
LATEST, BEST = "latest", "best"  # links beside the checkpoints of a run
REFERENCE = "reference"  # in a checkpoint of a run whose reference moves
NAMED_MODELS = ("builtin:tiny", *PACKAGED)
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # of a peft adapter
_WEIGHTS, _WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
GGUF = ".gguf"
# every tokenizer that transformers reads has one of these files
VOCABULARIES = ("tokenizer.json", "*.model", "*vocab*", "*.tiktoken", "tekken.json")
DATA_FILES = (".jsonl", ".json", ".csv", ".parquet")
_OTHER_FILES = (".txt", ".tsv", ".xlsx", ".zip", ".gz", ".zst", ".arrow", ".npy", ".npz", ".pkl", ".pt", ".py", ".yaml")
HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
_LONGEST_HUB_ID = 96  # characters, the hub client's own limit


# The folders of rlpost


def cache_folder() -> Path:
    """The folder of rlpost's caches on this machine; `XDG_CACHE_HOME` moves it."""
    root = os.environ.get("XDG_CACHE_HOME")
    return expanded(root or "~/.cache") / "rlpost"


def folder_of_packaged(path: str) -> Path:
    """The folder of the cache for the converted weights of the packaged model `path`."""
    return cache_folder() / "models" / PACKAGED[path].made


def is_made(path: str) -> bool:
    """Whether the weights of the packaged model `path` have been converted."""
    return (folder_of_packaged(path) / "config.json").is_file()


def name_of_gguf(file: Path) -> str:
    """The name in the cache of what a .gguf file is converted to, once for each path, size and modification time."""
    whole = file.resolve()
    facts = whole.stat()
    return "gguf-" + hashlib.sha256(f"{whole} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:16]


def is_run_folder(folder: Path) -> bool:
    """Whether a run has written here; False for a folder that may not be read."""
    try:
        return (folder / "checkpoints").is_dir() or any(
            (folder / name).is_file() for name in ("command.txt", "overrides.txt", "metrics.jsonl")
        )
    except PermissionError:  # another user's, which must not hide the runs beside it
        return False


def is_evaluation_folder(folder: Path) -> bool:
    """Whether this is a complete evaluation: `evals/NAME`."""
    return (folder / RESULT).is_file() and (folder / SAMPLES).is_file()


def evaluation_names(folder: Path = EVALS) -> list[str]:
    """The evaluations in a folder, by name."""
    return sorted(path.name for path in folder.iterdir() if is_evaluation_folder(path)) if folder.is_dir() else []


def is_checkpoint_folder(folder: Path) -> bool:
    """Whether this is one checkpoint of a run: `runs/NAME/checkpoints/step-000050`."""
    return (folder / "model" / "config.json").is_file()


def is_adapter_folder(folder: Path) -> bool:
    """Whether this is a peft adapter rather than a model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


# Paths that settings name


def resolve_model_path(path: str, key: str = "model.path") -> str:
    """The HF folder that the value of `key` means, or `path` itself if it names a model that is not local.

    A run folder stands for its latest checkpoint, a checkpoint for its model folder, the folder of a
    peft adapter for itself and the model that it names, a .gguf file for itself. Reads the disk,
    never the network. Raises ConfigError for a missing folder, for a folder without a model in
    safetensors, and for an adapter whose model is missing or an adapter; MissingExtraError for a packaged
    model whose packages are not installed.
    """
    if path.startswith(("builtin:", "packaged:")):
        if path not in NAMED_MODELS:
            hint = did_you_mean(nearest(path, NAMED_MODELS))
            raise ConfigError(f"{key}={path} is unknown: it is one of {', '.join(NAMED_MODELS)}{hint}")
        if path in PACKAGED and not is_made(path):
            PACKAGED[path].check_installed(f"{key}={path}")
        return path
    folder = expanded(path)
    if folder.is_dir():
        return str(_model_in(folder, path, key))
    if folder.suffix == GGUF and folder.is_file():
        return path
    if folder.exists():
        meant = "data is given as env.path" if folder.suffix in DATA_FILES else "give the folder that holds it"
        raise ConfigError(f"{key}={path} is a file: {meant}")
    if looks_local(path) or folder.suffix == GGUF or len(path) > _LONGEST_HUB_ID:
        otherwise = f": give a folder, a {GGUF} file, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct"
        near = nearby(folder, [GGUF], folders=True) or otherwise
        raise ConfigError(f"{key}={shortened(path, _LONGEST_HUB_ID)} does not exist{near}")
    if path.lower().endswith("-gguf"):
        raise ConfigError(
            f"{key}={path} holds {GGUF} files, by its name: download one and give {key}=FILE{GGUF}, or name "
            "the model that they were made of"
        )
    return path


def as_model(run: Path) -> str:
    """A run as a value of `model=`, which needs a slash."""
    return str(run) if "/" in str(run) else f"./{run}"


def adapter_base(folder: Path) -> str:
    """The base model that the adapter in `folder` names. Raises ConfigError if it names none."""
    base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"the adapter {folder} does not say which model it is for: give that as model.path and the adapter as "
            f"lora.path, or write base_model_name_or_path into its {ADAPTER_CONFIG}"
        )
    return base


def resolve_adapter_path(path: str, key: str = "lora.path") -> Path:
    """The folder of the peft adapter that the value of `key` names: a run's latest, a checkpoint's, or itself.

    Raises ConfigError where it holds none.
    """
    folder = expanded(path)
    if not folder.is_dir():
        raise ConfigError(f"{key}={path} is not a folder{nearby(folder, [], folders=True)}")
    of_a_checkpoint, of_a_run = folder / "adapter", folder / "checkpoints" / "latest" / "adapter"
    for found in (folder, of_a_checkpoint, of_a_run):
        if (found / ADAPTER_CONFIG).is_file() and (found / ADAPTER_WEIGHTS).is_file():
            return found
    raise ConfigError(f"{key}={path} holds no peft adapter: that is {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}")


def check_data_path(path: str, key: str = "env.path") -> None:
    """Raise DataError if the value of `key` is a local path that does not exist; a hub id passes."""
    for each in paths_in(path):
        if "://" in each:
            raise DataError(f"{key}={each} is an address: download it, and give the file")
        file = expanded(each)
        if file.exists():
            continue
        near = nearby(file, DATA_FILES, folders=True)
        if looks_local(each) or file.suffix in (*DATA_FILES, *_OTHER_FILES) or (file.suffix and near):
            raise DataError(f"{key}={each} does not exist{near}")


def check_reward(reward: str, key: str) -> None:
    """Raise ConfigError unless `reward` is a reward's name or FILE.py:FUNCTION, a function that the file defines.

    The file is parsed, not run.
    """
    known = [*BUILT_IN_REWARDS, *REWARDS]
    if reward in known:
        return
    from rlpost.user_file import check_defines, check_file, functions_of

    path, _, function = reward.rpartition(":")
    if path:
        check_defines(path, function, f"{key}={reward}")
    elif reward.endswith(".py"):
        functions = functions_of(check_file(reward, f"{key}={reward}"))
        meant = f"{reward}:{functions[0] if functions else 'FUNCTION'}"
        raise ConfigError(f"{key}={reward} names a file but no function in it; write {key}={meant}")
    else:
        hint = did_you_mean(nearest(reward, known), f"give FILE.py:FUNCTION, or one of {', '.join(known)}")
        raise ConfigError(f"{key}={shortened(reward, _LONGEST_HUB_ID)} is not a reward{hint}")


def check_class(place: str, key: str) -> None:
    """Raise ConfigError unless `place` is FILE.py:CLASS, and the file defines it. The file is parsed, not run."""
    from rlpost.user_file import check_defines

    path, _, name = place.rpartition(":")
    if not path:
        raise ConfigError(f"{key}={place} is not FILE.py:CLASS: name the file and the class in it")
    check_defines(path, name, f"{key}={place}", "class")


def looks_local(path: str) -> bool:
    """Whether a path that does not exist was meant as a local path rather than as a hub id."""
    first, slash, _ = path.partition("/")
    is_link = os.path.islink(path)  # a link to nowhere, or to itself
    return not HUB_ID.fullmatch(path) or first == "runs" or (slash != "" and Path(first).is_dir()) or is_link


def _model_in(folder: Path, path: str, key: str) -> Path:
    """The model that the existing `folder` stands for."""
    if is_adapter_folder(folder):
        resolve_adapter_path(path, key)
        base = adapter_base(folder)
        resolve_model_path(base, f"{key}={path} is an adapter, and its base model")
        return folder
    places = (folder, folder / "model", folder / "checkpoints" / LATEST / "model")
    found = next((place for place in places if (place / "config.json").is_file()), None)
    files = sorted(folder.glob(f"*{GGUF}"))
    if found is None and len(files) == 1:
        return files[0]
    if found is None and is_run_folder(folder):
        raise ConfigError(f"{key}={path} is a run without a finished checkpoint: resume it, or give another model")
    if found is None:
        below = [each for each in sorted(folder.iterdir()) if (each / "config.json").is_file() or is_run_folder(each)]
        data = any(file.suffix in DATA_FILES for file in folder.iterdir())
        named = ", ".join(str(Path(path) / each.name) for each in [*below, *files])
        hint = f"; give one of {named}" if named else "; data is given as env.path" if data else ""
        raise ConfigError(
            f"{key}={path} holds no model: there is no config.json in it, and it is not a run or checkpoint of "
            f"rlpost{hint}"
        )
    if not any(found.glob("*.safetensors")):
        raise ConfigError(
            f"{key}={path} holds no .safetensors file, and rlpost reads no other weights: convert it first"
        )
    return found


def nearby(missing: Path, endings: Collection[str], *, folders: bool = False) -> str:
    """A hint at a file of one of these endings, or a folder, of a similar name beside the missing path.

    For a broken link it is the link's target.
    """
    if missing.is_symlink():
        return f"; it is a link to {os.readlink(missing)}, which does not exist"
    try:
        names = sorted(p.name for p in missing.parent.iterdir() if p.suffix in endings or (folders and p.is_dir()))
    except (OSError, ValueError):  # the folder above is missing, closed or not a path: nothing to suggest
        return f"; there is no folder {missing.parent} either" if not missing.parent.exists() else ""
    stems = {Path(name).stem: name for name in names}  # a shared ending does not make two names alike
    near = stems.get(nearest(missing.stem, stems) or "") or one_typo_away(missing.name, names)
    return did_you_mean(str(missing.parent / near) if near else None)


# The files of a model's folder


def check_model_folder(folder: Path) -> None:
    """Raise ConfigError if a file that loading the model in `folder` needs is missing or damaged.

    A model that ships code to load it with is refused too.
    """
    config = read_json(folder / "config.json")
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
    """The files with the weights in `folder`. Raises ConfigError if one is missing."""
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    index = folder / _WEIGHTS_INDEX
    if index.is_file():
        places: dict[str, str] = read_json(index).get("weight_map", {})
        return [folder / name for name in sorted(set(places.values()))]
    found = sorted(folder.glob("*.safetensors"))
    held = f"{found[0].name}, which is not the" if found else "no"
    raise ConfigError(f"{folder} holds {held} {_WEIGHTS}: rlpost reads weights from that file or those of an index")


def check_ships_no_code(folder: Path, config: dict[str, Any]) -> None:
    """Raise ConfigError if a model's or a tokenizer's configuration names Python code to load it with."""
    if config.get("auto_map"):
        raise ConfigError(
            f"the model in {folder} is loaded with code that it ships (auto_map), which rlpost never runs: take a "
            "model that transformers reads by itself; if it reads this one, take auto_map out of the .json files there"
        )


def check_weights_file(file: Path) -> None:
    """Raise ConfigError unless the header of a safetensors file can be read and the file is as long as it says."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): download it again (in a clone: git lfs pull)") from error


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file of a model. Raises ConfigError unless it holds an object."""
    try:
        return dict(json_in(file))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{file} cannot be read as JSON ({error}): download it again (in a clone: git lfs pull)"
        ) from error
