"""The version of the policy's weights, in the data."""

from __future__ import annotations

import time
import uuid
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDictBase

from rlpost.data.conversation import PolicyVersionLabel
from rlpost.envs.transforms.base import Transform

_NEWEST_KEPT = 1000  # entries of the history: a long run makes one a step


class PolicyVersion(Transform):
    """Holds the version, and writes it as `policy_version` into every TensorDict that passes.

    With `version_type` int (or "int") it counts from 0; with str (or "uuid") each version is a
    fresh uuid4. The weight updater calls `increment_version` after a push has wholly succeeded, and
    nothing else does. Raises ValueError for any other `version_type`.
    """

    def __init__(self, version_type: type | str = int) -> None:
        if version_type not in (int, "int", str, "uuid"):
            raise ValueError(f"version_type={version_type!r} is unknown: it must be int, 'int', str or 'uuid'")
        self._counts = version_type in (int, "int")
        self.version: PolicyVersionLabel = 0 if self._counts else str(uuid.uuid4())
        self.version_history: list[tuple[float, PolicyVersionLabel, PolicyVersionLabel]] = []  # (unix time, old, new)

    def increment_version(self) -> PolicyVersionLabel:
        """Go on to the next version and return it."""
        old = self.version
        self.version = old + 1 if isinstance(old, int) else str(uuid.uuid4())
        self.version_history.append((time.time(), old, self.version))
        del self.version_history[:-_NEWEST_KEPT]
        return self.version

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
        """Go on from a saved version. Raises ValueError where it is not of this transform's type."""
        if isinstance(state["version"], int) != self._counts:
            kind = "int" if self._counts else "uuid"
            raise ValueError(f"the saved policy version {state['version']!r} does not fit version_type={kind!r}")
        self.version = state["version"]
