"""Whether an environment can be trained in with a model, found out before the model is loaded."""

from __future__ import annotations

from typing import Any

from rlpost.data.continuation import Continuation
from rlpost.envs.chat import ChatEnv
from rlpost.errors import ConfigError


def check_rewards(env: ChatEnv) -> None:
    """Raise ConfigError for an environment whose rewards are one a token: a step takes one a completion."""
    if changing := [type(transform).__name__ for transform in env.transforms if transform.reward_per_token]:
        raise ConfigError(
            f"the environment has a {changing[0]}, which makes a reward a token, and a training takes one a "
            "completion: leave it out and let the loss hold the penalty, with loss.kl_coef"
        )


def check_template(env: ChatEnv, tokenizer: Any) -> None:
    """Raise DataError where conversations of several turns cannot be written with the model's chat template."""
    if env.max_steps is not None and env.max_steps < 2:
        return
    tools = env.tools.transforms if env.tools else []
    schemas = [schema for tool in tools if tool.described for schema in tool.schemas()]
    Continuation(tokenizer).check(env.tool_role if tools else env.user_role, schemas)
