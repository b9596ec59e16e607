"""What a run records as it goes: the words of log.txt, and metrics.jsonl read back. Imports nothing heavy."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

# what a run says of itself in log.txt
BEGAN = "the run began"
FINISHED = "the run finished"
STOPPED = "the run was stopped by a signal"
FAILED = "the run ended with"
TOTAL_STEPS = "total_steps"  # in environment.json: how many steps there are, which may depend on the data


class Interval(NamedTuple):
    """A measure of an evaluation with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:6.1%} [{self.low:.1%}, {self.high:.1%}]"


def read_metrics(file: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of metrics.jsonl that are whole, and how many lines are not."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [], 0
    lines = [line for line in text.splitlines() if line.strip()]
    rows = [row for line in lines if (row := metrics_row(line)) is not None]
    return rows, len(lines) - len(rows)


def metrics_row(line: str) -> dict[str, Any] | None:
    """One line of metrics.jsonl; None for one that is not whole."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


class MetricsFile:
    """metrics.jsonl as it grows; resuming a run replaces it, and what was read before is not read again."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._inode = 0
        self._offset = 0
        self._read: set[int] = set()  # hashes of the lines that were given out

    def new_rows(self) -> list[dict[str, Any]]:
        """The rows that became whole since the last call."""
        try:
            with self.file.open("rb") as stream:
                status = os.fstat(stream.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset = status.st_ino, 0
                stream.seek(self._offset)
                whole = stream.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        self._offset += len(whole) + 1 if whole else 0
        fresh = [line for line in whole.splitlines() if hash(line) not in self._read]
        self._read.update(map(hash, fresh))
        return [row for line in fresh if (row := metrics_row(line.decode(errors="replace"))) is not None]


def has_evaluation(row: Mapping[str, Any]) -> bool:
    """Whether a metrics row says what an evaluation found."""
    return any(key.startswith("eval/") for key in row)


def number(row: Mapping[str, Any], key: str) -> float | None:
    """A figure of a metrics row; None where there is none, or it was not finite."""
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def interval(row: Mapping[str, Any], key: str = "eval/accuracy_lenient") -> Interval | None:
    """A measure of a metrics row with its interval; None where one of the three is missing."""
    known = [value for end in ("", "_low", "_high") if (value := number(row, key + end)) is not None]
    return Interval(*known) if len(known) == 3 else None
