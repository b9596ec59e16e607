"""Rollouts read back: every completion of a step, a search through many steps, an even spread."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlpost.errors import DataError
from rlpost.runs.rollout_table import SCHEMA
from rlpost.text import first_line

LATER = ("prompt_messages", "part_weights", "restarts")  # columns that the files of older runs lack
TOKEN_COLUMNS = ("token_ids", "log_probs", "mask", "prompt_ids", "trainer_log_probs", "token_versions", "restarts")
LIGHT = [name for name in SCHEMA.names if name not in TOKEN_COLUMNS]
MAPS = frozenset({"reward_parts", "part_weights"})
ROWS_AT_ONCE = 256  # held in memory by a search


def read_rollouts(run: Path, step: int) -> list[dict[str, Any]]:
    """The completions of one step, under the names of `SCHEMA`; maps as dicts.

    Raises DataError if the file is damaged, not rlpost's or empty, or has a null in a column that a row needs.
    """
    return read_table(_file(run, step))


def read_table(file: Path) -> list[dict[str, Any]]:
    """The completions in a table of rollouts; see `read_rollouts`."""
    return [row for batch in _pieces(file, SCHEMA.names) for row in _as_dicts(batch)]


def read_chosen(
    run: Path, step: int, choose: Callable[[list[dict[str, Any]]], Sequence[int]]
) -> tuple[list[dict[str, Any]], int]:
    """The completions of a step at the places that `choose` returns, and how many there are.

    `choose` is given all of them without their lists of tokens, which are most of the file, but with `surprise`, the
    mean -log µ of the sampled tokens. Raises as `read_rollouts`.
    """
    table = pa.Table.from_batches(list(_pieces(_file(run, step), SCHEMA.names)))
    light = list(_as_dicts(table.select(LIGHT)))
    for row, surprise in zip(light, _surprises(table), strict=True):
        row["surprise"] = surprise
    places = list(choose(light))
    chosen = zip(_as_dicts(table.take(places)), places, strict=True)
    return [{**row, "surprise": light[place]["surprise"]} for row, place in chosen], len(light)


def count_completions(run: Path, steps: Sequence[int]) -> int:
    """How many completions the files of `steps` hold; a damaged file counts none."""
    total = 0
    for step in steps:
        with contextlib.suppress(OSError, pa.ArrowException):
            total += pq.read_metadata(_file(run, step)).num_rows
    return total


@dataclass(frozen=True)
class Wanted:
    """The completions that a search looks for."""

    text: str = ""  # in the prompt or in one of the replies, in any case
    rewards: tuple[float, float] | None = None  # least and greatest; a failed reward is in no range
    finish_reason: str | None = None
    group: int | None = None


def search(run: Path, steps: Sequence[int], wanted: Wanted, limit: int) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """The first `limit` completions that are `wanted`, in the order of `steps`, and how many each step has.

    Files are read piece by piece, and only completions that are returned become Python objects. Of the lists of
    tokens rows have `mask` alone. Raises DataError if a file cannot be read.
    """
    rows: list[dict[str, Any]] = []
    counts: dict[int, int] = {}
    for step in steps:
        for batch in _pieces(_file(run, step), [*LIGHT, "mask"], "; leave the step out with --step"):
            found = batch.filter(_is_wanted(batch, wanted))
            if found.num_rows:
                counts[step] = counts.get(step, 0) + found.num_rows
                rows += _as_dicts(found.slice(0, max(0, limit - len(rows))))
    return rows, counts


def spread_of(run: Path, step: int, count: int) -> list[dict[str, Any]]:
    """At most `count` completions of a step, evenly spaced from the best to the worst; the same ones every time.

    Completions whose reward failed count as the worst. Empty for a step without completions.
    """
    if not _file(run, step).is_file():
        return []
    rows, _ = search(run, [step], Wanted(), sys.maxsize)
    rows.sort(key=lambda row: (row["reward"] is None, -(row["reward"] or 0.0), row["group"], row["sample"]))
    count = min(count, len(rows))
    return [rows[round(i * (len(rows) - 1) / max(1, count - 1))] for i in range(count)]


def figures_of_groups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of each group of completions, in the order of the groups' numbers; None where every reward failed."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["group"], row["sample"])):
        groups.setdefault(row["group"], []).append(row)
    found = []
    for number, its in groups.items():
        rewards = [row["reward"] for row in its if row["reward"] is not None]
        right = [row["accuracy_lenient"] for row in its if row["accuracy_lenient"] is not None]
        found.append(
            {
                "group": number,
                "size": len(its),
                "reward_mean": fmean(rewards) if rewards else None,
                "reward_std": spread(rewards) if rewards else None,
                "reward_min": min(rewards, default=None),
                "reward_max": max(rewards, default=None),
                "right": fmean(right) if right else None,
                "tokens": fmean(sum(row["mask"]) for row in its),
                "cut": sum(row["finish_reason"] == "length" for row in its),
                "prompt": its[0]["prompt"],
            }
        )
    return found


def spread(rewards: Sequence[float]) -> float:
    """The standard deviation of rewards, as `reward/std` of metrics.jsonl."""
    return stdev(rewards) if len(rewards) > 1 else 0.0


# Reading


def _as_dicts(rows: pa.RecordBatch | pa.Table) -> Iterator[dict[str, Any]]:
    """Rows as their reader wants them: maps as dicts."""
    for row in rows.to_pylist():
        for name in MAPS & row.keys():
            row[name] = dict(row[name] or [])
        if "restarts" in row:
            row["restarts"] = row["restarts"] or []
        yield row


def _surprises(table: pa.Table) -> list[float]:
    """The mean -log µ of each row's sampled tokens; 0 for a row without any."""
    log_probs, mask = (table[name].combine_chunks() for name in ("log_probs", "mask"))
    lengths = np.diff(log_probs.offsets.to_numpy())
    rows = np.repeat(np.arange(len(lengths)), lengths)
    sampled = mask.flatten().to_numpy(zero_copy_only=False)
    counts = np.bincount(rows, weights=sampled, minlength=len(lengths))
    sums = np.bincount(rows, weights=np.where(sampled, -log_probs.flatten().to_numpy(), 0.0), minlength=len(lengths))
    return (sums / np.maximum(counts, 1)).tolist()


def _is_wanted(batch: pa.RecordBatch, wanted: Wanted) -> pa.BooleanArray:
    """For each row of `batch` whether it is wanted."""
    from pyarrow import compute  # 40 ms that a training does not need

    pc: Any = compute  # whose functions type checkers do not see
    kept = [pa.array([True] * batch.num_rows)]
    if wanted.text:
        turns = batch["turns"]
        held = [pc.match_substring(batch[name], wanted.text, ignore_case=True) for name in ("prompt", "completion")]
        matches = pc.match_substring(turns.flatten().field("content"), wanted.text, ignore_case=True)
        speaking = pc.unique(pc.list_parent_indices(turns).filter(matches))
        numbers = pa.array(range(batch.num_rows), speaking.type)
        kept.append(pc.or_kleene(pc.or_kleene(*held), pc.is_in(numbers, value_set=speaking)))
    if wanted.rewards is not None:
        least, most = wanted.rewards
        kept += [pc.greater_equal(batch["reward"], least), pc.less_equal(batch["reward"], most)]
    for name in ("finish_reason", "group"):
        if (value := getattr(wanted, name)) is not None:
            kept.append(pc.equal(batch[name], value))
    return functools.reduce(pc.and_, kept)


def _pieces(file: Path, columns: Sequence[str], advice: str = "") -> Iterator[pa.RecordBatch]:
    """Pieces of a file, in order, under the types of `SCHEMA`; `advice` ends the message of one that is damaged."""
    schema = pa.schema([SCHEMA.field(name) for name in columns])
    try:
        with pq.ParquetFile(file) as parquet:
            there = set(parquet.schema_arrow.names)
            for batch in parquet.iter_batches(ROWS_AT_ONCE, columns=list(columns)):
                for name in [name for name in columns if name in LATER and name not in there]:
                    batch = batch.append_column(name, pa.nulls(batch.num_rows))
                piece = batch.select(list(columns)).cast(schema)
                piece.validate(full=True)  # finds text that is not UTF-8 here, where the file is known
                yield piece
    except (OSError, pa.ArrowException, KeyError) as error:
        raise DataError(f"{file} cannot be read: {first_line(error)}{advice}") from error


def _file(run: Path, step: int) -> Path:
    return run / "rollouts" / f"step-{step:06d}.parquet"
