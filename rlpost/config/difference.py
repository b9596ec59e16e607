"""Two configurations side by side: recipes, runs, or lists of settings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from rlpost.catalog import Command
from rlpost.config.code import is_code
from rlpost.config.compose import compose, merge_all
from rlpost.config.keys import flat
from rlpost.config.overrides import Override, shown
from rlpost.config.paths import RUNS, is_run_folder
from rlpost.config.plain_yaml import check_plain
from rlpost.config.recipes import command_of
from rlpost.config.registry import recipes
from rlpost.config.verbs import verb_and_rest
from rlpost.errors import ConfigError, DataError, RlpostError
from rlpost.files import json_in
from rlpost.home import expanded
from rlpost.nearest import did_you_mean, nearest


class Absent(Enum):
    """In place of the value of a setting that only the other side has."""

    absent = "-"


ABSENT = Absent.absent


@dataclass(frozen=True)
class Side:
    """One of the two: its settings, chosen options included, and for a run what it ran on."""

    name: str
    settings: dict[str, Any]
    environment: dict[str, Any] | None


@dataclass(frozen=True)
class Difference:
    """Key -> the two values, `ABSENT` where a side lacks it, for all keys that differ.

    `environment` only between two runs.
    """

    a: Side
    b: Side
    settings: dict[str, tuple[Any, Any]]
    environment: dict[str, tuple[Any, Any]]


def difference(a: str, b: str) -> Difference:
    """How `a` and `b` differ, each the name or file of a recipe, a run, or settings in one quoted word.

    Raises ConfigError for what is none of these or does not compose, DataError for a run whose
    files cannot be read.
    """
    left, right = _side(a), _side(b)
    environments = _differing(left.environment, right.environment) if left.environment and right.environment else {}
    return Difference(left, right, _differing(left.settings, right.settings), environments)


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    pairs = {key: (a.get(key, ABSENT), b.get(key, ABSENT)) for key in _together(a, b)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _together(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The keys of `a`, and after the last of each group those that only `b` has of it."""
    keys = list(a)
    for key in b:
        if key not in a:
            group = key.rpartition(".")[0]
            last = max((i for i, known in enumerate(keys) if known.rpartition(".")[0] == group), default=len(keys) - 1)
            keys.insert(last + 1, key)
    return keys


def _side(text: str) -> Side:
    folder = next((f for f in (expanded(text), RUNS / text) if text.strip() and is_run_folder(f)), None)
    if folder is not None:
        return _run(folder)
    if text in recipes() or (text.endswith((".yaml", ".yml")) and "=" not in text):
        return _composed(text, command_of(text), [f"recipe={text}"])
    if not text.strip() or "=" in text or " " in text:
        command, words = verb_and_rest(_words(text))
        return _composed(text.strip() or f"the defaults of {command.verb}", command, words)
    if (Path(text).is_dir() or "/" in text) and not Path(text).is_file():
        raise ConfigError(f"{shown(text)} is no run of rlpost: a run folder holds config.yaml and overrides.txt")
    runs = [folder.name for folder in RUNS.iterdir()] if RUNS.is_dir() else []
    hint = did_you_mean(nearest(text, [*recipes(), *runs]), "give a recipe, a run, or quoted settings such as steps=3")
    raise ConfigError(f"{shown(text)} is neither a recipe nor a run{hint}")


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{shown(text)} cannot be read as settings: {str(error).lower()}") from None


def _composed(name: str, command: Command[Any], words: list[str]) -> Side:
    composed = compose(command, words)
    return Side(name, {**composed.choices, **flat(composed.as_dict())}, None)


def _run(folder: Path) -> Side:
    """A run as it was resolved when it began, which another version of rlpost might resolve otherwise."""
    try:
        check_plain(folder / "config.yaml")
        resolved = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        environment = json_in(folder / "environment.json")
        overrides = (folder / "overrides.txt").read_text(encoding="utf-8").splitlines()
        typed = (folder / "command.txt").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{folder} cannot be read as a run: {str(error).splitlines()[0]}") from None
    if not isinstance(resolved, dict) or not isinstance(environment, dict):
        raise DataError(f"{folder} cannot be read as a run: config.yaml or environment.json holds no settings")
    machine = flat(environment)
    machine.pop("seed", None)  # a setting, and shown as one
    return Side(str(folder), {**_choices(typed, overrides), **flat(resolved)}, machine)


def _choices(typed: list[str], overrides: list[str]) -> dict[str, str]:
    """The options a run chose; none where its settings no longer compose, since its own values are shown anyway.

    Code that the run names is left out: whoever looks at a run has not asked for it.
    """
    verb = [word for word in shlex.split(typed[-1])[1:3] if "=" not in word and word[:1] != "-"] if typed else []
    asked = [Override(key, text, "overrides.txt") for key, _, text in (word.partition("=") for word in overrides)]
    env = {}
    if any(override.key == "plugin" for override in asked):
        env = {override.key: override.text for override in asked if override.key == "env"}
        asked = [override for override in asked if override.key.partition(".")[0] not in ("plugin", "env")]
    kept = [override for override in asked if not is_code(override)]
    try:
        return merge_all(verb_and_rest(verb)[0], kept=kept).choices | env
    except RlpostError:
        return {}
