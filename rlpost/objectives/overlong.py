"""Completions that ran into the length limit: DAPO's soft penalty, and leaving them out of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from tensordict import TensorDict, TensorDictBase

from rlpost.data.conversation import CUT
from rlpost.model.packing import Row

PART = "overlong"  # the name of the penalty among the parts of a reward


def soft_overlong_penalty(lengths: torch.Tensor, max_tokens: int, penalty_tokens: int) -> torch.Tensor:
    """What a completion's length costs, float32 of the shape of `lengths`: from 0 down to -1.

    0 up to `max_tokens - penalty_tokens` tokens, from there on a straight line down to -1 at
    `max_tokens`, and -1 beyond. DAPO (arXiv:2503.14476, eq. 13).
    """
    beyond = lengths.float() - (max_tokens - penalty_tokens)
    return -(beyond / penalty_tokens).clamp(0.0, 1.0)


def penalise_overlong(batch: TensorDictBase, max_tokens: int, penalty_tokens: int) -> None:
    """Add the penalty to each reward of `batch` (B,), as its part `overlong`.

    A completion is as long as what its model sampled. Accuracies stay as they are, and a reward that
    failed stays without a value.
    """
    lengths = torch.tensor([int(mask.sum()) for mask in batch["masks", "all_assistant_mask"].unbind()])
    penalty = soft_overlong_penalty(lengths, max_tokens, penalty_tokens).unsqueeze(-1)  # (B, 1)
    parts: TensorDictBase = batch["next"].get("reward_parts", TensorDict(batch_size=batch.batch_size))
    batch["next"].set("reward", batch["next", "reward"] + penalty)
    batch["next"].set("reward_parts", parts.set(PART, penalty))


def mask_overlong(batch: TensorDictBase, rows: Sequence[Row]) -> list[Row]:
    """`rows` with nothing to train on in those that were cut; the others are the same objects.

    Cut are those that ended at the length limit of a turn, or where the context had no room for more.
    Their rewards count in the baseline all the same. Overlong filtering of DAPO (arXiv:2503.14476,
    section 3.4).
    """
    return [
        replace(row, sampled=torch.zeros_like(row.sampled)) if reason in CUT else row
        for row, reason in zip(rows, batch["finish_reason"], strict=True)
    ]
