"""The curves of a report: their points, the ones left out because they say nothing, and where the time went."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rlpost.record import (
    BEGAN,
    FAILED,
    FINISHED,
    METRICS,
    STOPPED,
    Metric,
    number,
)
from rlpost.runs.reader import RunRecord, RunState

Row = Mapping[str, Any]
Points = list[list[float]]  # [step, value], or [step, value, low, high] with the ends of a 95% interval
NOISE = 1e-9  # share of a curve's largest value below which a value is rounding noise
ZERO = 1e-12  # below it a whole curve is
LEAST_SECONDS = 1e-3  # of a phase that is listed
ONCE = ("time/load", "time/eval")  # not of every step: the table of the time has them
NOT_DRAWN = ("step", "eval/prompts", "eval/rows", "eval/tokens", *ONCE)
OF_FIGURE = ("_low", "_high", "_prompts")  # ends of the keys that belong to a figure of an evaluation
_STAMP = re.compile(
    rf"^(\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d+) [A-Z]+ ({BEGAN}|{FINISHED}|{STOPPED}|{FAILED})?", re.MULTILINE
)


def curves_of(runs: Sequence[RunRecord], story: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
    """Each curve with the points of every run, those of `story` first; and which were left out, in words.

    Left out are lines that are flat in all runs, and lines that repeat an earlier one.
    """
    points = [points_of(run.metrics) for run in runs]
    known = list(dict.fromkeys(key for each in points for key in each))
    order = [*story, *METRICS, *sorted(key for key in known if key not in METRICS)]
    shown: list[dict[str, Any]] = []
    left_out: list[str] = []
    for key in dict.fromkeys(key for key in order if key in known):
        title, unit, _ = words_of_metric(key)
        lines = [each.get(key, []) for each in points]
        is_flat = len({point[1] for line in lines for point in line}) < 2
        if key not in story and (is_flat or any(curve["lines"] == lines for curve in shown)):
            left_out.append(title)
        else:
            shown.append({"key": key, "title": title, "unit": unit, "story": key in story, "lines": lines})
    return shown, f"Left out, flat or equal to another: {', '.join(left_out)}." if left_out else ""


def points_of(metrics: Sequence[Row]) -> dict[str, Points]:
    """The points of every metric; an evaluation's also have the ends of its interval."""
    curves: dict[str, Points] = {}
    for row in metrics:
        for key in row:
            value = number(row, key)
            if key in NOT_DRAWN or value is None or (key.startswith("eval/") and key.endswith(OF_FIGURE)):
                continue
            low, high = number(row, f"{key}_low"), number(row, f"{key}_high")
            ends = [] if low is None or high is None else [low, high]
            curves.setdefault(key, []).append([row["step"], *map(short, [value, *ends])])
    return {key: _without_noise(points) for key, points in curves.items()}


def words_of_metric(key: str) -> Metric:
    """The words for a metric; a reward part has its own name, and any other key stands for itself."""
    if key in METRICS:
        return METRICS[key]
    if key.startswith(("reward/", "eval/reward/")):
        held_out = "held-out " if key.startswith("eval/") else ""
        return Metric(f"{held_out}reward part {key.rpartition('/')[2]}")
    return Metric(key, "s" if key.startswith("time/") else "")


def story_keys(runs: Sequence[RunRecord], held_out: Iterable[str]) -> list[str]:
    """The curve of the training steps and that of the main held-out figure, for each kind of run."""
    learned = ("loss/distill", "reward/mean", "loss/dpo", "loss/sft")
    keys = [next((key for key in learned if run.series(key)), "") for run in runs]
    return [key for key in dict.fromkeys([*keys, *held_out]) if key]


def short(value: float) -> float:
    """Six digits of a number: more cannot be seen."""
    return float(f"{value:.6g}")


def _without_noise(points: Points) -> Points:
    """The points, with 0 for a value that is rounding noise beside the others."""
    least = max(NOISE * max(abs(point[1]) for point in points), ZERO)
    return [[step, *(0.0 if abs(value) < least else value for value in values)] for step, *values in points]


# Time


def time_of(run: RunRecord, log: str) -> list[tuple[str, float]]:
    """(phase, seconds) of the whole run, from its beginning to its end in `log`, the text of log.txt.

    While sampling goes on beside the training, the phases of the steps are the training's own.
    """
    parts = [(METRICS[f"time/{name}"].title, seconds) for name, seconds in run.phases().items()]
    of_steps = run.seconds - sum(seconds for _, seconds in parts)
    parts.append(("the rest of the steps" if run.series("time/train") else "training", of_steps))
    loading, evaluating = (sum(run.series(key)) for key in ONCE)
    parts = [("loading", loading), ("evaluating", evaluating), *parts]
    if whole := wall_clock(log, now=datetime.now() if run.state is RunState.running else None):
        whole += sum(run.series("time/load")[1:])  # a resumed run is loaded before its log says that it began
        rest = "saving and all else" if loading else "loading, evaluating, saving and all else"
        parts.append((rest, whole - sum(seconds for _, seconds in parts)))
    return [(name, seconds) for name, seconds in parts if seconds >= LEAST_SECONDS]


def wall_clock(log: str, now: datetime | None = None) -> float:
    """Seconds between the beginning and the end of each attempt, all together; an attempt that runs ends `now`.

    One that was killed ends with its last dated line. 0 without a dated line.
    """
    attempts: list[list[datetime]] = []  # first and last dated line of each
    runs = False
    for stamp, verdict in _STAMP.findall(log):
        at = datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f")
        if verdict == BEGAN:
            attempts.append([at, at])
            runs = True
        elif runs:
            attempts[-1][1] = at
            runs = not verdict
    if runs and now is not None:
        attempts[-1][1] = now
    return sum((last - first).total_seconds() for first, last in attempts)
