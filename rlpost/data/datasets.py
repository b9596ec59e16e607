"""Rows of a dataset: a local file, a folder of splits, or a dataset of the hub.

The only module that imports `datasets`, and it does so for hub ids alone.
"""

from __future__ import annotations

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


def load_rows(
    path: str,
    split: str,
    required: Sequence[str] = ("question", "answer"),
    limit: int | None = None,
    *,
    config: str | None = None,
    check: Callable[[Row], Complaint | None] | None = None,
    held_out: float = HELD_OUT,
    test_path: str | None = None,
    prompt: Callable[[Row], str] | None = None,
) -> list[Row]:
    """The rows of `located_rows`, without where they stand."""
    return [
        row
        for _, row in located_rows(
            path,
            split,
            required,
            limit,
            config=config,
            check=check,
            held_out=held_out,
            test_path=test_path,
            prompt=prompt,
        )
    ]


def located_rows(
    path: str,
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

    `path` is a .jsonl, .json, .csv or .parquet file, a folder with one such file named after each
    split, or a hub id, whose configuration `config` names; `test_path`, likewise, is where the split
    `test` is instead. Where `test` has no rows of its own it is a share `held_out` of the others,
    which `train` then leaves out: a row's `prompt` (None: its first required field) alone decides,
    so that no prompt is on both sides. `check` returns the field and the fault of a row it cannot
    accept. Raises DataError naming file, row (from 1; the line of a .jsonl or .csv file) and field.
    """
    if test_path is None:
        source = _open(path, split, config, "env.path")
    elif split == "test":
        source = _open(test_path, split, config, "env.test_path")
        if source.shared and not source.is_file:
            raise DataError(f"env.test_path={test_path} has no rows for the split test: give a file")
    else:
        source = _open(path, split, config, "env.path")
    divided = source.shared and test_path is None
    rows = []
    for number, row in source.numbered if divided else islice(source.numbered, limit):
        where = f"{source.name}, row {number}"
        complaint = _complaint(row, required) or (check(row) if check else None)
        if complaint:
            raise DataError(f"{where}, field {complaint[0]!r}: {complaint[1]}")
        rows.append((where, dict(row)))
    if not rows:
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
class _Source:
    """Numbered rows and what messages call them; `shared` where the splits train and test are both in them."""

    name: str
    numbered: Iterator[tuple[int, Any]]
    shared: bool
    is_file: bool = False


def _open(path: str, split: str, config: str | None, key: str) -> _Source:
    local = expanded(path)
    if local.is_dir():
        file = _split_file(local, split) or (_split_file(local, "train") if split == "test" else None)
        if file is None:
            others = sorted(f.name for f in local.iterdir() if f.suffix in _READERS and f.is_file())
            hint = f"give {key}={local / others[0]}" if others else f"add it, or {_INSTEAD}"
            raise DataError(f"{key}={path} has no {split}.jsonl (nor .json, .csv, .parquet): {hint}")
        return _Source(str(file), _READERS[file.suffix](file), _split_file(local, "test") is None)
    if local.is_file():
        if local.suffix not in _READERS:
            raise DataError(f"{local} is no {', '.join(_READERS)} file: convert it, or {_INSTEAD}")
        return _Source(str(local), _READERS[local.suffix](local), shared=True, is_file=True)
    if not _HUB_ID.fullmatch(path) or local.suffix in _READERS or path.startswith("."):
        raise DataError(f"{key}={path} does not exist: {_INSTEAD}")
    rows, shared = _fetch(path, split, config, key)
    return _Source(f"{path} ({split}) on the hub", enumerate(rows, start=1), shared)


def _split_file(folder: Path, split: str) -> Path | None:
    return next((f for suffix in _READERS if (f := folder / f"{split}{suffix}").is_file()), None)


def _complaint(row: Any, required: Sequence[str]) -> Complaint | None:
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


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise DataError(f"{path}, line {number} is not JSON ({error}): correct or remove the line") from error


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        rows = json.loads(_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}): correct it, or write one object a line as .jsonl") from error
    if not isinstance(rows, list):
        raise DataError(f"{path} holds a {type(rows).__name__} at its top: it must be a list of objects")
    yield from enumerate(rows, start=1)


def _read_csv(path: Path) -> Iterator[tuple[int, Any]]:
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)  # a record ends at \n or \r alone
    try:
        for row in reader:
            if None in row:
                raise DataError(f"{path}, row {reader.line_num} has more cells than the header has names")
            yield reader.line_num, row
    except csv.Error as error:
        raise DataError(f"{path}, row {reader.line_num} is not CSV ({error}): correct or remove it") from error


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({error}): write it again, or {_INSTEAD}") from error
    yield from enumerate(rows, start=1)


_READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _text(path: Path) -> str:
    """The file as text, without a byte order mark. Raises DataError where it is unreadable or no UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check its permissions") from error


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
