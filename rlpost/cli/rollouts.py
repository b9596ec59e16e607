"""`rlpost rollouts`: what the model wrote, and what it earned."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rlpost.cli.completion import complete_run
from rlpost.cli.terminal import print_json
from rlpost.cli.usage import App, AsJson
from rlpost.errors import ConfigError
from rlpost.folding import shortened
from rlpost.home import expanded
from rlpost.text import counted, printable

SHOW_EXAMPLES = """\b
Examples:
  rlpost rollouts show                              the newest run's last step
  rlpost rollouts show my-run --step 30 --group 237
  rlpost rollouts show my-run --sort length --limit 3 --full
"""
EXPORT_EXAMPLES = """\b
Examples:
  rlpost rollouts export my-run completions.parquet
  rlpost rollouts export my-run last.csv --step 50:60
  rlpost rollouts export my-run - | jq .completion
"""
STDOUT = "-"
MOST_DIGITS = 18  # of a step: Python makes no number of thousands of them
SUFFIXES = (".jsonl", ".csv", ".parquet")


class Order(StrEnum):
    """What completions are sorted by, the greatest first."""

    reward = "reward"
    length = "length"
    advantage = "advantage"


app = App(help="Read and export the completions of a run.")


@app.command("show", epilog=SHOW_EXAMPLES, short_help="Show the completions of a step.")
def show(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run's name or folder; the newest where it is left out.",
            autocompletion=complete_run,
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(metavar="N", help="The step; the last where it is left out.")] = None,
    group: Annotated[int | None, typer.Option(metavar="G", help="Only this group's completions.")] = None,
    sample: Annotated[int | None, typer.Option(metavar="S", help="Only this sample of each group.")] = None,
    sort: Annotated[Order | None, typer.Option(metavar="reward|length|advantage", help="The greatest first.")] = None,
    reverse: Annotated[bool, typer.Option("--reverse", "--worst", help="The least first.")] = False,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="At most so many.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Whole prompts and completions.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the groups of a step with the best and the worst completion, or the completions asked for."""
    from rlpost.cli.rollouts_view import completion_lines, overview_lines, selected, step_as_dict
    from rlpost.runs.reader import find_run
    from rlpost.runs.rollouts import read_rollouts

    folder = find_run(run)
    number = _step(folder, step)
    rows = read_rollouts(folder, number)
    order = sort.value if sort is not None else Order.reward.value if reverse else None
    chosen = selected(rows, group=group, sample=sample, order=order, reverse=reverse)
    if as_json:
        print_json(step_as_dict(folder, number, rows, chosen[:limit]))
    elif group is None and sample is None and order is None:
        print("\n".join(overview_lines(folder, number, rows, limit=limit, full=full)))
    else:
        print("\n".join(completion_lines(chosen, limit=limit, full=full)))


@app.command("export", epilog=EXPORT_EXAMPLES, short_help="Write the completions to one file.")
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or folder.", autocompletion=complete_run)],
    file: Annotated[str, typer.Argument(metavar="FILE", help="FILE.jsonl, .csv or .parquet; - is JSONL on stdout.")],
    step: Annotated[str, typer.Option(metavar="A:B", help="Steps A to B, both included; either may be left out.")] = "",
    tokens: Annotated[
        bool | None,
        typer.Option("--tokens/--no-tokens", help="With ids, log-probs and mask (not in .csv unless asked)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write all completions of a run, or of some steps, to one file; an existing file is left alone."""
    if as_json and file == STDOUT:
        raise ConfigError("--json tells what was written to a file: - prints the completions themselves")
    target = None if file == STDOUT else _target(expanded(file))
    from rlpost.runs.reader import find_run

    folder = find_run(run)
    from rlpost.runs.rollouts import export_rollouts, json_lines

    steps = _range(step, _steps(folder))
    if target is None:
        for line in json_lines(folder, steps, tokens=tokens is not False, ascii_only=sys.stdout.isatty()):
            print(line)
        return
    count = export_rollouts(folder, steps, target, tokens=target.suffix != ".csv" if tokens is None else tokens)
    if as_json:
        print_json({"file": str(target), "completions": count, "steps": len(steps)})
        return
    print(printable(f"{count:,} completions of {counted(len(steps), 'step')} in {target}"))


def _steps(folder: Path) -> list[int]:
    """The steps whose completions there are. Raises ConfigError for a run without any."""
    from rlpost.runs.rollouts import rollout_steps

    steps = rollout_steps(folder)
    if not steps:
        raise ConfigError(f"{folder} holds no completions yet: there is no file in {folder / 'rollouts'}")
    return steps


def _step(folder: Path, asked: int | None) -> int:
    steps = _steps(folder)
    if asked is None:
        return steps[-1]
    if asked not in steps:
        raise ConfigError(f"{folder} holds no completions of step {asked}: it has steps {steps[0]} to {steps[-1]}")
    return asked


def _target(file: Path) -> Path:
    """The file to write. Raises ConfigError for one that exists, or that cannot be one."""
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"{file} has no ending that says its format: give {', '.join(SUFFIXES)}, or - for stdout")
    if file.exists():
        raise ConfigError(f"{file} exists already: remove it, or give another name")
    if not file.parent.is_dir():
        raise ConfigError(f"there is no folder {file.parent}: make it first")
    return file


def _range(text: str, steps: list[int]) -> list[int]:
    """The steps that `A:B`, `A:`, `:B`, `A` or nothing mean. Raises ConfigError where there are none."""
    first, colon, last = text.partition(":")
    bounds = [first, last if colon else first]
    if any(bound and (not bound.isdecimal() or len(bound) > MOST_DIGITS) for bound in bounds):
        raise ConfigError(f"--step {shortened(text, 40)}: give one step or A:B, as in 50:60")
    low, high = (int(bound) if bound else edge for bound, edge in zip(bounds, (steps[0], steps[-1]), strict=True))
    chosen = [step for step in steps if low <= step <= high]
    if not chosen:
        raise ConfigError(f"--step {text}: there are no such steps; it has {steps[0]} to {steps[-1]}")
    return chosen
