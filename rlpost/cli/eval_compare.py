"""`rlpost eval compare`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from rlpost.cli.completion import complete_evaluation
from rlpost.cli.terminal import print_json
from rlpost.cli.usage import JSON_HELP, App
from rlpost.text import printable

EXAMPLES = """\b
Examples:
  rlpost eval compare before my-run
  rlpost eval compare evals/gsm8k-qwen-1 evals/gsm8k-my-run-1 --json
"""

Side = typer.Argument(
    help="An evaluation: its name in evals/, its folder, or its samples.parquet.",
    autocompletion=complete_evaluation,
    show_default=False,
)


def command() -> TyperCommand:
    """The verb, which stands below `rlpost eval`."""
    app = App(add_completion=False)
    app.command("compare", epilog=EXAMPLES, short_help="Say whether one evaluation is better than another.")(compare)
    verb: Any = typer.main.get_command(app)
    return verb


def compare(
    a: Annotated[str, Side],
    b: Annotated[str, Side],
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Say whether B is better than A, prompt by prompt: better, worse, within noise, or how many prompts would tell."""
    from rlpost.evaluation.compare import compare as compared
    from rlpost.evaluation.saved import find_evaluation, read_evaluation

    tables = find_evaluation(a), find_evaluation(b)  # both names are looked up before either is read
    found = compared(*(read_evaluation(table) for table in tables))
    if as_json:
        print_json(found.as_dict())
    else:
        print("\n".join(printable(line) for line in found.lines()))
