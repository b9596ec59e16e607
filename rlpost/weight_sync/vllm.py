"""Weight pushes into vLLM, as files or through a process group, and the scheme that broadcasts to several workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, cast

import torch

from rlpost.data.conversation import PolicyVersionLabel
from rlpost.policies.base import Policy
from rlpost.policies.vllm import vLLMWrapper
from rlpost.policies.vllm_engine import in_thread, wait_for
from rlpost.policies.vllm_worker import GROUP_SECONDS, WeightGroup, WeightMetadata, stateless_init_process_group
from rlpost.remote.process import free_port
from rlpost.weight_sync.base import (
    ModelMetadata,
    WeightReceiver,
    WeightSource,
    WeightSyncScheme,
    WeightUpdater,
    Worker,
    named_weights,
)
from rlpost.weight_sync.folder import weights_folder


class vLLMUpdater(WeightUpdater):
    """Reloads every weight through vLLM's public `reload_weights` and resets the prefix cache.

    With a `master_address` they go through a process group of this process, which is rank 0, and the
    engine's `vllm_tp_size` workers: between GPUs over NCCL, between CPUs over gloo. It is formed at
    the first push, on `master_port` (default: a free one). For `model_metadata` see `init`.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        master_address: str | None = None,
        master_port: int | None = None,
        model_metadata: ModelMetadata | None = None,
        vllm_tp_size: int = 1,
        timeout_seconds: float = GROUP_SECONDS,
    ) -> None:
        super().__init__(policy)
        self.model_metadata = model_metadata
        self.master_address = master_address
        self.master_port = master_port
        self.vllm_tp_size = vllm_tp_size
        self.timeout_seconds = timeout_seconds  # for the workers to join, and for one weight
        self._group: WeightGroup | None = None

    def send_weights(self, policy: Policy, source: WeightSource) -> None:
        wrapper, weights = cast(vLLMWrapper, policy), named_weights(source)
        if self.master_address is None:
            wrapper.load_weights(weights)
            return
        if self._group is None:
            self._group = self._joined(wrapper, self.master_address, next(iter(weights.values())).device)
        wrapper.receive_weights(weights, self._group)

    def _joined(self, wrapper: vLLMWrapper, address: str, device: torch.device) -> WeightGroup:
        """The group of this process and the engine's workers."""
        port, world_size = self.master_port or free_port(address), self.vllm_tp_size + 1
        limit = self.timeout_seconds
        workers = in_thread(
            lambda: wrapper.call_workers("init_weight_update_group", address, port, 1, world_size, limit)
        )
        group = stateless_init_process_group(address, port, 0, world_size, device, timeout_seconds=limit)
        wait_for(workers, limit, "the engine's workers to join the weight group")
        return group


class vLLMAdapterUpdater(WeightUpdater):
    """Replaces the adapter that vLLM applies on top of the starting weights, and resets the prefix cache.

    A push sends some MB instead of the whole model, and an adapter is not rounded to the dtype of the
    sampler's weights; sampling is slower, by the adapter's own matrix products.
    """

    def send_weights(self, policy: Policy, source: WeightSource) -> None:
        wrapper = cast(vLLMWrapper, policy)
        with weights_folder(source, adapter=True) as folder:
            wrapper.load_adapter(folder)


def updater_of(policy: Policy) -> WeightUpdater:
    """The updater of a `vLLMWrapper`; it pushes the adapter alone if the policy samples with one."""
    adapted = isinstance(policy, vLLMWrapper) and policy.adapter_rank is not None
    return vLLMAdapterUpdater(policy) if adapted else vLLMUpdater(policy)


@dataclass(eq=False)
class GroupWeightSyncScheme(WeightSyncScheme):
    """A push broadcasts every weight from this process, rank 0, to the workers: NCCL between GPUs, gloo between CPUs.

    `master_address` is this machine's, as the workers reach it. The group is formed at the first push, and anew when
    workers come or go or a push has failed. A worker holds a second copy of the weights until it has loaded them, in
    device memory if it has a GPU: vLLM gets them from there. Each wait is `timeout_seconds` at most, a worker's batch
    in flight included. NCCL is vLLM's communicator (`stateless_init_process_group`).
    """

    master_address: str
    _: KW_ONLY
    master_port: int | None = None
    timeout_seconds: float = GROUP_SECONDS

    def __post_init__(self) -> None:
        self._group: WeightGroup | None = None
        self._members: list[Any] = []  # of the group
        self._port = self._number = 0

    def receiver(self) -> GroupWeightReceiver:
        """See `WeightSyncScheme.receiver`."""
        return GroupWeightReceiver(self.timeout_seconds)

    @contextmanager
    def offered(self, source: WeightSource, workers: Mapping[int, Worker]) -> Iterator[dict[int, Invitation]]:
        """See `WeightSyncScheme.offered`."""
        weights = named_weights(source)
        members = [worker.identity for worker in workers.values()]
        if self._group is None or members != self._members:
            self._group, self._members, self._number = None, members, self._number + 1
            self._port = self.master_port or free_port(self.master_address)
        shapes = [(name, str(w.dtype).removeprefix("torch."), list(w.shape)) for name, w in weights.items()]
        yield {
            number: Invitation(self.master_address, self._port, rank, len(workers) + 1, shapes, self._number)
            for rank, number in enumerate(workers, start=1)
        }

    def transmit(self, source: WeightSource) -> None:
        """See `WeightSyncScheme.transmit`. Raises PolicyError if a worker does not come, or is lost."""
        weights = named_weights(source)
        group, self._group = self._group, None  # one that fails is not used again
        if group is None:
            device = next(iter(weights.values())).device
            limit, size = self.timeout_seconds, len(self._members) + 1
            group = stateless_init_process_group(
                self.master_address, self._port, 0, size, device, timeout_seconds=limit
            )
        for weight in weights.values():
            group.broadcast(weight.detach().contiguous(), src=0)
        self._group = group


class GroupWeightReceiver(WeightReceiver):
    """Joins the group that it is invited to, and takes part in its broadcasts."""

    def __init__(self, timeout_seconds: float = GROUP_SECONDS) -> None:
        super().__init__()
        self.timeout_seconds = timeout_seconds
        self._joined: tuple[tuple[str, int, int], WeightGroup] | None = None

    def place(self) -> str:
        """See `WeightReceiver.place`: the kind of device that this worker receives on."""
        return "cuda" if torch.cuda.is_available() else "cpu"

    def bring(self, collector: Any, model_id: str, content: Invitation, version: PolicyVersionLabel) -> None:
        """See `WeightReceiver.bring`: nothing is loaded unless all weights came."""
        device = torch.device(self.place())
        where = (content.address, content.port, content.number)
        joined, self._joined = self._joined, None
        if joined is None or joined[0] != where:
            rank, size, limit = content.rank, content.world_size, self.timeout_seconds
            joined = (where, stateless_init_process_group(*where[:2], rank, size, device, timeout_seconds=limit))
        came: dict[str, torch.Tensor] = {}
        for name, dtype, shape in content.weights:
            came[name] = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)
            joined[1].broadcast(came[name], src=0)
        self._joined = joined
        collector.take_up_model(model_id, came, version)


class Invitation(NamedTuple):
    """How a worker joins the group and receives one push."""

    address: str
    port: int
    rank: int
    world_size: int
    weights: WeightMetadata
    number: int  # counts the groups that the sender has formed
