"""The result of a sweep: the mean of each candidate over its seeds, and whether one is better than the others.

A candidate is one combination of the swept settings other than the seed: seeds are repetitions, not choices.
Candidates are compared over the seeds that both have, and on the held-out prompts that all of these runs answered, by
`crossed_interval`. Only the best is tested, against the second best. That needs no correction for the number of
candidates: if all are equal, the two highest means are closer to each other than two chosen in advance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from rlpost.config.paths import SAMPLES, SWEEP_FILE
from rlpost.errors import DataError
from rlpost.evaluation.comparison import Key, prompt_means
from rlpost.evaluation.saved import latest_held_out, metrics_of, read_evaluation
from rlpost.evaluation.statistics import crossed_interval, is_significant, shown, signed
from rlpost.files import json_in
from rlpost.record import (
    ACCURACY,
    LOSS,
    MEANS_LATE,
    REWARD,
    Interval,
    interval,
    main_figure,
    main_figures,
    trained_loss,
)
from rlpost.runs.reader import RunRecord, read_run
from rlpost.text import counted, one_line

SEED = "seed"
LONGEST_CELL = 32  # columns of a setting's value
MORE_SEEDS = 'add "seed=range(3)"'
KEYS = {"accuracy": ACCURACY, "reward": REWARD, "loss": LOSS}  # last word of the figure that jobs are compared by
COLUMNS = {"accuracy": "accuracy_lenient", "reward": "reward"}  # its column in a table of samples


@dataclass(frozen=True)
class Candidate:
    """The runs of one combination of settings: `runs` are the names of their folders, failed ones included.

    `seeds` counts the runs that have the `figure`, which is their mean; `late` is the mean reward or loss of the last
    quarter of their steps, `before` that of the figure before training.
    """

    settings: dict[str, str]
    runs: list[str]
    seeds: int
    late: float | None
    before: float | None
    figure: Interval | None

    @property
    def title(self) -> str:
        """The settings on one line, long texts cut."""
        return " ".join(f"{key}={one_line(text, LONGEST_CELL)}" for key, text in self.settings.items()) or "all runs"


@dataclass(frozen=True)
class Verdict:
    """The candidate with the best mean against the second, over the `seeds` that both have and the `prompts` of all.

    `better`: the interval of the difference leaves 0 out. `value` is None if they cannot be compared, `low` and `high`
    if nothing varies, `prompts` if held-out completions were not kept.
    """

    first: str
    second: str
    sentence: str
    seeds: int
    value: float | None = None
    low: float | None = None
    high: float | None = None
    prompts: int | None = None
    better: bool = False


@dataclass(frozen=True)
class SweepResult:
    """The candidates of a sweep, the best first, compared `by` a figure such as `held-out accuracy`.

    `verdict` is None if fewer than two candidates have the figure.
    """

    by: str
    learned: str  # reward or loss, which `late` is the mean of; empty for evaluations
    candidates: list[Candidate]
    verdict: Verdict | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        candidates = [
            {**asdict(each), "title": each.title, "figure": each.figure and each.figure.as_dict()}
            for each in self.candidates
        ]
        return {"by": self.by, "candidates": candidates, "verdict": self.verdict and asdict(self.verdict)}

    def rows(self) -> list[list[str]]:
        """A header, and a row for each candidate: settings, seeds, late reward or loss, the figure before and after."""
        known, columns = self.candidates, dict[str, list[str]]()
        for key in known[0].settings:
            columns[key] = [one_line(each.settings[key], LONGEST_CELL, counted=True) for each in known]
        if any(len(each.runs) > 1 for each in known):
            lacking = [f" of {len(each.runs)}" if each.seeds < len(each.runs) else "" for each in known]
            columns["seeds"] = [f"{each.seeds}{of}" for each, of in zip(known, lacking, strict=True)]
        if self.learned and not self.by.startswith("late"):
            columns[f"late {self.learned}"] = [_cell(each.late, is_share=False) for each in known]
        if any(each.before is not None for each in known):
            columns["before"] = [_cell(each.before, is_share=self.by.endswith("accuracy")) for each in known]
        columns[self.by] = ["-" if each.figure is None else f"{each.figure}".strip() for each in known]
        return [[*columns], *map(list, zip(*columns.values(), strict=True))]

    def lines(self) -> list[str]:
        """The line below the table, and the verdict."""
        figures = [each.figure for each in self.candidates if each.figure is not None]
        counts = {figure.prompts for figure in figures}
        unit = "row" if self.by.endswith("loss") else "prompt"
        count = counts.pop() if len(counts) == 1 else None
        over = ["seeds"] * any(each.seeds > 1 for each in self.candidates)
        over += [f"{unit}s" if count is None else counted(count, unit)] * any(figure.prompts for figure in figures)
        legend = [MEANS_LATE] * bool(self.learned) + [f"95% intervals over {' and '.join(over)}"] * bool(over)
        return [*(["; ".join(legend)] if legend else []), *([self.verdict.sentence] if self.verdict else [])]


@dataclass(frozen=True)
class _Run:
    """One run or evaluation of a sweep that ended well: its figures, and the figure of each prompt where it is kept."""

    seed: str | None
    figure: Interval
    before: float | None
    late: float | None
    prompts: Mapping[Key, float]


def read_sweep(folder: Path) -> SweepResult:
    """The result of the jobs of a sweep that have ended well so far."""
    jobs = json_in(folder / SWEEP_FILE)["jobs"]
    ended = [job for job in jobs if job["exit_code"] == 0 and job["result"]]
    trains = any("metrics" in job["result"] for job in ended)
    after = {job["name"]: _held_out(job["result"], "after") for job in ended}
    late = {job["name"]: late_figure(read_run(folder / job["name"])) for job in ended} if trains else {}
    learned = next((what for what, _ in late.values()), "")
    main = next((figure for figure in main_figures([*after.values()]) if figure), None)
    if main is not None or any(LOSS in row for row in after.values()):
        word = "loss" if main is None else "accuracy" if main.is_share else "reward"
        by = f"held-out {word}" if learned else word
        figures = {name: interval(row, KEYS[word]) for name, row in after.items()}
    else:
        word, by = "", f"late {learned or 'reward'}"
        known = {name: value for name, (_, value) in late.items() if value is not None}
        figures = {name: Interval(value, None, None, is_share=False) for name, value in known.items()}
    runs = {}
    for job in ended:
        name, before = job["name"], interval(_held_out(job["result"], "before"), KEYS.get(word, ""))
        if figure := figures.get(name):
            prompts = _prompts(folder / name, COLUMNS.get(word), trains=trains)
            earlier = before and before.value
            runs[name] = _Run(job["differs"].get(SEED), figure, earlier, late[name][1] if trains else None, prompts)
    together: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for job in jobs:
        settings = tuple((key, text) for key, text in job["differs"].items() if key != SEED)
        together.setdefault(settings, []).append(job["name"])
    found = [(_candidate(dict(s), names, runs), [runs[n] for n in names if n in runs]) for s, names in together.items()]
    sign = 1 if by.endswith("loss") else -1
    found.sort(key=lambda each: math.inf if each[0].figure is None else sign * each[0].figure.value)
    compared = [each for each in found if each[0].figure is not None][:2]
    verdict = _verdict(by, compared[0], compared[1], trains=trains) if len(compared) == 2 else None
    return SweepResult(by, learned, [candidate for candidate, _ in found], verdict)


def _held_out(result: Mapping[str, Any], when: str) -> Mapping[str, Any]:
    """The held-out figures of a job, as in metrics.jsonl; an evaluation has none before."""
    if "metrics" in result:
        return result[f"evaluation_{when}"] or {}
    return metrics_of(result["result"]) if when == "after" else {}


def figure_of(result: Mapping[str, Any]) -> str:
    """The main figure of a job's result in words: a held-out one, or else the last reward or loss."""
    row, last = _held_out(result, "after"), result.get("metrics") or {}
    if figure := main_figure(row) or interval(row, LOSS):
        return f"held-out {str(figure).strip()}"
    reward, loss = last.get("reward/mean"), trained_loss(last)
    return f"reward {reward:.3f}" if reward is not None else "" if loss is None else f"loss {loss:.3f}"


def late_figure(record: RunRecord) -> tuple[str, float | None]:
    """`reward` or `loss`, which the training reports at each step, and its mean in the last quarter of the steps."""
    reward, loss = record.late_reward, record.late_loss
    return ("loss", loss) if reward is None and loss is not None else ("reward", reward)


def _prompts(folder: Path, column: str | None, *, trains: bool) -> dict[Key, float]:
    """The figure of each prompt; empty if the figure is not one of prompts, or its completions were not kept."""
    with suppress(DataError):
        if column is not None:
            return prompt_means(latest_held_out(folder) if trains else read_evaluation(folder / SAMPLES), column)
    return {}


def _candidate(settings: dict[str, str], names: list[str], runs: Mapping[str, _Run]) -> Candidate:
    known = [runs[name] for name in names if name in runs]
    return Candidate(
        settings,
        names,
        len(known),
        _mean([run.late for run in known]),
        _mean([run.before for run in known]),
        _over_seeds(known) if known else None,
    )


def _over_seeds(runs: Sequence[_Run]) -> Interval:
    """The mean of the runs' figures; that of one run has the interval over its prompts that was recorded."""
    if len(runs) == 1:
        return runs[0].figure
    mean, is_share = fmean(run.figure.value for run in runs), runs[0].figure.is_share
    values, prompts = _crossed([run.prompts for run in runs], [run.figure.value for run in runs])
    _, low, high = crossed_interval(values) or (mean, None, None)
    if is_share and low is not None and high is not None:
        low, high = max(0.0, low), min(1.0, high)
    return Interval(mean, low, high, prompts, is_share)


def _crossed(tables: Sequence[Mapping[Key, float]], means: Sequence[float]) -> tuple[Any, int | None]:
    """(seeds, prompts) values on the prompts of all `tables`, and their number; without any, one column of `means`."""
    both = [key for key in tables[0] if all(key in table for table in tables)]
    if not both:
        return np.array(means, float)[:, None], None
    return np.array([[table[key] for key in both] for table in tables]), len(both)


def _verdict(
    by: str, first: tuple[Candidate, Sequence[_Run]], second: tuple[Candidate, Sequence[_Run]], *, trains: bool
) -> Verdict:
    titles = first[0].title, second[0].title
    of_second = {run.seed: run for run in second[1]}
    pairs = [(run, of_second[run.seed]) for run in first[1] if run.seed in of_second]
    both = " and ".join(titles)
    if not pairs:
        return Verdict(*titles, f"no seed ended well for both {both}", 0)
    if any(a.prompts and b.prompts and not a.prompts.keys() & b.prompts.keys() for a, b in pairs):
        return Verdict(*titles, f"{both} have different held-out prompts, so they are not compared", len(pairs))
    tables = [{key: a.prompts[key] - b.prompts[key] for key in a.prompts if key in b.prompts} for a, b in pairs]
    values, prompts = _crossed(tables, [a.figure.value - b.figure.value for a, b in pairs])
    value, low, high = crossed_interval(values) or (float(values.mean()), None, None)
    lowest, highest = (value, value) if low is None or high is None else (low, high)  # equal for all: no spread
    outside = highest < 0 if by.endswith("loss") else lowest > 0
    better = outside and (low is not None if prompts is None else bool(is_significant(values.mean(0))))
    counts = [counted(len(pairs), "seed")] * trains + ([counted(prompts, "prompt")] if prompts else [])
    size = ", ".join([signed(value, low, high, is_share=by.endswith("accuracy")), *counts])
    one_seed = trains and len(pairs) == 1
    if one_seed and prompts is None:
        sentence = f"one seed cannot tell {both} apart: {MORE_SEEDS}"
    elif better:
        sentence = f"{titles[0]} is better than {titles[1]} in {by}: {size}"
        sentence += f"; another seed may not agree: {MORE_SEEDS}" if one_seed else ""
    else:
        sentence = f"no difference found between {both} in {by}: {size}"
    return Verdict(*titles, sentence, len(pairs), value, low, high, prompts, better)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _cell(value: float | None, *, is_share: bool) -> str:
    return "-" if value is None else shown(value, is_share=is_share)
