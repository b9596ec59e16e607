"""What `rlpost rollouts show` prints: a step's groups, and completions to read."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rlpost.cli.columns import fitted_table, output_width, paragraph
from rlpost.cli.terminal import BOLD, DIM, painted
from rlpost.errors import ConfigError
from rlpost.folding import one_line, width_of
from rlpost.text import printable

Row = dict[str, Any]  # one completion, under the names of rlpost.runs.rollouts.SCHEMA

PIPED_WIDTH = 100
WIDEST_TEXT = 120  # columns: longer lines are hard to read
PROMPT_LINES, COMPLETION_LINES = 8, 16  # shown of one completion, unless all of it is asked for
MOST_GROUPS, MOST_COMPLETIONS = 20, 4
HEADER = ("group", "size", "reward", "spread", "least", "most", "right", "tokens", "cut")
LONG_OPENING = 20  # letters
NARROWEST_PROMPT = 12


def selected(rows: Sequence[Row], *, group: int | None, sample: int | None, order: str | None, reverse: bool) -> list:
    """The completions of a group or a sample, sorted; those without the figure come last.

    Raises ConfigError for a group or a sample that the step does not have.
    """
    chosen = list(rows)
    for name, wanted in (("group", group), ("sample", sample)):
        if wanted is None:
            continue
        known = sorted({row[name] for row in chosen})
        chosen = [row for row in chosen if row[name] == wanted]
        if not chosen:
            raise ConfigError(f"step {rows[0]['step']} has no {name} {wanted}: it has {known[0]} to {known[-1]}")
    if order is None:
        return chosen
    figures = [(length(row) if order == "length" else row[order], row) for row in chosen]
    known = [(figure, row) for figure, row in figures if figure is not None]
    known.sort(key=lambda pair: pair[0], reverse=not reverse)
    return [row for _, row in known] + [row for figure, row in figures if figure is None]


def overview_lines(folder: Path, step: int, rows: Sequence[Row], *, limit: int | None, full: bool) -> list[str]:
    """A step at a glance: its groups, then the best and the worst completion."""
    groups = grouped(rows)
    rewards = _rewards(rows)
    mean = f"reward {fmean(rewards):.2f} ± {_spread(rewards):.2f}" if rewards else "every reward failed"
    name = painted(printable(folder.name), BOLD, sys.stdout)
    lines = [f"{name}  step {step}: {len(rows)} completions in {len(groups)} groups, {mean}", ""]
    lines += _group_table(groups[: limit or MOST_GROUPS])
    if (left := len(groups) - (limit or MOST_GROUPS)) > 0:
        lines.append(f"… {left} more groups: --limit {len(groups)} shows them")
    scored = sorted((row for row in rows if row["reward"] is not None), key=_merit)
    if not scored or scored[0]["reward"] == scored[-1]["reward"]:
        title = "all rewards are equal; the first" if scored else "the first"
        return [*lines, "", *_completion(rows[0], title, full=full)]
    for title, row in (("best", scored[-1]), ("worst", scored[0])):
        lines += ["", *_completion(row, title, full=full)]
    return lines


def completion_lines(rows: Sequence[Row], *, limit: int | None, full: bool) -> list[str]:
    """Completions one below the other."""
    shown = rows[: limit or max(MOST_COMPLETIONS, len(rows) if len({r["group"] for r in rows}) == 1 else 0)]
    blocks = [_completion(row, "", full=full) for row in shown]
    lines = list(itertools.chain.from_iterable([*block, ""] for block in blocks))[:-1]
    if len(shown) < len(rows):
        lines += ["", f"{len(shown)} of {len(rows)} completions: --limit {len(rows)} shows all"]
    return lines


def step_as_dict(folder: Path, step: int, rows: Sequence[Row], chosen: Sequence[Row]) -> dict[str, Any]:
    """The step as JSON; ids, log-probs and masks are left to `rlpost rollouts export`."""
    from rlpost.runs.rollouts import TOKEN_COLUMNS

    groups = []
    for group in grouped(rows):
        rewards = _rewards(group)
        groups.append(
            {
                "group": group[0]["group"],
                "size": len(group),
                "reward_mean": fmean(rewards) if rewards else None,
                "reward_std": _spread(rewards) if rewards else None,
                "prompt": group[0]["prompt"],
            }
        )
    completions = [
        {**{name: value for name, value in row.items() if name not in TOKEN_COLUMNS}, "tokens": length(row)}
        for row in chosen
    ]
    return {"run": str(folder), "step": step, "groups": groups, "completions": completions}


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """The completions of each group, in the order of the groups' numbers."""
    ordered = sorted(rows, key=lambda row: (row["group"], row["sample"]))
    return [list(group) for _, group in itertools.groupby(ordered, key=lambda row: row["group"])]


def length(row: Row) -> int:
    """Tokens that the model sampled."""
    return sum(row["mask"])


def telling_parts(prompts: Sequence[str]) -> list[str]:
    """Prompts without the lines that all of them begin and end with, nor a last `<|im_end|>`: a chat template's.

    A long opening that they share is left out too: what tells them apart would not fit beside it.
    """
    lines = [prompt.split("\n") for prompt in prompts]
    if len({*prompts}) < 2:
        return list(prompts)
    most = min(map(len, lines)) - 1  # one line is left of each
    first = min(most, _common(lines))
    last = min(most - first, _common([each[::-1] for each in lines]))
    parts = ["\n".join(each[first : len(each) - last]) for each in lines]
    shared = parts[0][len(parts[0]) - _common([part[::-1] for part in parts]) :]
    closing = shared[shared.find("<") :] if "<" in shared and shared.endswith(">") else ""
    parts = [part.removesuffix(closing) for part in parts]
    alike = parts[0][: _common(parts)].rpartition(" ")[0]
    return [f"…{part[len(alike) :]}" for part in parts] if len(alike) >= LONG_OPENING else parts


def _common(lines: Sequence[Sequence[str]]) -> int:
    """How many lines (or letters, of texts) all of them begin with."""
    return sum(1 for _ in itertools.takewhile(lambda line: len({*line}) == 1, zip(*lines, strict=False)))


def _group_table(groups: Sequence[Sequence[Row]]) -> list[str]:
    rows = [HEADER, *(_group_row(group) for group in groups)]
    table = fitted_table(rows, None, right=range(len(HEADER)))
    width = max(NARROWEST_PROMPT, output_width(PIPED_WIDTH) - max(map(width_of, table)) - 2)
    prompts = telling_parts([group[0]["prompt"] for group in groups])
    cells = ["prompt", *(one_line(prompt, width, counted=True) for prompt in prompts)]
    heading, *lines = [f"{line}  {cell}" for line, cell in zip(table, cells, strict=True)]
    return [painted(heading, DIM, sys.stdout), *lines]


def _group_row(group: Sequence[Row]) -> tuple[str, ...]:
    rewards = _rewards(group)
    right = [row["accuracy_lenient"] for row in group if row["accuracy_lenient"] is not None]
    figures = (fmean(rewards), _spread(rewards), min(rewards), max(rewards)) if rewards else ()
    return (
        str(group[0]["group"]),
        str(len(group)),
        *((f"{figure:.2f}" for figure in figures) if figures else ("failed", "-", "-", "-")),
        f"{fmean(right):.0%}" if right else "-",
        f"{fmean(length(row) for row in group):.0f}",
        str(sum(row["finish_reason"] == "length" for row in group)),
    )


def _completion(row: Row, title: str, *, full: bool) -> list[str]:
    """One completion as a block: what it earned, then what was asked and answered."""
    width = min(output_width(PIPED_WIDTH), WIDEST_TEXT)
    heading = f"{title}: " if title else ""
    heading = painted(f"{heading}group {row['group']}, sample {row['sample']}", BOLD, sys.stdout)
    lines = [heading, *(f"  {line}" for text in _facts(row) for line in paragraph(text, width - 2))]
    most = (None, None) if full else (PROMPT_LINES, COMPLETION_LINES)
    parts = [
        ("prompt", paragraph(row["prompt"].rstrip("\n"), width - 4, most[0], keep_end=True)),  # the question is there
        *((label, paragraph(text, width - 4, most[1])) for label, text in _said(row)),
    ]
    for label, text in parts:
        lines.append(painted(f"  {label}", DIM, sys.stdout))
        lines += [f"  | {line}".rstrip() for line in text]
    return lines


def _said(row: Row) -> list[tuple[str, str]]:
    """What was said after the prompt, each with its label: the completion, or every turn of several."""
    turns = row["turns"] or []
    if len(turns) < 2:
        return [("completion", row["completion"])]
    return [(turn["role"], turn["content"]) for turn in turns]


def _facts(row: Row) -> tuple[str, str]:
    """What it earned; how long it is, how it ended, and under which weights it was sampled."""
    parts = ", ".join(f"{name} {value:.3g}" for name, value in row["reward_parts"].items())
    reward = "reward failed" if row["reward"] is None else f"reward {row['reward']:.3g}"
    earned = [reward + (f" ({parts})" if parts else "")]
    for name in ("strict", "lenient"):
        if row[f"accuracy_{name}"] is not None:
            earned.append(f"{name} {row[f'accuracy_{name}']:.3g}")
    if row["advantage"] is not None:
        earned.append(f"advantage {row['advantage']:+.2f}")
    low, high = row["policy_version_min"], row["policy_version_max"]
    versions = f"policy version {low}" if low == high else f"policy versions {low} to {high}"
    ended = "cut at its limit" if row["finish_reason"] == "length" else row["finish_reason"]
    return "  ".join(earned), f"{length(row)} tokens, {ended}, {versions}"


def _merit(row: Row) -> tuple[float, float]:
    """Reward first; among equals the one that stands out of its group more."""
    return row["reward"], row["advantage"] or 0.0


def _rewards(rows: Sequence[Row]) -> list[float]:
    return [row["reward"] for row in rows if row["reward"] is not None]


def _spread(rewards: Sequence[float]) -> float:
    """Their standard deviation, as `reward/std` of metrics.jsonl."""
    return stdev(rewards) if len(rewards) > 1 else 0.0
