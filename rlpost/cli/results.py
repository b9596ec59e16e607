"""What `--json` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlpost.runs.reader import read_run


def run_result(folder: Path, exit_code: int, seconds: float, error: str | None = None) -> dict[str, Any]:
    """How a run ended, from its metrics.jsonl, under the names used there.

    `metrics` are those of the last step, `evaluation_before` and `evaluation_after` the held-out
    figures before the first step and of the latest evaluation; each is None where there is none.
    `seconds` is the time of this attempt, set-up included.
    """
    record = read_run(folder)
    steps = [row for row in record.metrics if row["step"] > 0]
    return {
        "folder": str(folder),
        "exit_code": exit_code,
        "error": error,
        "steps": record.steps_done,
        "seconds": round(seconds, 1),
        "metrics": _part(steps[-1], evaluation=False) if steps else None,
        "evaluation_before": _part(record.evaluation(before=True), evaluation=True),
        "evaluation_after": _part(record.evaluation(before=False), evaluation=True),
    }


def _part(row: dict[str, Any] | None, *, evaluation: bool) -> dict[str, Any] | None:
    """The evaluation's figures of a metrics row, or all the others."""
    if row is None:
        return None
    return {key: value for key, value in row.items() if key != "step" and key.startswith("eval/") == evaluation}
