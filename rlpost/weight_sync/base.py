"""How the trainer's weights reach a policy, and the one writer of the policy's version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from rlpost.data.conversation import PolicyVersionLabel
from rlpost.errors import PolicyError
from rlpost.lora import MergedWeights, is_adapted
from rlpost.policies.base import Policy

WeightSource = torch.nn.Module | TensorDictBase | Mapping[str, torch.Tensor]


class WeightUpdater(ABC):
    """Pushes weights, all or nothing, and then raises the policy's version.

    `version_tracker` is whatever counts versions (`PolicyVersion`); without one the policy's own
    integer is raised by 1.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy
        self.version_tracker: Any | None = None

    def init(self, policy: Policy) -> None:
        """Name the policy to push to, where it was not yet known when the updater was built."""
        self.policy = policy

    def push(self, source: WeightSource) -> PolicyVersionLabel:
        """Push `source`'s weights; returns the new version, which is written only after all of it succeeded.

        Raises TypeError for a source that holds no weights, PolicyError when the push failed.
        """
        if self.policy is None:
            raise PolicyError("the weight updater has no policy yet: call init(policy)")
        self._send(self.policy, source)
        self.policy.version = self._next_version(self.policy.version)
        return self.policy.version

    def restore_version(self, version: PolicyVersionLabel) -> None:
        """Take up `version` where a run is resumed: the policy already has that version's weights."""
        assert self.policy is not None
        self.policy.version = version
        if self.version_tracker is not None:
            self.version_tracker.version = version

    @abstractmethod
    def _send(self, policy: Policy, source: WeightSource) -> None:
        """Bring the weights of `source` to `policy`, and leave `source` as it is."""

    def _next_version(self, current: PolicyVersionLabel) -> PolicyVersionLabel:
        if self.version_tracker is not None:
            self.version_tracker.increment_version()
            return self.version_tracker.version
        if not isinstance(current, int):
            raise PolicyError(f"policy version {current!r} is no number, so its updater needs a version_tracker")
        return current + 1


class SharedWeights(WeightUpdater):
    """For a policy that samples from the trainer's own tensors: nothing to send."""

    def _send(self, policy: Policy, source: WeightSource) -> None:
        named_weights(source)  # what holds no weights is refused here too


def named_weights(source: WeightSource) -> Mapping[str, torch.Tensor]:
    """Weights under the names of an HF checkpoint, a tied output head under its own name too.

    An engine may keep the output head apart from the embedding it is tied to (vLLM does on a CPU),
    so the head is always among them. Those of an adapted model are merged, each when it is read.
    """
    if isinstance(source, torch.nn.Module):
        # detached, and with a tied head under both its names
        return MergedWeights(source) if is_adapted(source) else source.state_dict()
    if isinstance(source, TensorDictBase):
        keys = source.keys(include_nested=True, leaves_only=True)
        return {key if isinstance(key, str) else ".".join(key): source.get(key) for key in keys}
    if isinstance(source, Mapping):
        return source
    raise TypeError(f"weights come from a module, a TensorDict or a mapping, not from {type(source).__name__}")
