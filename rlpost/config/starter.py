"""A recipe to begin with: every setting with its value and meaning, those one rarely changes commented out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from rlpost.catalog import Command
from rlpost.config.code import is_code
from rlpost.config.compose import Merged, compose, merge_all
from rlpost.config.keys import Key, as_text, docs_of
from rlpost.config.meaning import as_json, meaning_of
from rlpost.config.overrides import shown
from rlpost.config.provenance import value_of
from rlpost.config.registry import options
from rlpost.errors import CheckpointError, ConfigError
from rlpost.settings.checks import MISSING

# what people change first; everything else stands commented out
LIKELY = (
    "steps",
    "seed",
    "prompts_per_step",
    "group_size",
    "env.path",
    "env.limit",
    "env.max_completion_tokens",
    "sampling.temperature",
    "loss.kl_coef",
    "optim.lr",
)
REWARD = "env.reward"  # one of the user's own, mostly
A_NAME = "name"  # a value that runs nothing, unless every value of a key does
PLAIN = re.compile(r"[A-Za-z][\w./:-]*\w")
VALUE_COLUMN = 48  # where the comments begin


def write_starter(file: Path, command: Command[Any], words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Write the recipe of `command` under `words` to a new file.

    Returns the keys that still need a value in it, and the words that have to stand beside the recipe on a
    command line because they name code: those given, and a key that is likeliest to with an example.

    Raises ConfigError where the file exists or is no .yaml, and what `compose` raises for words that
    cannot work; CheckpointError where it cannot be written.
    """
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{shown(str(file))}: a recipe is a YAML file; write {shown(file.name)}.yaml")
    if file.exists():
        raise ConfigError(f"{shown(str(file))} exists already: give another name, or remove it first")
    merged = merge_all(command, words)
    needed = [key for key in merged.keys if value_of(merged, key.name) == MISSING]
    beside = [key for key in needed if key.name == REWARD]
    if not needed:
        compose(command, words)  # an impossible combination is an error here rather than in every later use
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as stream:
            stream.write(starter(merged))
    except OSError as error:
        raise CheckpointError(f"cannot write {shown(str(file))}: {error.strerror}; give another place") from None
    code = [f"{override.key}={override.text}" for override in merged.given if is_code(override)]
    examples = [f"{key.name}={key.runs.example}" for key in beside if key.runs is not None]
    return [key.name for key in needed if key not in beside], [*code, *examples]


def starter(merged: Merged[Any]) -> str:
    """The text of the recipe; it composes to the same settings, with its commented lines or without them.

    Code is the exception: a recipe cannot name it, so those words stay on the command line.
    """
    given = {override.key for override in merged.given}
    code = {override.key for override in merged.given if is_code(override)}
    lines = [
        f"# {merged.choices['model']} on {merged.choices['env']}",  # what rlpost config list will say of it
        f"command: {merged.command.verb}",
        "",
        "# A line with a # before its key says what holds anyway: take the # away to change it.",
    ]
    part = ""
    for key in sorted(merged.keys, key=lambda key: "." in key.name):  # what stands in no group first
        if (now := key.name.rpartition(".")[0]) != part:
            part = now
            lines += ["", *_heading(part, merged)]
        lines.append(_line(key, merged, key.name in given or key.name in LIKELY, key.name in code))
    return "\n".join(lines) + "\n"


def _heading(part: str, merged: Merged[Any]) -> list[str]:
    """What a part of the configuration is, and for a group its option."""
    meaning = docs_of(merged.command.settings).get(part) or part
    if part not in merged.choices:
        return [f"# {meaning}"]
    return [f"# {meaning}: {' | '.join(options(part, merged.command))}", f"{part}: {merged.choices[part]}"]


def _line(key: Key, merged: Merged[Any], active: bool, code: bool) -> str:
    value = value_of(merged, key.name)
    missing = value == MISSING
    text = f"{key.name}: {MISSING if missing else yaml_text(as_json(value))}"
    text = text if active and not missing and not code else f"# {text}"
    first = "on the command line only, since it names code" if code else _where(key)
    remarks = ["needs a value" * missing, first, " | ".join(key.choices), meaning_of(merged, key.name)]
    remark = "; ".join(filter(None, remarks))
    return f"{text.ljust(VALUE_COLUMN)}  # {remark}" if remark else text


def _where(key: Key) -> str:
    """Where the values of a key may stand, of which some make something run."""
    if key.runs is None:
        return ""
    if key.runs.beside:
        return f"in a file {key.runs.beside} alone"
    return "on the command line only" if key.runs.by([A_NAME]) else f"a file cannot {key.runs.no_file}"


def yaml_text(value: Any) -> str:
    """A value on one line of YAML that OmegaConf's loader reads as the same value."""
    if isinstance(value, list):
        return "[" + ", ".join(yaml_text(element) for element in value) + "]"
    if not isinstance(value, str):
        return as_text(value)
    if PLAIN.fullmatch(value) and OmegaConf.create(f"a: {value}").a == value:
        return value
    return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=10**9).rstrip("\n")
