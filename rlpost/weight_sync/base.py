"""How the trainer's weights reach a policy: a WeightUpdater, which alone writes its version once all have arrived."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase

from rlpost.data.conversation import PolicyVersionLabel, next_version
from rlpost.errors import PolicyError
from rlpost.model.weights import copy_weights, is_adapted, is_sharded
from rlpost.policies.base import Policy
from rlpost.settings.base import opened

if TYPE_CHECKING:
    from rlpost.envs.transforms.training import PolicyVersion

WeightSource = torch.nn.Module | TensorDictBase | Mapping[str, torch.Tensor]
ModelMetadata = Mapping[str, tuple[torch.dtype, Sequence[int]]]  # dtype and shape of each weight


class WeightUpdater(ABC):
    """Pushes weights, all or nothing, and then raises the policy's version: by 1, or to a new uuid."""

    new_version: PolicyVersionLabel  # of the weights that `send_weights` sends

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy
        self.model_metadata: ModelMetadata | None = None

    def init(self, policy: Policy | None = None, *, model_metadata: ModelMetadata | None = None) -> None:
        """Set the policy to push to, or the weights that a push must bring, if the constructor did not.

        `model_metadata` gives the dtype and shape of every weight; without it a push is checked against what
        the policy itself knows.
        """
        self.policy = self.policy if policy is None else policy
        self.model_metadata = self.model_metadata if model_metadata is None else model_metadata

    def push(self, source: WeightSource) -> PolicyVersionLabel:
        """Push `source`'s weights; returns the new version, which is written only after all of it succeeded.

        Raises TypeError for a source without weights, PolicyError if the push fails, or, before anything is
        sent, if `source` lacks a weight of `model_metadata`.
        """
        assert self.policy is not None  # the constructor or init(policy) gives it
        weights = named_weights(source)
        if self.model_metadata is not None:
            check_weights(weights, self.model_metadata)
        self.new_version = next_version(self.policy.version)
        self.send_weights(self.policy, source)
        self.policy.become(self.new_version)
        return self.new_version

    def restore_version(self, version: PolicyVersionLabel) -> None:
        """Set `version` when a run is resumed: the policy already has that version's weights."""
        assert self.policy is not None
        self.policy.version = version

    @abstractmethod
    def send_weights(self, policy: Policy, source: WeightSource) -> None:
        """Send the weights of `source` to `policy`; `source` is not changed."""


class SharedWeights(WeightUpdater):
    """For a policy that samples from the trainer's own tensors: nothing to send.

    Other weights are copied into those tensors. `push` raises PolicyError, and changes nothing, for a policy with
    weights of its own and for weights that do not fit its model. A policy without a model (`ScriptedPolicy`) takes
    any.
    """

    def send_weights(self, policy: Policy, source: WeightSource) -> None:
        weights = named_weights(source)
        model = getattr(policy, "model", None)
        if model is None or model is source:
            return
        shared = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        if all(weight.data_ptr() in shared for weight in weights.values()):  # the policy's own, under any names
            return
        with policy.batching.lock:
            copy_weights(weights, model)


def default_updater(policy: Policy) -> WeightUpdater:
    """The updater that the class of `policy` names as `pushes`."""
    return opened(policy.pushes)(policy)


def begin_versions(policy: Policy, tracker: PolicyVersion) -> None:
    """Give `policy` the first version of `tracker`, which follows the policy's version from then on."""
    policy.version = tracker.version
    tracker.follow(policy)


def check_weights(weights: Mapping[str, torch.Tensor], expected: ModelMetadata) -> None:
    """Raise PolicyError for a weight that is missing, or of another dtype or shape."""
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise PolicyError(f"a weight push lacks {len(missing)} weights, {missing[0]} among them; nothing was pushed")
    for name, (dtype, shape) in expected.items():
        weight = weights[name]
        if (weight.dtype, tuple(weight.shape)) != (dtype, tuple(shape)):
            raise PolicyError(
                f"{name} is {_kind(weight.dtype, weight.shape)} in this push and {_kind(dtype, shape)} in the engine: "
                "push the weights of the model the engine was started with; nothing was pushed"
            )


def _kind(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def named_weights(source: WeightSource) -> Mapping[str, torch.Tensor]:
    """Weights under the names of an HF checkpoint, a tied output head under its own name too.

    An engine may keep the output head apart from the embedding it is tied to (vLLM does on a CPU),
    so the head is always included. Those of an adapted model are merged, each when it is read.
    Raises TypeError if `source` holds no weights.
    """
    weights = _weights_of(source)
    if not weights:
        raise TypeError(f"this {type(source).__name__} has no weights to push: pass the trained model")
    return weights


def _weights_of(source: WeightSource) -> Mapping[str, torch.Tensor]:
    if is_sharded(source):
        from rlpost.model.sharding import GatheredWeights

        return GatheredWeights(source)
    if isinstance(source, torch.nn.Module):
        if is_adapted(source):
            from rlpost.model.lora import MergedWeights

            return MergedWeights(source)
        return source.state_dict()  # detached, and with a tied head under both its names
    if isinstance(source, TensorDictBase):
        keys = source.keys(include_nested=True, leaves_only=True)
        return {key if isinstance(key, str) else ".".join(key): source.get(key) for key in keys}
    if isinstance(source, Mapping):
        return source
    raise TypeError(f"weights come from a module, a TensorDict or a mapping, not from {type(source).__name__}")
