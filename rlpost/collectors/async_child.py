"""What lives in the process of an AsyncCollector: its collector, and the batches it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlpost.collectors.async_plan import CollectorPlan
from rlpost.collectors.group_player import HostProtocol
from rlpost.collectors.llm import LLMCollector
from rlpost.data.conversation import PolicyVersionLabel
from rlpost.policies.base import Policy


class CollectorHost:
    """Collects as many batches as its owner has asked for, on the process's main thread, between its owner's orders.

    Each comes as the event "batch", or "failed" with what was raised, after which nothing begins before more is asked
    for; "ended" says that there is no further one. So an order never meets a batch that is half collected, and the
    deadline of a score can interrupt it.
    """

    def __init__(self, plan: CollectorPlan, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self.host: HostProtocol | None = None  # set by the process before the first call
        self.collector = plan.built()
        self._asked = 0  # for so many batches that have not begun
        self._holders = 0
        self._is_due = False  # a round waits for the main thread
        self._has_failed = False

    # What the owner calls

    def about(self) -> tuple[int, bool, PolicyVersionLabel | None]:
        """How many frames a batch has, whether they are turns of conversations, and the policy's version."""
        is_language = isinstance(self.collector, LLMCollector)
        return self.collector.frames_per_batch, is_language, self.collector.policy_version

    def more(self, batches: int) -> None:
        """Collect so many more; after a failure this is to try again."""
        self._asked += batches
        self._has_failed = False
        self._go_on()

    def forget(self) -> None:
        """Collect none of those that were asked for and have not begun."""
        self._asked = 0

    def hold(self) -> None:
        """Begin nothing; what was under way has ended when this is carried out."""
        self._holders += 1

    def release(self) -> None:
        """Go on, once as many have released as have held."""
        self._holders -= 1
        self._go_on()

    def push(self, folder: Path, version: PolicyVersionLabel, adapter: bool = False) -> None:
        """Sample as `version` from now on, with the weights in `folder`."""
        self.collector.take_up(folder, version, adapter=adapter)

    def init_updater(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See `LLMCollector.init_updater`; frames have no updater, and nothing happens."""
        if isinstance(self.collector, LLMCollector):
            self.collector.init_updater(*args, **kwargs)

    def ask(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a method of the collector returns."""
        return getattr(self.collector, method)(*args, **kwargs)

    def finish(self, close_env: bool) -> None:
        """Collect no more, and close the policy, and with `close_env` the environment."""
        self._holders += 1
        self.collector.shutdown(close_env=close_env)
        if isinstance(self.collector.policy, Policy):
            self.collector.policy.close()

    def close(self) -> None:
        """The owner is gone: see `finish`."""
        self.finish(True)

    # Rounds

    def _go_on(self) -> None:
        if self._is_due or self._holders or self._has_failed or not self._asked:
            return
        assert self.host is not None
        if self.collector.wants_more:
            self._is_due = True
            self.host.in_main_thread(self._round)
        else:
            self.host.tell("ended", None)

    def _round(self) -> None:
        self._is_due = False
        if self._holders or not self._asked:
            return
        assert self.host is not None
        self._asked -= 1
        try:
            self.host.tell("batch", self.collector.next())
        except BaseException as error:  # noqa: BLE001  raised again in the owner's process
            self._has_failed = True
            self.host.tell("failed", error)
        self._go_on()
