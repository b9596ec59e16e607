"""Rows of a dataset: read from local files, folders of splits or the hub, checked, and held out for test.

The only module that imports `datasets`, and it does so for hub ids alone.
"""

from __future__ import annotations

import glob
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rlpost.data.demonstrations import Demonstration
from rlpost.data.faults import BadRows, FormatError
from rlpost.data.order import HASHES, HELD_OUT, Digests, digests_of, hash_of, hashes_held_out
from rlpost.data.rows import READERS, PackedRows, Row, without_nulls
from rlpost.errors import DataError
from rlpost.files import expanded, paths_in
from rlpost.text import counted

PROBE_SECONDS = 10  # timeout of the first request to the hub
TEST_NAMES = ("test", "validation", "valid", "val", "dev")  # names of the test split; the first that exists is used
INSTEAD = "give env.path=<folder with train.jsonl and test.jsonl>"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
Dataset = str | Sequence[str] | Sequence[Mapping[str, Any]]


Reader = Callable[[Row], str]  # reads a row as its environment does: its prompt as text, FormatError where it is bad


# Rows of a split


def located_rows(
    dataset: Dataset,
    split: str,
    reader: Reader,
    limit: int | None = None,
    *,
    config: str | None = None,
    prepare: Callable[[Row], Row] = dict,
    held_out: float = HELD_OUT,
    test_path: str | None = None,
    max_bad_share: float | None = None,
) -> LocatedRows:
    """The first `limit` rows (None: all) of a split, each as `prepare` makes it of one that `reader` can read.

    `dataset` is a sequence of rows, which serve either split, or a path: a .jsonl, .json, .csv or
    .parquet file, a folder with one such file named after each split, or a hub id, whose
    configuration `config` names; several paths are read one after the other. `test_path`, likewise,
    holds the split `test` instead; `validation`, or another of `TEST_NAMES`, serves as `test` if that is missing.
    If there is none of them, `test` is a share `held_out` of the rows, which `train` then leaves out: a row's
    prompt alone decides, so that no prompt is in both.

    Raises DataError with the file, row (from 1) and field of every bad row; if they are at most `max_bad_share` of
    the rows, they are left in `bad`, those of a file of both splits in that of `train`.
    """
    sources = sources_of(dataset, split, config, test_path)
    name = sources[0].name if len(sources) == 1 else f"{len(sources)} files"
    divided = test_path is None and any(source.shared for source in sources)
    of_test = divided and split == "test"
    share = held_out if divided else 0.0
    rows = LocatedRows(PackedRows() if is_path(dataset) else [])
    rows.read(sources, reader, prepare, None if limit is None else _Enough(limit, share, of_test))
    if rows.bad.share > (max_bad_share or 0.0):
        raise rows.bad.error(name, max_bad_share)
    if not rows.bad.total and is_path(dataset):
        raise DataError(f"{name} holds no rows: give a file with one JSON object a line")
    if not divided:
        return rows
    chosen = [number for number, held in enumerate(hashes_held_out(rows.prompts, held_out)) if held == of_test]
    if not chosen and len(rows):
        prompts = counted(len(set(rows.prompts)), "different prompt")
        raise DataError(
            f"{name}: env.held_out={held_out:g} of its {prompts} leaves none for {split}: change it, or {INSTEAD}"
        )
    part = rows.only(chosen[:limit])
    if of_test:
        part.bad = BadRows()
    return part


class LocatedRows(Sequence[Row]):
    """Rows with their places: each row a new dict, each place like "train.jsonl, row 3"; and the bad ones.

    A row's number counts from 1; in a .jsonl or .csv file it is the row's line.
    """

    def __init__(self, rows: PackedRows | list[Row]) -> None:
        self.rows = rows
        self.files: list[str] = []
        self.places: list[array[int]] = [array("I"), array("q")]  # of each row: index in `files`, number
        self.prompts = array("Q")  # a hash of the prompt of each row: equal for copies in other case or spacing
        self.bad = BadRows()

    def read(
        self,
        sources: Sequence[Source],
        reader: Reader,
        prepare: Callable[[Row], Row],
        enough: Callable[[int], bool] | None = None,
    ) -> None:
        """Add the good rows; ends as soon as `enough` is true of a prompt's hash."""
        for source in sources:
            self.files.append(source.name)
            for number, row, prompt in good_rows(source, reader, self.bad):
                try:
                    self.rows.append(prepare(row))
                except FormatError as error:
                    self.bad.add(f"{source.name}, row {number}", str(error))
                    continue
                self.places[0].append(len(self.files) - 1)
                self.places[1].append(number)
                self.prompts.append(hash_of(prompt))
                if enough is not None and enough(self.prompts[-1]):
                    return

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        """The row `number`, from 0; of a slice a list of them."""
        if isinstance(number, slice):
            return [self.rows[each] for each in range(len(self))[number]]
        return self.rows[number]

    def where(self, number: int) -> str:
        """The place of the row `number`."""
        file, row = (column[number] for column in self.places)
        return f"{self.files[file]}, row {row}"

    def located(self) -> Iterator[tuple[str, Row]]:
        """Each row with its place."""
        return ((self.where(number), self[number]) for number in range(len(self)))

    def only(self, numbers: Sequence[int]) -> LocatedRows:
        """The rows with these numbers."""
        rows = self.rows
        part = LocatedRows(rows.only(numbers) if isinstance(rows, PackedRows) else [rows[n] for n in numbers])
        part.files, part.bad = self.files, self.bad
        part.places = [array(column.typecode, [column[n] for n in numbers]) for column in self.places]
        part.prompts = array("Q", [self.prompts[n] for n in numbers])
        return part

    @property
    def digests(self) -> Digests:
        """One number a row, equal for equal rows."""
        return self.rows.digests if isinstance(self.rows, PackedRows) else digests_of(self.rows)


class ShownRows(Sequence[Demonstration]):
    """The demonstration, or pair, in each of `rows`, read when it is asked for; `not_used`: what is not, in words."""

    def __init__(self, rows: LocatedRows, read: Callable[[str, Row], Demonstration], not_used: str = "") -> None:
        self.rows, self.read, self.not_used = rows, read, not_used
        self.wrong = [Demonstration(bad.where, wrong=bad.reason) for bad in rows.bad.found]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        """The demonstration in the row `number`, from 0."""
        return self.read(self.rows.where(number), self.rows[number])

    @property
    def digests(self) -> Digests:
        """One number a row, equal for equal rows."""
        return self.rows.digests

    def in_turn(self) -> Iterator[Demonstration]:
        """The malformed ones, then the others."""
        return chain(self.wrong, self)


def first_row(dataset: Dataset, split: str, config: str | None = None) -> Row | None:
    """The first row of a split that is an object; None if there is none."""
    rows = (row for source in sources_of(dataset, split, config, None) for _, row in source.numbered)
    return next((dict(row) for row in rows if isinstance(row, Mapping)), None)


def good_rows(source: Source, reader: Reader, bad: BadRows, most: int | None = None) -> Iterator[tuple[int, Row, str]]:
    """The good ones of the first `most` rows, each with its number and prompt; `bad` counts all of them."""
    for number, row in islice(source.numbered, most):
        bad.total += 1
        try:
            if isinstance(row, FormatError):
                raise row
            prompt = reader(row)
        except FormatError as error:
            bad.add(f"{source.name}, row {number}", str(error))
        else:
            yield number, row, prompt


# What is held out


class _Enough:
    """Whether no later row can change which are the first `limit`, of the rows held out or of the others.

    A row changes sides only if all prompts would be on one side: see `hashes_held_out`.
    """

    def __init__(self, limit: int, share: float, of_held_out: bool) -> None:
        self.limit, self.share, self.of_held_out = limit, share, of_held_out
        self.below = self.above = 0

    def __call__(self, prompt: int) -> bool:
        """Count the hash of one more prompt."""
        if prompt < self.share * HASHES:
            self.below += 1
        else:
            self.above += 1
        one_sided = 0 < self.share < 1 and not (self.below and self.above)
        return not one_sided and (self.below if self.of_held_out else self.above) >= self.limit


# Where rows come from


@dataclass(frozen=True)
class Source:
    """Numbered rows and their name in messages; `shared` if they hold both splits, train and test."""

    name: str
    numbered: Iterable[tuple[int, Any]]
    shared: bool
    size: int = 0  # bytes of the file


def is_path(dataset: Dataset) -> bool:
    """Whether `dataset` names a place to read rows from, rather than holding them."""
    return isinstance(dataset, str) or (len(dataset) > 0 and isinstance(dataset[0], str))


def sources_of(dataset: Dataset, split: str, config: str | None, test_path: str | None) -> list[Source]:
    """The sources that `located_rows` reads for a split."""
    if not is_path(dataset):
        rows: Iterable[Any] = dataset
        return [Source("the dataset", enumerate(rows, start=1), shared=False)]
    key, given = ("env.path", dataset) if test_path is None or split != "test" else ("env.test_path", test_path)
    sources = []
    for path in paths_in(given) if isinstance(given, str) else given:
        assert isinstance(path, str)
        found = local_sources(path, split, key) or [_hub_source(path, split, config, key)]
        sources += found
    return sources


def local_sources(path: str, split: str, key: str) -> list[Source]:
    """The rows of a file or folder on this machine; none if `path` can only be a hub id.

    Raises DataError, naming `key`, for a path without rows.
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
        return [_source_of(file, shared) for file in files]
    if local.is_file():
        if local.suffix not in READERS:
            what = "unpack it with gunzip" if local.suffix == ".gz" else "convert it"
            raise DataError(f"{key}={local} is not a {', '.join(READERS)} file: {what}, or {INSTEAD}")
        if split not in ("train", "test"):
            raise DataError(f"{key}={local} is one file, which has train and test: env.split={split} needs a folder")
        return [_source_of(local, True)]
    if not _HUB_ID.fullmatch(path) or local.suffix in READERS or path.startswith("."):
        raise DataError(f"{key}={path} does not exist: {INSTEAD}")
    return []


def _source_of(file: Path, shared: bool) -> Source:
    return Source(str(file), READERS[file.suffix](file), shared, file.stat().st_size)


def _split_files(folder: Path, split: str, key: str) -> list[Path]:
    """The file named after a split; or its parts, as the hub names them (train-00000-of-00002.parquet)."""
    files = [file for suffix in READERS if (file := folder / f"{split}{suffix}").is_file()]
    if len(files) > 1:
        names = " and ".join(file.name for file in files)
        raise DataError(f"{key}={folder} has {names}, and only one can be the split {split}: remove the others")
    parts = (sorted(below.glob(f"{glob.escape(split)}-*-of-*")) for below in (folder, folder / "data"))
    return files or next((found for part in parts if (found := [f for f in part if f.suffix in READERS])), [])


def _instead_of(folder: Path, path: str, key: str) -> str:
    """The advice about a folder without the file of a split."""
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


def _hub_source(hub_id: str, split: str, config: str | None, key: str) -> Source:
    """A split of a hub dataset, from the hub or its cache on this machine."""
    try:
        import datasets
        from huggingface_hub import HfApi
    except ImportError as error:
        raise DataError(
            f"{key}={hub_id} is not a local file or folder, and the hub needs the package datasets, which is not "
            f"installed: pip install datasets, or {INSTEAD}"
        ) from error
    reason: Exception | None = None
    try:
        HfApi().dataset_info(hub_id, timeout=PROBE_SECONDS)  # one request: load_dataset retries for half a minute
    except Exception as error:  # noqa: BLE001  httpx, OSError and the hub's errors share no base
        reason = error
    try:
        with _offline(reason is not None):  # the dataset may be in the cache
            splits = datasets.load_dataset(hub_id, config)
    except Exception as error:  # re-raised; the first failure explains more
        message = " ".join(str(reason or error).split()) or type(reason or error).__name__
        instead = "give env.config=NAME" if message.startswith("Config name is missing") else INSTEAD
        raise DataError(
            f"{key}={hub_id} ({split}) is not a file or folder here and the hub does not give it "
            f"({message[:160]}): {instead}"
        ) from error
    test = next((name for name in TEST_NAMES if name in splits), None)
    chosen = (test or "train") if split == "test" else split
    if chosen not in splits:
        raise DataError(f"{key}={hub_id} on the hub has no split {chosen}: it has {', '.join(map(str, splits))}")
    shared = split in ("train", "test") and test is None
    found = splits[chosen]
    typed = "Json(" not in repr(getattr(found, "features", ""))  # a column of JSON has the nulls of its rows alone
    rows = map(without_nulls, found) if typed else found
    return Source(f"{hub_id} ({split}) on the hub", enumerate(rows, start=1), shared)


@contextmanager
def _offline(active: bool) -> Iterator[None]:
    """Keep `datasets` from asking the hub, by the switches that HF_HUB_OFFLINE sets at import."""
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
