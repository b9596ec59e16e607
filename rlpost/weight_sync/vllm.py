"""Weight pushes into vLLM."""

from __future__ import annotations

import socket

import torch

from rlpost.errors import ConfigError, PolicyError
from rlpost.model.lora import save_adapter
from rlpost.model.shards import is_adapted
from rlpost.policies.base import Policy
from rlpost.policies.vllm import vLLMWrapper
from rlpost.policies.vllm_exchange import exchange_folder
from rlpost.policies.vllm_process import in_thread, wait_for
from rlpost.policies.vllm_worker import GROUP_SECONDS, WeightGroup, stateless_init_process_group
from rlpost.weight_sync.base import ModelMetadata, WeightSource, WeightUpdater, named_weights


class vLLMUpdater(WeightUpdater):
    """Reloads every weight through vLLM's public `reload_weights` and resets the prefix cache.

    With a `master_address` they go through a process group of this process, which is rank 0, and the
    engine's `vllm_tp_size` workers: between GPUs over NCCL, between CPUs over gloo. It is formed at
    the first push, on `master_port`, or a free one. `model_metadata` is what `init` takes.
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
        if master_port is not None and master_address is None:
            raise ConfigError(f"master_port={master_port} is of a process group: give its master_address too")
        self.model_metadata = model_metadata
        self.master_address = master_address
        self.master_port = master_port
        self.vllm_tp_size = vllm_tp_size
        self.timeout_seconds = timeout_seconds  # for the workers to join, and for one weight
        self._group: WeightGroup | None = None

    def send_weights(self, policy: Policy, source: WeightSource) -> None:
        wrapper, weights = _vllm(self, policy), named_weights(source)
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
    """Replaces the adapter that vLLM applies beside the starting weights, and resets the prefix cache.

    Some MB go over in the place of the whole model, and an adapter is not rounded to the format of
    the sampler's weights; sampling is slower, by the adapter's own matrix products.
    """

    def send_weights(self, policy: Policy, source: WeightSource) -> None:
        wrapper = _vllm(self, policy)
        if not is_adapted(source):
            raise PolicyError(
                f"vLLMAdapterUpdater pushes the adapter of a model, and this {type(source).__name__} has none: use "
                "vLLMUpdater"
            )
        with exchange_folder() as folder:
            save_adapter(source, folder)
            wrapper.load_adapter(folder)


def updater_of(policy: Policy) -> WeightUpdater:
    """What brings weights to a `vLLMWrapper`: the adapter alone, where it samples with one."""
    adapted = isinstance(policy, vLLMWrapper) and policy.adapter_rank is not None
    return vLLMAdapterUpdater(policy) if adapted else vLLMUpdater(policy)


def free_port(address: str) -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def _vllm(updater: WeightUpdater, policy: Policy) -> vLLMWrapper:
    if not isinstance(policy, vLLMWrapper):
        raise PolicyError(f"{type(updater).__name__} pushes to a vLLMWrapper, not to a {type(policy).__name__}")
    return policy
