"""The data of a training: conversations, batches, histories, the replay buffer."""

from typing import TYPE_CHECKING

from rlpost.imports import lazy_names

if TYPE_CHECKING:
    from rlpost.data.chat_templates import add_chat_template as add_chat_template
    from rlpost.data.history import History as History
    from rlpost.data.rendering import ContentBase as ContentBase
    from rlpost.torchrl.buffer_transforms import TopKRewardSelector as TopKRewardSelector
    from rlpost.torchrl.envs import LLMData as LLMData
    from rlpost.torchrl.frames import FrameBuffer as FrameBuffer
    from rlpost.torchrl.frames import LazyTensorStorage as LazyTensorStorage
    from rlpost.torchrl.frames import MultiStep as MultiStep
    from rlpost.torchrl.frames import split_trajectories as split_trajectories
    from rlpost.torchrl.replay_buffer import RayReplayBuffer as RayReplayBuffer
    from rlpost.torchrl.replay_buffer import ReplayBuffer as ReplayBuffer

__getattr__, __dir__ = lazy_names(__name__, __file__)
