"""What the rest of the house needs to know of a model that is divided among ranks: see `rlpost.model.sharding`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ADAPTER = "the adapter"  # announced in the place of a weight's name

Announce = Callable[[str], None]  # told what all ranks are to gather


def is_sharded(model: Any) -> bool:
    """Whether each rank has a part of `model`'s weights only."""
    return hasattr(model, "unshard")  # FSDP2's own class, without importing it


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, gathered from all ranks where each has a part of it: all must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[attr-defined]


def announce_with(model: nn.Module, announce: Announce) -> None:
    """Have `announce` tell the other ranks of each weight of `model` that this one is about to read whole."""
    _ANNOUNCE[model] = announce


def announced(model: nn.Module, name: str) -> None:
    """All ranks are about to gather `name`, where `model` is divided among them."""
    if model in _ANNOUNCE:
        _ANNOUNCE[model](name)


_ANNOUNCE: weakref.WeakKeyDictionary[nn.Module, Announce] = weakref.WeakKeyDictionary()
