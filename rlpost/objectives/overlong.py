"""Completions that ran into the length limit: the soft penalty of DAPO."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase

PART = "overlong"  # the name of the penalty among the parts of a reward


def soft_overlong_penalty(lengths: torch.Tensor, max_tokens: int, penalty_tokens: int) -> torch.Tensor:
    """What a completion's length costs, float32 of the shape of `lengths`: from 0 down to -1.

    0 up to `max_tokens - penalty_tokens` tokens, from there on a straight line down to -1 at
    `max_tokens`, and -1 beyond. DAPO (arXiv:2503.14476, eq. 13).
    """
    beyond = lengths.float() - (max_tokens - penalty_tokens)
    return -(beyond / penalty_tokens).clamp(0.0, 1.0)


class OverlongPenalty:
    """The buffer's transform that adds the penalty to each reward, as its part `overlong`.

    A completion is as long as what its model sampled. Accuracies stay as they are, and a reward
    that failed stays without a value.
    """

    def __init__(self, max_tokens: int, penalty_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.penalty_tokens = penalty_tokens

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """`batch` (B,), with `("next", "reward")` and `("next", "reward_parts", "overlong")` written."""
        lengths = torch.tensor([int(mask.sum()) for mask in batch["masks", "all_assistant_mask"].unbind()])
        penalty = soft_overlong_penalty(lengths, self.max_tokens, self.penalty_tokens).unsqueeze(-1)  # (B, 1)
        parts: TensorDictBase = batch["next"].get("reward_parts", TensorDict(batch_size=batch.batch_size))
        batch["next"].set("reward", batch["next", "reward"] + penalty)
        batch["next"].set("reward_parts", parts.set(PART, penalty))
        return batch
