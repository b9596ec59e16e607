"""`rlpost config`: lists options and recipes, shows and explains settings, writes a recipe to begin with."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rlpost.catalog import CHOICES, COMMANDS
from rlpost.cli.completion import complete_explain, complete_group
from rlpost.cli.plan import resolved
from rlpost.cli.terminal import print_json, print_lines
from rlpost.cli.usage import App, AsJson, Words
from rlpost.cli.views import table
from rlpost.config.comments import describe, description
from rlpost.config.schema import commands_of, groups_of, options, recipes, verb_and_rest
from rlpost.errors import ConfigError
from rlpost.files import expanded
from rlpost.text import did_you_mean, nearest, printable

RECIPES = "recipe"
EXPLAIN_EXAMPLES = """\
  rlpost config explain
  rlpost config explain loss.clip_high
  rlpost config explain learning            every setting about it
  rlpost config explain env.path train grpo recipe=gsm8k-smollm2-cpu
"""
INIT_EXAMPLES = """\
  rlpost config init mine.yaml
  rlpost config init recipes/mine.yaml train grpo env=gsm8k optim.lr=1e-6
"""
LIST_EXAMPLES = """\
  rlpost config list
  rlpost config list model
"""
SHOW_EXAMPLES = """\
  rlpost config show
  rlpost config show train grpo env=gsm8k optim.lr=1e-6
  rlpost config show eval model=qwen
"""
app = App(help="List, show and explain settings.")


@app.command("explain", examples=EXPLAIN_EXAMPLES, short_help="Explain a setting, and who set it.")
def explain(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY] [VERB] [KEY=VALUE]...",
            help="A key or group, or a word to search for; all keys if left out.",
            autocompletion=complete_explain,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a setting is: value, type, meaning, who set it, and what the papers used.

    Of any other word: the settings whose name or meaning has it.
    """
    name, rest = _split_key(words or [])
    command, overrides = verb_and_rest(rest)
    from rlpost.config.explain import every_key, search
    from rlpost.config.explain import explain as explained

    if name is None:
        lines = every_key(command, overrides)
        if as_json:
            print_json(lines)
        else:
            print_lines(key_table(lines))
        return
    if not rest and (found := search(name)):
        if as_json:
            print_json(found)
        else:
            print_lines(table([(row["key"], row["meaning"]) for row in found]))
        return
    meaning = explained(name, command if rest and "=" not in rest[0] else None, overrides)
    if as_json:
        print_json(meaning)
    else:
        print_lines(lines_of(meaning))


@app.command("init", examples=INIT_EXAMPLES, short_help="Write a commented recipe.")
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The recipe to write, NAME.yaml.")],
    words: Words = None,
    as_json: AsJson = False,
) -> None:
    """Write a commented recipe: what people change first, and the rest commented out."""
    command, overrides = verb_and_rest(words or [])
    from rlpost.config.explain import write_starter

    needed, typed = write_starter(expanded(file), command, overrides)
    using = shlex.join([f"recipe={_as_recipe(file)}", *typed])
    use = f"rlpost {command.verb} {using}"
    if as_json:
        print_json({"file": str(expanded(file)), "needed": needed, "use": use})
        return
    if needed:
        print(f"give these a value in it first: {', '.join(needed)}")
    print(printable(f"wrote {file}; use it with: {use}"))


@app.command("list", examples=LIST_EXAMPLES, short_help="List the options of each group, and the recipes.")
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
        raise ConfigError(f"{wanted} is not a group{hint}")
    listed = {name: _described(name) for name in (groups if wanted is None else [wanted])}
    if as_json:
        print_json(listed)
        return
    for name, described in listed.items():
        print(f"{name}=")
        print_lines(table(list(described.items()), indent=2))


@app.command("show", examples=SHOW_EXAMPLES, short_help="Print a resolved configuration as YAML.")
def show(words: Words = None, as_json: AsJson = False) -> None:
    """Print the resolved configuration of a verb as YAML."""
    from rlpost.config.compose import compose

    command, overrides = verb_and_rest(words or [])
    composed, _ = resolved(compose(command, overrides))
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


def lines_of(meaning: Mapping[str, Any]) -> list[str]:
    """One key, group or part as lines of the terminal."""
    is_key = "type" in meaning
    name = meaning["key" if is_key else "group"]
    value = meaning["text" if is_key else "chosen"]
    set_by = meaning["set_by"] or ("nobody yet: it needs a value" if is_key else None)
    named = {"type": meaning.get("type"), "meaning": meaning["meaning"], "set by": set_by, "of": meaning.get("of")}
    lines = [
        name if value is None else f"{name}={value}",
        "",
        *table([row for row in named.items() if row[1]], indent=2),
    ]
    if options := meaning.get("options"):
        lines += [
            "",
            "options:",
            *table([("*" if each == value else " ", each, text) for each, text in options.items()], indent=2),
        ]
    if len(layers := meaning["layers"]) > 1:
        unused = " (of another option: without effect)"
        rows = [(layer["text"], layer["where"] + ("" if layer["effective"] else unused)) for layer in layers]
        lines += ["", "set by (the last one counts):", *table(rows, indent=2)]
    if papers := meaning.get("papers"):
        lines += [
            "",
            "values in papers:",
            *table([(p["value"], f"{p['paper']}, {p['where']}") for p in papers], indent=2),
        ]
    if is_key:
        return [*lines, "", f"as in {meaning['command']}"]
    return [*lines, "", "settings:", *key_table(meaning["keys"]), "", f"a group of {meaning['command']}"]


def key_table(keys: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys with their values and meanings; an empty line before each group of them."""
    rows = table([(f"{k['key']}={k['text']}", k["meaning"]) for k in keys], indent=2)
    parts = [k["key"].rpartition(".")[0] for k in keys]
    begins = [i > 0 and part != parts[i - 1] for i, part in enumerate(parts)]
    return [line for begin, row in zip(begins, rows, strict=True) for line in (["", row] if begin else [row])]


def _split_key(words: list[str]) -> tuple[str | None, list[str]]:
    """The key to explain, and the other words; without a key first, every key is meant."""
    if not words or "=" in words[0]:
        return None, words
    verbs = {command.verb for command in COMMANDS} - {"eval"}  # eval is a part of the configuration too
    if any(" ".join(words[: len(verb.split())]) == verb for verb in verbs):
        return None, words
    return words[0], words[1:]


def _described(group: str) -> dict[str, str]:
    """Option or recipe -> its description."""
    if group == RECIPES:
        return {name: description(file) for name, file in recipes().items()}
    return {option: describe(group, option) + _owners(group, option) for option in options(group)}


def _owners(group: str, option: str) -> str:
    """The commands that can choose an option, if others with its group cannot."""
    having = [command for command in COMMANDS if group in groups_of(command.settings)]
    owners = commands_of(group, option)
    return "" if owners == having else f" ({', '.join(command.verb for command in owners)})"


def _as_recipe(file: Path) -> str:
    """The value of `recipe=` for the file: its name if it is in ./recipes, else its path."""
    return file.stem if file.parent == Path("recipes") and file.suffix == ".yaml" else str(file)
