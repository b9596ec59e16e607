"""Rows of a dataset: a local file, a folder of splits, or a dataset of the hub.

The only module that imports `datasets`, and it does so for hub ids alone.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rlpost.errors import DataError
from rlpost.home import expanded
from rlpost.nearest import did_you_mean, nearest

Row = dict[str, Any]
Complaint = tuple[str, str]  # (field, what is wrong with it)
PROBE_SECONDS = 10  # longest wait for the hub's first answer
HELD_OUT = 0.1  # share of the prompts kept for test where that split has no rows of its own

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_INSTEAD = "give env.path=<folder with train.jsonl and test.jsonl>"


def located_rows(
    dataset: str | Sequence[Mapping[str, Any]],
    split: str,
    required: Sequence[str] = ("question", "answer"),
    limit: int | None = None,
    *,
    config: str | None = None,
    check: Callable[[Row], Complaint | None] | None = None,
    held_out: float = HELD_OUT,
    test_path: str | None = None,
    prompt: Callable[[Row], str] | None = None,
) -> list[tuple[str, Row]]:
    """The first `limit` rows (None: all) of a split, each with non-empty strings under `required`.

    Each comes with its place: "train.jsonl, row 3".

    `dataset` is a sequence of rows, which serve either split, or a path: a .jsonl, .json, .csv or
    .parquet file, a folder with one such file named after each split, or a hub id, whose
    configuration `config` names. `test_path`, likewise, is where the split `test` is instead. Where
    `test` has no rows of its own it is a share `held_out` of the others, which `train` then leaves
    out: a row's `prompt` (None: its first required field) alone decides, so that no prompt is on both
    sides. `check` returns the field and the fault of a row it cannot accept. Raises DataError naming
    file, row (from 1; the line of a .jsonl or .csv file) and field.
    """
    if isinstance(dataset, str):
        key, place = ("env.path", dataset) if test_path is None or split != "test" else ("env.test_path", test_path)
        source = local_source(place, split, key) or _hub_source(place, split, config, key)
        if key == "env.test_path" and source.shared and not source.is_file:
            raise DataError(f"env.test_path={test_path} has no rows for the split test: give a file")
    else:
        source = Source("the dataset", enumerate(dataset, start=1), shared=False)
    divided = source.shared and test_path is None
    rows = []
    for number, row in source.numbered if divided else islice(source.numbered, limit):
        where = f"{source.name}, row {number}"
        complaint = text_complaint(row, required) or (check(row) if check else None)
        if complaint:
            raise DataError(f"{where}, field {complaint[0]!r}: {complaint[1]}")
        rows.append((where, dict(row)))
    if not rows and isinstance(dataset, str):
        raise DataError(f"{source.name} holds no rows: {_INSTEAD}, one JSON object a line")
    if not divided:
        return rows
    prompts = [prompt(row) if prompt else row[required[0]] for _, row in rows]
    kept = [
        row for row, is_test in zip(rows, held_out_of(prompts, held_out), strict=True) if is_test == (split == "test")
    ]
    if not kept:
        raise DataError(
            f"{source.name}: env.held_out={held_out:g} of its {len(set(prompts))} different prompts leaves none for "
            f"{split}: change it, or {_INSTEAD}"
        )
    return kept[:limit]


def held_out_of(prompts: Sequence[str], share: float) -> list[bool]:
    """Whether each prompt is held out: a hash of the prompt says so, for about `share` of them.

    With `share` between 0 and 1 and two different prompts there is one on each side at least.
    """
    ranks = [_rank(prompt) for prompt in prompts]
    held_out = {rank for rank in ranks if rank < share}
    if 0 < share < 1 and len(set(ranks)) > 1:
        held_out = held_out - {max(ranks)} | {min(ranks)}
    return [rank in held_out for rank in ranks]


def _rank(prompt: str) -> float:
    """A number in [0, 1), as good as random, that is always the same for the same prompt."""
    digest = hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


@dataclass(frozen=True)
class Source:
    """Numbered rows and what messages call them; `shared` where the splits train and test are both in them.

    `partial` where they are the first row or none, of a file that is larger than was to be read.
    """

    name: str
    numbered: Iterator[tuple[int, Any]]
    shared: bool
    is_file: bool = False
    partial: bool = False


def local_source(path: str, split: str, key: str, most_bytes: int | None = None) -> Source | None:
    """The rows of a file or folder on this machine; None for what can only be a hub id.

    With `most_bytes` of a larger file no more than its first row, and at most so much of it is read. Raises
    DataError, naming `key`, for a path that holds no rows.
    """
    local = expanded(path)
    if local.is_dir():
        file = _split_file(local, split, key) or (_split_file(local, "train", key) if split == "test" else None)
        if file is None:
            raise DataError(
                f"{key}={path} has no {split}.jsonl (nor .json, .csv, .parquet): {_instead_of(local, path, key)}"
            )
        return _read(file, _split_file(local, "test", key) is None, most_bytes)
    if local.is_file():
        if local.suffix not in _READERS:
            raise DataError(f"{key}={local} is no {', '.join(_READERS)} file: convert it, or {_INSTEAD}")
        return _read(local, True, most_bytes, is_file=True)
    if not _HUB_ID.fullmatch(path) or local.suffix in _READERS or path.startswith("."):
        raise DataError(f"{key}={path} does not exist: {_INSTEAD}")
    return None


def _read(file: Path, shared: bool, most_bytes: int | None, *, is_file: bool = False) -> Source:
    if most_bytes is None or file.stat().st_size <= most_bytes:
        return Source(str(file), _READERS[file.suffix](file, None), shared, is_file)
    return Source(str(file), islice(_READERS[file.suffix](file, most_bytes), 1), shared, is_file, partial=True)


def _hub_source(path: str, split: str, config: str | None, key: str) -> Source:
    rows, shared = _fetch(path, split, config, key)
    return Source(f"{path} ({split}) on the hub", enumerate(rows, start=1), shared)


def _split_file(folder: Path, split: str, key: str) -> Path | None:
    files = [f for suffix in _READERS if (f := folder / f"{split}{suffix}").is_file()]
    if len(files) > 1:
        names = " and ".join(file.name for file in files)
        raise DataError(f"{key}={folder} has {names}, and only one can be the split {split}: remove the others")
    return files[0] if files else None


def _instead_of(folder: Path, path: str, key: str) -> str:
    """What to do about a folder without the file of a split."""
    if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
        return f"it is a model, for model={path}; {_INSTEAD}"
    if (folder / "checkpoints").is_dir():
        return f"it is a run, for model={path}; {_INSTEAD}"
    if (folder / "dataset_info.json").is_file():
        return "datasets saved it with save_to_disk: write it again with to_json or to_parquet"
    others = sorted(file for name in ("*", "*/*") for file in folder.glob(name) if file.suffix in _READERS)
    return f"give {key}={others[0]}" if others else f"add it, or {_INSTEAD}"


def text_complaint(row: Any, required: Sequence[str]) -> Complaint | None:
    """The first required field that is missing, no text or blank."""
    for field in required:
        if not isinstance(row, Mapping):
            return field, f"the row is no object of named fields but {type(row).__name__}"
        if field not in row:
            return field, missing(field, row)
        if not isinstance(row[field], str):
            return field, f"must be text, and is {type(row[field]).__name__}"
        if not row[field].strip():
            return field, "is empty"
    return None


def missing(field: str, row: Mapping[str, Any]) -> str:
    """What to say of a row without `field`: the nearest field it has, and all of them."""
    near = nearest(field, map(str, row))
    return f"missing{did_you_mean(near)}{'' if near else ';'} the row has {', '.join(map(str, row)) or 'no fields'}"


def _read_jsonl(path: Path, most_bytes: int | None) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_text(path, most_bytes).split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise DataError(f"{path}, line {number} is not JSON ({error}): correct or remove the line") from error


def _read_json(path: Path, most_bytes: int | None) -> Iterator[tuple[int, Any]]:
    text = _text(path, most_bytes)
    if most_bytes is not None:  # a list is whole or it is none
        return
    try:
        rows = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}): correct it, or write one object a line as .jsonl") from error
    if not isinstance(rows, list):
        raise DataError(f"{path} holds a {type(rows).__name__} at its top: it must be a list of objects")
    yield from enumerate(rows, start=1)


def _read_csv(path: Path, most_bytes: int | None) -> Iterator[tuple[int, Any]]:
    _check_separator(path, text := _text(path, most_bytes))
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)  # a record ends at \n or \r alone
    try:
        for row in reader:
            if None in row:
                raise DataError(f"{path}, row {reader.line_num} has more cells than the header has names")
            yield reader.line_num, row
    except csv.Error as error:
        raise DataError(f"{path}, row {reader.line_num} is not CSV ({error}): correct or remove it") from error


def _check_separator(path: Path, text: str) -> None:
    """Raise DataError for a header that other signs than commas divide, as spreadsheets of many countries write it."""
    header = text.partition("\n")[0]
    for mark, name in (";", "semicolons"), ("\t", "tabs"):
        if mark in header and "," not in header:
            columns = ", ".join(part.strip().strip('"') for part in header.split(mark)[:5])
            raise DataError(
                f"{path} has {name} between its columns ({columns}): save it with commas, or as {path.stem}.jsonl"
            )


def _read_parquet(path: Path, most_bytes: int | None) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        if most_bytes is None:
            rows = pyarrow.parquet.read_table(path).to_pylist()
        else:
            first = next(pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1), None)
            rows = [] if first is None else first.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({error}): write it again, or {_INSTEAD}") from error
    yield from enumerate(rows, start=1)


_READERS: dict[str, Callable[[Path, int | None], Iterator[tuple[int, Any]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _text(path: Path, most_bytes: int | None) -> str:
    """The file, or its whole lines within `most_bytes`, as text without a byte order mark.

    Raises DataError where it is unreadable or no UTF-8.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(-1 if most_bytes is None else most_bytes)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check its permissions") from error
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(content, final=most_bytes is None)
        if "\0" in text:
            raise UnicodeDecodeError("utf-8", content, content.index(0), content.index(0) + 1, "a zero byte")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        likely = "UTF-16" if b"\0" in content[:1000] else "Windows-1252 or Latin-1"
        raise DataError(
            f"{path}, line {line} is not UTF-8 (byte {error.start}), but likely {likely}: save the file as UTF-8"
        ) from error
    whole = text if most_bytes is None else text[: text.rfind("\n") + 1]
    return whole.replace("\r\n", "\n")


def _fetch(hub_id: str, split: str, config: str | None, key: str) -> tuple[Iterable[Any], bool]:
    """A split of a hub dataset, from the hub or its cache on this machine, and whether it serves for test too."""
    try:
        import datasets
        from huggingface_hub import HfApi
    except ImportError as error:
        raise DataError(
            f"{key}={hub_id} is no local file or folder, and the hub needs the package datasets, which is not "
            f"installed: pip install datasets, or {_INSTEAD}"
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
        instead = "give env.config=NAME" if said.startswith("Config name is missing") else _INSTEAD
        raise DataError(
            f"{key}={hub_id} ({split}) is no file or folder here and the hub does not give it ({said[:160]}): {instead}"
        ) from error
    chosen = split if split in splits or split != "test" else "train"
    if chosen not in splits:
        raise DataError(f"{key}={hub_id} on the hub has no split {chosen}: it has {', '.join(map(str, splits))}")
    return splits[chosen], "test" not in splits


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
