"""RayReplayBuffer: a replay buffer in a Ray actor, written and read from anywhere in the cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict, TensorDictBase

from rlpost.data.conversation import PolicyVersionLabel
from rlpost.errors import PolicyError
from rlpost.remote.cluster import Actor, joined, place
from rlpost.torchrl.frames import FrameBuffer
from rlpost.torchrl.replay_buffer import ReplayBuffer

LOOK_SECONDS = 0.05  # between two looks for enough groups


class RayReplayBuffer:
    """A `ReplayBuffer` of groups, or with `storage` a `FrameBuffer`, in a Ray actor; it may be sent to other actors.

    It takes their arguments. Whole groups are taken once (`take`, which waits for what collectors write), frames are
    drawn at random (`sample`).

    `remote_config` goes to `ray.remote` (default: no CPU of its own), `ray_init_config` to `ray.init` if Ray does not
    run yet. Every call waits `wait_seconds` at most. The actor ends with `close`, with the process that built it, or
    once nobody holds it. Raises MissingExtraError without ray, PolicyError if the actor finds no place, has died, or
    does not answer in time, and the errors of the buffer.
    """

    def __init__(
        self,
        *,
        replay_buffer_cls: type[Any] | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        wait_seconds: float = 600.0,
        **options: Any,
    ) -> None:
        ray = joined("RayReplayBuffer", {"include_dashboard": False, **(ray_init_config or {})})
        cls = replay_buffer_cls or (FrameBuffer if "storage" in options else ReplayBuffer)
        self.wait_seconds = wait_seconds
        self.holds_groups = issubclass(cls, ReplayBuffer)
        self.is_closed = False
        config = {"num_cpus": 0, **(remote_config or {})}
        handle = ray.remote(**config)(BufferActor).remote(cls, options)
        self._actor = Actor(ray, handle, "the actor of the replay buffer")
        try:
            place(ray, [self._actor], config, wait_seconds)
        except BaseException:
            self.close()
            raise

    # Writing

    def extend(self, batch: TensorDictBase) -> None:
        """See `extend` of the buffer; returns once it is written."""
        self._call("call", "extend", batch)

    def add(self, row: TensorDictBase) -> None:
        """Write one row or frame ()."""
        self._call("call", "extend", row.unsqueeze(0))

    @property
    def write_count(self) -> int:
        """Rows or frames written since the buffer was built."""
        return self._call("read", "write_count")

    # Reading

    def sample(self, batch_size: int | None = None) -> TensorDictBase:
        """See `FrameBuffer.sample`."""
        return self._call("call", "sample", batch_size)

    def take(
        self,
        num_groups: int,
        max_policy_lag: int | None = None,
        *,
        policy_version: PolicyVersionLabel | None = None,
        wait_seconds: float | None = None,
    ) -> TensorDict:
        """See `ReplayBuffer.take`: waits until enough groups were written, `wait_seconds` at most.

        A group older than `max_policy_lag` pushes before `policy_version` is dropped and counted. Raises PolicyError if
        too few groups come.
        """
        limit = self.wait_seconds if wait_seconds is None else wait_seconds
        until = time.monotonic() + limit
        while (batch := self._call("take", num_groups, max_policy_lag, policy_version)) is None:
            if time.monotonic() > until:
                raise PolicyError(
                    f"waited {limit:g} s for {num_groups} groups, and the replay buffer holds {len(self)} "
                    f"({self.write_count} rows were written): the collectors may have ended, or group_size or accept "
                    "may turn down what they write"
                )
            time.sleep(LOOK_SECONDS)
        return batch

    def __len__(self) -> int:
        return self._call("call", "__len__")

    @property
    def num_rows(self) -> int:
        """The rows of the whole groups; of a buffer of frames the frames."""
        return self._call("read", "num_rows") if self.holds_groups else len(self)

    def take_counts(self) -> dict[str, float]:
        """See `ReplayBuffer.take_counts`."""
        return self._call("call", "take_counts")

    # State and end

    def state_dict(self) -> dict[str, Any]:
        """See `state_dict` of the buffer."""
        return self._call("call", "state_dict")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `load_state_dict` of the buffer."""
        self._call("call", "load_state_dict", state)

    def close(self) -> None:
        """End the actor and what it holds; a second call does nothing."""
        if not self.is_closed:
            self.is_closed = True
            self._actor.kill()

    shutdown = close

    def _call(self, method: str, *args: Any) -> Any:
        """The answer. Raises NotReady past the limit, PolicyError if the actor is gone, and the buffer's error."""
        try:
            return self._actor.call(method, *args, seconds=self.wait_seconds)
        except PolicyError as error:
            if self._actor.failure is None:
                raise
            raise PolicyError(
                f"the actor of the replay buffer is gone ({error}), and what it held with it: build another, and load "
                "the last state that was saved"
            ) from error


class BufferActor:
    """The actor, which holds the buffer."""

    def __init__(self, cls: type[Any], options: Mapping[str, Any]) -> None:
        self.buffer = cls(**options)

    def read(self, name: str) -> Any:
        return getattr(self.buffer, name)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.buffer, method)(*args)

    def take(self, num_groups: int, max_lag: int | None, version: PolicyVersionLabel | None) -> TensorDict | None:
        """`num_groups` that are recent enough; None if there are fewer."""
        self.buffer.drop_stale(version, max_lag)
        return self.buffer.take(num_groups) if len(self.buffer) >= num_groups else None
