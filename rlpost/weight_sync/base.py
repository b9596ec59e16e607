"""How the trainer's weights reach a policy, and the one writer of the policy's version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from rlpost.data.conversation import PolicyVersionLabel
from rlpost.errors import PolicyError
from rlpost.policies.base import Policy


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

    def push(self, source: torch.nn.Module | TensorDictBase | Mapping[str, torch.Tensor]) -> PolicyVersionLabel:
        """Push `source`'s weights; returns the new version, which is written only after all of it succeeded.

        Raises TypeError for a source that holds no weights, PolicyError when the push failed.
        """
        if self.policy is None:
            raise PolicyError("the weight updater has no policy yet: call init(policy)")
        self._send(self.policy, dict(named_weights(source)))
        self.policy.version = self._next_version(self.policy.version)
        return self.policy.version

    def restore_version(self, version: PolicyVersionLabel) -> None:
        """Take up `version` where a run is resumed: the policy already has that version's weights."""
        assert self.policy is not None
        self.policy.version = version
        if self.version_tracker is not None:
            self.version_tracker.version = version

    @abstractmethod
    def _send(self, policy: Policy, weights: dict[str, torch.Tensor]) -> None:
        """Bring `weights`, under the names of the HF checkpoint, to `policy`."""

    def _next_version(self, current: PolicyVersionLabel) -> PolicyVersionLabel:
        if self.version_tracker is not None:
            self.version_tracker.increment_version()
            return self.version_tracker.version
        if not isinstance(current, int):
            raise PolicyError(f"policy version {current!r} is no number, so its updater needs a version_tracker")
        return current + 1


class SharedWeights(WeightUpdater):
    """For a policy that samples from the trainer's own tensors: nothing to send."""

    def _send(self, policy: Policy, weights: dict[str, torch.Tensor]) -> None:
        pass


def named_weights(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights under the names of an HF checkpoint, a tied output head under its own name too.

    An engine may keep the output head apart from the embedding it is tied to (vLLM does on a CPU),
    so the head is always among them.
    """
    if isinstance(source, torch.nn.Module):
        yield from source.state_dict().items()  # detached, and with a tied head under both its names
    elif isinstance(source, TensorDictBase):
        for key in source.keys(include_nested=True, leaves_only=True):
            yield key if isinstance(key, str) else ".".join(key), source.get(key)
    elif isinstance(source, Mapping):
        yield from source.items()
    else:
        raise TypeError(f"weights come from a module, a TensorDict or a mapping, not from {type(source).__name__}")
