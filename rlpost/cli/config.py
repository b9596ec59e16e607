"""`rlpost config`: lists options and recipes, shows, explains and compares settings, writes a recipe to begin with."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rlpost.catalog import CHOICES, COMMANDS
from rlpost.cli.completion import complete_explain, complete_group, complete_side
from rlpost.cli.plan import resolved
from rlpost.cli.terminal import print_json, print_lines
from rlpost.cli.usage import App, AsJson, Words
from rlpost.cli.views import table
from rlpost.config.comments import describe, description
from rlpost.config.paths import RUNS, is_run_folder
from rlpost.config.schema import as_text, commands_of, flat, groups_of, options, recipes, verb_and_rest
from rlpost.errors import ConfigError, DataError
from rlpost.files import expanded
from rlpost.record import is_apart
from rlpost.runs.reader import read_run
from rlpost.text import did_you_mean, nearest, printable

DIFFERENT = 1  # as diff and git diff --exit-code do
RECIPES = "recipe"
SIDE_HELP = "A recipe (name or file), a run, or quoted settings."
EXPLAIN_EXAMPLES = """\
  rlpost config explain
  rlpost config explain loss.clip_high
  rlpost config explain learning            every setting about it
  rlpost config explain env.path train grpo recipe=gsm8k-smollm2-cpu
"""
DIFF_EXAMPLES = """\
  rlpost config diff gsm8k-smollm2-cpu gsm8k-qwen0.5b-gpu
  rlpost config diff runs/first runs/second
  rlpost config diff "" "env=gsm8k optim.lr=1e-6"
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
app = App(help="List, show, explain and compare settings.")


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


@app.command("diff", examples=DIFF_EXAMPLES, short_help="Compare two recipes, runs or lists of settings.")
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=SIDE_HELP, autocompletion=complete_side)],
    b: Annotated[str, typer.Argument(metavar="B", help="The same as A.", autocompletion=complete_side)],
    as_json: AsJson = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if they differ.")] = False,
) -> None:
    """Print the settings that differ; for two runs, the versions and the machine too."""
    found = difference(a, b)
    if as_json:
        print_json(found)
    else:
        print_lines(difference_lines(found))
    if exit_code and (found["settings"] or found["environment"]):
        raise typer.Exit(DIFFERENT)


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


def difference(a: str, b: str) -> dict[str, Any]:
    """How `a` and `b` differ, as JSON: each is the name or file of a recipe, a run, or settings in one quoted word.

    `settings` and, for two runs, `environment` (versions and machine) have the two values of each key that differs; a
    side that lacks it is left out. Of a run it is the settings as resolved when it began: another version of rlpost
    might resolve them differently, and looking at a run must not run code that it names.

    Raises ConfigError for any other word and for settings that do not compose, DataError for a run whose settings
    cannot be read.
    """
    (left, settings, machine), (right, others, other_machine) = _side(a), _side(b)
    if machine is None or other_machine is None:
        return {"a": left, "b": right, "settings": _differing(settings, others), "environment": {}}
    apart = {
        key: pair
        for key, pair in _differing(settings, others).items()
        if len(pair) == 1 or is_apart(key, list(pair.values()))
    }
    environment = _differing(machine, other_machine) if machine and other_machine else {}
    return {"a": left, "b": right, "settings": apart, "environment": environment}


def difference_lines(found: Mapping[str, Any]) -> list[str]:
    """The difference as lines of the terminal."""
    settings, machine = (
        [(key, *(as_text(pair[side]) if side in pair else "-" for side in "ab")) for key, pair in found[kind].items()]
        for kind in ("settings", "environment")
    )
    lines = table([("", found["a"], found["b"]), *settings]) if settings else ["no setting differs"]
    return [*lines, "", "versions and machine", *table(machine)] if machine else lines


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The keys whose values differ, those of a part together."""
    parts = list(dict.fromkeys(key.partition(".")[0] for key in (*a, *b)))
    keys = sorted(dict.fromkeys((*a, *b)), key=lambda key: parts.index(key.partition(".")[0]))
    pairs = {key: {side: values[key] for side, values in (("a", a), ("b", b)) if key in values} for key in keys}
    return {key: pair for key, pair in pairs.items() if len(pair) == 1 or pair["a"] != pair["b"]}


def _side(text: str) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    """Name and settings with the chosen options; versions and machine of a run, None for anything else."""
    folder = next((f for f in (expanded(text), RUNS / text) if text.strip() and is_run_folder(f)), None)
    if folder is not None:
        record = read_run(folder)
        if not record.config:
            raise DataError(f"{folder / 'config.yaml'} holds no settings that can be read")
        chosen = {group: option for group in CHOICES if (option := record.choice(group)) is not None}
        machine = flat(record.environment)
        machine.pop("seed", None)  # a setting, and shown as one
        return str(folder), chosen | flat(record.config), machine
    from rlpost.config.compose import compose
    from rlpost.config.recipes import command_of

    name = text.strip()
    if text in recipes() or (text.endswith((".yaml", ".yml")) and "=" not in text):
        command, words = command_of(text), [f"recipe={text}"]
    elif not name or "=" in text or " " in text:
        command, words = verb_and_rest(shlex.split(text))
    elif (Path(text).is_dir() or "/" in text) and not Path(text).is_file():
        raise ConfigError(f"{text} is not a run of rlpost: a run folder holds config.yaml and overrides.txt")
    else:
        runs = [folder.name for folder in RUNS.iterdir()] if RUNS.is_dir() else []
        hint = did_you_mean(nearest(text, [*recipes(), *runs]), "give a recipe, a run, or quoted settings: steps=3")
        raise ConfigError(f"{text} is neither a recipe nor a run{hint}")
    composed = compose(command, words)
    return name or f"the defaults of {command.verb}", composed.choices | flat(composed.as_dict()), None


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
