"""Builds environments from settings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from rlpost.catalog import BUILT_IN_TOOLS, OWN_TOOL, row_of
from rlpost.envs.base import ToolLimits, ToolTransform
from rlpost.envs.chat import ChatEnv, DatasetChatEnv
from rlpost.errors import ConfigError
from rlpost.settings import EnvSettings, ToolsSettings
from rlpost.settings.env import ToolRole

if TYPE_CHECKING:
    from rlpost.data.datasets import ShownRows


def build_env(
    settings: EnvSettings,
    *,
    num_prompts: int = 1,
    group_size: int = 1,
    seed: int = 0,
    tools: ToolsSettings | None = None,
    hint: str | None = None,
) -> DatasetChatEnv:
    """The environment of `settings`: `num_prompts` whole groups of `group_size` conversations at once.

    `seed`, the run's, and `settings.seed` choose the order of the prompts together. A reference reads the `hint`, a
    text with fields of the task, beside the prompt. Nothing is read until the environment is started. Raises
    ConfigError for settings without an environment, and for several turns if nothing answers the first.
    """
    env = make_env(settings, num_prompts=num_prompts, group_size=group_size, seed=seed)
    for part in env.parts:
        own = part.source_settings or settings
        part.history = own.history if settings.history is None else settings.history
        part.hint = hint
        if tools is not None and (tools.use or own.brings_tools):
            add_tools(part, tools)
        elif own.most_turns > 1 and not part.answers:
            raise ConfigError(
                f"env.max_turns={own.max_turns} gives turns that nothing answers: add tools.use=python, for example"
            )
    return env


def add_tools(env: ChatEnv, settings: ToolsSettings) -> None:
    """Append the tools named in `settings.use` to `env`; what the settings say holds for its own tools too.

    Raises ConfigError if a plugin's tool is not a tool.
    """
    env.tool_role = (settings.role or ToolRole.user).value
    env.tool_limits = ToolLimits(settings.max_calls, settings.max_calls_per_turn, settings.max_output_chars)
    env.tool_parser, env.tool_role_follows = settings.parser, settings.role is None
    for name in settings.use:
        tool: ToolTransform = BUILT_IN_TOOLS.get(name, OWN_TOOL).build(name, settings)
        tool.described = settings.describe
        env.append_transform(tool)


def contents_of(
    env: EnvSettings,
    held_out: EnvSettings | None,
    seed: int,
    shown_of: Callable[[DatasetChatEnv], ShownRows | None] = lambda env: None,
) -> dict[str, str]:
    """The rows that a training reads, as its environment.json has them: see `DatasetChatEnv.content`.

    `shown_of` gives the rows of a training on rows; a training on its own completions reads prompts. Raises DataError
    for rows that cannot be used.
    """
    found: dict[str, str] = {}
    for name, settings in (("train", env), ("held out", held_out)):
        if settings is not None:
            with closing(make_env(settings, num_prompts=1, group_size=1, seed=seed)) as made:
                found[name] = made.content(shown_of(made))
    return found


def make_env(settings: EnvSettings, *, num_prompts: int, group_size: int, seed: int) -> DatasetChatEnv:
    """The environment of `settings` as it is without tools: see `build_env`."""
    return row_of("env", type(settings)).build(
        settings,
        system_prompt=settings.system_prompt,
        split=settings.split,
        limit=settings.limit,
        prompt_template=settings.prompt_template,
        max_prompt_tokens=settings.max_prompt_tokens,
        max_completion_tokens=settings.max_completion_tokens,
        max_steps=settings.max_turns,
        num_envs=num_prompts,
        repeats=group_size,
        group_repeats=True,
        seed=seed,
    )
