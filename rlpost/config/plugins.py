"""Plugins: Python files of the user's own, imported before anything is composed, and what they add by name."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any

from rlpost.catalog import BUILT_IN_TOOLS, CHOICES, COMMANDS, TRAIN_GRPO, TRAIN_SFT, WATCHERS, Command
from rlpost.config.code import check_origin
from rlpost.config.overrides import Override, parse_value, parse_words
from rlpost.config.schema import TYPE_NAMES, Key, keys_of
from rlpost.errors import ConfigError
from rlpost.settings.base import BUILT_IN_REWARDS, CODE, MISSING, NAME, REWARD_FILES, REWARDS, TOOLS, Choice
from rlpost.settings.commands import FineTuningSettings, RunRequest, SampledSettings
from rlpost.settings.env import EnvSettings
from rlpost.settings.loss import ESTIMATORS, PolicyLossSettings
from rlpost.text import first_line_of
from rlpost.user_file import check_file, import_file

PLUGIN = Key("plugin", list[str], False, [], CODE)
_loaded: set[str] = set()  # full paths


def load_plugins(paths: Sequence[str]) -> None:
    """Import each file, once a process, and make what it registers as choosable as what is built in.

    Raises ConfigError for a file that is missing, does not import (its line is named), registers
    nothing, or registers what cannot be used.
    """
    for path in paths:
        check_file(path, f"plugin={path}")
        before = registered()
        try:
            file = str(import_file(path).__file__)
        except ConfigError:
            restore(before)
            raise
        if file not in _loaded and registered() == before:
            raise ConfigError(
                f"plugin={path} registers nothing: end it with rlpost.register_env(...), or with register_reward, "
                "register_tool, register_loss, register_estimator, register_algorithm or register_watcher"
            )
        _loaded.add(file)
        REWARD_FILES.update(dict.fromkeys(REWARDS.keys() - before["reward"].keys(), file))


def without_plugins(words: Sequence[str]) -> list[str]:
    """Load what the words `plugin=...` of a command line name; returns the other words.

    Raises what `load_plugins` raises, and ConfigError for a list that cannot be read.
    """
    named = [word for word in words if word.startswith("plugin=")]
    load_plugins([path for override in parse_words(named) for path in plugin_paths(override)])
    return [word for word in words if word not in named]


def plugin_paths(override: Override) -> list[str]:
    """The paths that `plugin=...` names. Raises ConfigError for a list that cannot be read, or stands in a file."""
    paths = parse_value(PLUGIN, override.text)
    check_origin(PLUGIN, paths, override)
    return paths


# What plugins register. Each function raises ConfigError for a name that is taken or cannot be one, and for other
# arguments that cannot be used.


def register_env(name: str, settings: type[EnvSettings], build: Callable[..., Any]) -> None:
    """Make `env=NAME` choose an environment of your own, with the fields of `settings` as its keys.

    `settings` is a dataclass derived from `rlpost.settings.EnvSettings`. `build`, a class or a
    function, is called as `build(settings, **common)` and returns a `DatasetChatEnv`; `common` are
    that class's own arguments.
    """
    _register_option("env", name, settings, EnvSettings, build)


def register_loss(name: str, settings: type[PolicyLossSettings], function: Callable[..., Any]) -> None:
    """Make `loss=NAME` choose a loss of your own, with the fields of `settings` as its keys.

    `settings` is a dataclass derived from `rlpost.settings.PolicyLossSettings`, or from a class that is.
    `function(tokens, **coefficients)` takes the `rlpost.objectives.functional.Tokens` of some completions
    and the fields that `settings` adds to `PolicyLossSettings`, and returns a `Surrogate`: a loss for each
    token. rlpost averages it, weights it for the sampler, and adds KL and entropy terms. Every command
    whose loss is a policy loss can choose it.
    """
    _register_option("loss", name, settings, PolicyLossSettings, function)


def register_estimator(name: str, function: Callable[..., Any]) -> None:
    """Make `advantage.estimator=NAME` choose an advantage estimator of your own.

    `function(rewards, groups)` gets the rewards of a step's completions, (N,) float64, all of them finite,
    and for each the number of its group, (N,) int64. It returns the advantages, (N,).
    """
    _check_name("register_estimator", name, ESTIMATORS)
    ESTIMATORS[name] = Choice(None, first_line_of(function), function)


def register_algorithm(
    name: str,
    settings: type[Any],
    train: Callable[[Any, RunRequest], int],
    *,
    choices: Mapping[str, str] | None = None,
    without: Sequence[str] = (),
) -> None:
    """Make `rlpost train NAME` run a training loop of your own, with the fields of `settings` as its keys.

    `settings` is a dataclass derived from `rlpost.settings.SampledSettings`, or from the settings of a
    training that rlpost has. `train(settings, request)` runs or resumes the training and returns the exit
    code; docs/plugins.md has one. `choices` says which option a group has where none is chosen, as
    {"loss": "reinforce"}; the others are those of the training that `settings` derives from. `without` are
    inherited keys that the loop does not read, so nobody can set them. The docstring of `settings` becomes
    the verb's help.
    """
    caller, verb = f"register_algorithm({name!r})", f"train {name}"
    _check_name("register_algorithm", name, {word for c in COMMANDS for word in (c.name, c.verb.split()[-1])})
    _check_dataclass(caller, settings, SampledSettings, FineTuningSettings)
    usual: Command[Any] = TRAIN_GRPO if issubclass(settings, SampledSettings) else TRAIN_SFT
    near = next((c for c in COMMANDS if issubclass(settings, c.settings)), usual)
    defaults = {**near.choices, **(choices or {})}
    groups = [own.name for own in fields(settings) if own.default is MISSING]
    short = first_line_of(settings)
    COMMANDS.append(
        Command(
            verb,
            name.replace("-", "_"),
            settings,
            {group: defaults[group] for group in groups},
            without=(*near.without, *without),
            optional=near.optional,
            short=short,
            doc=(inspect.getdoc(settings) or "") if short else "",
            examples=(f"rlpost {verb} plugin=FILE.py",),
            loop=train,
            rows=near.rows,
        )
    )


def register_reward(name: str, function: Callable[..., Any]) -> None:
    """Make `env.reward=NAME` choose a reward of your own."""
    _check_name("register_reward", name, (*BUILT_IN_REWARDS, *REWARDS))
    REWARDS[name] = function


def register_tool(name: str, tool: Callable[..., Any]) -> None:
    """Make `tools.use=[NAME]` offer a tool of your own.

    `tool` is a function that the model may call, with type hints and a docstring that describes each
    parameter, or a class derived from `rlpost.envs.ToolTransform`, made without arguments.
    """
    _check_name("register_tool", name, (*BUILT_IN_TOOLS, *TOOLS))
    TOOLS[name] = tool


def register_watcher(name: str, build: Callable[[Any], Any], *, optional: bool = False) -> None:
    """Watch every training with a watcher of your own, `build(run)`: see docs/plugins.md.

    It has any of the methods `on_start(facts)`, `on_step(step)`, `on_evaluation(evaluation)`, `on_end(outcome)`, and
    may end the run with `run.stop(reason)`. What it raises ends the run, unless it is `optional`: then its errors are
    counted and shown.
    """
    _check_name("register_watcher", name, WATCHERS)
    WATCHERS[name] = build, optional


_REGISTRIES: dict[str, dict[str, Any]] = {
    "env": CHOICES["env"],
    "loss": CHOICES["loss"],
    "estimator": ESTIMATORS,
    "reward": REWARDS,
    "tool": TOOLS,
    "watcher": WATCHERS,
}


def registered() -> dict[str, dict[str, Any]]:
    """Everything that a plugin can add to, by kind and name, as it is at present."""
    algorithms = {command.verb: command for command in COMMANDS}
    return {kind: dict(rows) for kind, rows in _REGISTRIES.items()} | {"algorithm": algorithms}


def restore(before: Mapping[str, Mapping[str, Any]]) -> None:
    """Bring back what `registered` returned, in place."""
    for kind, rows in _REGISTRIES.items():
        rows.clear()
        rows.update(before[kind])
    COMMANDS[:] = before["algorithm"].values()


def _register_option(group: str, name: str, settings: type[Any], base: type, build: Callable[..., Any]) -> None:
    caller = f"register_{group}"
    _check_name(caller, name, CHOICES[group])
    _check_dataclass(f"{caller}({name!r})", settings, base)
    CHOICES[group][name] = Choice(settings, builds=build)


def _check_name(caller: str, name: Any, existing: Any) -> None:
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise ConfigError(f"{caller}({name!r}): a name is letters, digits, - and _, a letter first")
    if name in existing:
        raise ConfigError(f"{caller}({name!r}): the name is taken; choose another")


def _check_dataclass(caller: str, settings: Any, *bases: type) -> None:
    """Raise ConfigError unless `settings` is a dataclass derived from one of `bases`, of values that can be set."""
    name = getattr(settings, "__name__", repr(settings))
    if not (isinstance(settings, type) and issubclass(settings, bases)):
        known = " or ".join(f"rlpost.settings.{base.__name__}" for base in bases)
        raise ConfigError(f"{caller}: {name} is not derived from {known}: derive it")
    if "__dataclass_fields__" not in vars(settings):
        raise ConfigError(f"{caller}: {name} is not a dataclass: put @dataclass above it")
    for key in keys_of(settings):
        is_value = typing.get_origin(key.annotation) in (None, list) and isinstance(key.element, type)
        if not is_value or not issubclass(key.element, (*TYPE_NAMES, Enum)):
            raise ConfigError(
                f"{caller}: {name}.{key.name} has a type that cannot be set: use int, float, bool, str, an Enum, or a "
                "list of one of them"
            )
