"""Settings to environments: the one place that maps each settings class to what it builds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlpost.envs.arithmetic import ArithmeticEnv
from rlpost.envs.chat import DatasetChatEnv
from rlpost.envs.countdown import CountdownEnv
from rlpost.envs.dataset import DatasetEnv
from rlpost.envs.gsm8k import SYSTEM_PROMPT, GSM8KEnv
from rlpost.envs.ifeval import IFBenchEnv, IFEvalEnv
from rlpost.envs.math_problems import SYSTEM_PROMPT as MATH_SYSTEM_PROMPT
from rlpost.envs.math_problems import MathEnv
from rlpost.envs.reasoning import ReasoningGymEnv
from rlpost.envs.text_game import TextGameEnv
from rlpost.envs.tool_choice import add_tools
from rlpost.errors import ConfigError
from rlpost.settings import (
    AnswerPlace,
    ArithmeticSettings,
    CountdownSettings,
    DatasetSettings,
    EnvSettings,
    GSM8KSettings,
    IFBenchSettings,
    IFEvalSettings,
    MathSettings,
    ReasoningGymSettings,
    TextGameSettings,
    ToolsSettings,
)
from rlpost.settings.more_envs import named_values
from rlpost.settings.registered import ENVS


def build_env(
    settings: EnvSettings, *, num_prompts: int, group_size: int, seed: int, tools: ToolsSettings | None = None
) -> DatasetChatEnv:
    """The environment of `settings`: `num_prompts` whole groups of `group_size` conversations at once.

    `seed`, the run's, and `settings.seed` choose the order of the prompts together. Nothing is read
    until the environment is started. Raises ConfigError for settings no environment belongs to, and for
    several turns where nothing answers the first.
    """
    builders = BUILDERS | {env.settings: env.build for env in ENVS.values()}
    build = builders.get(type(settings))
    if build is None:
        raise ConfigError(f"no environment belongs to {type(settings).__name__}: register it with rlpost.register_env")
    env = build(
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
    if not isinstance(env, DatasetChatEnv):
        raise ConfigError(
            f"what is registered for {type(settings).__name__} made a {type(env).__name__}, which is no DatasetChatEnv"
        )
    if tools is not None and tools.use:
        add_tools(env, tools)
    elif settings.max_turns > 1 and not env.answers:
        raise ConfigError(
            f"env.max_turns={settings.max_turns} gives turns that nothing answers: add tools.use=[python], for example"
        )
    return env


def _arithmetic(settings: ArithmeticSettings, *, seed: int, **common: Any) -> ArithmeticEnv:
    return ArithmeticEnv(
        operations=[operation.value for operation in settings.operations],
        digits=settings.digits,
        held_out=settings.held_out,
        seed=order_seed(seed, settings.seed),
        **common,
    )


def _countdown(settings: CountdownSettings, *, seed: int, **common: Any) -> CountdownEnv:
    return CountdownEnv(
        min_numbers=settings.min_numbers,
        max_numbers=settings.max_numbers,
        max_number=settings.max_number,
        max_target=settings.max_target,
        operations=[operation.value for operation in settings.operations],
        held_out=settings.held_out,
        seed=order_seed(seed, settings.seed),
        **common,
    )


def _dataset(settings: DatasetSettings, *, seed: int, **common: Any) -> DatasetEnv:
    return DatasetEnv(settings, seed=order_seed(seed, settings.seed), **common)


def _gsm8k(settings: GSM8KSettings, *, seed: int, system_prompt: str | None, **common: Any) -> GSM8KEnv:
    return GSM8KEnv(
        settings.path,
        shuffle=settings.shuffle,
        held_out=settings.held_out,
        system_prompt=SYSTEM_PROMPT if system_prompt is None else system_prompt,
        seed=order_seed(seed, settings.seed),
        **common,
    )


def _ifeval(settings: IFEvalSettings, *, seed: int, **common: Any) -> IFEvalEnv:
    env = IFBenchEnv if isinstance(settings, IFBenchSettings) else IFEvalEnv
    return env(
        settings.path,
        answer_only=settings.answer_only,
        leave_out=settings.leave_out,
        shuffle=settings.shuffle,
        held_out=settings.held_out,
        seed=order_seed(seed, settings.seed),
        **common,
    )


def _math(settings: MathSettings, *, seed: int, system_prompt: str | None, **common: Any) -> MathEnv:
    return MathEnv(
        settings.path,
        config=settings.config,
        shuffle=settings.shuffle,
        held_out=settings.held_out,
        verify_seconds=settings.verify_seconds,
        system_prompt=MATH_SYSTEM_PROMPT if system_prompt is None else system_prompt,
        seed=order_seed(seed, settings.seed),
        **common,
    )


def _reasoning_gym(settings: ReasoningGymSettings, *, seed: int, **common: Any) -> ReasoningGymEnv:
    return ReasoningGymEnv(
        settings.task,
        task_config=named_values("env.task_config", settings.task_config),
        answer_in_tags=settings.answer_in is AnswerPlace.tags,
        score_seconds=settings.score_seconds,
        held_out=settings.held_out,
        seed=order_seed(seed, settings.seed),
        **common,
    )


def _text_game(settings: TextGameSettings, *, seed: int, **common: Any) -> TextGameEnv:
    return TextGameEnv(
        settings.id,
        arguments=named_values("env.arguments", settings.arguments),
        moves=settings.moves,
        success_return=settings.success_return,
        invalid_reward=settings.invalid_reward,
        step_seconds=settings.step_seconds,
        held_out=settings.held_out,
        seed=order_seed(seed, settings.seed),
        **common,
    )


def longest_sampled(settings: EnvSettings) -> int:
    """Tokens that the model can sample in a conversation."""
    return settings.max_turns * settings.max_completion_tokens


def longest_conversation(settings: EnvSettings) -> int:
    """Tokens for which a conversation has room: the prompt, the model's turns, and what is said between them."""
    observed = (settings.max_turns - 1) * settings.max_observation_tokens
    return settings.max_prompt_tokens + longest_sampled(settings) + observed


def order_seed(run_seed: int, env_seed: int) -> int:
    """One number for the two: different for every pair of seeds below 2**32."""
    return run_seed << 32 | env_seed


BUILDERS: dict[type[EnvSettings], Callable[..., DatasetChatEnv]] = {
    ArithmeticSettings: _arithmetic,
    CountdownSettings: _countdown,
    DatasetSettings: _dataset,
    GSM8KSettings: _gsm8k,
    MathSettings: _math,
    ReasoningGymSettings: _reasoning_gym,
    TextGameSettings: _text_game,
    IFBenchSettings: _ifeval,
    IFEvalSettings: _ifeval,
}
