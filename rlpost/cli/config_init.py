"""`rlpost config init`: a recipe to begin with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rlpost.cli.completion import complete_settings_of_verb
from rlpost.cli.terminal import print_json
from rlpost.cli.usage import JSON_HELP
from rlpost.config.verbs import verb_and_rest
from rlpost.home import expanded
from rlpost.text import printable

EXAMPLES = """\b
Examples:
  rlpost config init mine.yaml
  rlpost config init recipes/mine.yaml train grpo env=gsm8k optim.lr=1e-6
"""


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The recipe to write, NAME.yaml.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[VERB] [KEY=VALUE]...",
            help="What it should say; train grpo where no verb is named.",
            autocompletion=complete_settings_of_verb,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Write a commented recipe: what people change first, and the rest commented out."""
    command, overrides = verb_and_rest(words or [])
    from rlpost.config.starter import write_starter

    needed, typed = write_starter(expanded(file), command, overrides)
    using = shlex.join([f"recipe={_as_recipe(file)}", *typed])
    use = f"rlpost {command.verb} {using}"
    if as_json:
        print_json({"file": str(expanded(file)), "needed": needed, "use": use})
        return
    if needed:
        print(f"give these a value in it first: {', '.join(needed)}")
    print(printable(f"wrote {file}; use it with: {use}"))


def _as_recipe(file: Path) -> str:
    """How `recipe=` names the file: by its name where it lies in ./recipes."""
    return file.stem if file.parent == Path("recipes") and file.suffix == ".yaml" else str(file)
