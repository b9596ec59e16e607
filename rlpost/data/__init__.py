"""What flows between the parts: conversations, batches, histories, the replay buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlpost.lazy import lazy_names

if TYPE_CHECKING:
    from rlpost.collectors.ray_buffer import RayReplayBuffer as RayReplayBuffer
    from rlpost.data.chat_templates import add_chat_template as add_chat_template
    from rlpost.data.content import ContentBase as ContentBase
    from rlpost.data.frames import FrameBuffer as FrameBuffer
    from rlpost.data.frames import LazyTensorStorage as LazyTensorStorage
    from rlpost.data.frames import MultiStep as MultiStep
    from rlpost.data.frames import split_trajectories as split_trajectories
    from rlpost.data.history import History as History
    from rlpost.data.replay_buffer import ReplayBuffer as ReplayBuffer
    from rlpost.torchrl.llm_data import LLMData as LLMData
    from rlpost.torchrl.topk import TopKRewardSelector as TopKRewardSelector

__getattr__, __dir__ = lazy_names(__name__, __file__)
