"""Builds environments from settings."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

from rlpost.catalog import BUILT_IN_TOOLS, OWN_TOOL, row_of
from rlpost.envs.base import ToolLimits, ToolTransform
from rlpost.envs.chat import ChatEnv, DatasetChatEnv
from rlpost.errors import ConfigError
from rlpost.settings import EnvSettings, ToolsSettings
from rlpost.settings.commands import FineTuningSettings, SampledSettings
from rlpost.settings.env import ToolRole

if TYPE_CHECKING:
    from rlpost.data.datasets import ShownRows


def build_env(
    settings: EnvSettings, *, num_prompts: int, group_size: int, seed: int, tools: ToolsSettings | None = None
) -> DatasetChatEnv:
    """The environment of `settings`: `num_prompts` whole groups of `group_size` conversations at once.

    `seed`, the run's, and `settings.seed` choose the order of the prompts together. Nothing is read
    until the environment is started. Raises ConfigError for settings without an environment, and for
    several turns if nothing answers the first.
    """
    env = make_env(settings, num_prompts=num_prompts, group_size=group_size, seed=seed)
    for part in env.parts:
        own = part.source_settings or settings
        part.history = own.history if settings.history is None else settings.history
        if tools is not None and tools.use:
            add_tools(part, tools)
        elif own.max_turns > 1 and not part.answers:
            raise ConfigError(
                f"env.max_turns={own.max_turns} gives turns that nothing answers: add tools.use=python, for example"
            )
    return env


def add_tools(env: ChatEnv, settings: ToolsSettings) -> None:
    """Append the tools named in `settings.use` to `env`. Raises ConfigError if a plugin's tool is not a tool."""
    env.tool_role = (settings.role or ToolRole.user).value
    env.tool_limits = ToolLimits(settings.max_calls, settings.max_calls_per_turn, settings.max_output_chars)
    for name in settings.use:
        tool: ToolTransform = BUILT_IN_TOOLS.get(name, OWN_TOOL).build(name, settings)
        tool.described = settings.describe
        env.append_transform(tool)
    if env.tools is not None:
        env.tools.parser, env.tools.follows_role = settings.parser, settings.role is None


def build_training_env(settings: SampledSettings) -> DatasetChatEnv:
    """The environment that a step of training samples from: see `build_env`."""
    env = build_env(
        settings.env,
        num_prompts=settings.prompts_per_step,
        group_size=settings.group_size,
        seed=settings.seed,
        tools=settings.tools,
    )
    for part in env.parts:
        part.hint = settings.reference_hint
    return env


def contents_of(settings: Any) -> dict[str, str]:
    """The rows that a training with `settings` reads, as its environment.json has them: see `DatasetChatEnv.content`.

    Raises DataError for rows that cannot be used.
    """
    splits = {"train": settings.env}
    if settings.eval.enabled:
        splits["held out"] = settings.env.held_out_for(settings.eval.limit)
    found: dict[str, str] = {}
    for name, own in splits.items():
        env = make_env(own, num_prompts=1, group_size=1, seed=settings.seed)
        with closing(env):
            found[name] = env.content(None if settings.learns_from_own else shown_of(env, settings))
    return found


def shown_of(env: DatasetChatEnv, settings: FineTuningSettings) -> ShownRows | None:
    """The rows of `env` that `settings` train on, pairs or demonstrations; None if they can only be iterated."""
    return env.paired() if settings.learns_from_pairs else env.demonstrated()


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
