"""Settings to environments: the one place that maps each settings class to what it builds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlpost.envs.arithmetic import ArithmeticEnv
from rlpost.envs.chat import DatasetChatEnv
from rlpost.envs.gsm8k import SYSTEM_PROMPT, GSM8KEnv
from rlpost.errors import ConfigError
from rlpost.settings import ArithmeticSettings, EnvSettings, GSM8KSettings


def build_env(settings: EnvSettings, *, num_prompts: int, group_size: int, seed: int) -> DatasetChatEnv:
    """The environment of `settings`: `num_prompts` whole groups of `group_size` conversations at once.

    `seed`, the run's, and `settings.seed` choose the order of the prompts together. Nothing is read
    until the environment is started. Raises ConfigError for settings no environment belongs to.
    """
    build = BUILDERS.get(type(settings))
    if build is None:
        raise ConfigError(
            f"no environment belongs to {type(settings).__name__}: add its builder to rlpost.envs.build.BUILDERS"
        )
    return build(
        settings,
        split=settings.split,
        limit=settings.limit,
        prompt_template=settings.prompt_template,
        max_prompt_tokens=settings.max_prompt_tokens,
        max_completion_tokens=settings.max_completion_tokens,
        num_envs=num_prompts,
        repeats=group_size,
        group_repeats=True,
        seed=seed,
    )


def _arithmetic(settings: ArithmeticSettings, *, seed: int, **common: Any) -> ArithmeticEnv:
    return ArithmeticEnv(
        operations=[operation.value for operation in settings.operations],
        digits=settings.digits,
        system_prompt=settings.system_prompt,
        seed=order_seed(seed, settings.seed),
        **common,
    )


def _gsm8k(settings: GSM8KSettings, *, seed: int, **common: Any) -> GSM8KEnv:
    return GSM8KEnv(
        settings.path,
        shuffle=settings.shuffle,
        system_prompt=SYSTEM_PROMPT if settings.system_prompt is None else settings.system_prompt,
        seed=order_seed(seed, settings.seed),
        **common,
    )


def order_seed(run_seed: int, env_seed: int) -> int:
    """One number for the two: different for every pair of seeds below 2**32."""
    return run_seed << 32 | env_seed


BUILDERS: dict[type[EnvSettings], Callable[..., DatasetChatEnv]] = {
    ArithmeticSettings: _arithmetic,
    GSM8KSettings: _gsm8k,
}
