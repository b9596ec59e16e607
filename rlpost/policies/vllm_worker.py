"""Weights over a process group: a trainer's rank 0 sends, and the workers of a vLLM engine receive.

`vLLMWorker` is what vLLM mixes into its own worker class (`worker_extension_cls`), so this module is
imported in the engine's processes; its methods are called with `collective_rpc`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch

from rlpost.errors import PolicyError
from rlpost.model.memory import give_back_contents
from rlpost.model.weight_sums import sums_of

EXTENSION = "rlpost.policies.vllm_worker.vLLMWorker"
GROUP_SECONDS = 300.0  # longest wait for the other ranks of a group, and for one weight
WeightMetadata = Sequence[tuple[str, str, Sequence[int]]]  # name, torch dtype as text, shape


class WeightGroup(Protocol):
    """Ranks that exchange tensors outside of torch.distributed's own group."""

    rank: int
    world_size: int

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Copy the `tensor` of rank `src` into that of every rank, before a deadline."""
        ...


def stateless_init_process_group(
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    device: torch.device | str | int,
    *,
    timeout_seconds: float = GROUP_SECONDS,
) -> WeightGroup:
    """A group of `world_size` ranks apart from torch.distributed: NCCL between GPUs, gloo between CPUs.

    Rank 0 listens at `master_address`, `master_port`; every rank calls this, each with its own
    `device`. torch.distributed's own group, which either side may use for something else, is not
    touched. Raises PolicyError if the other ranks do not join within `timeout_seconds`.
    """
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if place.type == "cuda" and place.index is None:  # vLLM compares it with the device of each tensor
        place = torch.device("cuda", torch.cuda.current_device())
    build = _NCCLGroup if place.type == "cuda" else _GlooGroup
    try:
        return build((master_address, master_port), rank, world_size, place, timeout_seconds)
    except (RuntimeError, OSError, TimeoutError, AssertionError) as error:  # of torch's store, gloo and vLLM
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PolicyError(
            f"rank {rank} of {world_size} found no group at {master_address}:{master_port} within "
            f"{timeout_seconds:.0f} s ({reason}): start every rank with one address, and a free port"
        ) from error


class _GlooGroup:
    """CPU tensors, over gloo."""

    def __init__(
        self, address: tuple[str, int], rank: int, world_size: int, device: torch.device, timeout_seconds: float
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._timeout = timedelta(seconds=timeout_seconds)
        self._store = torch.distributed.TCPStore(*address, world_size, rank == 0, self._timeout)
        self._gloo: Any = torch.distributed.ProcessGroupGloo(self._store, rank, world_size, self._timeout)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """See `WeightGroup.broadcast`."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        try:
            self._gloo.broadcast([tensor], options).wait(self._timeout)
        except RuntimeError as error:
            raise _lost(self, src, str(error)) from error


class _NCCLGroup:
    """CUDA tensors, over vLLM's NCCL communicator."""

    def __init__(
        self, address: tuple[str, int], rank: int, world_size: int, device: torch.device, timeout_seconds: float
    ) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        self.rank, self.world_size = rank, world_size
        self._timeout = timeout_seconds
        limit = max(1, round(timeout_seconds))
        ranks = StatelessProcessGroup.create(*address, rank, world_size, store_timeout=limit)
        self._nccl = PyNcclCommunicator(ranks, device=device)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """See `WeightGroup.broadcast`."""
        stream = torch.cuda.current_stream(tensor.device)
        self._nccl.broadcast(tensor, src=src, stream=stream)
        arrived = torch.cuda.Event()
        arrived.record(stream)
        deadline = time.monotonic() + self._timeout
        while not arrived.query():  # NCCL itself waits for ever
            if time.monotonic() > deadline:
                raise _lost(self, src, f"nothing came within {self._timeout:.0f} s")
            time.sleep(0.001)


def _lost(group: WeightGroup, src: int, reason: str) -> PolicyError:
    cause = reason.splitlines()[0] if reason else "the connection is gone"
    return PolicyError(
        f"rank {group.rank} of {group.world_size} lost the weights that rank {src} was to send ({cause}): the group is "
        "of no more use, start the engine again"
    )


class vLLMWorker:
    """Mixed into vLLM's worker class: joins a trainer's group and receives weights through it.

    The trainer is rank 0 and the engine's workers are 1 to its tensor-parallel size. No method may have the name
    of one of vLLM's own, which refuses that.
    """

    # attributes of vLLM's worker
    device: torch.device
    rank: int
    reload_weights: Callable[..., None]
    compute_weight_checksums: Callable[[], dict[str, str]]
    get_model: Callable[[], Any]
    model_runner: Any

    def init_weight_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        timeout_seconds: float = GROUP_SECONDS,
    ) -> None:
        """Join the group as rank `rank_offset` plus this worker's own. Raises PolicyError past the timeout."""
        self._weight_group = stateless_init_process_group(
            master_address,
            master_port,
            rank_offset + self.rank,
            world_size,
            self.device,
            timeout_seconds=timeout_seconds,
        )
        self._checksums_before = self.compute_weight_checksums()

    def update_weight_broadcast(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Receive one weight from rank 0, under its name in a checkpoint, and load it.

        Raises PolicyError for a part of a fused weight (q, k and v; gate and up): `update_weights_broadcast`
        takes the parts together.
        """
        self.update_weights_broadcast([(name, dtype, shape)])

    def update_weights_broadcast(self, metadata: WeightMetadata) -> None:
        """Receive these weights from rank 0, in this order, one at a time, and load them.

        Raises PolicyError before `init_weight_update_group`, for a part of a fused weight, or if a weight does
        not arrive.
        """
        group: WeightGroup = self._weight_group
        _check_fused({name for name, _, _ in metadata}, self.get_model())

        def received() -> Iterator[tuple[str, torch.Tensor]]:
            for name, dtype, shape in metadata:
                weight = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=self.device)
                group.broadcast(weight, src=0)
                yield name, weight

        self.reload_weights(weights_iterator=received(), is_checkpoint_format=True)

    def pack_experts_again(self) -> None:
        """Have `reload_weights` pack experts for a CPU's kernel, as at the start.

        vLLM 0.32 copies them unpacked into the packed ones: `UnquantizedFusedMoEMethod._setup_kernel` packs them only
        while the layer has no kernel yet.
        """
        if self.device.type != "cpu":
            return
        for layer in self.get_model().modules():
            method: Any = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None and "process_weights_after_loading" not in vars(method):
                method.process_weights_after_loading = partial(_without_a_kernel, method)

    def check_weights_changed(self) -> bool:
        """Whether any weight has changed since this worker joined the group or this was last called."""
        before, self._checksums_before = getattr(self, "_checksums_before", None), self.compute_weight_checksums()
        return before != self._checksums_before

    def sum_weights(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """The sums of this worker's weights, to be compared with the trainer's: see `sums_of`."""
        return sums_of(self.get_model(), names)

    def give_back_kv_cache(self) -> None:
        """Return the KV cache's pages to the kernel, on a CPU; nothing may be in flight or cached."""
        for cache in _tensors(self.model_runner.kv_caches):
            if cache.device.type == "cpu":
                storage = cache.untyped_storage()  # layers may share it: freeing it twice is harmless
                give_back_contents(storage.data_ptr(), storage.nbytes())


def _without_a_kernel(method: Any, layer: Any) -> None:
    method.moe_kernel = None
    type(method).process_weights_after_loading(method, layer)


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists: a layer's cache may be several."""
    if isinstance(nested, torch.Tensor):
        yield nested
    else:
        for each in nested:
            yield from _tensors(each)


def _check_fused(names: set[str], model: Any) -> None:
    """Raise PolicyError if `names` holds a part of a fused weight without its other parts."""
    for parts in getattr(model, "packed_modules_mapping", {}).values():
        for name in names:
            part = next((part for part in parts if f".{part}." in name), None)
            for other in parts if part is not None else ():
                sibling = name.replace(f".{part}.", f".{other}.")
                if sibling not in names:
                    raise PolicyError(f"vLLM keeps {name} and {sibling} as one weight: send them together")
