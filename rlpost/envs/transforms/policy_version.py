"""The version of the policy's weights, in the data."""

from __future__ import annotations

import time
import uuid
from collections import deque
from typing import Any, Protocol

import torch
from tensordict import NonTensorStack, TensorDictBase

from rlpost.data.conversation import PolicyVersionLabel, next_version
from rlpost.envs.transforms.base import Transform


class Versioned(Protocol):
    """What has a version that a weight updater raises: a policy."""

    version: PolicyVersionLabel
    version_history: deque[tuple[float, PolicyVersionLabel, PolicyVersionLabel]]


class PolicyVersion(Transform):
    """Writes the version of a policy's weights as `policy_version` into every TensorDict that passes.

    With `version_type` int (or "int") versions count from 0; with str (or "uuid") each is a fresh
    uuid4. Once it follows a policy, as a collector makes it, its version is the policy's, which the
    weight updater alone raises; before that `increment_version` does. Raises ValueError for any other
    `version_type`.
    """

    def __init__(self, version_type: type | str = int) -> None:
        if version_type not in (int, "int", str, "uuid"):
            raise ValueError(f"version_type={version_type!r} is unknown: it must be int, 'int', str or 'uuid'")
        self._counts = version_type in (int, "int")
        self._followed: Versioned | None = None
        self._version: PolicyVersionLabel = 0 if self._counts else str(uuid.uuid4())
        self._history: deque[tuple[float, PolicyVersionLabel, PolicyVersionLabel]] = deque(maxlen=1000)

    @property
    def version(self) -> PolicyVersionLabel:
        """The version of the weights that are sampled with."""
        return self._version if self._followed is None else self._followed.version

    @property
    def version_history(self) -> list[tuple[float, PolicyVersionLabel, PolicyVersionLabel]]:
        """The newest changes of the version: unix time, old, new."""
        return list(self._history if self._followed is None else self._followed.version_history)

    def follow(self, policy: Versioned) -> None:
        """Read the version of `policy` from now on."""
        self._followed = policy

    def increment_version(self) -> PolicyVersionLabel:
        """Go on to the next version and return it. Raises RuntimeError where it follows a policy."""
        self._check_alone("increment_version")
        old, self._version = self._version, next_version(self._version)
        self._history.append((time.time(), old, self._version))
        return self._version

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write `policy_version`: int64 of the batch shape, or the uuid once a row."""
        shape = tensordict.batch_size
        if isinstance(self.version, int):
            stamp: Any = torch.full(shape, self.version, dtype=torch.int64, device=tensordict.device)
        else:
            stamp = NonTensorStack(*[self.version] * shape[0]) if len(shape) == 1 else self.version
        return tensordict.set("policy_version", stamp)

    def state_dict(self) -> dict[str, Any]:
        """The version, ready for JSON."""
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved version. Raises ValueError where it is not of this transform's type.

        Raises RuntimeError where it follows a policy.
        """
        self._check_alone("load_state_dict")
        if isinstance(state["version"], int) != self._counts:
            kind = "int" if self._counts else "uuid"
            raise ValueError(f"the saved policy version {state['version']!r} does not fit version_type={kind!r}")
        self._version = state["version"]

    def _check_alone(self, method: str) -> None:
        if self._followed is not None:
            raise RuntimeError(
                f"{method} would set a version that its policy has not: the collector's weight_updater raises it with "
                "push, and puts a saved one back with restore_version"
            )
