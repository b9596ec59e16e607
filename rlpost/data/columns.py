"""Columns of Python values in a tensorclass: one value an element of the batch, whatever was given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorDictBase


def grid(values: Any, shape: Sequence[int]) -> NonTensorStack | NonTensorData:
    """Lists nested as `shape` says, as TensorDict stores them; the innermost values may be lists too."""
    if not shape:
        return NonTensorData(values)
    if len(shape) == 1:
        return NonTensorStack(*values)
    return NonTensorStack(*(grid(row, shape[1:]) for row in values))


def settle(fields: TensorDictBase, names: Iterable[str]) -> None:
    """Make each column of `names` that was given as lists one value an element, in place; one not given is left.

    What lists become when they are set depends on `tensordict.set_list_to_stack`, and where they are
    stacked, on what they hold: lists within are stacked too, and those of numbers become tensors.
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
    """Whether `values` are lists nested as `shape` says."""
    if not shape:
        return True
    return isinstance(values, list) and len(values) == shape[0] and all(_has_shape(row, shape[1:]) for row in values)


def own(value: Any) -> Any:
    """`value` with lists and dicts of its own, so that changing those it came from does not change it."""
    if isinstance(value, list):
        return [own(each) for each in value]
    if isinstance(value, dict):
        return {key: own(each) for key, each in value.items()}
    return value


def fields_of(tensorclass: Any) -> TensorDictBase:
    """The fields of a tensorclass as they are stored: read as attributes, columns would become lists each time."""
    return tensorclass._tensordict
