"""Sums over the ranks of a training; without a process group there is one rank, and nothing to do."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from rlpost.errors import RankError

DEADLINE_SECONDS = 600.0  # for the slowest rank to reach the same sum


def sum_over_ranks(value: float, *, what: str) -> float:
    """The sum of every rank's `value`; `what` names it where a rank does not come.

    Raises RankError when DEADLINE_SECONDS pass, or another rank is lost, before all ranks are here.
    """
    if not _several_ranks():
        return value
    total = torch.tensor([value], dtype=torch.float64, device=_device())
    _wait([dist.all_reduce(total, async_op=True)], what)
    return total.item()


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace each trained parameter's gradient by its sum over all ranks; one that a rank lacks is 0 there.

    Every rank must call this for the same parameters in the same order. Raises as `sum_over_ranks`.
    """
    if not _several_ranks():
        return
    sums = []
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            sums.append(dist.all_reduce(parameter.grad, async_op=True))
    _wait(sums, "the gradients")


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _device() -> torch.device:
    """Where the process group's backend sums small tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _wait(sums: Iterable[dist.Work | None], what: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for work in sums:
        try:
            if work is not None:
                work.wait(timedelta(seconds=DEADLINE_SECONDS))
        except RuntimeError as error:
            raise RankError(
                f"rank {rank} of {world} could not sum {what}: within {DEADLINE_SECONDS:g} s another did not come, or "
                f"was lost; look into the logs of the others for the one that stopped ({_reason(error)})"
            ) from error


def _reason(error: RuntimeError) -> str:
    """What the backend says, on one line, without the place in its source and its advice."""
    return str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0]
