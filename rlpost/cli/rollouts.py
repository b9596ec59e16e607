"""`rlpost runs rollouts`: shows a step's groups and completions with their rewards, and searches all steps."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, Literal

import typer

from rlpost.cli.runs import NewestRun, app
from rlpost.cli.terminal import BOLD, output_width, painted, print_json
from rlpost.cli.usage import AsJson
from rlpost.cli.views import below_each_other, completion_block, labelled_texts, sampled_tokens, table
from rlpost.errors import ConfigError
from rlpost.record import one_of_each_first
from rlpost.runs.reader import find_run, read_run
from rlpost.text import counted, one_line, printable, shortened

EXAMPLES = """\
  rlpost runs rollouts                              the newest run's last step
  rlpost runs rollouts my-run --step 30 --group 237
  rlpost runs rollouts my-run --sort length --limit 3 --full
  rlpost runs rollouts my-run --search "I cannot"   in all steps
  rlpost runs rollouts my-run --reward :0 --step 50: --finish length
"""
MOST_GROUPS, MOST_COMPLETIONS, MOST_FOUND = 20, 4, 20
GROUP_COLUMNS = ("group", "size", "reward", "spread", "least", "most", "right", "tokens", "cut", "prompt")
FOUND_COLUMNS = ("step", "group", "sample", "reward", "tokens", "ended", "completion")
LONG_OPENING = 20  # letters
BEFORE_HIT = 24  # letters that a line of a search shows before the text that was found
Row = dict[str, Any]  # one completion, under the names of rlpost.runs.rollouts.SCHEMA


Order = Literal["reward", "length", "advantage"]  # the figure that completions are sorted by, the largest first
Finish = Literal["stop", "length", "context"]  # why a completion ended


@app.command("rollouts", examples=EXAMPLES, short_help="Read and search the completions of a run.")
def rollouts(
    run: NewestRun = None,
    step: Annotated[
        str, typer.Option(metavar="N|A:B", help="One step, or steps A to B; default: the last, of a search all.")
    ] = "",
    search: Annotated[str, typer.Option(metavar="TEXT", help="Text in the prompt or completion, in any case.")] = "",
    reward: Annotated[
        str, typer.Option(metavar="LO:HI", help="Search for rewards from LO to HI, both included; each optional.")
    ] = "",
    finish: Annotated[
        Finish | None, typer.Option(metavar="stop|length|context", help="Search for completions that ended so.")
    ] = None,
    group: Annotated[int | None, typer.Option(metavar="G", help="Only this group's completions.")] = None,
    sample: Annotated[int | None, typer.Option(metavar="S", help="Only this sample of each group.")] = None,
    sort: Annotated[Order | None, typer.Option(metavar="reward|length|advantage", help="Sort, high to low.")] = None,
    reverse: Annotated[bool, typer.Option("--reverse", "--worst", help="Sort, low to high.")] = False,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Show at most N.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Print whole prompts and completions.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the groups of a step with the best and the worst completion, or the completions asked for.

    A search goes through all steps, the newest first, and counts: one line each, or with --full as a block. --reward 1
    finds one reward, --reward :0 all up to 0. Sorted by reward, one completion of each group comes first, so that the
    best are those of different prompts.
    """
    rewards, order = _rewards_in(reward), sort or ("reward" if reverse else None)
    folder = find_run(run)
    known = steps_of(folder)
    from rlpost.runs.rollouts import Wanted
    from rlpost.runs.rollouts import search as searched

    wanted = Wanted(search, rewards, finish, group, sample)
    searches = bool(search or reward or finish)
    steps = steps_in(step, known) if step or searches else known[-1:]
    is_one = len(steps) == 1
    found, counts = searched(folder, steps[::-1], wanted, sys.maxsize if is_one or order else limit or MOST_FOUND)
    found = _sorted(found, order, reverse=reverse)
    if as_json:
        of_step = {"step": steps[0], "groups": _groups_as_dicts(found)} if is_one else {}
        totals = {"steps_searched": len(steps), "found": sum(counts.values()), "found_by_step": counts}
        print_json({"run": str(folder), **of_step, **totals, "completions": [plain(row) for row in found[:limit]]})
        return
    if is_one and wanted == Wanted() and order is None:
        print("\n".join(overview_lines(folder, steps[0], found, limit=limit, full=full)))
        return
    of_a_step = is_one and not searches
    most = limit or (MOST_FOUND if not of_a_step else MOST_COMPLETIONS if group is None else len(found))
    total = sum(counts.values())
    where = f"step {steps[0]}" if is_one else f"{len(counts)} of {counted(len(steps), 'step')}"
    lines = [f"{painted(printable(folder.name), BOLD, sys.stdout)}  {total:,} found in {where}"]
    if order == "reward" and found:
        lines[0] += f", the {'worst' if reverse else 'best'} of each group first"
    if found:
        lines += ["", *found_lines(found[:most], search, as_blocks=full or of_a_step, full=full)]
    if most < total:
        lines += ["", f"{most} of {total:,} shown: --limit {total} shows all"]
    print("\n".join(lines))


def found_lines(rows: Sequence[Row], text: str, *, as_blocks: bool, full: bool) -> list[str]:
    """The completions that were found: below each other, or a table with a line each."""
    if as_blocks:
        headings = [f"step {row['step']}, {_place(row)}" for row in rows]
        return below_each_other([completion_block(h, row, full=full) for h, row in zip(headings, rows, strict=True)])
    cells = []
    for row in rows:
        earned = "failed" if row["reward"] is None else f"{row['reward']:.2f}"
        numbers = (str(row[name]) for name in ("step", "group", "sample"))
        cells.append((*numbers, earned, str(sampled_tokens(row)), row["finish_reason"], _around(row, text)))
    return _with_texts(FOUND_COLUMNS, cells, range(5))


def overview_lines(folder: Path, step: int, rows: Sequence[Row], *, limit: int | None, full: bool) -> list[str]:
    """A step at a glance: its groups, then the best and the worst completion."""
    groups = grouped(rows)
    rewards = _rewards(rows)
    mean = f"reward {fmean(rewards):.2f} ± {_spread(rewards):.2f}" if rewards else "every reward failed"
    name = painted(printable(folder.name), BOLD, sys.stdout)
    lines = [f"{name}  step {step}: {len(rows)} completions in {len(groups)} groups, {mean}", ""]
    shown = groups[: limit or MOST_GROUPS]
    prompts = telling_parts([group[0]["prompt"] for group in shown])
    cells = [(*_group_cells(group), prompt) for group, prompt in zip(shown, prompts, strict=True)]
    lines += _with_texts(GROUP_COLUMNS, cells, range(9))
    if len(shown) < len(groups):
        lines.append(f"… {len(groups) - len(shown)} more groups: --limit {len(groups)} shows them")
    scored = sorted(
        (row for row in rows if row["reward"] is not None), key=lambda row: (row["reward"], row["advantage"] or 0.0)
    )
    if not scored or scored[0]["reward"] == scored[-1]["reward"]:
        title = "all rewards are equal; the first" if scored else "the first"
        return [*lines, "", *completion_block(f"{title}: {_place(rows[0])}", rows[0], full=full)]
    for title, row in (("best", scored[-1]), ("worst", scored[0])):
        lines += ["", *completion_block(f"{title}: {_place(row)}", row, full=full)]
    return lines


def _groups_as_dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
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
    return groups


def plain(row: Row) -> Row:
    """A completion for JSON: the number of its tokens instead of their ids, log-probs and mask."""
    from rlpost.runs.rollouts import TOKEN_COLUMNS

    kept = {name: value for name, value in row.items() if name not in TOKEN_COLUMNS}
    return {**kept, "tokens": sampled_tokens(row)}


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """The completions of each group, in the order of the groups' numbers."""
    ordered = sorted(rows, key=lambda row: (row["group"], row["sample"]))
    return [list(group) for _, group in itertools.groupby(ordered, key=lambda row: row["group"])]


def telling_parts(prompts: Sequence[str]) -> list[str]:
    """Prompts without the opening that all of them share, if it is long or has lines of its own."""
    shared = os.path.commonprefix(list(prompts))  # noqa: RUF071  characters are what is compared
    begin = max(shared.rfind(" "), shared.rfind("\n")) + 1
    if len({*prompts}) < 2 or not ("\n" in shared or begin >= LONG_OPENING):
        return list(prompts)
    return [f"…{prompt[begin:]}" for prompt in prompts]


def steps_of(folder: Path) -> list[int]:
    """The steps with completions. Raises ConfigError for a run without any."""
    steps = read_run(folder).rollout_steps
    if not steps:
        raise ConfigError(f"{folder} holds no completions yet: there is no file in {folder / 'rollouts'}")
    return steps


def steps_in(text: str, steps: list[int]) -> list[int]:
    """The steps that `A:B`, `A:`, `:B`, `A` or nothing select. Raises ConfigError if there are none."""
    first, colon, last = text.partition(":")
    bounds = [first, last if colon else first]
    if any(bound and not bound.isdecimal() for bound in bounds):
        raise ConfigError(f"--step {shortened(text, 40)}: give one step or A:B, as in 50:60")
    low, high = (int(bound) if bound else edge for bound, edge in zip(bounds, (steps[0], steps[-1]), strict=True))
    chosen = [step for step in steps if low <= step <= high]
    if not chosen:
        raise ConfigError(f"--step {text}: there are no such steps; it has {steps[0]} to {steps[-1]}")
    return chosen


def _rewards_in(text: str) -> tuple[float, float] | None:
    """The range that `LO:HI`, `LO:`, `:HI` or one reward gives; None for no text. Raises ConfigError for other text."""
    if not text:
        return None
    low, colon, high = text.partition(":")
    try:
        least, most = float(low or -math.inf), float((high or math.inf) if colon else low)
    except ValueError:
        least, most = 1.0, 0.0
    if not least <= most:
        raise ConfigError(f"--reward {shortened(text, 40)}: give one reward or LO:HI, as in 0.5:1 or :0")
    return least, most


def _sorted(rows: list[Row], order: str | None, *, reverse: bool) -> list[Row]:
    """Completions sorted by a figure; those without it come last. By reward, one of each group comes first."""
    if order is None:
        return rows
    figures = [(sampled_tokens(row) if order == "length" else row[order], row) for row in rows]
    sign = 1 if reverse else -1
    ordered = [r for _, r in sorted(figures, key=lambda pair: math.inf if pair[0] is None else sign * pair[0])]
    return one_of_each_first(ordered, "group") if order == "reward" else ordered


def _with_texts(heading: Sequence[str], rows: Sequence[Sequence[str]], right: range) -> list[str]:
    """A table whose last column has texts, each on one line and cut to the room left."""
    width = output_width()
    cells = [heading, *((*row, one_line(text, width)) for *row, text in rows)]
    return table(cells, width, right=right, cuttable=[len(heading) - 1], heading=True)


def _group_cells(group: Sequence[Row]) -> tuple[str, ...]:
    rewards = _rewards(group)
    right = [row["accuracy_lenient"] for row in group if row["accuracy_lenient"] is not None]
    figures = (fmean(rewards), _spread(rewards), min(rewards), max(rewards)) if rewards else ()
    return (
        str(group[0]["group"]),
        str(len(group)),
        *((f"{figure:.2f}" for figure in figures) if figures else ("failed", "-", "-", "-")),
        f"{fmean(right):.0%}" if right else "-",
        f"{fmean(sampled_tokens(row) for row in group):.0f}",
        str(sum(row["finish_reason"] == "length" for row in group)),
    )


def _place(row: Row) -> str:
    return f"group {row['group']}, sample {row['sample']}"


def _around(row: Row, text: str) -> str:
    """A completion from shortly before `text` on, or from its beginning; the prompt if only that holds `text`."""
    for label, passage in (*labelled_texts(row), ("prompt", row["prompt"])):
        at = passage.lower().find(text.lower())
        if at >= 0:
            passage = f"…{passage[at - BEFORE_HIT :]}" if at > BEFORE_HIT else passage
            return f"({label}) {passage}" if label == "prompt" else passage
    return row["completion"]


def _rewards(rows: Sequence[Row]) -> list[float]:
    return [row["reward"] for row in rows if row["reward"] is not None]


def _spread(rewards: Sequence[float]) -> float:
    """The standard deviation of rewards, as `reward/std` of metrics.jsonl."""
    return stdev(rewards) if len(rewards) > 1 else 0.0
