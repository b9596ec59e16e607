"""What `rlpost runs tail` prints: the steps of a run, those still to come included."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import Any

from rlpost.cli.columns import output_width
from rlpost.record import MetricsFile, has_evaluation, number
from rlpost.runs.reader import RunRecord, RunState, is_running, read_run
from rlpost.text import printable

POLL_SECONDS = 0.5
RECENT = 8  # steps that the time left is estimated from


def print_tail(run: Path, *, lines: int, follow: bool, as_json: bool) -> None:
    """Print the last `lines` steps of `run`, then, if `follow`, each new one until the run ends."""
    file = MetricsFile(run / "metrics.jsonl")
    as_text = json.dumps if as_json else StepText(read_run(run).total_steps)
    for text in deque((as_text(row) for row in file.new_rows()), maxlen=lines):
        print(text)
    sys.stdout.flush()
    while follow:
        running = is_running(run)  # asked before reading, so that what was written last is read
        for row in file.new_rows():
            print(as_text(row), flush=True)
        if not running:
            break
        time.sleep(POLL_SECONDS)
    record = read_run(run)
    if remark := ending(record, follow=follow):
        print(printable(remark), file=sys.stderr)


class StepText:
    """Metrics rows as the lines that training prints, called in the order of the steps."""

    def __init__(self, total_steps: int | None) -> None:
        self.total_steps = total_steps
        self._recent: deque[float] = deque(maxlen=RECENT)  # seconds that the last steps took

    def __call__(self, row: dict[str, Any]) -> str:
        lines = [line for line in (self._step(row), self._evaluation(row)) if line]
        return "\n".join(lines) or f"step {row['step']}"

    def _step(self, row: dict[str, Any]) -> str:
        from rlpost.screen import clock, step_line

        step, seconds = row["step"], number(row, "time/step")
        if step == 0 or seconds is None:
            return ""
        self._recent.append(seconds)
        total = self.total_steps or step
        figures = {key: math.nan if (value := number(row, key)) is None else value for key in row}
        left = clock(fmean(self._recent) * (total - step))
        return step_line(step, total, figures, left, width=output_width(0) or None)

    def _evaluation(self, row: dict[str, Any]) -> str:
        from rlpost.screen import evaluation_line

        if not has_evaluation(row):
            return ""
        figures = {key: number(row, key) for key in row}
        return evaluation_line(figures, "before training" if row["step"] == 0 else f"after step {row['step']}")


def ending(record: RunRecord, *, follow: bool) -> str:
    """What is to be said after the steps: nothing of a run that is well and not followed."""
    remarks = []
    if not record.metrics:
        remarks.append("no step is recorded yet")
    if record.damaged_lines and record.state is not RunState.running:
        remarks.append(f"{record.damaged_lines} of its metrics lines cannot be read")
    if follow or record.state in (RunState.failed, RunState.killed):
        remarks.append(f"{record.state.value} {record.error}".rstrip())
    return f"{record.folder}: {'; '.join(remarks)}" if remarks else ""
