"""What the rest of the house needs to know of a model that is divided among ranks: see `rlpost.model.sharding`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

BLOCK_BYTES = 2**24  # that are gathered at once
ADAPTER = "the adapter"  # announced in the place of a weight's name

Announce = Callable[[str], None]  # told what all ranks are to gather


def is_sharded(model: Any) -> bool:
    """Whether each rank has a part of `model`'s weights only."""
    return hasattr(model, "unshard")  # FSDP2's own class, without importing it


def divided_again(model: Any) -> None:
    """Drop what a forward pass has gathered of a divided model; only a backward pass does that by itself."""
    if is_sharded(model):
        model.reshard()


def device_of(model: Any) -> torch.device:
    """Where `model` computes: its parts may wait in the machine's memory, and are gathered on a GPU."""
    if not is_sharded(model):
        return model.device
    kind = next(iter(model.parameters())).device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, gathered from all ranks where each has a part of it: all must call this.

    It is gathered in blocks: in one piece, gloo and DTensor's own way take its size again.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    shared: Any = tensor
    if not (shared.ndim and all(placement.is_shard(0) for placement in shared.placements)):
        return shared.full_tensor()
    ranks = shared.device_mesh.size()
    rows = -(-shared.shape[0] // ranks)  # of each rank, but for the last ones
    own = shared.to_local().detach()
    if own.shape[0] < rows:
        own = torch.cat([own, own.new_zeros(rows - own.shape[0], *own.shape[1:])])
    gathered = own.new_empty(ranks, rows, *own.shape[1:])
    group = shared.device_mesh.get_group()
    for begin, part in _blocks(own, BLOCK_BYTES // ranks):
        block = own.new_empty(ranks, *part.shape)
        torch.distributed.all_gather(list(block.unbind()), part.contiguous(), group=group)
        gathered[:, begin : begin + part.shape[0]] = block
    return gathered.flatten(0, 1)[: shared.shape[0]]


def _blocks(tensor: torch.Tensor, most_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Rows of `tensor` in pieces of at most so many bytes, but a row at least, each with the place of its first."""
    size = max(1, most_bytes // max(1, tensor[:1].nbytes))
    for begin in range(0, tensor.shape[0], size):
        yield begin, tensor[begin : begin + size]


def announce_with(model: nn.Module, announce: Announce) -> None:
    """Have `announce` tell the other ranks of each weight of `model` that this one is about to read whole."""
    _ANNOUNCE[model] = announce


def announced(model: nn.Module, name: str) -> None:
    """All ranks are about to gather `name`, where `model` is divided among them."""
    if model in _ANNOUNCE:
        _ANNOUNCE[model](name)


_ANNOUNCE: weakref.WeakKeyDictionary[nn.Module, Announce] = weakref.WeakKeyDictionary()


def is_adapted(model: Any) -> bool:
    """Whether `model` has an adapter of `add_adapter`'s."""
    return isinstance(model, nn.Module) and hasattr(model, "peft_config")
