"""`rlpost eval`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rlpost.cli.terminal import stdout_on_stderr
from rlpost.cli.usage import OVERRIDES_HELP
from rlpost.text import printable

EXAMPLES = """\b
Examples:
  rlpost eval
  rlpost eval model=runs/my-run env=gsm8k env.limit=64
  rlpost eval model=runs/my-run --json > result.json
"""


def evaluate(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help=OVERRIDES_HELP)] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON on stdout, everything else on stderr.")
    ] = False,
) -> None:
    """Score a model on an environment's held-out prompts, greedily unless sampling.temperature says."""
    from rlpost.config.compose import compose
    from rlpost.config.registry import EVAL

    settings = compose(EVAL, overrides or []).settings
    from rlpost.assemble import evaluate_command

    if as_json:
        with stdout_on_stderr():
            result = evaluate_command(settings)
        print(json.dumps(result.as_dict(), indent=2))
    else:
        print("\n".join(printable(line) for line in evaluate_command(settings).lines()))
