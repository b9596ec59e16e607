"""Elements of different lengths as one batch: ragged, or padded to the longest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torch.nn.functional import pad

from rlpost.data.ragged import ragged
from rlpost.errors import DataError

Side = Literal["left", "right"]


def as_nested_tensor(elements: Sequence[Mapping[str, Any] | TensorDictBase]) -> TensorDict:
    """`elements` as one TensorDict (B,) whose 1-D tensors are ragged: jagged nested tensors (B, *).

    Tensors of other dimensions, and numbers, are stacked; everything else is one value a row.
    Raises DataError for no elements, other fields in one of them, or shapes that cannot be stacked,
    TypeError for an element without fields.
    """

    def nested(name: str, values: list[torch.Tensor]) -> torch.Tensor:
        return ragged(values) if values[0].ndim == 1 else _stacked(name, values, "rows alone become ragged")

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
    and numbers, are stacked; everything else is one value a row. Raises DataError for no elements,
    other fields in one of them, or shapes that differ beyond `dim`; ValueError for another `side`.
    """
    if side not in ("left", "right"):
        raise ValueError(f"side={side!r} is unknown: it must be left or right")

    def filled(name: str, values: list[torch.Tensor]) -> torch.Tensor:
        if values[0].ndim == 0:
            return torch.stack(values)
        longest = max(tensor.shape[dim] for tensor in values)
        padded = [_pad_to(longest, tensor, dim, side, value) for tensor in values]
        return _stacked(name, padded, f"they may differ along dim={dim} alone")

    return _together(elements, filled)


def stack_equal(elements: Sequence[Mapping[str, Any] | TensorDictBase]) -> TensorDict:
    """`elements` as one TensorDict (B,), tensors and numbers stacked, everything else one value a row.

    Raises DataError for no elements, other fields in one of them, or tensors of different shapes.
    """
    hint = "as_padded_tensor and as_nested_tensor take such (stack_method= of a DataLoadingPrimer)"
    return _together(elements, lambda name, values: _stacked(name, values, hint))


def _together(
    elements: Sequence[Mapping[str, Any] | TensorDictBase], join: Callable[[str, list[torch.Tensor]], torch.Tensor]
) -> TensorDict:
    """One TensorDict of the fields of all `elements`; `join` puts the tensors of one field together."""
    if not elements:
        raise DataError("no elements to put together: give at least one")
    wrong = next((e for e in elements if not isinstance(e, Mapping | TensorDictBase)), None)
    if wrong is not None:
        raise TypeError(f"an element is no mapping but {type(wrong).__name__}: each has to name its fields")
    rows = [element.to_dict() if isinstance(element, TensorDictBase) else element for element in elements]
    names = list(rows[0])
    for number, row in enumerate(rows):
        if set(row) != set(names):
            raise DataError(f"element {number} has {_listed(row)}, and element 0 has {_listed(names)}: they must agree")
    fields = {name: _column(name, [row[name] for row in rows], join) for name in names}
    return TensorDict(fields, batch_size=[len(rows)])


def _column(name: str, values: list[Any], join: Callable[[str, list[torch.Tensor]], torch.Tensor]) -> Any:
    if all(isinstance(value, Mapping) for value in values):
        return _together(values, join)
    if all(isinstance(value, torch.Tensor) for value in values):
        if len({value.ndim for value in values}) > 1:
            raise DataError(f"the elements' {name!r} have other numbers of dimensions: {_shapes(values)}")
        return join(name, values)
    if all(isinstance(value, bool | int | float) for value in values):
        return torch.tensor(values)
    return NonTensorStack(*values)


def _stacked(name: str, values: list[torch.Tensor], hint: str) -> torch.Tensor:
    if len({value.shape for value in values}) > 1:
        raise DataError(f"the elements' {name!r} have the shapes {_shapes(values)}, which cannot be stacked: {hint}")
    return torch.stack(values)


def _shapes(values: Sequence[torch.Tensor]) -> str:
    return ", ".join(map(str, dict.fromkeys(tuple(value.shape) for value in values)))


def _pad_to(length: int, tensor: torch.Tensor, dim: int, side: Side, value: float) -> torch.Tensor:
    missing = length - tensor.shape[dim]
    # torch counts pads from the last dimension on, (left, right) each
    pads = [0, 0] * (tensor.ndim - 1 - dim % tensor.ndim) + ([missing, 0] if side == "left" else [0, missing])
    return pad(tensor, pads, value=value)


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(map(str, names)) or "nothing"
