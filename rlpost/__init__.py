"""rlpost: post-train language models with GRPO and SFT from the command line."""

from typing import TYPE_CHECKING

from rlpost.imports import lazy_names

if TYPE_CHECKING:
    from rlpost.config.plugins import register_algorithm as register_algorithm
    from rlpost.config.plugins import register_env as register_env
    from rlpost.config.plugins import register_estimator as register_estimator
    from rlpost.config.plugins import register_loss as register_loss
    from rlpost.config.plugins import register_reward as register_reward
    from rlpost.config.plugins import register_tool as register_tool
    from rlpost.config.plugins import register_watcher as register_watcher

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_names(__name__, __file__)
