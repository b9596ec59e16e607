"""What a collector can be told by another process: weights to take up, and a method to call, by its path."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from rlpost.data.conversation import PolicyVersionLabel
from rlpost.model.weights import SavedWeights, load_weights
from rlpost.weight_sync.base import WeightSource, named_weights
from rlpost.weight_sync.schemes import MODEL_ID, WeightReceiver, WeightSyncScheme

PART = re.compile(r"""(?:^|(?!^)\.)([A-Za-z]\w*)|\[(?:'([^']*)'|"([^"]*)"|(-?\d+))\]""")  # .name, ['key'] or [3]


class ReceivesWeights(ABC):
    """A collector as one worker of several, which a parent sends weights to."""

    receiver_schemes: Mapping[str, WeightReceiver] = {}  # by model

    @abstractmethod
    def take_up(self, weights: WeightSource | Path, version: PolicyVersionLabel, *, adapter: bool = False) -> None:
        """Sample as `version` from now on, with `weights`: a source of them, or a folder of *.safetensors.

        With `adapter` the folder holds a peft adapter. What is collected in the background waits meanwhile.
        """

    @abstractmethod
    def pause(self) -> AbstractContextManager[None]:
        """A block in which nothing is collected in the background."""

    @abstractmethod
    def update_policy_weights_(self, policy_or_weights: Any = None) -> None:
        """Push weights into the policy; without any, those of the model that it was made from."""

    def receive_weights(self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None) -> None:
        """Sample with these weights from now on: a module's, a TensorDict or a mapping, given in one of three ways.

        Without any: what was offered to the registered receivers, or, where there are none, those of the policy's
        own model, as `update_policy_weights_` says. Raises ValueError for two sets of weights, and for any where
        receivers are registered, which bring them.
        """
        given = {"policy_or_weights": policy_or_weights, "weights": weights, "policy": policy}
        named = [name for name, value in given.items() if value is not None]
        if named and self.receiver_schemes:
            raise ValueError(
                f"receive_weights was given {named[0]}, and {', '.join(self.receiver_schemes)} have receivers that "
                "bring the weights: leave it out"
            )
        if len(named) > 1:
            raise ValueError(f"receive_weights was given weights twice, as {' and '.join(named)}: leave one out")
        for model_id, receiver in self.receiver_schemes.items():
            receiver.receive(self, model_id)
        if not self.receiver_schemes:
            self.update_policy_weights_(*(given[name] for name in named))

    def register_scheme_receiver(
        self, weight_recv_schemes: Mapping[str, WeightSyncScheme | WeightReceiver], *, synchronize_weights: bool = True
    ) -> None:
        """Take weights from these schemes, by model, from now on; `synchronize_weights`: what they offer now too.

        A model is "policy", or the path of a module: as that of a method in `cascade_execute`. Raises ValueError for
        another.
        """
        made = {
            model_id: scheme.receiver() if isinstance(scheme, WeightSyncScheme) else scheme
            for model_id, scheme in weight_recv_schemes.items()
        }
        for model_id in made.keys() - {MODEL_ID}:
            self._module(model_id)
        self.receiver_schemes = {**self.receiver_schemes, **made}
        if synchronize_weights:
            self.receive_weights()

    def take_up_model(
        self, model_id: str, weights: WeightSource | Path, version: PolicyVersionLabel, *, adapter: bool = False
    ) -> None:
        """`take_up` of the policy, or new weights for the module at the path `model_id`, which has no version."""
        if model_id == MODEL_ID:
            self.take_up(weights, version, adapter=adapter)
            return
        with self.pause():
            load_weights(
                self._module(model_id), SavedWeights(weights) if isinstance(weights, Path) else named_weights(weights)
            )

    def _module(self, model_id: str) -> torch.nn.Module:
        try:
            found = reached(self, model_id)
        except (AttributeError, LookupError) as error:
            raise ValueError(f"this collector has no model {model_id!r}: {error}") from error
        if not isinstance(found, torch.nn.Module):
            raise ValueError(f"{model_id!r} is a {type(found).__name__} of this collector, and no module with weights")
        return found

    def receive_offered(self, offers: Mapping[str, Any], version: PolicyVersionLabel) -> None:
        """Take up what a parent's schemes offer, by model, as `version`. Raises KeyError without their receivers."""
        for model_id, content in offers.items():
            self.receiver_schemes[model_id].offer(content, version)
        self.receive_weights()

    def receiving_places(self) -> dict[str, Any]:
        """Where this worker is, as the receiver of each model says it to the sender."""
        return {model_id: receiver.place() for model_id, receiver in self.receiver_schemes.items()}

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of something that the collector holds: `"receiver_schemes['policy'].place"`.

        The path is of names and of keys or indices in brackets. Raises ValueError for anything else and for names
        that begin with an underscore, AttributeError or LookupError where the path leads nowhere, TypeError where it
        leads to nothing that can be called.
        """
        found = reached(self, attr_path)
        if not callable(found):
            raise TypeError(f"{attr_path} is a {type(found).__name__}, which cannot be called")
        return found(*args, **kwargs)


def reached(start: Any, path: str) -> Any:
    """What a path of public names and keys leads to. Raises as `cascade_execute` says."""
    found, position = start, 0
    while position < len(path) or not position:
        part = PART.match(path, position)
        if part is None:
            raise ValueError(
                f"{path!r} is no path of public names and ['keys'], from {path[position:]!r} on: names that begin with "
                "an underscore are not reached from elsewhere"
            )
        name, *keys, index = part.groups()
        key = next((key for key in keys if key is not None), None)
        found = getattr(found, name) if name else found[int(index) if key is None else key]
        position = part.end()
    return found
