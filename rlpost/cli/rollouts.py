"""`rlpost runs rollouts`: shows a step's groups and completions with their rewards, and searches all steps."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import typer

from rlpost.cli.runs import NewestRun, app
from rlpost.cli.terminal import BOLD, output_width, painted, print_json
from rlpost.cli.usage import AsJson
from rlpost.cli.views import below_each_other, completion_block, figure_text, labelled_texts, sampled_tokens, table
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
    rewards = _range("--reward", reward, "0.5:1") if reward else None
    order = sort or ("reward" if reverse else None)
    folder = find_run(run)
    searches = bool(search or reward or finish)
    known = steps_of(folder)
    steps = steps_in(step, known) if step or searches else known[-1:]
    from rlpost.runs.rollouts import Wanted, figures_of_groups
    from rlpost.runs.rollouts import search as searched

    wanted = Wanted(search, rewards, finish, group)
    is_one = len(steps) == 1
    found, counts = searched(folder, steps[::-1], wanted, sys.maxsize if is_one or order else limit or MOST_FOUND)
    found = _sorted(found, order, reverse=reverse)
    if as_json:
        of_step = {"step": steps[0], "groups": figures_of_groups(found)} if is_one else {}
        totals = {"steps_searched": len(steps), "found": sum(counts.values()), "found_by_step": counts}
        print_json({"run": str(folder), **of_step, **totals, "completions": [plain(row) for row in found[:limit]]})
        return
    name = painted(printable(folder.name), BOLD, sys.stdout)
    if is_one and wanted == Wanted() and order is None:
        print("\n".join(overview_lines(f"{name}  step {steps[0]}", found, limit=limit, full=full)))
        return
    as_blocks = full or (is_one and not searches)
    most = limit or (MOST_COMPLETIONS if as_blocks and group is None else MOST_FOUND)
    total = sum(counts.values())
    where = f"step {steps[0]}" if is_one else f"{len(counts)} of {counted(len(steps), 'step')}"
    first_ones = f", the {'worst' if reverse else 'best'} of each group first" if order == "reward" and found else ""
    lines = [f"{name}  {total:,} found in {where}{first_ones}", ""]
    if as_blocks:
        blocks = [completion_block(f"step {row['step']}, {_place(row)}", row, full=full) for row in found[:most]]
        lines += below_each_other(blocks)
    elif found:
        lines += found_table(found[:most], search)
    if most < total:
        lines += ["", f"{most} of {total:,} shown: --limit {total} shows all"]
    print("\n".join(lines).rstrip())


def found_table(rows: Sequence[Row], text: str) -> list[str]:
    """A line for each completion that was found."""
    cells = []
    for row in rows:
        earned = "failed" if row["reward"] is None else f"{row['reward']:.2f}"
        numbers = (str(row[name]) for name in ("step", "group", "sample"))
        cells.append((*numbers, earned, str(sampled_tokens(row)), row["finish_reason"], _around(row, text)))
    return _with_texts(FOUND_COLUMNS, cells, range(5))


def overview_lines(title: str, rows: Sequence[Row], *, limit: int | None, full: bool) -> list[str]:
    """A step at a glance: its groups, then the best and the worst completion."""
    from rlpost.runs.rollouts import figures_of_groups, spread

    groups = figures_of_groups(rows)
    scored = sorted(
        (row for row in rows if row["reward"] is not None), key=lambda row: (row["reward"], row["advantage"] or 0.0)
    )
    rewards = [row["reward"] for row in scored]
    mean = f"reward {fmean(rewards):.2f} ± {spread(rewards):.2f}" if rewards else "every reward failed"
    lines = [f"{title}: {len(rows)} completions in {len(groups)} groups, {mean}", ""]
    shown = groups[: limit or MOST_GROUPS]
    cells = []
    for its, prompt in zip(shown, telling_parts([its["prompt"] for its in shown]), strict=True):
        earned = (figure_text(its[name], 2) for name in ("reward_mean", "reward_std", "reward_min", "reward_max"))
        right = "-" if its["right"] is None else f"{its['right']:.0%}"
        numbers = (str(its["group"]), str(its["size"]))
        cells.append((*numbers, *earned, right, f"{its['tokens']:.0f}", str(its["cut"]), prompt))
    lines += _with_texts(GROUP_COLUMNS, cells, range(9))
    if len(shown) < len(groups):
        lines.append(f"… {len(groups) - len(shown)} more groups: --limit {len(groups)} shows them")
    differ = len(set(rewards)) > 1
    for name, row in {"best": scored[-1], "worst": scored[0]}.items() if differ else [("first", rows[0])]:
        lines += ["", *completion_block(f"{name}: {_place(row)}", row, full=full)]
    return lines


def plain(row: Row) -> Row:
    """A completion for JSON: the number of its tokens instead of their ids, log-probs and mask."""
    from rlpost.runs.rollouts import TOKEN_COLUMNS

    kept = {name: value for name, value in row.items() if name not in TOKEN_COLUMNS}
    return {**kept, "tokens": sampled_tokens(row)}


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
    """The steps that `A:B`, `A:`, `:B` or `A` select; all for no text. Raises ConfigError if there are none."""
    first, last = _range("--step", text or ":", "50:60")
    chosen = [step for step in steps if first <= step <= last]
    if not chosen:
        raise ConfigError(f"--step {text}: there are no such steps; it has {steps[0]} to {steps[-1]}")
    return chosen


def _range(option: str, text: str, example: str) -> tuple[float, float]:
    """The ends that `A:B`, `A:`, `:B` or one number gives, both included. Raises ConfigError for other text."""
    low, colon, high = text.partition(":")
    try:
        least, most = float(low or -math.inf), float((high or math.inf) if colon else low)
    except ValueError:
        least, most = 1.0, 0.0
    if not least <= most:
        raise ConfigError(f"{option} {shortened(text, 40)}: give one number or a range, as in {example}")
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
