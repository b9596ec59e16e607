"""Weight pushes into vLLM."""

from __future__ import annotations

from rlpost.errors import PolicyError
from rlpost.lora import is_adapted, save_adapter
from rlpost.policies.base import Policy
from rlpost.policies.vllm import vLLMWrapper
from rlpost.policies.vllm_engines import exchange_folder
from rlpost.weight_sync.base import WeightSource, WeightUpdater, named_weights


class vLLMUpdater(WeightUpdater):
    """Reloads every weight through vLLM's public `reload_weights` and resets the prefix cache."""

    def _send(self, policy: Policy, source: WeightSource) -> None:
        _vllm(self, policy).load_weights(named_weights(source))


class vLLMAdapterUpdater(WeightUpdater):
    """Replaces the adapter that vLLM applies beside the starting weights, and resets the prefix cache.

    Some MB go over in the place of the whole model, and an adapter is not rounded to the format of
    the sampler's weights; sampling is slower, by the adapter's own matrix products.
    """

    def _send(self, policy: Policy, source: WeightSource) -> None:
        wrapper = _vllm(self, policy)
        if not is_adapted(source):
            raise PolicyError(
                f"vLLMAdapterUpdater pushes the adapter of a model, and this {type(source).__name__} has none: use "
                "vLLMUpdater"
            )
        with exchange_folder() as folder:
            save_adapter(source, folder)
            wrapper.load_adapter(folder)


def _vllm(updater: WeightUpdater, policy: Policy) -> vLLMWrapper:
    if not isinstance(policy, vLLMWrapper):
        raise PolicyError(f"{type(updater).__name__} pushes to a vLLMWrapper, not to a {type(policy).__name__}")
    return policy
