"""Values that hold tensors, made fit for a pipe and back: as arrays, which go over with their own numbers alone.

A tensor that is a view takes all that it is a view of with it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def as_arrays(value: Any) -> Any:
    """`value` with an array in the place of each tensor in its dataclasses, dicts, lists and tuples."""
    return _mapped(value, torch.Tensor, lambda tensor: tensor.detach().cpu().numpy())


def as_tensors(value: Any) -> Any:
    """What `as_arrays` was given, on the CPU."""
    return _mapped(value, np.ndarray, torch.from_numpy)


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(each, kind, change) for each in value)
    if isinstance(value, dict):
        return {key: _mapped(each, kind, change) for key, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(changed, field.name, _mapped(getattr(value, field.name), kind, change))
        return changed
    return value
