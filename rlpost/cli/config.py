"""`rlpost config`: lists options and recipes, shows and explains settings, writes a recipe to begin with."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rlpost.catalog import CHOICES, COMMANDS
from rlpost.cli.completion import complete_explain, complete_group
from rlpost.cli.terminal import print_json, print_lines, table
from rlpost.cli.usage import App, AsJson, Words
from rlpost.config.schema import commands_of, describe, description, groups_of, options, recipes, verb_and_rest
from rlpost.errors import ConfigError
from rlpost.files import expanded
from rlpost.text import did_you_mean, first_line_of, nearest, printable

RECIPES, REWARDS = "recipe", "reward"  # what is listed beside the groups
EXPLAIN_EXAMPLES = """\
  rlpost config explain
  rlpost config explain loss.clip_high
  rlpost config explain env=gsm8k           an option and its settings
  rlpost config explain learning            every setting about it
  rlpost config explain env.path train grpo recipe=gsm8k-smollm2-cpu
"""
LIST_EXAMPLES = """\
  rlpost config list
  rlpost config list model
  rlpost config list env plugin=./my_env.py
"""
SHOW_EXAMPLES = """\
  rlpost config show
  rlpost config show train grpo env=gsm8k optim.lr=1e-6
  rlpost config show eval model=qwen
  rlpost config show env=gsm8k --recipe mine.yaml
"""
app = App(help="List, show and explain settings.")


@app.command("explain", examples=EXPLAIN_EXAMPLES, short_help="Explain a setting, and who set it.")
def explain(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY] [VERB] [KEY=VALUE]...",
            help="A key, group or option, or a word to search for; all keys if left out.",
            autocompletion=complete_explain,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a setting is: value, type, meaning, who set it, and what the papers used.

    Of an option, as env=gsm8k: what it is, and its settings. Of any other word: the settings whose name or meaning has
    it.
    """
    name, rest = _split_key(words or [])
    command, overrides = verb_and_rest(rest)
    from rlpost.config.explain import every_key, search
    from rlpost.config.explain import explain as explained

    found: Any
    if name is None:
        found = every_key(command, overrides)
        lines = key_table(found)
    elif not rest and (found := search(name)):
        lines = table([(row["key"], row["meaning"]) for row in found])
    else:
        found = explained(name, command if rest and "=" not in rest[0] else None, overrides)
        if rest == words:  # one option was named: the others are beside the point
            del found["options"]
        lines = group_lines(found) if "keys" in found else key_lines(found)
    if as_json:
        print_json(found)
    else:
        print_lines(lines)


@app.command("list", examples=LIST_EXAMPLES, short_help="List the options of each group, recipes and rewards.")
def list_options(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[GROUP] [plugin=FILE]...",
            help="Only this group; files that add to it.",
            autocompletion=complete_group,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the options of each group (chosen by group=option), the recipes, and the rewards for env.reward."""
    wanted = words or []
    if any(word.startswith("plugin=") for word in wanted):
        from rlpost.config.plugins import without_plugins

        wanted = without_plugins(wanted)
    groups = [*CHOICES, RECIPES, REWARDS]
    named = [word if word in groups else word.removesuffix("s") for word in wanted]
    if unknown := next((word for word in named if word not in groups), None):
        hint = did_you_mean(nearest(unknown, groups), f"the groups are {', '.join(groups)}")
        raise ConfigError(f"{unknown} is not a group{hint}")
    listed = {name: _described(name) for name in named or groups}
    if as_json:
        print_json(listed)
        return
    rows: list[tuple[str, str]] = []
    for name, described in listed.items():
        rows.append(("env.reward=" if name == REWARDS else f"{name}=", ""))
        rows += [(f"  {option}", about) for option, about in described.items()]
    print_lines(table(rows))


@app.command("show", examples=SHOW_EXAMPLES, short_help="Print a configuration, or write it as a recipe.")
def show(
    words: Words = None,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a commented recipe to this new file, NAME.yaml.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the resolved configuration of a verb as YAML.

    With --recipe, write a recipe instead: what people change first, and the rest commented out.
    """
    command, overrides = verb_and_rest(words or [])
    if recipe is not None:
        from rlpost.config.explain import write_starter

        needed, code = write_starter(expanded(recipe), command, overrides)
        name = recipe.stem if recipe.parent == Path("recipes") and recipe.suffix == ".yaml" else recipe
        use = f"rlpost {command.verb} {shlex.join([f'recipe={name}', *code])}"
        if as_json:
            print_json({"file": str(expanded(recipe)), "needed": needed, "use": use})
            return
        if needed:
            print(f"give these a value in it first: {', '.join(needed)}")
        print(printable(f"wrote {recipe}; use it with: {use}"))
        return
    from rlpost.cli.plan import resolved
    from rlpost.config.compose import compose

    composed, _ = resolved(compose(command, overrides))
    if as_json:
        shown = {"verb": command.verb, "choices": composed.choices, "overrides": composed.overrides}
        print_json({**shown, "settings": composed.as_dict()})
    else:
        sys.stdout.write(composed.yaml)


def key_lines(meaning: Mapping[str, Any]) -> list[str]:
    """One key as lines of the terminal."""
    set_by = meaning["set_by"] or "nobody yet: it needs a value"
    rows = [("type", meaning["type"]), ("meaning", meaning["meaning"]), ("set by", set_by), ("of", meaning["of"])]
    lines = [f"{meaning['key']}={meaning['text']}", "", *table(rows, indent=2)]
    if papers := [(paper["value"], f"{paper['paper']}, {paper['where']}") for paper in meaning["papers"]]:
        lines += ["", "values in papers:", *table(papers, indent=2)]
    return [*lines, "", f"as in {meaning['command']}"]


def group_lines(meaning: Mapping[str, Any]) -> list[str]:
    """A group, or a part without options, as lines of the terminal."""
    chosen = meaning["chosen"]
    lines = [meaning["group"] if chosen is None else f"{meaning['group']}={chosen}", ""]
    rows = [("meaning", meaning["meaning"]), ("set by", meaning["set_by"])]
    lines += table([row for row in rows if row[1]], indent=2)
    lines += ["", *meaning["description"].splitlines()]
    if listed := [("*" if name == chosen else " ", name, text) for name, text in meaning.get("options", {}).items()]:
        lines += ["", "options:", *table(listed, indent=2)]
    settings = [(f"{key['key']}={key['text']}", key["meaning"], key["type"]) for key in meaning["keys"]]
    return [*lines, "", "settings:", *table(settings, indent=2), "", f"a group of {meaning['command']}"]


def key_table(keys: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys with their values and meanings; an empty line before each group of them."""
    rows = table([(f"{k['key']}={k['text']}", k["meaning"]) for k in keys], indent=2)
    parts = [k["key"].rpartition(".")[0] for k in keys]
    begins = [i > 0 and part != parts[i - 1] for i, part in enumerate(parts)]
    return [line for begin, row in zip(begins, rows, strict=True) for line in (["", row] if begin else [row])]


def _split_key(words: list[str]) -> tuple[str | None, list[str]]:
    """The key or group to explain, and the other words; without one first, every key is meant.

    An option, env=gsm8k, names its group.
    """
    first = words[0] if words else ""
    if (group := first.partition("=")[0]) in CHOICES and "=" in first:
        return group, words
    verbs = {command.verb for command in COMMANDS} - {"eval"}  # eval is a part of the configuration too
    if not words or "=" in first or any(" ".join(words[: len(verb.split())]) == verb for verb in verbs):
        return None, words
    return first, words[1:]


def _described(group: str) -> dict[str, str]:
    """Option, recipe or reward -> its description."""
    if group == RECIPES:
        return {name: description(file) for name, file in recipes().items()}
    if group == REWARDS:
        from rlpost.rewards.builtin import BUILT_IN
        from rlpost.settings.base import REWARDS as OWN

        more = {name: ", and env.accuracy" if row.measures_accuracy else "" for name, row in BUILT_IN.items()}
        built_in = {name: first_line_of(row.function).removesuffix(".") + more[name] for name, row in BUILT_IN.items()}
        return built_in | {name: first_line_of(function) for name, function in OWN.items()}
    having = [command for command in COMMANDS if group in groups_of(command.settings)]
    owners = {option: commands_of(group, option) for option in options(group)}
    only = {option: f" ({', '.join(o.verb for o in each)})" for option, each in owners.items() if each != having}
    return {option: describe(group, option) + only.get(option, "") for option in owners}
