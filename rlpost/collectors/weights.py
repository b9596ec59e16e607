"""The part of a collector that is about its policy's weights and their version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlpost.collectors.base import CollectorBase
from rlpost.data.conversation import PolicyVersionLabel
from rlpost.data.replay_buffer import ReplayBuffer
from rlpost.envs.transforms.policy_version import PolicyVersion
from rlpost.model.weights import SavedWeights
from rlpost.policies.base import Policy
from rlpost.weight_sync.base import WeightSource, WeightUpdater, begin_versions, check_weights, default_updater
from rlpost.weight_sync.schemes import MODEL_ID

CPU = torch.device("cpu")
Workers = int | torch.device | Sequence[int | torch.device]


class WeightsCollector(CollectorBase):
    """A collector with one policy, which a `weight_updater` brings weights to."""

    policy: Policy
    weight_updater: WeightUpdater

    def _become_source_of(self, buffer: ReplayBuffer) -> None:
        """Be what `buffer` asks for more, if it asks. Raises RuntimeError where another collector, not shut down, is.

        One in an actor asks nobody.
        """
        if not isinstance(buffer, ReplayBuffer):
            return
        if isinstance(buffer.source, CollectorBase) and buffer.source.is_initialized():
            raise RuntimeError(
                "another collector fills this replay buffer, and both would number their draws from 0: shut it down "
                "first, or give this one a buffer of its own"
            )
        buffer.source = self

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: Workers | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        state_dict: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Push weights into the policy; its version rises once the push has wholly succeeded.

        They come from a module, a TensorDict or a mapping, as the first argument, `weights`, `policy` or
        `state_dict`, or as `weights_dict={"policy": ...}`; without any they are those of the policy's own model,
        where it has one that somebody trains. The only model is "policy" (`model_id`), the only worker number 0, or
        the device that samples. What is collected in the background waits meanwhile.

        Raises TypeError without weights, or for `worker_ids` where the collector was given no weight_updater;
        ValueError for two sets of weights, and for a worker or a model that is not there.
        """
        self._check_worker(worker_ids)
        sources = self._given_weights(policy_or_weights, weights, policy, model_id, weights_dict, state_dict)
        if sources.keys() != {MODEL_ID}:
            raise ValueError(
                f"this collector has one model, {MODEL_ID!r}, and not {', '.join(sorted(sources)) or 'none'}"
            )
        with self.pause():
            self.weight_updater.push(sources[MODEL_ID])

    def _given_weights(
        self,
        policy_or_weights: Any,
        weights: Any,
        policy: Any,
        model_id: str | None,
        weights_dict: Mapping[str, Any] | None,
        state_dict: Mapping[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """The weights of each model that `update_policy_weights_` was given, and else the policy's own."""
        given = {
            "policy_or_weights": policy_or_weights,
            "weights": weights,
            "policy": policy,
            "state_dict": state_dict,
            "weights_dict": weights_dict,
        }
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1 or (weights_dict is not None and model_id is not None):
            twice = [*named, "model_id"] if len(named) < 2 else named
            raise ValueError(f"update_policy_weights_ was given weights twice, as {' and '.join(twice)}: leave one out")
        if weights_dict is not None:
            return dict(weights_dict)
        if model_id not in (None, MODEL_ID) and not named:
            raise ValueError(f"update_policy_weights_ was given no weights for {model_id!r}: pass them")
        return {model_id or MODEL_ID: given[named[0]] if named else self._own_weights()}

    def take_up(self, weights: WeightSource | Path, version: PolicyVersionLabel, *, adapter: bool = False) -> None:
        """See `ReceivesWeights.take_up`; a folder is loaded by the policy itself where it can and may."""
        policy, updater = self.policy, self.weight_updater
        loads = not self._has_own_updater and type(policy).load_folder is not Policy.load_folder
        with self.pause():
            if adapter and isinstance(weights, Path):
                policy.load_adapter_folder(weights, version)
                return
            source = SavedWeights(weights) if isinstance(weights, Path) else weights
            if isinstance(weights, Path) and loads:
                if updater.model_metadata is not None:
                    check_weights(SavedWeights(weights), updater.model_metadata)
                policy.load_folder(weights, version)  # which may need no second copy of them
            else:
                updater.push(source)
                updater.restore_version(version)

    def _own_weights(self) -> torch.nn.Module:
        model = self.get_policy_model()
        if not isinstance(model, torch.nn.Module):
            raise TypeError("update_policy_weights_ was given no weights: pass a module, a TensorDict or state_dict=")
        return model

    def _check_worker(self, worker_ids: Workers | None) -> None:
        if worker_ids is None:
            return
        if not self._has_own_updater:
            raise TypeError(
                "worker_ids chooses among the workers of a weight_updater, and this collector was given none: leave it "
                "out"
            )
        workers = [worker_ids] if isinstance(worker_ids, int | torch.device) else worker_ids
        if any(worker != 0 and worker != self._device for worker in workers):
            raise ValueError(f"worker_ids={worker_ids!r}: this collector is one worker, number 0, on {self._device}")

    @property
    def _device(self) -> torch.device:
        """Where the policy samples."""
        model = self.get_policy_model()
        parameters = model.parameters() if isinstance(model, torch.nn.Module) else iter(())
        first = next(parameters, None)
        return torch.device("cuda", 0) if first is None and torch.cuda.is_available() else getattr(first, "device", CPU)

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """`weight_updater.init` with these arguments."""
        self.weight_updater.init(*args, **kwargs)

    def get_policy_model(self) -> Any:
        """What the policy samples with: its transformers model or vLLM engine; None where it has neither."""
        return getattr(self.policy, "model", None)

    @property
    def policy_version(self) -> PolicyVersionLabel:
        """The version the policy samples with now; it has one whether or not it is tracked."""
        return self.policy.version

    def get_policy_version(self) -> PolicyVersionLabel:
        """`policy_version` as a method, for callers that cannot read a property."""
        return self.policy_version

    def _version_tracker(self, track: bool | PolicyVersion) -> PolicyVersion | None:
        if track is False:
            return None
        tracker = PolicyVersion() if track is True else track
        self.env = self.env.append_transform(tracker)
        begin_versions(self.policy, tracker)
        return tracker

    def _updater(self, updater: WeightUpdater | Callable[[], WeightUpdater] | None) -> WeightUpdater:
        self._has_own_updater = updater is not None
        if updater is None:
            return default_updater(self.policy)
        built = updater if isinstance(updater, WeightUpdater) else updater()
        if built.policy is None:
            built.init(self.policy)
        elif built.policy is not self.policy:
            raise ValueError("the weight_updater pushes to another policy than the one this collector samples with")
        return built
