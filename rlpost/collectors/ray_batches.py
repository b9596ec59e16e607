"""Batches of several workers as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rlpost.data.batch import concat_rows


def joined(batches: Sequence[TensorDictBase], are_conversations: bool) -> TensorDictBase:
    """`batches` one after the other along their first dimension.

    Conversations are ragged, (B,) or (B, T); frames (*batch_size, T) are dense.
    """
    if len(batches) == 1:
        return batches[0]
    if not are_conversations:
        return torch.cat(list(batches), dim=0)  # pyright: ignore[reportArgumentType, reportReturnType]
    if batches[0].ndim == 1:
        return concat_rows(batches)
    steps = zip(*(batch.unbind(1) for batch in batches), strict=True)
    return LazyStackedTensorDict.lazy_stack([concat_rows(each) for each in steps], -1)
