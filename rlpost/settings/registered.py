"""What a plugin adds, by name: rewards and tools. An environment gets its row in rlpost/catalog.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlpost.errors import ConfigError
from rlpost.settings.code import NAME

BUILT_IN_REWARDS = ("exact", "number", "contains")  # what each is: rlpost/rewards/builtin.py

REWARDS: dict[str, Callable[..., Any]] = {}
REWARD_FILES: dict[str, str] = {}  # reward -> the plugin that registered it, full path; none for one of other code
TOOLS: dict[str, Callable[..., Any]] = {}


def register_reward(name: str, function: Callable[..., Any]) -> None:
    """Make `env.reward=NAME` choose a reward of your own.

    Raises ConfigError for a name that is taken or cannot be one, and for what cannot be called.
    """
    check_name("register_reward", name, (*BUILT_IN_REWARDS, *REWARDS))
    if not callable(function):
        raise ConfigError(f"register_reward({name!r}): {shown(function)} is no function")
    REWARDS[name] = function


def register_tool(name: str, tool: Callable[..., Any]) -> None:
    """Make `tools.use=[NAME]` offer a tool of your own.

    `tool` is a function that the model may call, with type hints and a docstring that describes each
    parameter, or a class derived from `rlpost.envs.ToolTransform`, made without arguments. Raises
    ConfigError for a name that is taken or cannot be one, and for what cannot be called.
    """
    check_name("register_tool", name, ("python", "mcp", "browser", *TOOLS))
    if not callable(tool):
        raise ConfigError(f"register_tool({name!r}): {shown(tool)} cannot be called: give a function or a class")
    TOOLS[name] = tool


def check_name(said: str, name: Any, taken: Any) -> None:
    """Raise ConfigError, in the name of the function `said`, for a name that is taken or cannot be one."""
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise ConfigError(f"{said}({name!r}): a name is letters, digits, - and _, a letter first")
    if name in taken:
        raise ConfigError(f"{said}({name!r}): the name is taken; choose another")


def shown(value: Any) -> str:
    """A value by its name, where it has one."""
    return getattr(value, "__name__", None) or repr(value)
