"""How a training's completions are collected."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rlpost.settings.checks import Settings, limited


class PushMode(Enum):
    """What becomes of groups under way when weights are pushed: waited for, or kept with the new weights."""

    wait = "wait"
    keep = "keep"


@dataclass
class CollectorSettings(Settings, group="collector"):
    """What every way of collecting is."""


@dataclass
class SyncCollectorSettings(CollectorSettings):
    """In this process, in turn with training."""


@dataclass
class AsyncCollectorSettings(CollectorSettings):
    """In a process of its own, beside training: within max_policy_lag, 1 where nothing else is said."""

    depth: int | None = limited(None, at_least=0)  # steps ahead that groups begin; None: max_policy_lag, its most
    push: PushMode = PushMode.wait  # groups under way at a push end first, or go on with the new weights
    max_restarts: int = limited(3, at_least=0)  # of a process that dies; one more ends the run
    wait_seconds: float = limited(900.0, above=0.0)  # longest wait for one more group
