"""`rlpost config diff`: what differs between two recipes, runs or lists of settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlpost.cli.completion import complete_side
from rlpost.cli.terminal import print_json, print_lines, table
from rlpost.cli.usage import AsJson

if TYPE_CHECKING:
    from rlpost.config.difference import Difference

DIFFERENT = 1  # as diff and git diff --exit-code say it

EXAMPLES = """\b
Examples:
  rlpost config diff gsm8k-smollm2-cpu gsm8k-qwen0.5b-gpu
  rlpost config diff runs/first runs/second
  rlpost config diff "" "env=gsm8k optim.lr=1e-6"
"""

SIDE_HELP = "A recipe (name or file), a run, or settings in quotes."


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=SIDE_HELP, autocompletion=complete_side)],
    b: Annotated[str, typer.Argument(metavar="B", help="The same.", autocompletion=complete_side)],
    as_json: AsJson = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if they differ.")] = False,
) -> None:
    """Print the settings that differ; for two runs, the versions and the machine too."""
    from rlpost.config.difference import difference

    found = difference(a, b)
    if as_json:
        print_json(difference_as_dict(found))
    else:
        print_lines(difference_lines(found))
    if exit_code and (found.settings or found.environment):
        raise typer.Exit(DIFFERENT)


def difference_lines(found: Difference) -> list[str]:
    """The difference, as the terminal shows it."""
    titles = ("", found.a.name, found.b.name)
    lines = ["no setting differs"]
    if found.settings:
        lines = table([titles, *((key, *map(_text, pair)) for key, pair in found.settings.items())], indent="")
    if found.environment:
        rows = [(key, *map(_text, pair)) for key, pair in found.environment.items()]
        lines += ["", "versions and machine", *table(rows, indent="")]
    return lines


def difference_as_dict(found: Difference) -> dict[str, Any]:
    """The difference as JSON has it; a side that lacks a setting is left out of it."""
    from rlpost.config.difference import ABSENT

    def values(pairs: dict[str, tuple[Any, Any]]) -> dict[str, dict[str, Any]]:
        return {
            key: {side: value for side, value in zip("ab", pair, strict=True) if value is not ABSENT}
            for key, pair in pairs.items()
        }

    return {
        "a": found.a.name,
        "b": found.b.name,
        "settings": values(found.settings),
        "environment": values(found.environment),
    }


def _text(value: Any) -> str:
    from rlpost.config.difference import ABSENT
    from rlpost.config.overrides import as_text

    return "-" if value is ABSENT else as_text(value)
