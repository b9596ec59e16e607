"""What flows between the parts: conversations, batches, histories, the replay buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlpost.lazy import lazy_names

if TYPE_CHECKING:
    from rlpost.data.history import History as History
    from rlpost.data.replay_buffer import ReplayBuffer as ReplayBuffer
    from rlpost.data.topk import TopKRewardSelector as TopKRewardSelector

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "History": "history",
        "ReplayBuffer": "replay_buffer",
        "TopKRewardSelector": "topk",
    },
)
