"""How a training's completions are collected."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from rlpost.errors import ConfigError
from rlpost.settings.checks import Settings, limited

MAX_RESTARTS = 3  # where nothing else is said


class PushMode(Enum):
    """What becomes of groups under way when weights are pushed: waited for, or kept with the new weights."""

    wait = "wait"
    keep = "keep"


@dataclass
class CollectorSettings(Settings, group="collector"):
    """What every way of collecting is."""

    name: ClassVar[str] = ""  # by which collector= chooses it


@dataclass
class SyncCollectorSettings(CollectorSettings):
    """In this process, in turn with training."""

    name: ClassVar[str] = "sync"


@dataclass
class AsyncCollectorSettings(CollectorSettings):
    """In a process of its own, beside training: within max_policy_lag, 1 where nothing else is said."""

    name: ClassVar[str] = "async"

    depth: int | None = limited(None, at_least=0)  # steps ahead that groups begin, max_policy_lag at most; None: 1
    push: PushMode = PushMode.wait  # groups under way at a push end first, or go on with the new weights
    max_restarts: int = limited(MAX_RESTARTS, at_least=0)  # of a process that dies; one more ends the run
    wait_seconds: float = limited(900.0, above=0.0)  # longest wait for one more group
    players: int = limited(1, at_least=1)  # processes that sample, each with an engine of its own
    gpus: list[int] = field(default_factory=list)  # that they sample on, equally many each; []: all, training's too

    def __post_init__(self) -> None:
        super().__post_init__()
        if twice := sorted({gpu for gpu in self.gpus if self.gpus.count(gpu) > 1 or gpu < 0}):
            raise ConfigError(f"collector.gpus={self.gpus}: {twice[0]} is no number of one GPU: name each once, from 0")
        if len(self.gpus) % self.players:
            raise ConfigError(
                f"collector.gpus={self.gpus} cannot be shared by collector.players={self.players}: give each as many"
            )
