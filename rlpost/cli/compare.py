"""`rlpost runs compare`: several runs beside each other in the terminal or as a picture, or the settings that differ.

Each run has a letter: it is the run's mark in the curves, its row in the tables, and its name in the verdict.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from string import ascii_uppercase
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlpost.cli.completion import complete_side
from rlpost.cli.runs import app
from rlpost.cli.terminal import BOLD, DIM, output_width, painted, print_json, print_lines, takes_colour
from rlpost.cli.usage import AsJson
from rlpost.cli.views import candidate_lines, figure_text, progress, table
from rlpost.config.paths import RUNS
from rlpost.config.schema import as_text, flat, recipes, verb_and_rest
from rlpost.errors import ConfigError, DataError
from rlpost.files import expanded
from rlpost.record import (
    ACCURACY,
    HELD_OUT_FIGURES,
    LOSS,
    MEANS_LATE,
    PAIR_ACCURACY,
    REWARD,
    TRAINED_LOSSES,
    worth_showing,
)
from rlpost.report.curves import draw, title_of
from rlpost.runs.reader import RunRecord, find_sweep, read_run, run_at, runs_of
from rlpost.runs.reproduction import differences
from rlpost.text import counted, did_you_mean, nearest, nearest_key, printable

if TYPE_CHECKING:
    from rlpost.evaluation.comparison import Comparison
    from rlpost.evaluation.sweeps import SweepResult

EXAMPLES = """\
  rlpost runs compare first second
  rlpost runs compare my-sweep --json
  rlpost runs compare first second --key entropy --key grad_norm
  rlpost runs compare first second --plot curves.pdf --smooth 10
  rlpost runs compare gsm8k-smollm2-cpu gsm8k-qwen0.5b-gpu     two recipes
  rlpost runs compare "" "env=gsm8k optim.lr=1e-6"
"""
SIDES_HELP = "Names or folders of runs and sweeps; or two sides, one a recipe or quoted settings."
WIDEST_CHART, CHART_LINES, TICKS = 100, 14, 5
TERMINAL_COLOURS = ("blue+", "red+", "green+", "magenta+", "orange+", "cyan+")


@app.command("compare", examples=EXAMPLES, short_help="Compare runs: curves, figures, paired test, settings.")
def compare(
    sides: Annotated[list[str], typer.Argument(metavar="RUN", help=SIDES_HELP, autocompletion=complete_side)],
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="KEY", help="Draw this metric of metrics.jsonl instead; may be repeated."),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Only draw the curves into FILE.png, .svg or .pdf.")
    ] = None,
    smooth: Annotated[
        int, typer.Option(metavar="N", min=1, help="In FILE, draw means of N steps; the values stay as a pale line.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Compare runs: curves over each other, final figures with 95% intervals, a paired test, settings that differ.

    The paired test compares the last held-out completions of each run with those of A, prompt by prompt. Of a sweep
    alone, the settings are compared over their seeds instead. Where one of two sides is a recipe or quoted settings,
    only the settings are compared.
    """
    if len(sides) == 2 and not all(side.strip() and (run_at(side) or find_sweep(side)) for side in sides):
        found = settings_apart(*sides)
        print_json(found) if as_json else print_lines(apart_lines(found))
        return
    records = [read_run(folder) for folder in runs_of(sides)]
    if not (1 if plot else 2) <= len(records) <= len(ascii_uppercase):
        raise ConfigError(f"rlpost runs compare takes 2 to {len(ascii_uppercase)} runs: {len(records)} given")
    sweeps = _sweeps(sides)
    keys = _keys(records, key)
    if plot is not None:
        draw(records, _labels(records, sweeps), keys, expanded(plot), smooth=smooth)
        print(printable(f"written to {plot}"))
        return
    tests = [] if len(sweeps) == len(sides) else [_paired(records[0], other) for other in records[1:]]
    if as_json:
        print_json(_as_dict(records, keys, tests) | {"sweeps": {name: its.as_dict() for name, its in sweeps.items()}})
    else:
        print("\n".join(compare_lines(records, keys, tests, sweeps)))


# Settings


def settings_apart(a: str, b: str) -> dict[str, Any]:
    """How the settings of two sides differ, as JSON: the two values of each key; a side that lacks it is left out.

    Of a run they are the settings as resolved when it began: another version of rlpost might resolve them differently,
    and looking at a run must not run code that it names. Raises ConfigError for a side that is nothing, and for
    settings that do not compose; DataError for a run whose settings cannot be read.
    """
    (name_a, of_a), (name_b, of_b) = _settings_of(a), _settings_of(b)
    groups = list(dict.fromkeys(key.partition(".")[0] for key in (*of_a, *of_b)))
    apart = {}
    for key in sorted({**of_a, **of_b}, key=lambda key: groups.index(key.partition(".")[0])):  # a group together
        pair = {side: its[key] for side, its in (("a", of_a), ("b", of_b)) if key in its}
        if len(pair) == 1 or pair["a"] != pair["b"]:
            apart[key] = pair
    return {"a": name_a, "b": name_b, "settings": apart, "environment": {}}


def apart_lines(found: Mapping[str, Any]) -> list[str]:
    """The settings that differ, as lines of the terminal."""
    rows = [
        (key, *(as_text(pair[side]) if side in pair else "-" for side in "ab"))
        for key, pair in found["settings"].items()
    ]
    return table([("", found["a"], found["b"]), *rows], heading=True) if rows else ["no setting differs"]


def _settings_of(side: str) -> tuple[str, dict[str, Any]]:
    """The name of a side, and its settings with the chosen options."""
    if side.strip() and (run := run_at(side)):
        record = read_run(run)
        if not record.config:
            raise DataError(f"{run / 'config.yaml'} holds no settings that can be read")
        return str(run), record.settings
    from rlpost.config.compose import compose
    from rlpost.config.recipes import command_of

    if side in recipes() or (side.endswith((".yaml", ".yml")) and "=" not in side):
        command, words = command_of(side), [f"recipe={side}"]
    elif not side.strip() or "=" in side or " " in side:
        command, words = verb_and_rest(shlex.split(side))
    else:
        runs = [folder.name for folder in RUNS.iterdir()] if RUNS.is_dir() else []
        hint = did_you_mean(nearest(side, [*recipes(), *runs]), "give a run, a recipe, or quoted settings: steps=3")
        raise ConfigError(f"{side} is neither a run nor a recipe{hint}")
    composed = compose(command, words)
    return side.strip() or f"the defaults of {command.verb}", composed.choices | flat(composed.as_dict())


# Runs


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


def _keys(records: Sequence[RunRecord], requested: Sequence[str] | None) -> list[str]:
    """The metrics to draw: those asked for, or the main ones that a run has. Raises ConfigError for an unknown one."""
    known = list(dict.fromkeys(key for record in records for row in record.metrics for key in row if key != "step"))
    if requested:
        for key in requested:
            if key not in known:
                near = next((name for name in known if name.startswith(f"{key}/")), None) or nearest_key(key, known)
                raise ConfigError(f"--key {key}: no run has this metric{did_you_mean(near)}")
        return list(dict.fromkeys(requested))
    accuracy, reward = (any(any(record.series(key)) for record in records) for key in (ACCURACY, REWARD))
    held_out = REWARD if reward and not accuracy else ACCURACY
    return [key for key in ("reward/mean", *TRAINED_LOSSES, held_out, PAIR_ACCURACY, LOSS) if key in known]


def _paired(a: RunRecord, b: RunRecord) -> Comparison | str:
    """The comparison of B's last held-out completions with A's, or why there is none."""
    from rlpost.evaluation.comparison import compare as compared
    from rlpost.evaluation.saved import latest_held_out

    try:
        return compared(latest_held_out(a.folder), latest_held_out(b.folder))
    except DataError as error:
        return str(error)


def _as_dict(records: Sequence[RunRecord], keys: Sequence[str], tests: Sequence[Comparison | str]) -> dict[str, Any]:
    runs: list[Mapping[str, Any]] = [
        {
            "letter": letter,
            **record.summary(),
            "tokens": record.tokens,
            "seconds": record.seconds,
            "curves": {key: record.points(key) for key in keys},
        }
        for letter, record in zip(ascii_uppercase, records, strict=False)
    ]
    compared = [
        {"a": "A", "b": letter, **({"missing": test} if isinstance(test, str) else test.as_dict())}
        for letter, test in zip(ascii_uppercase[1:], tests, strict=False)
    ]
    return {"runs": runs, "tests": compared, **differences(records)}


# The comparison for people


def compare_lines(
    records: Sequence[RunRecord],
    keys: Sequence[str],
    tests: Sequence[Comparison | str],
    sweeps: Mapping[str, SweepResult],
) -> list[str]:
    """Curves, tables, verdicts, and what differs."""
    names = [printable(name) for name in names_of(records)]
    width = output_width(0) or None  # a pipe takes tables whole
    lines: list[str] = []
    for key in keys:
        if sum(len(record.points(key)) > 1 for record in records) > 1:
            lines += [*chart(records, key, min(output_width(), WIDEST_CHART)), ""]
    lines += table(_figures(records, names), width, right=range(3, 8), cuttable=(1,), heading=True)
    lines += [painted(MEANS_LATE, DIM, sys.stdout), ""]
    for rows in _held_out(records, names):
        lines += [*table(rows, width, right=(4,), cuttable=(1,), heading=True), ""]
    for name, found in sweeps.items():
        lines += [painted(f"sweep {printable(name)}", DIM, sys.stdout), *candidate_lines(found, width), ""]
    lines += [*_verdicts(records, tests), ""] if tests else []
    differ = differences(records)
    settings, of_some, environment = (differ[name] for name in ("settings", "settings_of_some", "environment"))
    lines += _letters("settings that differ", settings, width) if settings else ["no setting differs"]
    if of_some:
        lines.append(f"{counted(len(of_some), 'setting')} only some of the runs have: --json lists them")
    return [*lines, *(["", *_letters("versions and machine", environment, width)] if environment else [])]


def _letters(title: str, differing: Mapping[str, Sequence[str]], width: int | None) -> list[str]:
    """A table of values that differ, each with the letters of its runs."""
    rows = []
    for key, values in differing.items():
        letters: dict[str, str] = {}
        for letter, value in zip(ascii_uppercase, values, strict=False):
            letters[value] = letters.get(value, "") + letter
        rows.append((printable(key), printable("  ".join(f"{who}={value}" for value, who in letters.items()))))
    return [painted(title, DIM, sys.stdout), *table(rows, width, cuttable=(1,))]


def _figures(records: Sequence[RunRecord], names: Sequence[str]) -> list[list[str]]:
    """Progress, late reward or loss, tokens and seconds of each run."""
    columns: dict[str, Callable[[RunRecord], str]] = {
        "state": lambda record: record.state.value,
        "steps": progress,
        "late reward": lambda record: figure_text(record.late_reward, 3),
        "late loss": lambda record: figure_text(record.late_loss, 3),
        "tokens": lambda record: f"{record.tokens:,.0f}",
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
        rows = [["", title_of(key)[0], "before", "after", "n"]]
        for i, (before, after) in enumerate(found[key]):
            count = next((str(f.prompts) for f in (after, before) if f is not None and f.prompts is not None), "-")
            cells = ("-" if figure is None else f"{figure}".strip() for figure in (before, after))
            rows.append([ascii_uppercase[i], names[i], *cells, count])
        tables.append(rows)
    return tables


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


# Curves


def chart(records: Sequence[RunRecord], key: str, width: int) -> list[str]:
    """The curves of a metric over each other, each drawn with its run's letter, under a title."""
    import plotext

    title, size = title_of(key)
    most = max(2, (width - 10) // 2)
    together = max(1, math.ceil(max(len(record.points(key)) for record in records) / most))
    curves = [[(s, size * v) for s, v in _means(record.points(key), together)] for record in records]
    steps = [step for record in records for step, _ in record.points(key)]
    plotext.clear_figure()
    plotext.limit_size(False, False)
    plotext.plot_size(width, CHART_LINES)
    plotext.theme("clear")
    for place, curve in reversed([*enumerate(curves)]):  # A is drawn last, over the others
        if curve:
            colour = TERMINAL_COLOURS[place % len(TERMINAL_COLOURS)]
            plotext.plot(*zip(*curve, strict=True), marker=ascii_uppercase[place], color=colour)
    plotext.yfrequency(TICKS)
    first, last = min(steps), max(steps)
    plotext.xlim(first, last)
    plotext.xticks(sorted({round(first + i * (last - first) / (TICKS - 1)) for i in range(TICKS)}))
    drawn = plotext.build()
    drawn = drawn if takes_colour(sys.stdout) else plotext.uncolorize(drawn)
    averaged = f", means of {together} steps" if together > 1 else ""
    return [f"{painted(title, BOLD, sys.stdout)}, by step{averaged}", *(line.rstrip() for line in drawn.splitlines())]


def _means(curve: Sequence[tuple[int, float]], together: int) -> list[tuple[float, float]]:
    """The means of each `together` neighbouring points."""
    parts = [curve[i : i + together] for i in range(0, len(curve), together)]
    return [(fmean(step for step, _ in part), fmean(value for _, value in part)) for part in parts]
