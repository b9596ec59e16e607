"""Whether a value makes something run, and who gave it: asked of the decoded value, for every road that values come on.

A person's own words on a command line may name code and programs. A recipe, a file of conf/ and what a run folder
kept may be anybody's, and may not.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from rlpost.catalog import CHOICES, COMMANDS
from rlpost.config.overrides import Override, parse_value, shown
from rlpost.config.schema import Key, as_text, class_of, flat, keys_of, options
from rlpost.errors import ConfigError
from rlpost.files import expanded
from rlpost.settings.base import MISSING
from rlpost.settings.env import SourceText
from rlpost.text import without_passwords

_FILE = re.compile(r"[^\s,=:\[\]\"']+\.py\b")
_SOURCES = "env.sources"  # each of them has the settings of an environment, and code by the rules of that one


def check_code(keys: Iterable[Key], config: DictConfig, given: Sequence[Override]) -> None:
    """Raise ConfigError where a value of `config` makes something run that no word of a command line gave.

    A value of conf/ cannot refer to others (${...}): it could copy a secret of this machine into a run.
    """
    by = {override.key: override for override in given}
    values = flat(cast(dict[str, Any], OmegaConf.to_container(config)))  # as they are written
    for name, value in values.items():
        if "${" in str(value):
            raise ConfigError(f"{name} stands in conf/ and refers to another value with ${{...}}: write it out")
        check_no_password(name, value)
    for key in keys:
        check_origin(key, values.get(key.name), by.get(key.name))


def check_no_password(name: str, value: Any) -> None:
    """Raise ConfigError where `value` is a URL with a password: a run folder keeps its settings, readable by others."""
    text = str(value)
    if " " not in text and (hidden := without_passwords(text)) != text:
        variables = "MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        where = f"in the environment ({variables})" if name == "tracking.uri" else "where its program looks for it"
        raise ConfigError(
            f"{name}={shown(hidden)} is refused: it holds a password, and a run keeps its settings in plain files; "
            f"leave it out and give it {where}"
        )


def check_origin(key: Key, value: Any, given: Override | None) -> None:
    """Raise ConfigError where `value` makes something run, and `given` is not of a command line."""
    if key.runs is None or not makes_run(key, value) or (given and not given.source):
        return
    if given is None:
        raise ConfigError(
            f"{key.name} stands in conf/, and a file cannot {key.runs.no_file}: give {key.name}=... on the command line"
        )
    raise ConfigError(
        f"{given.source}: a file cannot {key.runs.no_file}; leave the line out and give "
        f"{shlex.quote(f'{key.name}={shown(as_text(value))}')} on the command line"
    )


def makes_run(key: Key, value: Any) -> bool:
    """Whether `value` of `key` makes something run."""
    if key.runs is None or value == MISSING:
        return False
    if key.name == _SOURCES:
        return any(_is_source_of_code(str(text)) for text in value)
    return key.runs.by(value)


def choices_in(overrides: Iterable[Override]) -> dict[str, str]:
    """Group -> its option, as far as `overrides` choose one."""
    return {override.key: override.text for override in overrides if override.key in CHOICES}


def is_code(override: Override, choices: Mapping[str, str]) -> bool:
    """Whether an override makes something run under `choices`, so that it has to be given on a command line."""
    return code_word(override, choices) is not None


def code_word(override: Override, choices: Mapping[str, str]) -> str | None:
    """The override as a word of a command line, no letter of it disguised, where it makes something run; else None.

    `choices` maps groups to their options: env.id names code in env=verifiers, and a game in env=textarena. Where they
    leave the group open, the override counts as code if it is code to any option.
    """
    for key in _keys_named(override.key, choices):
        try:
            value = parse_value(key, override.text)
        except ConfigError:  # it runs nothing: composing it raises this
            continue
        if makes_run(key, value):
            return f"{override.key}={as_text(value)}"
    return None


def code_files(words: Sequence[str]) -> list[Path]:
    """The Python files on this machine that the words `key=value` of a run name as code."""
    overrides = [Override(key, text) for key, _, text in (word.partition("=") for word in words)]
    choices = choices_in(overrides)
    named = [name for override in overrides if is_code(override, choices) for name in _FILE.findall(override.text)]
    return [Path(name) for name in dict.fromkeys(named) if expanded(name).is_file()]


def _is_source_of_code(text: str) -> bool:
    """Whether a source of a mix, as written, makes something run."""
    try:
        source = SourceText.of(text)
    except ConfigError:  # composing it raises this
        return False
    choices = {"env": source.env}
    return any(is_code(Override(f"env.{key}", value), choices) for key, value in source.given.items())


def _keys_named(name: str, choices: Mapping[str, str]) -> list[Key]:
    """The keys called `name` with values that run code: that of the chosen option, or of all options if it is open."""
    group = name.partition(".")[0]
    is_known = group in choices and choices[group] in options(group)
    settings = class_of(group, choices[group]) if is_known else None
    keys = _running() if settings is None else keys_of(settings, f"{group}.")
    return [key for key in keys if key.name == name and key.runs is not None]


@cache
def _running() -> list[Key]:
    """rlpost's own keys with values that run code."""
    classes = [(command.settings, "") for command in COMMANDS]
    classes += [(row.cls, f"{group}.") for group, rows in CHOICES.items() for row in rows.values()]
    return [key for settings, prefix in classes for key in keys_of(settings, prefix) if key.runs is not None]
