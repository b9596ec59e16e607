"""`rlpost config`: what can be chosen, and what a choice comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlpost.cli.terminal import table
from rlpost.cli.usage import OVERRIDES_HELP, Verbs
from rlpost.config.nearest import did_you_mean, nearest
from rlpost.config.registry import COMMANDS, SCHEMAS, TRAIN_GRPO, Command, description, options, recipes
from rlpost.errors import ConfigError

RECIPES = "recipe"

LIST_EXAMPLES = """\b
Examples:
  rlpost config list
  rlpost config list model
"""
SHOW_EXAMPLES = """\b
Examples:
  rlpost config show
  rlpost config show train grpo env=gsm8k optim.lr=1e-6
  rlpost config show eval model=qwen
"""

app = typer.Typer(cls=Verbs, no_args_is_help=True, rich_markup_mode=None, help="List options, show a configuration.")


@app.command("list", epilog=LIST_EXAMPLES, short_help="List the options of each group, and the recipes.")
def list_options(
    group: Annotated[str | None, typer.Argument(metavar="[GROUP]", help="Only this group.")] = None,
) -> None:
    """List the options of each group (chosen by group=option) and the recipes."""
    groups = [*SCHEMAS, RECIPES]
    wanted = group.removesuffix("s") if group == "recipes" else group
    if wanted is not None and wanted not in groups:
        hint = did_you_mean(nearest(wanted, groups), f"the groups are {', '.join(groups)}")
        raise ConfigError(f"{wanted} is no group{hint}")
    for name in groups if wanted is None else [wanted]:
        print(f"{name}=")
        print("\n".join(table(_rows(recipes() if name == RECIPES else options(name)))))


@app.command("show", epilog=SHOW_EXAMPLES, short_help="Print a resolved configuration as YAML.")
def show(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="VERB|KEY=VALUE", help=f"train grpo or eval, then settings. {OVERRIDES_HELP}"),
    ] = None,
) -> None:
    """Print the resolved configuration of a verb (train grpo if none is named) as YAML."""
    from rlpost.config.compose import compose

    command, overrides = split_verb(words or [])
    print(compose(command, overrides).yaml, end="")


def split_verb(words: list[str]) -> tuple[Command, list[str]]:
    """The configured verb that `words` begin with, whole or by its last word, and the rest.

    Raises ConfigError for an unknown verb.
    """
    count = next((i for i, word in enumerate(words) if "=" in word), len(words))
    verb, rest = " ".join(words[:count]), words[count:]
    if not verb:
        return TRAIN_GRPO, rest
    names = {name: command for command in COMMANDS for name in (command.verb, command.name)}
    if verb not in names:
        hint = did_you_mean(nearest(verb, names), f"it is {' or '.join(c.verb for c in COMMANDS)}")
        raise ConfigError(f"{verb} has no configuration{hint}")
    return names[verb], rest


def _rows(files: dict[str, Path]) -> list[tuple[str, str]]:
    return [(name, description(file)) for name, file in files.items()]
