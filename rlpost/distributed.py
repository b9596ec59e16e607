"""Sums over all ranks of a training; without a process group there is a single rank, and they return their argument."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from rlpost.errors import RankError

DEADLINE_SECONDS = 600.0  # for the slowest rank to reach the same sum
BUCKET_BYTES = 64 << 20  # of gradients in one message


def sum_over_ranks(value: float, *, what: str) -> float:
    """The sum of every rank's `value`; `what` names the values in an error.

    Raises RankError if DEADLINE_SECONDS pass, or another rank is lost, before all ranks have come.
    """
    return _over_ranks(value, what, dist.ReduceOp.SUM)


def most_over_ranks(value: float, *, what: str) -> float:
    """The largest of every rank's `value`; see `sum_over_ranks`."""
    return _over_ranks(value, what, dist.ReduceOp.MAX)


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace each trained parameter's gradient by its sum over all ranks; a rank without a gradient adds 0.

    A sharded model's gradients are sums already. Every rank must call this for the same parameters in the same order.
    Raises as `sum_over_ranks`.
    """
    if not _several_ranks():
        return
    gradients = []
    for parameter in parameters:
        if parameter.requires_grad and not hasattr(parameter, "full_tensor"):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        together = torch.cat([gradient.flatten() for gradient in bucket])
        _wait([dist.all_reduce(together, async_op=True)], "the gradients")
        parts = together.split([gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbouring tensors of one dtype that are sent together: one message costs more than a few MB."""
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        held = sum(each.nbytes for each in bucket)
        if bucket and (tensor.dtype != bucket[0].dtype or held + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _over_ranks(value: float, what: str, how: dist.ReduceOp.RedOpType) -> float:
    if not _several_ranks():
        return value
    on_gpu = dist.get_backend() == "nccl"  # a backend sums tensors of its own device
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    total = torch.tensor([value], dtype=torch.float64, device=device)
    _wait([dist.all_reduce(total, how, async_op=True)], what)
    return total.item()


def _wait(sums: Iterable[dist.Work | None], what: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for work in sums:
        try:
            if work is not None:
                work.wait(timedelta(seconds=DEADLINE_SECONDS))
        except RuntimeError as error:
            raise RankError(
                f"rank {rank} of {world} could not sum {what}: within {DEADLINE_SECONDS:g} s another did not come, or "
                f"was lost; look into the logs of the others for the one that stopped ({reason_of(error)})"
            ) from error


def reason_of(error: RuntimeError) -> str:
    """The backend's message on one line, without the place in its source and its advice."""
    return str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0]
