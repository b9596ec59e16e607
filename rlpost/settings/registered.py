"""What a plugin adds, by name: environments, rewards and tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rlpost.errors import ConfigError
from rlpost.settings.code import NAME
from rlpost.settings.env import EnvSettings

BUILT_IN_REWARDS = ("exact", "number", "contains")  # what each is: rlpost/rewards/builtin.py


@dataclasses.dataclass(frozen=True)
class RegisteredEnv:
    """An environment of a plugin: `build(settings, **common)` makes it, a class or a function."""

    settings: type[EnvSettings]
    build: Callable[..., Any]


ENVS: dict[str, RegisteredEnv] = {}
REWARDS: dict[str, Callable[..., Any]] = {}
REWARD_FILES: dict[str, str] = {}  # reward -> the plugin that registered it, full path; none for one of other code
TOOLS: dict[str, Callable[..., Any]] = {}


def register_env(name: str, settings: type[EnvSettings], build: Callable[..., Any]) -> None:
    """Make `env=NAME` choose an environment of your own, with the fields of `settings` as its keys.

    `settings` is a dataclass derived from `rlpost.settings.EnvSettings`. `build`, a class or a
    function, is called as `build(settings, **common)` and returns a `DatasetChatEnv`; `common` are
    that class's own arguments. Raises ConfigError for a name or class that is taken or cannot be one.
    """
    _check_name("register_env", name, ENVS)
    if not (isinstance(settings, type) and issubclass(settings, EnvSettings)):
        raise ConfigError(
            f"register_env({name!r}): {_shown(settings)} is not derived from rlpost.settings.EnvSettings: let it be"
        )
    if "__dataclass_fields__" not in vars(settings):
        raise ConfigError(f"register_env({name!r}): {settings.__name__} is no dataclass: put @dataclass above it")
    if not callable(build):
        raise ConfigError(f"register_env({name!r}): {_shown(build)} builds nothing: give a class or a function")
    owner = next((other for other, env in ENVS.items() if env.settings is settings), None)
    if owner is not None:
        raise ConfigError(f"register_env({name!r}): {settings.__name__} belongs to env={owner}: derive another class")
    ENVS[name] = RegisteredEnv(settings, build)


def register_reward(name: str, function: Callable[..., Any]) -> None:
    """Make `env.reward=NAME` choose a reward of your own.

    Raises ConfigError for a name that is taken or cannot be one, and for what cannot be called.
    """
    _check_name("register_reward", name, (*BUILT_IN_REWARDS, *REWARDS))
    if not callable(function):
        raise ConfigError(f"register_reward({name!r}): {_shown(function)} is no function")
    REWARDS[name] = function


def register_tool(name: str, tool: Callable[..., Any]) -> None:
    """Make `tools.use=[NAME]` offer a tool of your own.

    `tool` is a function that the model may call, with type hints and a docstring that describes each
    parameter, or a class derived from `rlpost.envs.ToolTransform`, made without arguments. Raises
    ConfigError for a name that is taken or cannot be one, and for what cannot be called.
    """
    _check_name("register_tool", name, ("python", "mcp", "browser", *TOOLS))
    if not callable(tool):
        raise ConfigError(f"register_tool({name!r}): {_shown(tool)} cannot be called: give a function or a class")
    TOOLS[name] = tool


def _check_name(said: str, name: Any, taken: Any) -> None:
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise ConfigError(f"{said}({name!r}): a name is letters, digits, - and _, a letter first")
    if name in taken:
        raise ConfigError(f"{said}({name!r}): the name is taken; choose another")


def _shown(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)
