"""`rlpost config`: what can be chosen, and what a choice comes to."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rlpost.catalog import CHOICES, COMMANDS
from rlpost.cli import config_diff, config_explain
from rlpost.cli.completion import complete_group
from rlpost.cli.terminal import print_json, print_lines, table
from rlpost.cli.usage import App, AsJson, Words
from rlpost.config.keys import groups_of
from rlpost.config.registry import commands_of, describe, description, options, recipes
from rlpost.config.verbs import verb_and_rest
from rlpost.errors import ConfigError
from rlpost.home import expanded
from rlpost.nearest import did_you_mean, nearest
from rlpost.text import printable

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
INIT_EXAMPLES = """\b
Examples:
  rlpost config init mine.yaml
  rlpost config init recipes/mine.yaml train grpo env=gsm8k optim.lr=1e-6
"""

app = App(help="List, show, explain and compare settings.")
app.command("explain", epilog=config_explain.EXAMPLES, short_help="Say what a setting is, and who set it.")(
    config_explain.explain
)
app.command("diff", epilog=config_diff.EXAMPLES, short_help="Compare two recipes, runs or lists of settings.")(
    config_diff.diff
)


@app.command("init", epilog=INIT_EXAMPLES, short_help="Write a commented recipe to begin with.")
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The recipe to write, NAME.yaml.")],
    words: Words = None,
    as_json: AsJson = False,
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


@app.command("list", epilog=LIST_EXAMPLES, short_help="List the options of each group, and the recipes.")
def list_options(
    group: Annotated[
        str | None, typer.Argument(metavar="[GROUP]", help="Only this group.", autocompletion=complete_group)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the options of each group (chosen by group=option) and the recipes."""
    groups = [*CHOICES, RECIPES]
    wanted = group.removesuffix("s") if group == "recipes" else group
    if wanted is not None and wanted not in groups:
        hint = did_you_mean(nearest(wanted, groups), f"the groups are {', '.join(groups)}")
        raise ConfigError(f"{wanted} is no group{hint}")
    listed = {name: _described(name) for name in (groups if wanted is None else [wanted])}
    if as_json:
        print_json(listed)
        return
    for name, described in listed.items():
        print(f"{name}=")
        print_lines(table(list(described.items())))


@app.command("show", epilog=SHOW_EXAMPLES, short_help="Print a resolved configuration as YAML.")
def show(words: Words = None, as_json: AsJson = False) -> None:
    """Print the resolved configuration of a verb as YAML."""
    from rlpost.config.compose import compose

    command, overrides = verb_and_rest(words or [])
    composed = compose(command, overrides)
    if as_json:
        print_json(
            {
                "verb": command.verb,
                "choices": composed.choices,
                "overrides": composed.overrides,
                "settings": composed.as_dict(),
            }
        )
    else:
        print(composed.yaml, end="")


def _described(group: str) -> dict[str, str]:
    """Option or recipe -> its description."""
    if group == RECIPES:
        return {name: description(file) for name, file in recipes().items()}
    return {option: describe(group, option) + _owners(group, option) for option in options(group)}


def _owners(group: str, option: str) -> str:
    """The commands that can choose an option, where others that have its group cannot."""
    having = [command for command in COMMANDS if group in groups_of(command.settings)]
    owners = commands_of(group, option)
    return "" if owners == having else f" ({', '.join(command.verb for command in owners)})"


def _as_recipe(file: Path) -> str:
    """How `recipe=` names the file: by its name where it lies in ./recipes."""
    return file.stem if file.parent == Path("recipes") and file.suffix == ".yaml" else str(file)
