"""What flows between the parts: conversations, batches, histories, the replay buffer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlpost.data.history import History as History
    from rlpost.data.replay_buffer import ReplayBuffer as ReplayBuffer

_HOME = {
    "History": "rlpost.data.history",
    "ReplayBuffer": "rlpost.data.replay_buffer",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOME)
