"""Whether an environment can be trained in with a model, found out before the model is loaded."""

from __future__ import annotations

from typing import Any

from rlpost.data.continuation import Continuation
from rlpost.envs.chat import ChatEnv
from rlpost.envs.transforms.log_prob import KLRewardTransform
from rlpost.errors import ConfigError


def check_rewards(env: ChatEnv) -> None:
    """Raise ConfigError for an environment whose rewards are one a token: a step takes one a completion."""
    if any(isinstance(transform, KLRewardTransform) and transform.add_to_reward for transform in env.transforms):
        raise ConfigError(
            "the environment has a KLRewardTransform, which makes a reward a token, and a training takes one a "
            "completion: leave it out and let the loss hold the penalty, with loss.kl_coef"
        )


def check_template(env: ChatEnv, tokenizer: Any) -> None:
    """Raise DataError where conversations of several turns cannot be written with the model's chat template."""
    if env.max_steps is not None and env.max_steps < 2:
        return
    tools = env.tools.transforms
    schemas = [schema for tool in tools if tool.described for schema in tool.schemas()]
    Continuation(tokenizer).check(env.tools.role if tools else env.user_role, schemas)
