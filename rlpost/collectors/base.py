"""What collectors have in common: batches on demand or from a thread, and an end."""

from __future__ import annotations

import logging
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self

from tensordict import TensorDictBase

from rlpost.collectors.receiving import ReceivesWeights
from rlpost.data.replay_buffer import ReplayBuffer
from rlpost.envs.base import EnvBase
from rlpost.errors import PolicyError

if TYPE_CHECKING:
    from rlpost.collectors.background import Background

log = logging.getLogger("rlpost")


class CollectorBase(ReceivesWeights):
    """Plays `env`, and fills `replay_buffer` where there is one: when asked, or from a thread of its own."""

    def __init__(self, env: EnvBase, replay_buffer: ReplayBuffer | None, *, wait_seconds: float) -> None:
        self.env = env
        self.replay_buffer = replay_buffer
        self.wait_seconds = wait_seconds  # for a batch that is collected in the background
        self._background: Background | None = None
        self._is_shut_down = False
        self._worker_idx: int | None = None

    @property
    def plays_conversations(self) -> bool:
        """Whether a batch is of turns of conversations, and not of frames."""
        return False

    @property
    def worker_idx(self) -> int:
        """Its number, from 0, among the workers of a RayCollector. Raises RuntimeError where it is none of them."""
        if self._worker_idx is None:
            raise RuntimeError("this collector is no worker of another, and has no worker_idx")
        return self._worker_idx

    def number_as_worker(self, number: int) -> None:
        """Be worker `number` of a RayCollector."""
        self._worker_idx = number

    @abstractmethod
    def collect_round(self) -> TensorDictBase | None:
        """Collect one more batch and deliver it: here, or where it goes instead, and then this is None."""

    @property
    @abstractmethod
    def wants_more(self) -> bool:
        """Whether there is to be another batch."""

    @property
    def is_ahead(self) -> bool:
        """Whether so much waits to be taken that the background rests until somebody takes it, or asks for more."""
        return False

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        while self.wants_more:
            self._check_foreground("iterate over")
            yield self.collect_round()

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """What iterating over the collector gives."""
        return iter(self)

    def next(self) -> TensorDictBase | None:
        """The next batch where iterating gives one; None where it is delivered elsewhere, and at the end."""
        return next(iter(self), None)

    def collect(self) -> None:
        """One more batch into the replay buffer; where the background fills it, return with its next one.

        Raises RuntimeError without a buffer, PolicyError where all batches that were wanted are there.
        """
        if self.replay_buffer is None:
            raise RuntimeError("collect() fills a replay buffer, and this collector has none: iterate over it instead")
        if self._background is None:
            self._check_foreground("collect with")
        else:
            self._background.check()
        if not self.wants_more:
            raise PolicyError(
                "the collector has collected all its total_dialog_turns, or total_frames: the buffer gets no more"
            )
        if self._background is None:
            self.collect_round()
        else:
            self._background.wait_for_round()

    @property
    def owes(self) -> bool:
        """See `GroupSource.owes`: what it samples is delivered before anything later begins."""
        return False

    def give_back(self, count: int) -> None:
        """So many turns or frames were thrown away untaken: they count towards no total."""

    def taken(self, groups: Sequence[int]) -> None:
        """See `GroupSource.taken`: the background may go on."""
        if self._background is not None:
            self._background.look_again()

    def start(self) -> None:
        """Fill the replay buffer from a thread of its own, without end or up to `total_dialog_turns`.

        What goes wrong there is raised by the next call here. Raises RuntimeError without a buffer,
        when it is running already, or after `shutdown`.
        """
        if self.replay_buffer is None:
            raise RuntimeError("start() fills a replay buffer, and this collector has none: give it one")
        self._check_foreground("start")
        mine = weakref.ref(self)  # a collector that nobody holds any more may go

        def work() -> bool:
            collector = mine()
            if collector is None or not collector.wants_more:
                return False
            collector.collect_round()
            return collector.wants_more

        def may_begin() -> bool:
            collector = mine()
            return collector is None or not collector.is_ahead

        from rlpost.collectors.background import Background

        name = "the batch that is collected in the background"
        self._background = Background(work, name, self.wait_seconds, may_begin)

    def pause(self) -> AbstractContextManager[None]:
        """A block in which nothing is collected in the background; the batch under way is waited for."""
        return nullcontext() if self._background is None else self._background.held()

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Collect no more, and close the environment; the policy stays its owner's. A second call does nothing.

        Raises what went wrong in the background, and PolicyError where the batch under way there has
        not ended within `timeout` seconds (None: `wait_seconds`); without `raise_on_error` that is logged.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        try:
            if self._background is not None:
                self._background.stop(timeout)
        except Exception as error:
            if raise_on_error:
                raise
            log.warning("the collector was shut down after an error: %s", error)
        finally:
            if close_env:
                self.env.close()

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """`shutdown`, under the name that ends what was started in the background."""
        self.shutdown(timeout, close_env)

    def is_initialized(self) -> bool:
        """Whether batches can be collected: until `shutdown`."""
        return not self._is_shut_down

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        if getattr(self, "_background", None) is not None:  # a constructor may have failed before
            assert self._background is not None
            self._background.tell_to_stop()
            self._background.check()  # what nobody has asked for is told on the way out

    @classmethod
    def as_remote(cls, remote_config: Mapping[str, Any] | None = None) -> Any:
        """This class as a Ray actor class: `as_remote({"num_cpus": 1}).remote(env, policy=...)` makes one.

        `remote_config` is what `ray.remote` takes. Raises MissingExtraError without ray.
        """
        from rlpost.collectors.ray import actor_class

        return actor_class(cls, remote_config or {})

    def _check_foreground(self, doing: str) -> None:
        """Raise RuntimeError where the background collects, after what went wrong there, or nothing may any more."""
        if self._is_shut_down:
            raise RuntimeError(f"cannot {doing} a collector that was shut down: build another")
        if self._background is not None:
            self._background.check()
            raise RuntimeError(f"cannot {doing} a collector that was started in the background: read its replay buffer")


def postprocessed(batch: TensorDictBase, postproc: Callable[[TensorDictBase], TensorDictBase] | None) -> TensorDictBase:
    """`batch` as `postproc` returns it. Raises TypeError where that is no TensorDict."""
    if postproc is None:
        return batch
    made = postproc(batch)
    if not isinstance(made, TensorDictBase):
        raise TypeError(
            f"the postproc returned {type(made).__name__}: it must return the batch to deliver; what holds rows back "
            "is a transform of the buffer, ReplayBuffer(transforms=[...])"
        )
    return made
