"""Rows of a dataset: a local file, a folder of splits, or a dataset of the hub.

The only module that imports `datasets`, and it does so for hub ids alone.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from rlpost.errors import DataError
from rlpost.home import expanded

Row = dict[str, Any]
Complaint = tuple[str, str]  # (field, what is wrong with it)
PROBE_SECONDS = 10  # longest wait for the hub's first answer

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
) -> list[Row]:
    """The first `limit` rows (None: all) of a split, each with non-empty strings under `required`.

    `path` is a .jsonl, .json, .csv or .parquet file (the split is then whatever the file holds), a
    folder with one such file named after each split, or a hub id, whose configuration `config`
    names. `check` returns the field and the fault of a row it cannot accept. Raises DataError
    naming file, row (from 1; the line of a .jsonl or .csv file) and field.
    """
    source, numbered = _open(path, split, config)
    rows = []
    for number, row in islice(numbered, limit):
        complaint = _complaint(row, required) or (check(row) if check else None)
        if complaint:
            raise DataError(f"{source}, row {number}, field {complaint[0]!r}: {complaint[1]}")
        rows.append(dict(row))
    if not rows:
        raise DataError(f"{source} holds no rows: {_INSTEAD}, one JSON object a line")
    return rows


def _open(path: str, split: str, config: str | None) -> tuple[str, Iterator[tuple[int, Any]]]:
    """What to call the source in messages, and its rows, numbered."""
    local = expanded(path)
    if local.is_dir():
        found = _split_file(local, split)
        if found is None:
            raise DataError(f"env.path={path} has no {split}.jsonl (nor .json, .csv, .parquet): add it, or {_INSTEAD}")
        local = found
    if local.is_file():
        if local.suffix not in _READERS:
            raise DataError(f"{local} is no {', '.join(_READERS)} file: convert it, or {_INSTEAD}")
        return str(local), _READERS[local.suffix](local)
    if not _HUB_ID.fullmatch(path) or local.suffix in _READERS or path.startswith("."):
        raise DataError(f"env.path={path} does not exist: {_INSTEAD}")
    return f"{path} ({split}) on the hub", enumerate(_fetch(path, split, config), start=1)


def _split_file(folder: Path, split: str) -> Path | None:
    return next((f for suffix in _READERS if (f := folder / f"{split}{suffix}").is_file()), None)


def _complaint(row: Any, required: Sequence[str]) -> Complaint | None:
    """The first required field that is missing, no text or blank."""
    for field in required:
        if not isinstance(row, Mapping):
            return field, f"the row is no object of named fields but {type(row).__name__}"
        if field not in row:
            return field, f"missing; the row has {', '.join(map(str, row)) or 'no fields'}"
        if not isinstance(row[field], str):
            return field, f"must be text, and is {type(row[field]).__name__}"
        if not row[field].strip():
            return field, "is empty"
    return None


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
    reader = csv.DictReader(_text(path).splitlines(keepends=True), strict=True)
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


def _fetch(hub_id: str, split: str, config: str | None) -> Iterable[Any]:
    """A split of a hub dataset, from the hub or its cache on this machine."""
    try:
        import datasets
        from huggingface_hub import HfApi
    except ImportError as error:
        raise DataError(
            f"env.path={hub_id} is no local file or folder, and the hub needs the package datasets, which is not "
            f"installed: pip install datasets, or {_INSTEAD}"
        ) from error
    reason: Exception | None = None
    try:
        HfApi().dataset_info(hub_id, timeout=PROBE_SECONDS)  # one request: load_dataset retries for half a minute
    except Exception as error:  # noqa: BLE001  httpx, OSError and the hub's errors share no base
        reason = error
    try:
        with _offline(reason is not None):  # an unreachable hub may still have left the split in its cache
            return datasets.load_dataset(hub_id, config, split=split)
    except Exception as error:  # re-raised; the first failure says more than its consequence
        said = str(reason or error).strip().splitlines() or [type(reason or error).__name__]
        raise DataError(
            f"env.path={hub_id} ({split}) is no file or folder here and the hub does not give it ({said[0]}): "
            f"{_INSTEAD}"
        ) from error


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
