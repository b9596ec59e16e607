"""`rlpost runs compare` and `rlpost runs plot`: several runs beside each other, in the terminal and as a picture.

Each run has a letter: it is the run's mark in the curves, its row in the tables, and its name in the verdict.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from string import ascii_uppercase
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlpost.catalog import CHOICES
from rlpost.cli.completion import complete_run_or_sweep
from rlpost.cli.runs import app, candidate_lines, progress, summary
from rlpost.cli.terminal import BOLD, DIM, output_width, painted, print_json, takes_colour
from rlpost.cli.usage import AsJson
from rlpost.cli.views import table
from rlpost.config.schema import as_text, flat
from rlpost.errors import ConfigError, DataError
from rlpost.files import expanded, replaced
from rlpost.imports import require
from rlpost.record import (
    ACCURACY,
    HELD_OUT_FIGURES,
    LOSS,
    MARGIN,
    MEANS_LATE,
    PAIR_ACCURACY,
    REWARD,
    STRICT,
    TRAINED_LOSSES,
    interval,
    is_apart,
    late_mean,
    number,
    trained_loss,
    worth_showing,
)
from rlpost.runs.reader import RunRecord, find_sweep, read_run, runs_of
from rlpost.text import counted, did_you_mean, nearest_key, printable

if TYPE_CHECKING:
    from rlpost.evaluation.comparison import Comparison
    from rlpost.evaluation.sweeps import SweepResult

COMPARE_EXAMPLES = """\
  rlpost runs compare first second
  rlpost runs compare my-sweep --json
  rlpost runs compare first second --key entropy --key grad_norm
"""
PLOT_EXAMPLES = """\
  rlpost runs plot my-run -o curve.png
  rlpost runs plot first second -o curves.pdf --smooth 10
  rlpost runs plot my-sweep -o curves.png
  rlpost runs plot my-run -o kl.svg --key kl/ref --key entropy
"""
NAMES = {  # metric -> (title, unit, the unit's size)
    "reward/mean": ("reward", "", 1.0),
    "loss/sft": ("loss", "nats per token", 1.0),
    "loss/distill": ("distillation loss", "nats per token", 1.0),
    "kl/teacher": ("divergence from the teacher", "nats per token", 1.0),
    "accuracy/lenient": ("accuracy of sampled completions", "%", 100.0),
    "accuracy/strict": ("strict accuracy of sampled completions", "%", 100.0),
    ACCURACY: ("held-out accuracy", "%", 100.0),
    STRICT: ("held-out accuracy, strict", "%", 100.0),
    REWARD: ("held-out reward", "", 1.0),
    LOSS: ("held-out loss", "nats per token", 1.0),
    "loss/dpo": ("loss", "per pair", 1.0),
    "reward_margin": ("reward margin", "", 1.0),
    "pair_accuracy": ("pair accuracy", "%", 100.0),
    PAIR_ACCURACY: ("held-out pair accuracy", "%", 100.0),
    MARGIN: ("held-out reward margin", "", 1.0),
    "entropy": ("entropy", "nats per token", 1.0),
    "completion/tokens_mean": ("completion length", "tokens", 1.0),
    "completion/truncated": ("truncated completions", "%", 100.0),
}
UNITS = {"time/": "s", "memory/": "GB"}  # of the metrics with these beginnings
LEFT_OUT = ("tracking.",)  # settings that say where output goes
WIDEST_CHART, CHART_LINES, TICKS = 100, 14, 5
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito 2008
TERMINAL_COLOURS = ("blue+", "red+", "green+", "magenta+", "orange+", "cyan+")
DASHES = ("-", "--", "-.", ":")
Points = list[tuple[int, float]]  # (step, value)
Runs = Annotated[
    list[str],
    typer.Argument(metavar="RUN", help="Names or folders of runs and sweeps.", autocompletion=complete_run_or_sweep),
]
Keys = Annotated[
    list[str] | None,
    typer.Option("--key", metavar="KEY", help="Draw this metric of metrics.jsonl instead; may be repeated."),
]


@app.command("compare", examples=COMPARE_EXAMPLES, short_help="Compare runs: curves, figures, paired test, settings.")
def compare(runs: Runs, key: Keys = None, as_json: AsJson = False) -> None:
    """Compare runs: curves over each other, final figures with 95% intervals, a paired test, settings that differ.

    The paired test compares the last held-out completions of each run with those of A, prompt by prompt. Of a sweep
    alone, the settings are compared over their seeds instead.
    """
    folders = runs_of(runs)
    if not 2 <= len(folders) <= len(ascii_uppercase):
        raise ConfigError(f"rlpost runs compare takes 2 to {len(ascii_uppercase)} runs: {len(folders)} given")
    records = [read_run(folder) for folder in folders]
    keys = _keys(records, key)
    sweeps = _sweeps(runs)
    tests = [] if len(sweeps) == len(runs) else [_paired(records[0], other) for other in records[1:]]
    if as_json:
        print_json(_as_dict(records, keys, tests) | {"sweeps": {name: its.as_dict() for name, its in sweeps.items()}})
    else:
        print("\n".join(compare_lines(records, keys, tests, sweeps)))


@app.command("plot", examples=PLOT_EXAMPLES, short_help="Draw the curves of runs into a file.")
def plot(
    runs: Runs,
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="FILE.png, .svg or .pdf; it is replaced.")],
    key: Keys = None,
    smooth: Annotated[
        int, typer.Option(metavar="N", min=1, help="Mean of N steps around each; the values stay as a pale line.")
    ] = 1,
) -> None:
    """Draw the curves of one or more runs into a picture for papers and slides.

    By default reward and held-out accuracy, of fine-tuning the losses; a band is the 95% interval. A sweep's runs
    that differ in their seed alone have one colour.
    """
    target = expanded(out)
    if target.suffix not in PLOT_SUFFIXES:
        raise ConfigError(f"-o {out} has no ending that says its format: give {', '.join(PLOT_SUFFIXES)}")
    require("matplotlib", "plot", "rlpost runs plot")
    records = [read_run(folder) for folder in runs_of(runs)]
    draw(records, _labels(records, _sweeps(runs)), _keys(records, key), target, smooth=smooth)
    print(printable(f"written to {out}"))


def points(record: RunRecord, key: str) -> Points:
    """The recorded values of a metric with their steps."""
    return [(row["step"], value) for row in record.metrics if (value := number(row, key)) is not None]


def _sweeps(names: Sequence[str]) -> dict[str, SweepResult]:
    """The results of the sweeps among `names`."""
    from rlpost.evaluation.sweeps import read_sweep

    return {str(sweep): read_sweep(sweep) for name in names if (sweep := find_sweep(name))}


def _labels(records: Sequence[RunRecord], sweeps: Mapping[str, SweepResult]) -> list[str]:
    """The label of each run in a picture: its name; of a sweep's run the settings, which other seeds share."""
    of_run = {
        str(Path(sweep, run)): candidate.title if len(sweeps) == 1 else f"{Path(sweep).name} {candidate.title}"
        for sweep, found in sweeps.items()
        for candidate in found.candidates
        for run in candidate.runs
    }
    return [of_run.get(str(r.folder), name) for r, name in zip(records, names_of(records), strict=True)]


def names_of(records: Sequence[RunRecord]) -> list[str]:
    """A name for each run: its folder's, with the path where two have the same."""
    names = [record.folder.name for record in records]
    return [n if names.count(n) == 1 else str(r.folder) for n, r in zip(names, records, strict=True)]


def differing_settings(records: Sequence[RunRecord]) -> tuple[dict[str, list[str]], int]:
    """Settings that all runs have and that differ, each with the runs' values; and how many only some runs have.

    A chosen option counts as a setting, as does the command; where output goes does not.
    """
    configs = [flat(record.config) for record in records]
    known = dict.fromkeys(key for config in configs for key in config if not key.startswith(LEFT_OUT))
    shared = [key for key in known if all(key in config for config in configs)]
    values = {"command": [record.verb or "unknown" for record in records]}
    values |= {group: [record.choice(group) or "unknown" for record in records] for group in CHOICES}
    apart = {key: [config[key] for config in configs] for key in shared}
    values |= {key: list(map(as_text, each)) for key, each in apart.items() if is_apart(key, each)}
    return {key: per_run for key, per_run in values.items() if len({*per_run}) > 1}, len(known) - len(shared)


def compare_lines(
    records: Sequence[RunRecord],
    keys: Sequence[str],
    tests: Sequence[Comparison | str],
    sweeps: Mapping[str, SweepResult],
) -> list[str]:
    """The comparison for people."""
    names = [printable(name) for name in names_of(records)]
    width = output_width(0) or None  # a pipe takes tables whole
    lines: list[str] = []
    for key in keys:
        if sum(len(points(record, key)) > 1 for record in records) > 1:
            lines += [*chart(records, key, min(output_width(), WIDEST_CHART)), ""]
    figures = _figures(records, names)
    for shown, right in [(figures, range(3, 8)), *((each, (4,)) for each in _held_out(records, names))]:
        heading, *rows = table(shown, width, right=right, cuttable=(1,))
        late = [painted(MEANS_LATE, DIM, sys.stdout)] if shown is figures else []
        lines += [painted(heading, DIM, sys.stdout), *rows, *late, ""]
    for name, found in sweeps.items():
        lines += [painted(f"sweep {printable(name)}", DIM, sys.stdout), *candidate_lines(found, width), ""]
    return [*lines, *([*_verdicts(records, tests), ""] if tests else []), *_settings(records, width)]


def chart(records: Sequence[RunRecord], key: str, width: int) -> list[str]:
    """The curves of a metric over each other, each drawn with its run's letter, under a title."""
    import plotext

    title, unit, size = _title(key)
    most = max(2, (width - 10) // 2)
    together = max(1, math.ceil(max(len(points(record, key)) for record in records) / most))
    curves = [[(s, size * v) for s, v in _means(points(record, key), together)] for record in records]
    steps = [step for record in records for step, _ in points(record, key)]
    values = [value for curve in curves for _, value in curve]
    low, high = min(values), max(values)
    low, high = (low, high) if high > low else (low - 0.5 * size / 100, high + 0.5 * size / 100)
    plotext.clear_figure()
    plotext.limit_size(False, False)
    plotext.plot_size(width, CHART_LINES)
    plotext.theme("clear")
    for place, curve in reversed([*enumerate(curves)]):  # A is drawn last, over the others
        if curve:
            colour = TERMINAL_COLOURS[place % len(TERMINAL_COLOURS)]
            plotext.plot(*zip(*curve, strict=True), marker=ascii_uppercase[place], color=colour)
    plotext.ylim(low, high)
    ticks = [low + i * (high - low) / (TICKS - 1) for i in range(TICKS)]
    digits = max(0, 1 - math.floor(math.log10(ticks[1] - ticks[0])))
    plotext.yticks(ticks, [f"{tick:.{digits}f}" for tick in ticks])
    first, last = min(steps), max(steps)
    plotext.xlim(first, last)
    plotext.xticks(sorted({round(first + i * (last - first) / (TICKS - 1)) for i in range(TICKS)}))
    drawn = plotext.build()
    drawn = drawn if takes_colour(sys.stdout) else plotext.uncolorize(drawn)
    averaged = f", means of {together} steps" if together > 1 else ""
    heading = painted(f"{title}{f' ({unit})' if unit else ''}", BOLD, sys.stdout)
    return [f"{heading}, by step{averaged}", *(line.rstrip() for line in drawn.splitlines())]


def draw(records: Sequence[RunRecord], labels: Sequence[str], keys: Sequence[str], file: Path, *, smooth: int) -> None:
    """Draw a panel for each metric into `file`, with one legend; runs with equal labels look alike.

    Raises DataError if the file cannot be written.
    """
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
                _draw_curve(axes, record, key, names.index(printable(label)), smooth)
            title, unit, _ = _title(key)
            axes.set_xlabel("step")
            axes.set_ylabel(f"{title} ({unit})" if unit else title)
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


# Curves


def _keys(records: Sequence[RunRecord], requested: Sequence[str] | None) -> list[str]:
    """The metrics to draw: those asked for, or the main ones that a run has. Raises ConfigError for an unknown one."""
    known = list(dict.fromkeys(key for record in records for row in record.metrics for key in row if key != "step"))
    if requested:
        for key in requested:
            if key not in known:
                near = next((name for name in known if name.startswith(f"{key}/")), None) or nearest_key(key, known)
                raise ConfigError(f"--key {key}: no run has this metric{did_you_mean(near)}")
        return list(dict.fromkeys(requested))
    accuracy, reward = (any(value for r in records for _, value in points(r, key)) for key in (ACCURACY, REWARD))
    held_out = REWARD if reward and not accuracy else ACCURACY
    found = [key for key in ("reward/mean", *TRAINED_LOSSES, held_out, PAIR_ACCURACY, LOSS) if key in known]
    if not found:
        raise DataError(f"{records[0].folder} has recorded no reward, accuracy or loss yet: wait for its first step")
    return found


def _title(key: str) -> tuple[str, str, float]:
    unit = next((unit for beginning, unit in UNITS.items() if key.startswith(beginning)), "")
    return NAMES.get(key, (key, unit, 1.0))


def _means(curve: Points, together: int) -> list[tuple[float, float]]:
    """The means of each `together` neighbouring points."""
    parts = [curve[i : i + together] for i in range(0, len(curve), together)]
    return [(fmean(step for step, _ in part), fmean(value for _, value in part)) for part in parts]


def _smoothed(values: Sequence[float], window: int) -> list[float]:
    """For each value the mean of about `window` values around it, fewer at the ends."""
    before, after = (window - 1) // 2, window // 2
    return [fmean(values[max(0, i - before) : i + after + 1]) for i in range(len(values))]


def _style(place: int) -> dict[str, Any]:
    """The colour and dashes of a run's line; no two runs of 28 have the same."""
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": DASHES[place % len(DASHES)], "linewidth": 1.4}


def _draw_curve(axes: Any, record: RunRecord, key: str, place: int, smooth: int) -> None:
    size = _title(key)[2]
    curve = points(record, key)
    if not curve:
        return
    steps, values = [s for s, _ in curve], [size * v for _, v in curve]
    style = _style(place)
    is_held_out = key.startswith("eval/")
    if smooth > 1 and not is_held_out:
        axes.plot(steps, values, color=style["color"], alpha=0.25, linewidth=0.7)
        values = _smoothed(values, smooth)
    axes.plot(steps, values, **style, marker="o" if is_held_out or len(steps) == 1 else "", markersize=3)
    found = [(row["step"], f) for row in record.metrics if (f := interval(row, key)) and f.low is not None]
    ends = [(step, size * (f.low or 0.0), size * (f.high or 0.0)) for step, f in found]
    if ends:
        axes.fill_between(*zip(*ends, strict=True), color=style["color"], alpha=0.15, linewidth=0)


# Tables and verdicts


def _figures(records: Sequence[RunRecord], names: Sequence[str]) -> list[list[str]]:
    """Progress, late reward or loss, tokens and seconds of each run."""
    columns: dict[str, Callable[[RunRecord], str]] = {
        "state": lambda record: record.state.value,
        "steps": progress,
        "late reward": lambda record: _late(number(row, "reward/mean") for row in record.metrics),
        "late loss": lambda record: _late(map(trained_loss, record.metrics)),
        "tokens": lambda record: f"{_tokens(record):,.0f}",
        "seconds": lambda record: f"{record.seconds:,.1f}",
    }
    cells = {title: [cell(record) for record in records] for title, cell in columns.items()}
    kept = [title for title, column in cells.items() if {*column} != {"-"}]
    rows = [[ascii_uppercase[i], name, *(cells[t][i] for t in kept)] for i, name in enumerate(names)]
    return [["", "run", *kept], *rows]


def _held_out(records: Sequence[RunRecord], names: Sequence[str]) -> list[list[list[str]]]:
    """A table for each held-out figure that a run has: before, after, and the number of prompts or rows."""
    found = {key: [record.before_and_after(key) for record in records] for _, key in HELD_OUT_FIGURES}
    values = {key: [f and f.value for pair in pairs for f in pair] for key, pairs in found.items()}
    tables = []
    for key in worth_showing(values):
        rows = [["", NAMES[key][0], "before", "after", "n"]]
        for i, (before, after) in enumerate(found[key]):
            count = next((str(f.prompts) for f in (after, before) if f is not None and f.prompts is not None), "-")
            cells = ("-" if figure is None else f"{figure}".strip() for figure in (before, after))
            rows.append([ascii_uppercase[i], names[i], *cells, count])
        tables.append(rows)
    return tables


def _paired(a: RunRecord, b: RunRecord) -> Comparison | str:
    """The comparison of B's last held-out completions with A's, or why there is none."""
    from rlpost.evaluation.comparison import compare as compared
    from rlpost.evaluation.saved import latest_held_out

    try:
        return compared(latest_held_out(a.folder), latest_held_out(b.folder))
    except DataError as error:
        return str(error)


def _verdicts(records: Sequence[RunRecord], tests: Sequence[Comparison | str]) -> list[str]:
    """A sentence for each run but A, or why there is no test."""
    missing = [test for test in tests if isinstance(test, str)]
    if len(missing) == len(tests):
        both = f"rlpost eval model={records[0].folder} and the same for the others, then rlpost eval compare"
        return [printable(f"no paired test: {missing[0]}; use {both}")]
    each = ", each test alone" if len(tests) > 1 else ""
    lines = [painted(f"held-out prompts, paired; 95% interval{each}", DIM, sys.stdout)]
    for letter, test in zip(ascii_uppercase[1:], tests, strict=False):
        sentence = f"no test of {letter}: {test}" if isinstance(test, str) else test.sentence("A", letter)
        lines.append(printable(sentence))
    return lines


def _settings(records: Sequence[RunRecord], width: int | None) -> list[str]:
    """The settings that differ, each value with the letters of its runs."""
    differing, only_some = differing_settings(records)
    rows = []
    for key, values in differing.items():
        letters: dict[str, str] = {}
        for letter, value in zip(ascii_uppercase, values, strict=False):
            letters[value] = letters.get(value, "") + letter
        rows.append((printable(key), printable("  ".join(f"{who}={value}" for value, who in letters.items()))))
    lines = [painted("settings that differ", DIM, sys.stdout), *table(rows, width, cuttable=(1,))] if rows else []
    some = f"{counted(only_some, 'setting')} only some of the runs have: rlpost config diff RUN RUN lists them"
    return [*(lines or ["no setting differs"]), *([some] if only_some else [])]


def _as_dict(records: Sequence[RunRecord], keys: Sequence[str], tests: Sequence[Comparison | str]) -> dict[str, Any]:
    differing, _ = differing_settings(records)
    runs: list[Mapping[str, Any]] = [
        {
            "letter": letter,
            **summary(record),
            "tokens": _tokens(record),
            "seconds": record.seconds,
            "held_out_loss_before": (loss := record.before_and_after(LOSS))[0] and loss[0].as_dict(),
            "held_out_loss_after": loss[1] and loss[1].as_dict(),
            "curves": {key: points(record, key) for key in keys},
        }
        for letter, record in zip(ascii_uppercase, records, strict=False)
    ]
    compared = [
        {"a": "A", "b": letter, **({"missing": test} if isinstance(test, str) else test.as_dict())}
        for letter, test in zip(ascii_uppercase[1:], tests, strict=False)
    ]
    return {"runs": runs, "tests": compared, "settings": differing}


def _tokens(record: RunRecord) -> float:
    """Tokens sampled, or where nothing is sampled, trained on."""
    return sum(record.series("tokens/generated")) or sum(record.series("tokens/trained"))


def _late(values: Iterable[float | None]) -> str:
    return "-" if (late := late_mean(values)) is None else f"{late:.3f}"
