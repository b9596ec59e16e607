"""What `--json` prints."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlpost.cli.terminal import StatusLine, print_json, stdout_on_stderr
from rlpost.config.registry import Command, S
from rlpost.errors import ConfigError, RlpostError
from rlpost.runs.reader import read_run
from rlpost.settings.run import RunRequest


def load_training(command: Command[S]) -> Callable[[S, RunRequest], int]:
    """The loop of `command`, rlpost/train/NAME.py, imported: three seconds in which nothing else could say so."""
    with StatusLine("loading torch"):
        return importlib.import_module(f"rlpost.train.{command.name}").train


def train_and_print_json(command: Command[S], settings: S, request: RunRequest) -> int:
    """Train with everything on stderr and the result on stdout; returns the exit code.

    An error other than one of the configuration is told in the result too, before it is raised.
    """
    started, error, exit_code = time.monotonic(), None, 0
    with stdout_on_stderr():
        train = load_training(command)
        try:
            exit_code = train(settings, request)
        except ConfigError:
            raise
        except RlpostError as raised:
            error, exit_code = raised, raised.exit_code
    seconds = time.monotonic() - started
    print_json(run_result(request.folder, exit_code, seconds, str(error) if error is not None else None))
    if error is not None:
        raise error
    return exit_code


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
