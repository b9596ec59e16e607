"""Rows of a dataset, read from where they come from, and which of them are held out."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from rlpost.data.complaints import Complaint, Complaints, Malformed, text_complaint
from rlpost.data.demonstrations import Demonstration
from rlpost.data.row_files import TOO_DEEP, Unreadable, is_too_deep
from rlpost.data.row_store import PackedRows, Row, Rows, digests_of
from rlpost.data.sources import INSTEAD, Dataset, Source, is_path, sources_of
from rlpost.errors import DataError

if TYPE_CHECKING:
    from rlpost.data.row_store import Digests

HELD_OUT = 0.1  # share of the prompts kept for test where that split has no rows of its own


class LocatedRows(Rows):
    """Rows and their places: each a new dict, and "train.jsonl, row 3".

    A row's number counts from 1; in a .jsonl or .csv file it is the row's line.
    """

    def __init__(self, rows: Sequence[Row], numbers: Sequence[int], files: Sequence[tuple[int, str]]) -> None:
        self.rows = rows
        self.numbers = numbers
        self.files = files  # where each file's rows begin in `rows`, and its name
        self.chosen: Sequence[int] = range(len(numbers))

    def __len__(self) -> int:
        return len(self.chosen)

    def at(self, number: int) -> Row:
        """See `Rows.at`."""
        return self.rows[self.chosen[number]]

    def where(self, number: int) -> str:
        """The place of the row `number`."""
        place = self.chosen[number]
        _, file = self.files[bisect_right(self.files, place, key=lambda each: each[0]) - 1]
        return f"{file}, row {self.numbers[place]}"

    def located(self) -> Iterator[tuple[str, Row]]:
        """Each row with its place."""
        return ((self.where(number), self[number]) for number in range(len(self)))

    def only(self, numbers: Sequence[int]) -> LocatedRows:
        """The rows with these numbers."""
        rows = LocatedRows(self.rows, self.numbers, self.files)
        rows.chosen = array("q", (self.chosen[number] for number in numbers))
        return rows

    @property
    def digests(self) -> Digests:
        """One number a row, equal for equal rows."""
        digests = self.rows.digests if isinstance(self.rows, PackedRows) else digests_of(self.rows)
        return digests[list(self.chosen)]


class DemonstratedRows(Sequence[Demonstration]):
    """What each of `rows` shows, made with `of` when it is asked for; `wrong` are the malformed ones beside them."""

    def __init__(
        self, rows: LocatedRows, of: Callable[[str, Row], Demonstration], wrong: Sequence[Demonstration] = ()
    ) -> None:
        self.rows, self.of, self.wrong = rows, of, wrong

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        """The demonstration of the row `number`, from 0."""
        return self.of(self.rows.where(number), self.rows[number])

    @property
    def digests(self) -> Digests:
        """One number a row, equal for equal rows."""
        return self.rows.digests

    def in_turn(self) -> Iterator[Demonstration]:
        """The malformed ones, then the others."""
        yield from self.wrong
        yield from self


def located_rows(
    dataset: Dataset,
    split: str,
    required: Sequence[str] = ("question", "answer"),
    limit: int | None = None,
    *,
    config: str | None = None,
    check: Callable[[Row], Complaint | None] | None = None,
    prepare: Callable[[Row], Row] = dict,
    held_out: float = HELD_OUT,
    test_path: str | None = None,
    prompt: Callable[[Row], str] | None = None,
    malformed: Malformed | None = None,
    shared_as: str | None = None,
) -> LocatedRows:
    """The first `limit` rows (None: all) of a split, each with non-empty strings under `required`.

    `dataset` is a sequence of rows, which serve either split, or a path: a .jsonl, .json, .csv or
    .parquet file, a folder with one such file named after each split, or a hub id, whose
    configuration `config` names; several paths are read one after the other. `test_path`, likewise,
    is where the split `test` is instead; `validation`, or another of `TEST_NAMES`, serves as `test`
    where that is missing. Where there is none of them `test` is a share `held_out` of the other rows,
    which `train` then leaves out: a row's `prompt` (None: its first required field) alone decides, so
    that no prompt is on both sides. `check` returns the field and the fault of a
    row it cannot accept; `prepare` makes of one that is right what is kept. A file of both splits is
    read once for the two where `shared_as`, which names all that `check` and `prepare` do, is given both times.

    Raises DataError with the file, row (from 1) and field of every bad row, unless `malformed` takes them.
    """
    sources = sources_of(dataset, split, config, test_path)
    name = sources[0].name if len(sources) == 1 else f"{len(sources)} files"
    divided = test_path is None and any(source.shared for source in sources)
    stops = None if limit is None else (split, limit)  # a reading that stops early serves its own split alone
    key = (shared_as, stops, *(source.age for source in sources)) if divided and shared_as is not None else None
    read = _latest.get(key)
    if read is None:
        told_of = (lambda where, wrong: None) if malformed and divided and split == "test" else malformed
        complaints = Complaints(name, told_of)
        reading = _Reading(required, check, prepare, prompt, limit, held_out, split, divided=divided)
        read = reading.of(sources, complaints, from_path=is_path(dataset))
        _latest.clear()
        if key is not None and not complaints.count:  # bad rows are told each time
            _latest[key] = read
    elif check is not None and len(read[0]):
        check(read[0][0])  # which tells from the first row how all are
    rows, ranks = read
    if not divided:
        return rows
    chosen = array("q", (n for n, is_test in enumerate(_held_out(ranks, held_out)) if is_test == (split == "test")))
    if not chosen and len(rows):
        raise DataError(
            f"{name}: env.held_out={held_out:g} of its {len(set(ranks))} different prompts leaves none for {split}: "
            f"change it, or {INSTEAD}"
        )
    return rows.only(chosen[:limit])


_latest: dict[Any, tuple[LocatedRows, array[float]]] = {}  # the file of both splits that was read last, and its ranks


@dataclass(frozen=True)
class _Reading:
    """How rows are examined and kept: see `located_rows`."""

    required: Sequence[str]
    check: Callable[[Row], Complaint | None] | None
    prepare: Callable[[Row], Row]
    prompt: Callable[[Row], str] | None
    limit: int | None
    held_out: float
    split: str
    divided: bool

    def of(
        self, sources: Sequence[Source], complaints: Complaints, *, from_path: bool
    ) -> tuple[LocatedRows, array[float]]:
        """The rows without a complaint, and where they are divided the rank of each one's prompt; raises as above."""
        kept: PackedRows | list[Row] = PackedRows() if from_path else []
        numbers, ranks = array("q"), array("d")
        files: list[tuple[int, str]] = []
        below = 0  # rows that are held out by their rank
        for source in sources:
            files.append((len(numbers), source.name))
            left = None if self.limit is None or self.divided else self.limit - complaints.rows
            for number, row in examined(source, complaints, kept, left, self.required, self.check, self.prepare):
                numbers.append(number)
                if self.divided:
                    ranks.append(self._rank(row))
                    below += ranks[-1] < self.held_out
                    if self._has_enough(below, len(ranks) - below):
                        break
            else:
                continue
            break
        if complaints.count and complaints.malformed is None:
            raise complaints.error()
        if not complaints.rows and from_path:
            raise DataError(f"{complaints.source} holds no rows: {INSTEAD}, one JSON object a line")
        if isinstance(kept, PackedRows):
            kept.finish()
        return LocatedRows(kept, numbers, files), ranks

    def _has_enough(self, below: int, above: int) -> bool:
        """Whether no later row can change which are the first `limit` of a divided split.

        A row changes sides only where all prompts would be on one side: see `_held_out`.
        """
        if self.limit is None or (0 < self.held_out < 1 and not (below and above)):
            return False
        return (below if self.split == "test" else above) >= self.limit

    def _rank(self, row: Row) -> float:
        prompt = self.prompt(row) if self.prompt else row[self.required[0]] if self.required else ""
        return _rank(prompt)


def first_row(dataset: Dataset, split: str, config: str | None = None) -> Row | None:
    """The first row of a split that is an object, and not nested too deeply; None where there is none."""
    rows = (row for source in sources_of(dataset, split, config, None) for _, row in source.numbered)
    return next((dict(row) for row in rows if isinstance(row, Mapping) and _nesting(row) is None), None)


def examined(
    source: Source,
    complaints: Complaints,
    kept: PackedRows | list[Row],
    most: int | None = None,
    required: Sequence[str] = (),
    check: Callable[[Row], Complaint | None] | None = None,
    prepare: Callable[[Row], Row] = dict,
) -> Iterator[tuple[int, Row]]:
    """The rows without a complaint, of the first `most` of `source`, each with its number and added to `kept`.

    `complaints` counts all rows and is given those of the others.
    """
    for number, row in islice(source.numbered, most):
        complaints.rows += 1
        if isinstance(row, Unreadable):
            complaints.add(source.name, number, ("", row.wrong))
            continue
        wrong = _nesting(row) or text_complaint(row, required) or (check(row) if check else None)
        prepared: Row = row if wrong else prepare(row)
        if wrong := wrong or _keep(kept, prepared):
            complaints.add(source.name, number, wrong)
        else:
            yield number, prepared


def _nesting(row: Any) -> Complaint | None:
    """The first field that is nested too deeply."""
    if not is_too_deep(row):
        return None
    fields = row if isinstance(row, Mapping) else {}
    return next(((str(name), TOO_DEEP) for name, value in fields.items() if is_too_deep(value)), ("", TOO_DEEP))


def _keep(kept: PackedRows | list[Row], row: Row) -> Complaint | None:
    """Add a row; or what is wrong with it, where it cannot be kept."""
    if isinstance(kept, list):
        kept.append(row)
        return None
    wrong = kept.add(row)
    return None if wrong is None else ("", wrong)


def held_out_of(prompts: Sequence[str], share: float) -> list[bool]:
    """Whether each prompt is held out: a hash of the prompt says so, for about `share` of them.

    With `share` between 0 and 1 and two different prompts there is one on each side at least.
    """
    return _held_out([_rank(prompt) for prompt in prompts], share)


def _held_out(ranks: Sequence[float], share: float) -> list[bool]:
    different = set(ranks)
    least, most = (min(different), max(different)) if 0 < share < 1 and len(different) > 1 else (-1.0, 2.0)
    return [rank == least or (rank < share and rank != most) for rank in ranks]


def _rank(prompt: str) -> float:
    """A number in [0, 1), as good as random, that is always the same for the same prompt."""
    digest = hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48
