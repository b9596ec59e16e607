"""The curves of a report: their points, the ones left out because they say nothing, and where the time went."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from rlpost.errors import ConfigError, DataError
from rlpost.files import replaced
from rlpost.imports import require
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
from rlpost.text import printable

Row = Mapping[str, Any]
Points = list[list[float]]  # [step, value], or [step, value, low, high] with the ends of a 95% interval
NOISE = 1e-9  # share of a curve's largest value below which a value is rounding noise
ZERO = 1e-12  # below it a whole curve is
LEAST_SECONDS = 1e-3  # of a phase that is listed
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito 2008
DASHES = ("-", "--", "-.", ":")
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


def title_of(key: str) -> tuple[str, float]:
    """The title of a metric with its unit, and the size of the unit."""
    name, unit = words_of_metric(key)[:2]
    return f"{name} ({unit})" if unit else name, 100.0 if unit == "%" else 1.0


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


# The picture of `rlpost runs compare --plot`


def draw(records: Sequence[RunRecord], labels: Sequence[str], keys: Sequence[str], file: Path, *, smooth: int) -> None:
    """Draw a panel for each metric into `file`, with one legend; runs with equal labels look alike.

    Raises ConfigError for a file of another kind, DataError if it cannot be written.
    """
    if file.suffix not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot {file} has no ending that says its format: give {', '.join(PLOT_SUFFIXES)}")
    if not keys:
        raise DataError(f"{records[0].folder} has recorded no reward, accuracy or loss yet: wait for its first step")
    require("matplotlib", "plot", "rlpost runs compare --plot")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [printable(label) for label in dict.fromkeys(labels)]
    columns = max(1, min(len(names), 40 * len(keys) // (max(map(len, names)) + 8)))
    size = (3.6 * len(keys), 2.7 + 0.17 * math.ceil(len(names) / columns))  # inches
    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "pdf.fonttype": 42}
    with matplotlib.rc_context({**style, "svg.fonttype": "none"}):  # fonts that stay text
        figure, panels = pyplot.subplots(1, len(keys), figsize=size, layout="constrained", squeeze=False)
        for key, axes in zip(keys, panels[0], strict=True):
            for record, label in zip(records, labels, strict=True):
                _draw_curve(axes, record, key, _style(names.index(printable(label))), smooth)
            axes.set_xlabel("step")
            axes.set_ylabel(title_of(key)[0])
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.25, linewidth=0.5)
        lines = [pyplot.Line2D([], [], **_style(place)) for place in range(len(names))]
        legend = figure.legend(lines, ["."] * len(names), loc="outside lower center", ncols=columns, frameon=False)
        for text, name in zip(legend.get_texts(), names, strict=True):
            text.set_parse_math(False)  # a name may hold a $
            text.set_text(name)
        try:
            with replaced(file) as making:
                figure.savefig(making, format=file.suffix[1:], dpi=200)
        except OSError as error:
            raise DataError(f"cannot write {file}: {error.strerror or error}; give another place for it") from error
        finally:
            pyplot.close(figure)


def _style(place: int) -> dict[str, Any]:
    """The colour and dashes of a run's line; no two runs of 28 have the same."""
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": DASHES[place % len(DASHES)], "linewidth": 1.4}


def _draw_curve(axes: Any, record: RunRecord, key: str, style: Mapping[str, Any], smooth: int) -> None:
    """One run's curve, with the 95% intervals of a held-out figure as a band."""
    size = title_of(key)[1]
    steps, values = [s for s, _ in record.points(key)], [size * v for v in record.series(key)]
    is_held_out = key.startswith("eval/")
    if smooth > 1 and not is_held_out:
        axes.plot(steps, values, color=style["color"], alpha=0.25, linewidth=0.7)
        before, after = (smooth - 1) // 2, smooth // 2
        values = [fmean(values[max(0, i - before) : i + after + 1]) for i in range(len(values))]
    axes.plot(steps, values, **style, marker="o" if is_held_out or len(steps) == 1 else "", markersize=3)
    found = [(step, f) for step, f in record.intervals(key) if f.low is not None]
    ends = [(step, size * (f.low or 0.0), size * (f.high or 0.0)) for step, f in found]
    if ends:
        axes.fill_between(*zip(*ends, strict=True), color=style["color"], alpha=0.15, linewidth=0)
