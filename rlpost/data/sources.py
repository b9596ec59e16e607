"""Where rows come from: a local file, several, a folder of splits, or a dataset of the hub.

The only module that imports `datasets`, and it does so for hub ids alone.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rlpost.data.row_files import READERS
from rlpost.errors import DataError
from rlpost.home import expanded, paths_in

PROBE_SECONDS = 10  # longest wait for the hub's first answer
TEST_NAMES = ("test", "validation", "valid", "val", "dev")  # of the split test, the first that there is

Dataset = str | Sequence[str] | Sequence[Mapping[str, Any]]
INSTEAD = "give env.path=<folder with train.jsonl and test.jsonl>"

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Source:
    """Numbered rows and what messages call them; `shared` where the splits train and test are both in them.

    `partial` where they are the first row or none, of a file that is larger than was to be read.
    """

    name: str
    numbered: Iterable[tuple[int, Any]]
    shared: bool
    is_file: bool = False
    partial: bool = False
    age: tuple[Any, ...] = ()  # of a file: what changes when it is written again


def is_path(dataset: Dataset) -> bool:
    """Whether rows are to be read from somewhere, rather than given."""
    return isinstance(dataset, str) or (len(dataset) > 0 and isinstance(dataset[0], str))


def sources_of(dataset: Dataset, split: str, config: str | None, test_path: str | None) -> list[Source]:
    """What `located_rows` reads for a split."""
    if not is_path(dataset):
        rows: Iterable[Any] = dataset
        return [Source("the dataset", enumerate(rows, start=1), shared=False)]
    key, given = ("env.path", dataset) if test_path is None or split != "test" else ("env.test_path", test_path)
    sources = []
    for path in paths_in(given) if isinstance(given, str) else given:
        assert isinstance(path, str)
        found = local_sources(path, split, key) or [_hub_source(path, split, config, key)]
        if key == "env.test_path" and any(source.shared and not source.is_file for source in found):
            raise DataError(f"env.test_path={test_path} has no rows for the split test: give a file")
        sources += found
    return sources


def local_sources(path: str, split: str, key: str, most_bytes: int | None = None) -> list[Source]:
    """The rows of a file or folder on this machine; none for what can only be a hub id.

    With `most_bytes` of a larger file no more than its first row. Raises DataError, naming `key`, for a path that
    holds no rows.
    """
    local = expanded(path)
    if local.is_dir():
        named = next((found for name in TEST_NAMES if (found := _split_files(local, name, key))), [])
        files = _split_files(local, split, key) or (
            named or _split_files(local, "train", key) if split == "test" else []
        )
        if not files:
            raise DataError(
                f"{key}={path} has no {split}.jsonl (nor .json, .csv, .parquet): {_instead_of(local, path, key)}"
            )
        shared = split in ("train", "test") and not named
        return [_read(file, shared, most_bytes) for file in files]
    if local.is_file():
        if local.suffix not in READERS:
            what = "unpack it with gunzip" if local.suffix == ".gz" else "convert it"
            raise DataError(f"{key}={local} is no {', '.join(READERS)} file: {what}, or {INSTEAD}")
        if split not in ("train", "test"):
            raise DataError(f"{key}={local} is one file, which has train and test: env.split={split} needs a folder")
        return [_read(local, True, most_bytes, is_file=True)]
    if local.exists():
        raise DataError(f"{key}={local} is neither a file nor a folder: write its rows to a file, or {INSTEAD}")
    if not _HUB_ID.fullmatch(path) or local.suffix in READERS or path.startswith("."):
        raise DataError(f"{key}={path} does not exist: {INSTEAD}")
    return []


def _read(file: Path, shared: bool, most_bytes: int | None, *, is_file: bool = False) -> Source:
    rows = READERS[file.suffix](file)
    partial = most_bytes is not None and file.stat().st_size > most_bytes
    found = file.stat()
    age = (str(file), found.st_size, found.st_mtime_ns)
    return Source(str(file), islice(rows, 1) if partial else rows, shared, is_file, partial, age)


def _hub_source(path: str, split: str, config: str | None, key: str) -> Source:
    rows, shared = _fetch(path, split, config, key)
    return Source(f"{path} ({split}) on the hub", enumerate(rows, start=1), shared, age=(path, config, shared))


def _split_files(folder: Path, split: str, key: str) -> list[Path]:
    """The file named after a split; or its parts, as the hub names them (train-00000-of-00002.parquet)."""
    files = [file for suffix in READERS if (file := folder / f"{split}{suffix}").is_file()]
    if len(files) > 1:
        names = " and ".join(file.name for file in files)
        raise DataError(f"{key}={folder} has {names}, and only one can be the split {split}: remove the others")
    parts = (sorted(below.glob(f"{glob.escape(split)}-*-of-*")) for below in (folder, folder / "data"))
    return files or next((found for part in parts if (found := [f for f in part if f.suffix in READERS])), [])


def _instead_of(folder: Path, path: str, key: str) -> str:
    """What to do about a folder without the file of a split."""
    if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
        return f"it is a model, for model={path}; {INSTEAD}"
    if (folder / "checkpoints").is_dir():
        return f"it is a run, for model={path}; {INSTEAD}"
    if (folder / "dataset_info.json").is_file():
        return "datasets saved it with save_to_disk: write it again with to_json or to_parquet"
    others = sorted(file for name in ("*", "*/*") for file in folder.glob(name) if file.suffix in READERS)
    splits = sorted({file.stem for file in others if file.parent == folder} - {"train", "test"})
    if splits and key == "env.path":
        return f"give env.path={others[0]}, or a split that it has with env.split={splits[0]}"
    return f"give {key}={others[0]}" if others else f"add it, or {INSTEAD}"


def _fetch(hub_id: str, split: str, config: str | None, key: str) -> tuple[Iterable[Any], bool]:
    """A split of a hub dataset, from the hub or its cache on this machine, and whether it serves for test too."""
    try:
        import datasets
        from huggingface_hub import HfApi
    except ImportError as error:
        raise DataError(
            f"{key}={hub_id} is no local file or folder, and the hub needs the package datasets, which is not "
            f"installed: pip install datasets, or {INSTEAD}"
        ) from error
    reason: Exception | None = None
    try:
        HfApi().dataset_info(hub_id, timeout=PROBE_SECONDS)  # one request: load_dataset retries for half a minute
    except Exception as error:  # noqa: BLE001  httpx, OSError and the hub's errors share no base
        reason = error
    try:
        with _offline(reason is not None):  # an unreachable hub may still have left the dataset in its cache
            splits = datasets.load_dataset(hub_id, config)
    except Exception as error:  # re-raised; the first failure says more than its consequence
        said = " ".join(str(reason or error).split()) or type(reason or error).__name__
        instead = "give env.config=NAME" if said.startswith("Config name is missing") else INSTEAD
        raise DataError(
            f"{key}={hub_id} ({split}) is no file or folder here and the hub does not give it ({said[:160]}): {instead}"
        ) from error
    test = next((name for name in TEST_NAMES if name in splits), None)
    chosen = (test or "train") if split == "test" else split
    if chosen not in splits:
        raise DataError(f"{key}={hub_id} on the hub has no split {chosen}: it has {', '.join(map(str, splits))}")
    return splits[chosen], split in ("train", "test") and test is None


@contextmanager
def _offline(active: bool) -> Iterator[None]:
    """Keep `datasets` from asking the hub: the switch it reads, which an environment variable sets at import."""
    import datasets.config
    import huggingface_hub.constants

    switches: tuple[Any, ...] = (datasets.config, huggingface_hub.constants) if active else ()
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    for switch in switches:
        switch.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value
