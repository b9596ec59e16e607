"""What the model is asked, and how its replies are scored."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlpost.envs.arithmetic import ArithmeticEnv as ArithmeticEnv
    from rlpost.envs.base import EnvBase as EnvBase
    from rlpost.envs.chat import ChatEnv as ChatEnv
    from rlpost.envs.chat import DatasetChatEnv as DatasetChatEnv
    from rlpost.envs.gsm8k import GSM8KEnv as GSM8KEnv
    from rlpost.envs.gsm8k import GSM8KPrepareQuestion as GSM8KPrepareQuestion
    from rlpost.envs.gsm8k import GSM8KRewardParser as GSM8KRewardParser
    from rlpost.envs.gsm8k import make_gsm8k_env as make_gsm8k_env

_HOME = {
    "ArithmeticEnv": "rlpost.envs.arithmetic",
    "ChatEnv": "rlpost.envs.chat",
    "DatasetChatEnv": "rlpost.envs.chat",
    "EnvBase": "rlpost.envs.base",
    "GSM8KEnv": "rlpost.envs.gsm8k",
    "GSM8KPrepareQuestion": "rlpost.envs.gsm8k",
    "GSM8KRewardParser": "rlpost.envs.gsm8k",
    "make_gsm8k_env": "rlpost.envs.gsm8k",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOME)
