"""Fields of a batch, ragged or padded, as one 1-D tensor a row; and such rows as a padded tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase

from rlpost.data.ragged import ASSISTANT, ATTENTION, Key


def numbers(batch: TensorDictBase, name: Key, missing: type[Exception] = KeyError) -> list[torch.Tensor]:
    """The field's rows without pads, each 1-D. Raises `missing` where there is no such field.

    A padded field (B, T) is read through the attention mask, if there is one of its shape.
    """
    value = batch.get(name, None)
    if value is None:
        raise missing(f"the batch has no {name}")
    if value.is_nested:
        return list(value.unbind())
    if value.ndim == 3 and value.shape[-1] == 1:
        value = value.squeeze(-1)
    if value.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: it must be ragged (B, *) or padded (B, T)")
    attention = batch.get(ATTENTION, None)
    if attention is None or attention.is_nested:
        return list(value.unbind())
    if attention.shape != value.shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, the attention mask {tuple(attention.shape)}")
    return [row[kept.bool()] for row, kept in zip(value, attention, strict=True)]


def aligned(batch: TensorDictBase, name: Key, ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The field's rows, one value an id. Raises KeyError where there is none, ValueError for other lengths."""
    rows = numbers(batch, name)
    lengths, wanted = [row.numel() for row in rows], [row.numel() for row in ids]
    if lengths != wanted:
        raise ValueError(f"{name} has rows of {lengths} values for sequences of {wanted} ids")
    return rows


def per_token(batch: TensorDictBase, name: str, ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The field, given once a row (B,) or (B, 1) or once an id, as one value an id; ValueError where it is missing."""
    value = batch.get(name, None)
    if value is None:
        raise ValueError(f"the batch has no {name}: MCAdvantage writes it")
    size = len(ids)
    if not value.is_nested and tuple(value.shape) in ((size,), (size, 1), (size, 1, 1)):
        return [row.expand(i.numel()) for row, i in zip(value.reshape(size, 1), ids, strict=True)]
    return aligned(batch, name, ids)


def trained_masks(batch: TensorDictBase, ids: Sequence[torch.Tensor], strategy: str) -> list[torch.Tensor]:
    """Which ids are trained under a masking strategy, bool; never a sequence's first, which nothing predicts."""
    if strategy == "generic":
        masks = [torch.ones_like(row, dtype=torch.bool) for row in ids]
    elif strategy == "sft" and batch.get(("tokens", "prompt"), None) is not None:
        masks = [torch.arange(row.numel(), device=row.device) >= n for row, n in _with_prompt_length(batch, ids)]
    else:
        masks = [mask.bool().clone() for mask in aligned(batch, ASSISTANT, ids)]
    for mask in masks:
        mask[:1] = False
    return masks


def _with_prompt_length(batch: TensorDictBase, ids: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Each row with the number of its ids that are the prompt's. Raises ValueError where it does not begin with it."""
    pairs = list(zip(ids, batch.get(("tokens", "prompt")).unbind(), strict=True))
    for row, prompt in pairs:
        if not torch.equal(row[: prompt.numel()], prompt):
            raise ValueError(
                "('tokens', 'full') does not begin with ('tokens', 'prompt'): give the prompts ragged, without pads, "
                "or masking_strategy='rlhf' and an assistant mask"
            )
    return [(row, prompt.numel()) for row, prompt in pairs]
