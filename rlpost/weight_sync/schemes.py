"""What a weight sync scheme is: how weights go from the process that trains to the workers that sample with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rlpost.data.conversation import PolicyVersionLabel
from rlpost.errors import PolicyError
from rlpost.weight_sync.base import WeightSource

MODEL_ID = "policy"  # of the model that a collector samples with


class TakesWeights(Protocol):
    """What a receiver brings weights to: a collector."""

    def take_up_model(
        self, model_id: str, weights: WeightSource | Path, version: PolicyVersionLabel, *, adapter: bool = False
    ) -> None: ...


class WeightReceiver(ABC):
    """A worker's side of a scheme: it is told of weights, and brings them to the collector when that receives."""

    def __init__(self) -> None:
        self._offered: tuple[Any, PolicyVersionLabel] | None = None

    def offer(self, content: Any, version: PolicyVersionLabel) -> None:
        """There are weights, to be `version` once they are received; `content` says where, as the sender wrote it."""
        self._offered = (content, version)

    def receive(self, collector: TakesWeights, model_id: str = MODEL_ID) -> None:
        """Bring what was last offered to `collector`, once; nothing happens where nothing was."""
        offered, self._offered = self._offered, None
        if offered is not None:
            self.bring(collector, model_id, *offered)

    def place(self) -> Any:
        """What the sender has to know of where this worker is."""
        return None

    @abstractmethod
    def bring(self, collector: TakesWeights, model_id: str, content: Any, version: PolicyVersionLabel) -> None:
        """Let `collector` sample with the weights that `content` speaks of, as `version`."""


class Worker(NamedTuple):
    """A worker as the sender's side of a scheme sees it."""

    identity: Any  # another one's has another
    place: Any  # what its receiver's `place` said


class WeightSyncScheme(ABC):
    """The sender's side, in the process that trains; `receiver` makes what each worker has of it.

    A push goes: `offered` makes the weights ready, each worker is handed its part and receives, and meanwhile
    `transmit` sends what does not lie ready.
    """

    @abstractmethod
    def receiver(self) -> WeightReceiver:
        """What a worker registers (`register_scheme_receiver`). It can be pickled."""

    @abstractmethod
    def offered(self, source: WeightSource, workers: Mapping[int, Worker]) -> AbstractContextManager[Mapping[int, Any]]:
        """A block in which the weights of `source` lie ready for `workers`; what to offer to each."""

    def transmit(self, source: WeightSource) -> None:  # noqa: B027  what lies ready need not be sent
        """Send the weights of `source` while the workers receive."""

    def close(self) -> None:  # noqa: B027  not every scheme has something of its own
        """Give back what pushes have needed."""


class WorkersFailed(PolicyError):
    """A push did not reach these workers. `reasons` says why, by their number; all others have the new weights."""

    def __init__(self, reasons: Mapping[int, str], others: Sequence[int]) -> None:
        told = "; ".join(f"worker {number}: {reason}" for number, reason in sorted(reasons.items()))
        rest = f"workers {', '.join(map(str, sorted(others)))} have them" if others else "no worker has them"
        super().__init__(
            f"weights did not reach {len(reasons)} of {len(reasons) + len(others)} workers ({told}); {rest}"
        )
        self.reasons = dict(reasons)
