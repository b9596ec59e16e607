"""`rlpost config explain`: what a setting is, and who set it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from rlpost.catalog import COMMANDS
from rlpost.cli.completion import complete_explain
from rlpost.cli.terminal import print_json, print_lines, table
from rlpost.cli.usage import AsJson
from rlpost.config.verbs import verb_and_rest

if TYPE_CHECKING:
    from rlpost.config.meaning import GroupMeaning, KeyLine, KeyMeaning
    from rlpost.config.provenance import Layer

EXAMPLES = """\b
Examples:
  rlpost config explain
  rlpost config explain loss.clip_high
  rlpost config explain env.path train grpo recipe=gsm8k-smollm2-cpu
"""


def explain(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY] [VERB] [KEY=VALUE]...",
            help="A key, group or part of the configuration; every key where none is named.",
            autocompletion=complete_explain,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a setting is: value, type, meaning, who set it, and what the papers used."""
    name, rest = _split_key(words or [])
    command, overrides = verb_and_rest(rest)
    from rlpost.config.meaning import KeyMeaning, as_dict, every_key
    from rlpost.config.meaning import explain as explained

    if name is None:
        lines = every_key(command, overrides)
        if as_json:
            print_json([dataclasses.asdict(line) for line in lines])
        else:
            print_lines(key_table(lines))
        return
    meaning = explained(name, command if rest and "=" not in rest[0] else None, overrides)
    if as_json:
        print_json(as_dict(meaning))
    else:
        print_lines(key_lines(meaning) if isinstance(meaning, KeyMeaning) else group_lines(meaning))


def key_lines(meaning: KeyMeaning) -> list[str]:
    """One key, as the terminal shows it."""
    rows = [
        ("type", meaning.type),
        ("meaning", meaning.meaning),
        ("set by", meaning.set_by or "nobody yet: it needs a value"),
    ]
    lines = [f"{meaning.key}={meaning.text}", "", *table([row for row in rows if row[1]])]
    lines += layer_lines(meaning.layers)
    if meaning.papers:
        rows = [(p["value"], f"{p['paper']}, arXiv:{p['arxiv']}, {p['where']}") for p in meaning.papers]
        lines += ["", "what papers used:", *table(rows)]
    return [*lines, "", f"in: {meaning.command}"]


def group_lines(meaning: GroupMeaning) -> list[str]:
    """One group or part, as the terminal shows it."""
    lines = [f"{meaning.group}={meaning.chosen}" if meaning.chosen is not None else meaning.group, ""]
    lines += table([row for row in (("meaning", meaning.meaning), ("set by", meaning.set_by or "")) if row[1]])
    if meaning.options:
        marked = [("*" if name == meaning.chosen else " ", name, text) for name, text in meaning.options.items()]
        lines += ["", "options:", *table(marked)]
    lines += layer_lines(meaning.layers)
    return [*lines, "", "settings:", *key_table(meaning.keys), "", f"in: {meaning.command}"]


def key_table(keys: list[KeyLine]) -> list[str]:
    """Keys with their values and meanings; an empty line before each group of them."""
    lines: list[str] = []
    group = ""
    for key, line in zip(keys, table([(f"{k.key}={k.text}", k.meaning) for k in keys]), strict=True):
        part = key.key.rpartition(".")[0]
        if part != group and lines:
            lines.append("")
        group = part
        lines.append(line)
    return lines


def layer_lines(layers: list[Layer]) -> list[str]:
    """What several places say of one setting; nothing where one alone does."""
    if len(layers) < 2:
        return []
    unused = " (of another option: without effect)"
    rows = [(layer.text, layer.where + ("" if layer.effective else unused)) for layer in layers]
    return ["", "what was said, the last counts:", *table(rows)]


def _split_key(words: list[str]) -> tuple[str | None, list[str]]:
    """The key asked for and the rest; a verb or a setting in its place means every key."""
    if not words or "=" in words[0]:
        return None, words
    verbs = {command.verb for command in COMMANDS} - {"eval"}  # eval is a part of the configuration too
    if any(" ".join(words[: len(verb.split())]) == verb for verb in verbs):
        return None, words
    return words[0], words[1:]
