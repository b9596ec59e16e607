"""What a player is built from, in the process that it samples in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle

from rlpost.assemble_policy import build_policy
from rlpost.collectors.group_player import GroupPlayer
from rlpost.config.plugins import load_plugins
from rlpost.envs.build import build_training_env
from rlpost.policies.sampling import training_sampling
from rlpost.settings import PolicySettings
from rlpost.settings.commands import SampledSettings


@dataclass
class PlayerOrder:
    """What a player is built from, in its process."""

    settings: SampledSettings
    policy: PolicySettings
    folder: Path
    tokenizer: Any
    adapter_rank: int | None
    adapter: Path | None


def player_builder(order: PlayerOrder) -> Callable[[], GroupPlayer]:
    """What builds the player of `order` in a process that knows no plugin yet."""
    return partial(build_player, list(order.settings.plugin), cloudpickle.dumps(order))


def build_player(plugins: list[str], order: bytes) -> GroupPlayer:
    """The player that `order` describes, its policy started; in its own process, which knows no plugin yet."""
    load_plugins(plugins)
    asked: PlayerOrder = cloudpickle.loads(order)
    settings = asked.settings
    env = build_training_env(settings)
    policy = build_policy(
        asked.policy,
        asked.folder,
        asked.tokenizer,
        model=None,
        model_settings=settings.model,
        env_settings=settings.env,
        sampling=training_sampling(settings),
        seed=settings.seed,
        adapter_rank=asked.adapter_rank,
        adapter=asked.adapter,
    )
    policy.start()
    return GroupPlayer(env, policy)
