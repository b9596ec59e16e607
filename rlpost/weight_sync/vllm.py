"""Weight pushes into vLLM."""

from __future__ import annotations

import torch

from rlpost.errors import PolicyError
from rlpost.policies.base import Policy
from rlpost.policies.vllm import vLLMWrapper
from rlpost.weight_sync.base import WeightUpdater


class vLLMUpdater(WeightUpdater):
    """Reloads every weight through vLLM's public `reload_weights` and resets the prefix cache."""

    def _send(self, policy: Policy, weights: dict[str, torch.Tensor]) -> None:
        if not isinstance(policy, vLLMWrapper):
            raise PolicyError(f"vLLMUpdater pushes to a vLLMWrapper, not to a {type(policy).__name__}")
        policy.load_weights(weights.items())
