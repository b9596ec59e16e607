"""`rlpost rollouts`: shows a step's groups and completions with their rewards, searches all steps, and exports them."""

from __future__ import annotations

import itertools
import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, Literal

import typer

from rlpost.cli.completion import complete_run
from rlpost.cli.runs import NewestRun
from rlpost.cli.terminal import BOLD, DIM, output_width, painted, paragraph, print_json
from rlpost.cli.usage import App, AsJson
from rlpost.cli.views import table
from rlpost.errors import ConfigError
from rlpost.files import expanded
from rlpost.record import one_of_each_first
from rlpost.text import counted, one_line, printable, shortened, width_of

SHOW_EXAMPLES = """\
  rlpost rollouts show                              the newest run's last step
  rlpost rollouts show my-run --step 30 --group 237
  rlpost rollouts show my-run --sort length --limit 3 --full
"""
EXPORT_EXAMPLES = """\
  rlpost rollouts export my-run completions.parquet
  rlpost rollouts export my-run last.csv --step 50:60
  rlpost rollouts export my-run - | jq .completion
"""
SEARCH_EXAMPLES = """\
  rlpost rollouts search my-run "I cannot"
  rlpost rollouts search my-run --reward 1 --step 50:
  rlpost rollouts search my-run --reward :0 --finish length --full
"""
STDOUT = "-"
SUFFIXES = (".jsonl", ".csv", ".parquet")
WIDEST_TEXT = 120  # columns: longer lines are hard to read
PROMPT_LINES, COMPLETION_LINES = 8, 16  # lines of one completion, without --full
MOST_GROUPS, MOST_COMPLETIONS, MOST_FOUND = 20, 4, 20
HEADER = ("group", "size", "reward", "spread", "least", "most", "right", "tokens", "cut")
LONG_OPENING = 20  # letters
BEFORE_HIT = 24  # letters that a line of a search shows before the text that was found
NARROWEST_PROMPT = 12
Row = dict[str, Any]  # one completion, under the names of rlpost.runs.rollouts.SCHEMA


Order = Literal["reward", "length", "advantage"]  # the figure that completions are sorted by, the largest first
Finish = Literal["stop", "length", "context"]  # why a completion ended
app = App(help="Read, search and export the completions of a run.")


@app.command("show", examples=SHOW_EXAMPLES, short_help="Show the completions of a step.")
def show(
    run: NewestRun = None,
    step: Annotated[int | None, typer.Option(metavar="N", help="The step; default: the last.")] = None,
    group: Annotated[int | None, typer.Option(metavar="G", help="Only this group's completions.")] = None,
    sample: Annotated[int | None, typer.Option(metavar="S", help="Only this sample of each group.")] = None,
    sort: Annotated[Order | None, typer.Option(metavar="reward|length|advantage", help="Sort, high to low.")] = None,
    reverse: Annotated[bool, typer.Option("--reverse", "--worst", help="Sort, low to high.")] = False,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Show at most N.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Print whole prompts and completions.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the groups of a step with the best and the worst completion, or the completions asked for.

    Sorted by reward, one completion of each group comes first, so that the best are those of different prompts.
    """
    from rlpost.runs.reader import find_run
    from rlpost.runs.rollouts import read_rollouts

    folder = find_run(run)
    number = _step(folder, step)
    rows = read_rollouts(folder, number)
    order = sort or ("reward" if reverse else None)
    chosen = selected(rows, group=group, sample=sample, order=order, reverse=reverse)
    remark = ""
    if order == "reward" and group is None and len(groups := {row["group"] for row in chosen}) > 1:
        chosen = one_of_each_first(chosen, "group")
        remark = f"the {'worst' if reverse else 'best'} of each of {len(groups)} groups first, then the others"
    if as_json:
        print_json(step_as_dict(folder, number, rows, chosen[:limit]))
    elif group is None and sample is None and order is None:
        print("\n".join(overview_lines(folder, number, rows, limit=limit, full=full)))
    else:
        blocks = completion_lines(chosen, limit=limit, full=full)
        print("\n".join([*([painted(remark, DIM, sys.stdout), ""] if remark else []), *blocks]))


@app.command("search", examples=SEARCH_EXAMPLES, short_help="Search the completions of all steps.")
def search(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or folder.", autocompletion=complete_run)],
    text: Annotated[
        str, typer.Argument(metavar="[TEXT]", help="Text in the prompt or the completion, in any case; default: all.")
    ] = "",
    reward: Annotated[
        str, typer.Option(metavar="LO:HI", help="Rewards from LO to HI, both included; each optional.")
    ] = "",
    step: Annotated[str, typer.Option(metavar="A:B", help="Steps A to B, both included; each optional.")] = "",
    finish: Annotated[
        Finish | None, typer.Option(metavar="stop|length|context", help="Completions that ended for this reason.")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Show at most N.")] = MOST_FOUND,
    full: Annotated[bool, typer.Option("--full", help="Print whole prompts and completions.")] = False,
    as_json: AsJson = False,
) -> None:
    """Search the completions of all steps, the newest first, and count them: one line each, or with --full as a block.

    --reward 1 finds one reward, --reward :0 all up to 0. Failed rewards are in no range.
    """
    from rlpost.runs.reader import find_run

    rewards = _rewards_in(reward)
    folder = find_run(run)
    from rlpost.runs.rollouts import Wanted
    from rlpost.runs.rollouts import search as searched

    steps = steps_in(step, steps_of(folder))
    found, counts = searched(folder, steps[::-1], Wanted(text, rewards, finish), limit)
    if as_json:
        print_json(
            {
                "run": str(folder),
                "steps_searched": len(steps),
                "found": sum(counts.values()),
                "found_by_step": counts,
                "completions": [plain(row) for row in found],
            }
        )
    else:
        print("\n".join(search_lines(folder, found, counts, len(steps), text=text, full=full)))


@app.command("export", examples=EXPORT_EXAMPLES, short_help="Write the completions to one file.")
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or folder.", autocompletion=complete_run)],
    file: Annotated[str, typer.Argument(metavar="FILE", help="FILE.jsonl, .csv or .parquet; - is JSONL on stdout.")],
    step: Annotated[str, typer.Option(metavar="A:B", help="Steps A to B, both included; each optional.")] = "",
    tokens: Annotated[
        bool | None,
        typer.Option("--tokens/--no-tokens", help="Include ids, log-probs and mask (default: not in .csv)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write all completions of a run, or of some steps, to one file; an existing file is left alone."""
    target = None if file == STDOUT else expanded(file)
    if target is not None and target.suffix not in SUFFIXES:
        raise ConfigError(f"{target} has no ending that says its format: give {', '.join(SUFFIXES)}, or - for stdout")
    if target is not None and target.exists():
        raise ConfigError(f"{target} exists already: remove it, or give another name")
    from rlpost.runs.reader import find_run

    folder = find_run(run)
    from rlpost.runs.rollouts import export_rollouts, json_lines

    steps = steps_in(step, steps_of(folder))
    if target is None:
        for line in json_lines(folder, steps, tokens=tokens is not False, ascii_only=sys.stdout.isatty()):
            print(line)
        return
    count = export_rollouts(folder, steps, target, tokens=target.suffix != ".csv" if tokens is None else tokens)
    if as_json:
        print_json({"file": str(target), "completions": count, "steps": len(steps)})
        return
    print(printable(f"{count:,} completions of {counted(len(steps), 'step')} in {target}"))


def selected(rows: Sequence[Row], *, group: int | None, sample: int | None, order: str | None, reverse: bool) -> list:
    """The completions of a group or a sample, sorted; completions without the figure come last.

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
    sign = 1 if reverse else -1
    return [r for _, r in sorted(figures, key=lambda pair: math.inf if pair[0] is None else sign * pair[0])]


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
    scored = sorted(
        (row for row in rows if row["reward"] is not None), key=lambda row: (row["reward"], row["advantage"] or 0.0)
    )
    if not scored or scored[0]["reward"] == scored[-1]["reward"]:
        title = "all rewards are equal; the first" if scored else "the first"
        return [*lines, "", *completion_block(f"{title}: {_place(rows[0])}", rows[0], full=full)]
    for title, row in (("best", scored[-1]), ("worst", scored[0])):
        lines += ["", *completion_block(f"{title}: {_place(row)}", row, full=full)]
    return lines


def completion_lines(rows: Sequence[Row], *, limit: int | None, full: bool) -> list[str]:
    """Completions below each other."""
    shown = rows[: limit or max(MOST_COMPLETIONS, len(rows) if len({r["group"] for r in rows}) == 1 else 0)]
    lines = below_each_other([completion_block(_place(row), row, full=full) for row in shown])
    if len(shown) < len(rows):
        lines += ["", f"{len(shown)} of {len(rows)} completions: --limit {len(rows)} shows all"]
    return lines


def search_lines(
    folder: Path, rows: Sequence[Row], counts: dict[int, int], searched: int, *, text: str, full: bool
) -> list[str]:
    """The completions that a search found, after a line that counts them."""
    total = sum(counts.values())
    where = f"{len(counts)} of {counted(searched, 'step')}"
    if not total:
        return [f"no completion of {counted(searched, 'step')} was found"]
    lines = [f"{painted(printable(folder.name), BOLD, sys.stdout)}  {total:,} found in {where}, the newest first", ""]
    if full:
        lines += below_each_other([completion_block(f"step {r['step']}, {_place(r)}", r, full=True) for r in rows])
    else:
        cells: list[Sequence[str]] = [("step", "group", "sample", "reward", "tokens", "ended")]
        for row in rows:
            earned = "failed" if row["reward"] is None else f"{row['reward']:.2f}"
            numbers = (str(row[name]) for name in ("step", "group", "sample"))
            cells.append((*numbers, earned, str(length(row)), row["finish_reason"]))
        lines += _with_texts(cells, range(5), "completion", [_around(row, text) for row in rows])
    last = rows[0]
    read = f"rlpost rollouts show {shlex.quote(str(folder))} --step {last['step']} --group {last['group']}"
    lines += ["", printable(f"read the first: {read}")]
    return lines if len(rows) == total else [*lines, f"{len(rows)} of {total:,} shown: --limit {total} shows all"]


def below_each_other(blocks: Sequence[Sequence[str]]) -> list[str]:
    """The lines of `blocks` with an empty line between two of them."""
    return list(itertools.chain.from_iterable([*block, ""] for block in blocks))[:-1]


def step_as_dict(folder: Path, step: int, rows: Sequence[Row], chosen: Sequence[Row]) -> dict[str, Any]:
    """The step as JSON; ids, log-probs and masks are left to `rlpost rollouts export`."""
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
    return {"run": str(folder), "step": step, "groups": groups, "completions": [plain(row) for row in chosen]}


def plain(row: Row) -> Row:
    """A completion for JSON: the number of its tokens instead of their ids, log-probs and mask."""
    from rlpost.runs.rollouts import TOKEN_COLUMNS

    return {**{name: value for name, value in row.items() if name not in TOKEN_COLUMNS}, "tokens": length(row)}


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """The completions of each group, in the order of the groups' numbers."""
    ordered = sorted(rows, key=lambda row: (row["group"], row["sample"]))
    return [list(group) for _, group in itertools.groupby(ordered, key=lambda row: row["group"])]


def length(row: Row) -> int:
    """Tokens that the model sampled."""
    return row["tokens"] if "tokens" in row else sum(row["mask"])


def telling_parts(prompts: Sequence[str]) -> list[str]:
    """Prompts without the opening that all of them share, if it is long or has lines of its own."""
    shared = os.path.commonprefix(list(prompts))  # noqa: RUF071  characters are what is compared
    begin = max(shared.rfind(" "), shared.rfind("\n")) + 1
    if len({*prompts}) < 2 or not ("\n" in shared or begin >= LONG_OPENING):
        return list(prompts)
    return [f"…{prompt[begin:]}" for prompt in prompts]


def steps_of(folder: Path) -> list[int]:
    """The steps with completions. Raises ConfigError for a run without any."""
    from rlpost.runs.reader import read_run

    steps = read_run(folder).rollout_steps
    if not steps:
        raise ConfigError(f"{folder} holds no completions yet: there is no file in {folder / 'rollouts'}")
    return steps


def _step(folder: Path, step: int | None) -> int:
    steps = steps_of(folder)
    if step is None:
        return steps[-1]
    if step not in steps:
        raise ConfigError(f"{folder} holds no completions of step {step}: it has steps {steps[0]} to {steps[-1]}")
    return step


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


def _group_table(groups: Sequence[Sequence[Row]]) -> list[str]:
    rows = [HEADER, *(_group_row(group) for group in groups)]
    return _with_texts(rows, range(len(HEADER)), "prompt", telling_parts([group[0]["prompt"] for group in groups]))


def _with_texts(rows: Sequence[Sequence[str]], right: range, title: str, texts: Sequence[str]) -> list[str]:
    """The lines of a table, its heading dim, with a last column of `texts` that are cut to the room left."""
    lines = table(rows, right=right)
    used = max(map(width_of, lines))
    width = max(NARROWEST_PROMPT, output_width() - used - 2)
    cells = [title, *(one_line(text, width, counted=True) for text in texts)]
    heading, *lines = [f"{line:<{used}}  {cell}" for line, cell in zip(lines, cells, strict=True)]
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


def completion_block(heading: str, row: Row, *, full: bool, more: Sequence[str] = ()) -> list[str]:
    """One completion of a training or an evaluation: its figures and `more` under `heading`, then prompt and reply.

    `row` has the names of rlpost.runs.rollouts.SCHEMA or rlpost.evaluation.saved.SCHEMA.
    """
    width = min(output_width(), WIDEST_TEXT)
    lines = [painted(heading, BOLD, sys.stdout)]
    lines += [f"  {line}" for text in (*_facts(row), *more) for line in paragraph(text, width - 2)]
    most = (None, None) if full else (PROMPT_LINES, COMPLETION_LINES)
    parts = [
        ("prompt", paragraph(row["prompt"].rstrip("\n"), width - 4, most[0], keep_end=True)),  # the question is there
        *((label, paragraph(text, width - 4, most[1])) for label, text in _labelled_texts(row)),
    ]
    for label, text in parts:
        lines.append(painted(f"  {label}", DIM, sys.stdout))
        lines += [f"  | {line}".rstrip() for line in text]
    return lines


def _place(row: Row) -> str:
    return f"group {row['group']}, sample {row['sample']}"


def _around(row: Row, text: str) -> str:
    """A completion from shortly before `text` on, or from its beginning; the prompt if only that holds `text`."""
    for label, passage in (*_labelled_texts(row), ("prompt", row["prompt"])):
        at = passage.lower().find(text.lower())
        if at >= 0:
            passage = f"…{passage[at - BEFORE_HIT :]}" if at > BEFORE_HIT else passage
            return f"({label}) {passage}" if label == "prompt" else passage
    return row["completion"]


def _labelled_texts(row: Row) -> list[tuple[str, str]]:
    """The completion, or every turn of several, each with its label."""
    turns = row.get("turns") or []
    if len(turns) < 2:
        return [("completion", row["completion"])]
    return [(turn["role"], turn["content"]) for turn in turns]


def _facts(row: Row) -> list[str]:
    """Its reward and advantage, or its loss; its length, how it ended, and the weights that sampled it."""
    if row.get("loss") is not None:
        return [f"loss {row['loss']:.3f} a token, {row['tokens']} tokens"]
    parts = ", ".join(f"{name} {value:.3g}" for name, value in row["reward_parts"].items())
    reward = "reward failed" if row["reward"] is None else f"reward {row['reward']:.3g}"
    earned = [reward + (f" ({parts})" if parts else "")]
    for name in ("strict", "lenient"):
        if row[f"accuracy_{name}"] is not None:
            earned.append(f"{name} {row[f'accuracy_{name}']:.3g}")
    if row.get("advantage") is not None:
        earned.append(f"advantage {row['advantage']:+.2f}")
    ended = "cut at its limit" if row["finish_reason"] == "length" else row["finish_reason"]
    length_and_end = f"{length(row)} tokens, {ended}"
    if "policy_version_min" in row:
        low, high = row["policy_version_min"], row["policy_version_max"]
        length_and_end += f", policy version {low}" if low == high else f", policy versions {low} to {high}"
    return ["  ".join(earned), length_and_end]


def _rewards(rows: Sequence[Row]) -> list[float]:
    return [row["reward"] for row in rows if row["reward"] is not None]


def _spread(rewards: Sequence[float]) -> float:
    """The standard deviation of rewards, as `reward/std` of metrics.jsonl."""
    return stdev(rewards) if len(rewards) > 1 else 0.0
