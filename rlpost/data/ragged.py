"""Rows of different lengths in a TensorDict: ragged or padded tensors, and one Python value a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDictBase
from torch.nn.utils.rnn import pad_sequence

from rlpost.data.conversation import PolicyVersionLabel

Key = str | tuple[str, ...]  # of an entry, perhaps a nested one
ATTENTION, ASSISTANT = ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")


def ragged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Jagged nested tensor (B, *) of 1-D `rows`; B must be at least 1."""
    lengths = torch.tensor([row.numel() for row in rows])
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(torch.cat(list(rows)), offsets)


def ragged_rows(values: Any) -> list[torch.Tensor]:
    """The rows of a jagged nested tensor (B, *), 1-D each."""
    if values.lengths() is not None:  # a view with holes between its rows
        return list(values.unbind())
    # unbind() checks every row, which took most of the time of grouping a large batch
    return list(values.values().split(values.offsets().diff().tolist()))


def joined(parts: Sequence[torch.Tensor], *, pads: bool = False) -> torch.Tensor:
    """The rows of all `parts`, one part after the other.

    Rows of different lengths become ragged, or with `pads`, or more dimensions, padded with zeros on the right.
    """
    if not any(part.is_nested for part in parts) and len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(list(parts))
    rows = [row for part in parts for row in (ragged_rows(part) if part.is_nested else part.unbind())]
    flat = [row.squeeze(-1) if row.ndim > 1 else row for row in rows]
    return padded(rows) if pads or flat[0].ndim > 1 else ragged(flat)


def padded(rows: Sequence[torch.Tensor], fill: float = 0, *, left: bool = False) -> torch.Tensor:
    """(B, T) of 1-D `rows`, T the longest, with `fill` behind the shorter ones or, if `left`, before them."""
    side = "left" if left else "right"
    return pad_sequence(list(rows), batch_first=True, padding_value=fill, padding_side=side)


def token_fields(
    prompts: Sequence[Sequence[float]],
    responses: Sequence[Sequence[float]],
    dtype: torch.dtype,
    fill: float | None = None,
) -> dict[str, torch.Tensor]:
    """`prompt`, `response` and `full`, both one after the other, of a value per token: ragged (B, *).

    With `fill` padded: prompts on the left (B, P), responses on the right (B, R), and full is both, (B, P + R).
    """
    before, after = ([torch.tensor(row, dtype=dtype) for row in rows] for rows in (prompts, responses))
    if fill is not None:
        left, right = padded(before, fill, left=True), padded(after, fill)
        return {"prompt": left, "response": right, "full": torch.cat([left, right], 1)}
    full = [torch.cat(pair) for pair in zip(before, after, strict=True)]
    return {"prompt": ragged(before), "response": ragged(after), "full": ragged(full)}


def padding_id(tokenizer: Any) -> int:
    """The id that fills rows: the tokenizer's pad token, its end of turn where it has none, else 0."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in candidates if token is not None)


def one_each(values: Sequence[float | None], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(B, 1) of a number, or a bool, a row; NaN for None."""
    return torch.tensor([math.nan if value is None else value for value in values], dtype=dtype).unsqueeze(-1)


def strings(values: Sequence[Any]) -> NonTensorStack:
    """One Python value a row, as TensorDict stores it."""
    return NonTensorStack(*values)


def versions(labels: Sequence[PolicyVersionLabel]) -> torch.Tensor | NonTensorStack:
    """Policy versions, one a row: integers as a tensor (B,), uuids as strings."""
    if all(isinstance(label, int) for label in labels):
        return torch.tensor(list(labels))
    return strings([str(label) for label in labels])


def column(tensordict: TensorDictBase, key: Key) -> list[Any]:
    """The entry `key`, one Python value (or tensor) a row."""
    value = tensordict.get(key)
    if isinstance(value, NonTensorStack):
        return value.tolist()
    if isinstance(value, torch.Tensor):
        return ragged_rows(value) if value.is_nested else list(value.unbind(0))
    plain = getattr(value, "data", None)  # one value that stands for every row, or all of them as one object
    if isinstance(plain, list | np.ndarray) and len(plain) == tensordict.batch_size[0]:
        return list(plain) if isinstance(plain, list) else plain.tolist()
    return [plain if isinstance(plain, str | int | float) else value[i] for i in range(tensordict.batch_size[0])]
