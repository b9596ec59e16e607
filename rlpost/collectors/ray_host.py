"""What runs in each actor of a RayCollector: its collector, and what the driver asks of it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import cloudpickle
import torch
from tensordict import TensorDictBase

from rlpost.collectors.base import postprocessed
from rlpost.collectors.ray_plan import WORKER_DRAWS
from rlpost.data.conversation import PolicyVersionLabel
from rlpost.data.frames import TRAJ_IDS
from rlpost.policies.base import Policy

log = logging.getLogger("rlpost")


class RayHost:
    """The actor: one collector, which `build` makes from a pickled plan; everything is done in the order it comes.

    Trajectories are numbered from `WORKER_DRAWS` times the worker's number on, so that no two workers' are equal.
    """

    def __init__(self, number: int, num_threads: int) -> None:
        self.number = number
        os.environ["OMP_NUM_THREADS"] = str(num_threads)  # of what is started here, engines among it
        torch.set_num_threads(num_threads)
        self.collector: Any = None
        self._buffer: Any = None
        self._postproc: Callable[[TensorDictBase], TensorDictBase] | None = None
        self._lock = threading.Lock()  # of what follows
        self._holders = 0
        self._held: AbstractContextManager[None] | None = None
        self._lease: threading.Timer | None = None

    def build(
        self, plan: bytes, policy: bytes | None, delivery: bytes | None
    ) -> tuple[int, bool, PolicyVersionLabel | None]:
        """Build the collector; frames in a batch, whether they are turns of conversations, and the policy's version.

        `delivery`: the buffer to write batches to, and what is called on each before.
        """
        built = cloudpickle.loads(plan)
        if policy is not None:
            built.policy = cloudpickle.loads(policy)
        if delivery is not None:
            self._buffer, self._postproc = cloudpickle.loads(delivery)
        self.collector = collector = built.built()
        collector.number_as_worker(self.number)
        return collector.frames_per_batch, collector.plays_conversations, collector.get_policy_version()

    def next(self) -> TensorDictBase | int:
        """One batch; how many turns or frames it has where it went into a buffer from here."""
        batch = self.collector.next()
        if (numbers := batch.get(TRAJ_IDS, None)) is not None:
            batch.set(TRAJ_IDS, numbers + self.number * WORKER_DRAWS)
        if self._buffer is None:
            return batch
        self._buffer.extend(postprocessed(batch, self._postproc))
        return batch.numel()

    # What the sender of weights and a user's own remote calls need

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """See the collector's."""
        return self.collector.cascade_execute(attr_path, *args, **kwargs)

    def register_scheme_receiver(self, schemes: Mapping[str, Any], *, synchronize_weights: bool = True) -> None:
        """See the collector's."""
        self.collector.register_scheme_receiver(schemes, synchronize_weights=synchronize_weights)

    def receiving_places(self) -> Any:
        """See the collector's."""
        return self.collector.receiving_places()

    def receive_offered(self, offers: Mapping[str, Any], version: PolicyVersionLabel) -> None:
        """See the collector's."""
        self.collector.receive_offered(offers, version)

    def receive_weights(self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None) -> None:
        """See the collector's."""
        self.collector.receive_weights(policy_or_weights, weights=weights, policy=policy)

    def get_policy_version(self) -> PolicyVersionLabel | None:
        """See the collector's."""
        return self.collector.get_policy_version()

    # Pauses

    def pause_begin(self, seconds: float) -> None:
        """Let the collector begin nothing until a `pause_end` for each, or for so many seconds if none renews them."""
        with self._lock:
            if self._held is None:
                block = self.collector.pause()
                block.__enter__()
                self._held = block
            self._holders += 1
        self.pause_renew(seconds)

    def pause_renew(self, seconds: float) -> bool:
        """Hold it for so many seconds from now on; False where it has gone on already."""
        with self._lock:
            if self._lease is not None:
                self._lease.cancel()
            if self._held is None:
                return False
            self._lease = threading.Timer(seconds, self._expire)
            self._lease.daemon = True
            self._lease.start()
            return True

    def pause_end(self, all_of_them: bool = False) -> None:
        """Let the collector go on, once as many have said so as have paused it; nothing happens where it does."""
        with self._lock:
            self._holders = 0 if all_of_them else max(0, self._holders - 1)
            if self._holders:
                return
            held, self._held = self._held, None
            if self._lease is not None:
                self._lease.cancel()
        if held is not None:
            held.__exit__(None, None, None)

    def is_held(self) -> bool:
        """Whether a pause is on."""
        return self._held is not None

    def _expire(self) -> None:
        log.warning("worker %d was paused by somebody who gives no sign of life any more: it goes on", self.number)
        self.pause_end(all_of_them=True)

    # The end

    def finish(self) -> None:
        """Close the environment and the policy."""
        if self.collector is None:
            return
        self.pause_end(all_of_them=True)
        self.collector.shutdown()
        if isinstance(policy := getattr(self.collector, "policy", None), Policy):
            policy.close()
