"""Rows of different lengths in a TensorDict: ragged or padded tensors, and columns of Python values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from rlpost.data.conversation import PolicyVersionLabel
from rlpost.errors import DataError

Key = str | tuple[str, ...]  # of an entry, perhaps a nested one
Side = Literal["left", "right"]
ATTENTION, ASSISTANT = ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")


# Ragged and padded tensors


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
    """The id that pads rows: the tokenizer's pad token, or else its eos token, or else 0."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in candidates if token is not None)


# One value a row


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
    plain = getattr(value, "data", None)  # one value for every row, or one object with all values
    if isinstance(plain, list | np.ndarray) and len(plain) == tensordict.batch_size[0]:
        return list(plain) if isinstance(plain, list) else plain.tolist()
    return [plain if isinstance(plain, str | int | float) else value[i] for i in range(tensordict.batch_size[0])]


def grid(values: Any, shape: Sequence[int]) -> NonTensorStack | NonTensorData:
    """Lists nested in the shape `shape`, as TensorDict stores them; the innermost values may be lists too."""
    if not shape:
        return NonTensorData(values)
    if len(shape) == 1:
        return NonTensorStack(*values)
    return NonTensorStack(*(grid(row, shape[1:]) for row in values))


def settle(fields: TensorDictBase, names: Iterable[str]) -> None:
    """Store each column of `names` that was given as lists as one value an element, in place; skips missing ones.

    The type of a column set from lists depends on `tensordict.set_list_to_stack`; stacking them stacks
    inner lists too, and turns lists of numbers into tensors.
    """
    shape = fields.batch_size
    for name in names:
        held = fields.get(name, None)
        if held is None:
            continue
        if isinstance(held, NonTensorData):
            if shape and _has_shape(held.data, shape):
                fields.set(name, grid(held.data, shape))
        elif not isinstance(held, NonTensorStack) or held.ndim > len(shape):
            fields.set(name, grid(held.tolist(), shape))


def _has_shape(values: Any, shape: Sequence[int]) -> bool:
    """Whether `values` are lists nested in the shape `shape`."""
    if not shape:
        return True
    return isinstance(values, list) and len(values) == shape[0] and all(_has_shape(row, shape[1:]) for row in values)


def own(value: Any) -> Any:
    """A deep copy of the lists and dicts of `value`."""
    if isinstance(value, list):
        return [own(each) for each in value]
    if isinstance(value, dict):
        return {key: own(each) for key, each in value.items()}
    return value


def fields_of(tensorclass: Any) -> TensorDictBase:
    """The stored fields of a tensorclass: as attributes, columns would become lists at each access."""
    return tensorclass._tensordict


# Elements of different lengths as one batch


def as_nested_tensor(elements: Sequence[Mapping[str, Any] | TensorDictBase]) -> TensorDict:
    """`elements` as one TensorDict (B,) whose 1-D tensors are ragged: jagged nested tensors (B, *).

    Tensors of other dimensions, and numbers, are stacked; everything else is one value a row.
    Raises DataError if one of them has other fields.
    """

    def nested(values: list[torch.Tensor]) -> torch.Tensor:
        return ragged(values) if values[0].ndim == 1 else torch.stack(values)

    return _together(elements, nested)


def as_padded_tensor(
    elements: Sequence[Mapping[str, Any] | TensorDictBase],
    *,
    dim: int = 0,
    side: Side = "left",
    value: float = 0,
) -> TensorDict:
    """`elements` as one TensorDict (B,), their tensors padded along `dim` to the longest.

    The padding is `value`, on the left unless `side` says otherwise. Tensors without a dimension,
    and numbers, are stacked; everything else is one value a row. Raises DataError if one of them has other fields.
    """

    def filled(values: list[torch.Tensor]) -> torch.Tensor:
        if values[0].ndim == 0:
            return torch.stack(values)
        longest = max(tensor.shape[dim] for tensor in values)
        return torch.stack([_pad_to(longest, tensor, dim, side, value) for tensor in values])

    return _together(elements, filled)


def stack_equal(elements: Sequence[Mapping[str, Any] | TensorDictBase]) -> TensorDict:
    """`elements` as one TensorDict (B,), tensors and numbers stacked, everything else one value a row.

    Raises DataError if one of them has other fields.
    """
    return _together(elements, torch.stack)


def _together(
    elements: Sequence[Mapping[str, Any] | TensorDictBase], join: Callable[[list[torch.Tensor]], torch.Tensor]
) -> TensorDict:
    """One TensorDict of the fields of all `elements`; `join` puts the tensors of one field together."""
    rows = [element.to_dict() if isinstance(element, TensorDictBase) else element for element in elements]
    names = list(rows[0])
    for number, row in enumerate(rows):
        if set(row) != set(names):
            raise DataError(f"element {number} has the fields {', '.join(row)}, and element 0 {', '.join(names)}")
    fields = {name: _column([row[name] for row in rows], join) for name in names}
    return TensorDict(fields, batch_size=[len(rows)])


def _column(values: list[Any], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    if all(isinstance(value, Mapping) for value in values):
        return _together(values, join)
    if all(isinstance(value, torch.Tensor) for value in values):
        return join(values)
    if all(isinstance(value, bool | int | float) for value in values):
        return torch.tensor(values)
    return NonTensorStack(*values)


def _pad_to(length: int, tensor: torch.Tensor, dim: int, side: Side, value: float) -> torch.Tensor:
    missing = length - tensor.shape[dim]
    # torch counts pads from the last dimension on, (left, right) each
    pads = [0, 0] * (tensor.ndim - 1 - dim % tensor.ndim) + ([missing, 0] if side == "left" else [0, missing])
    return pad(tensor, pads, value=value)
