"""How a RayCollector's weights go to its workers, and the version that they have then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from rlpost.collectors.child_weights import ChildPolicy
from rlpost.collectors.ray_crew import Crew
from rlpost.collectors.ray_rounds import Rounds
from rlpost.collectors.weights import Workers
from rlpost.data.conversation import PolicyVersionLabel
from rlpost.weight_sync.base import WeightSource
from rlpost.weight_sync.ray import WeightSender
from rlpost.weight_sync.schemes import MODEL_ID, WeightSyncScheme, WorkersFailed


class Pushes:
    """Sends by `schemes` to the workers of `crew`, and tells `policy` the version and `rounds` who was updated."""

    def __init__(
        self,
        crew: Crew,
        rounds: Rounds,
        policy: ChildPolicy,
        schemes: Mapping[str, WeightSyncScheme] | None,
    ) -> None:
        self._crew = crew
        self._rounds = rounds
        self._policy = policy
        self._schemes = schemes
        self._sender = WeightSender(schemes, version=policy.version)
        self._last: dict[str, WeightSource] = {}  # what was sent, by model

    def send(self, sources: Mapping[str, WeightSource], numbers: Iterable[int]) -> None:
        """Send to these workers, all of which answer. Raises as `WeightSender.send`; those reached have the version."""
        actors = {number: self._crew.members[number].actor for number in numbers}
        failed: Mapping[int, str] = {}
        try:
            self._sender.send(sources, actors)
        except WorkersFailed as error:
            failed = error.reasons
            self._crew.look(failed)
            raise
        finally:
            if self._sender.version != self._policy.version:
                self._policy.become(self._sender.version)
                self._last = dict(sources)
                self._rounds.since_update |= {number: 0 for number in actors if number not in failed}

    def send_to_due(self) -> None:
        """Update the workers that are to be updated before they go on, where there is something to send."""
        sources = self._last
        if not sources and self._policy.model is not None:
            sources = {MODEL_ID: self._policy.model}
        if sources and (due := self._rounds.due()):
            self.send(sources, due)
        self._rounds.settled()

    def send_again(self) -> None:
        """What was last sent, to all, as a new version; nothing where nothing was."""
        if self._last:
            self.send(self._last, self._crew.members)

    def chosen(self, worker_ids: Workers | None) -> list[int]:
        """The numbers of the workers that are meant. Raises ValueError for one that is not there."""
        members = self._crew.members
        if worker_ids is None:
            return list(members)
        if not self._sender.schemes:
            raise TypeError("worker_ids chooses among those that weight_sync_schemes send to, and there are none")
        chosen: set[int] = set()
        for worker in [worker_ids] if isinstance(worker_ids, int | torch.device) else worker_ids:
            found = [n for n, member in members.items() if worker in (n, member.policy_device)]
            if not found:
                raise ValueError(
                    f"worker_ids={worker_ids!r}: there is no worker {worker}; they are 0 to {max(members)}"
                )
            chosen.update(found)
        return sorted(chosen)

    def restore(self, version: PolicyVersionLabel) -> None:
        """The workers have the weights of `version` already."""
        self._policy.version = version
        self._sender.close()
        self._sender = WeightSender(self._schemes, version=version)

    def close(self) -> None:
        """Give back what sending has needed."""
        self._sender.close()
