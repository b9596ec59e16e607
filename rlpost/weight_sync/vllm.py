"""Weight pushes into vLLM, as files or through a process group."""

from __future__ import annotations

from typing import cast

import torch

from rlpost.policies.base import Policy
from rlpost.policies.vllm import vLLMWrapper
from rlpost.policies.vllm_engine import in_thread, wait_for
from rlpost.policies.vllm_worker import GROUP_SECONDS, WeightGroup, stateless_init_process_group
from rlpost.remote.process import free_port
from rlpost.weight_sync.base import (
    ModelMetadata,
    WeightSource,
    WeightUpdater,
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
            wrapper.load_adapter_folder(folder, None)


def updater_of(policy: Policy) -> WeightUpdater:
    """The updater of a `vLLMWrapper`; it pushes the adapter alone if the policy samples with one."""
    adapted = isinstance(policy, vLLMWrapper) and policy.adapter_rank is not None
    return vLLMAdapterUpdater(policy) if adapted else vLLMUpdater(policy)
