"""Plugins: Python files of the user's own that add environments, rewards and tools before anything is composed."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from enum import Enum

from rlpost.catalog import CHOICES, Choice
from rlpost.config.keys import NUMBERS, Key, keys_of
from rlpost.config.overrides import Override, parse_value, parse_words
from rlpost.errors import ConfigError
from rlpost.settings.code import CODE, RUNS
from rlpost.settings.registered import REWARD_FILES, REWARDS, TOOLS
from rlpost.user_file import check_file, import_file

PLUGIN = Key("plugin", list[str], False, [], CODE[RUNS])
_loaded: set[str] = set()  # full paths


def load_plugins(paths: Sequence[str]) -> None:
    """Import each file, once a process, and make what it registers as choosable as what is built in.

    Raises ConfigError for a file that is missing, does not import (its line is named), registers
    nothing, or registers what cannot be used.
    """
    for path in paths:
        check_file(path, f"plugin={path}")
        envs, rewards, tools = dict(CHOICES["env"]), dict(REWARDS), dict(TOOLS)
        try:
            file = import_file(path).__file__
            if file not in _loaded:
                added = {name: env for name, env in CHOICES["env"].items() if name not in envs}
                _check_added(path, added, others=len(REWARDS) + len(TOOLS) - len(rewards) - len(tools))
        except ConfigError:
            _restore(CHOICES["env"], envs)
            _restore(REWARDS, rewards)
            _restore(TOOLS, tools)
            raise
        _loaded.add(str(file))
        REWARD_FILES.update({name: str(file) for name in REWARDS if name not in rewards})


def without_plugins(words: Sequence[str]) -> list[str]:
    """Load what the words `plugin=...` of a command line name; returns the other words.

    Raises what `load_plugins` raises, and ConfigError for a list that cannot be read.
    """
    load_plugins([path for o in parse_words([w for w in words if _names_plugins(w)]) for path in plugin_paths(o)])
    return [word for word in words if not _names_plugins(word)]


def plugin_paths(override: Override) -> list[str]:
    """The paths that `plugin=...` names. Raises ConfigError for a list that cannot be read."""
    return parse_value(PLUGIN, override.text)


def _names_plugins(word: str) -> bool:
    return word.startswith("plugin=")


def _check_added(path: str, envs: dict[str, Choice], *, others: int) -> None:
    if not envs and not others:
        raise ConfigError(
            f"plugin={path} registers nothing: end it with rlpost.register_env(...), rlpost.register_reward(...) or "
            "rlpost.register_tool(...)"
        )
    for settings in (env.cls for env in envs.values()):
        try:
            keys = keys_of(settings, "env.")
        except (NameError, TypeError) as error:
            raise ConfigError(f"plugin={path}: a type in {settings.__name__} cannot be read: {error}") from error
        for key in keys:
            if not _can_be_set(key):
                raise ConfigError(
                    f"plugin={path}: {settings.__name__}.{key.name.removeprefix('env.')} has a type that cannot be "
                    "set: use int, float, bool, str, an Enum, or a list of one of them"
                )


def _can_be_set(key: Key) -> bool:
    if typing.get_origin(key.annotation) not in (None, list):
        return False
    return key.element in NUMBERS or (isinstance(key.element, type) and issubclass(key.element, Enum))


def _restore(registry: dict[str, typing.Any], before: dict[str, typing.Any]) -> None:
    registry.clear()
    registry.update(before)
