"""What an appended transform may do to an environment."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import TensorDictBase

from rlpost.data.conversation import Conversation


class Transform:
    """Acts on conversations when they begin, after each reply and when they end, and on the TensorDicts made of them.

    `on_begin`, `on_reply` and `on_end` are called whichever face of the environment is used, `__call__`
    only by `reset` and `step`. A transform overrides what it needs; each method does nothing by itself.
    Where conversations are played one by one (`collector=async`) the three are called by several threads, each
    with some conversations, though never by two at once in one environment.
    """

    reward_per_token = False  # whether it makes a reward for each token, which no training of rlpost takes

    def start(self) -> None:
        """Load or start what is needed, or raise why that cannot be done; a second call does nothing."""

    def on_begin(self, conversations: Sequence[Conversation]) -> None:
        """Change conversations that have just been drawn, in place."""

    def on_reply(self, conversations: Sequence[Conversation]) -> None:
        """React to the policy's turn, in place: append a message, add to the reward, end the conversation."""

    def on_end(self, conversations: Sequence[Conversation]) -> None:
        """Give back what is held for conversations that are over; called once for each, after it was scored.

        Also for those that are given up before they are over, of which nothing may be held yet.
        """

    def on_reset(self) -> None:
        """Give back what is held for conversations under way: the environment is reset, and they are abandoned."""

    def close(self) -> None:
        """Give back everything; called when the environment closes. A second call does nothing."""

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Change what the policy is shown: what `reset` returns, and `next` of what `step` does."""
        return tensordict

    def on_played(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Change turns that were played, with their `next`: what `step` returns, and the batch of a collector."""
        return tensordict
