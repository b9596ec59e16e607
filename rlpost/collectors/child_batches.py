"""The batches of a collector's process, as they come to its owner: asked for ahead, waited for, one by one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from tensordict import TensorDictBase

from rlpost.collectors.async_child import CollectorHost
from rlpost.collectors.async_plan import CollectorPlan, unsendable
from rlpost.collectors.process import WorkerProcess
from rlpost.data.replay_buffer import ReplayBuffer
from rlpost.errors import PolicyError


class ChildBatches:
    """Has a `CollectorHost` collect in a process of its own, at most `batches_ahead` batches beyond those taken.

    A batch is moved to `storing_device`, and written to `replay_buffer` where there is one, by the thread that
    listens to the process; what goes wrong there is raised by the next call here. Nobody waits for an answer of the
    process while holding `_changed`, which that thread needs. Raises TypeError for a plan that cannot be sent, and
    what building it there raises.
    """

    def __init__(
        self,
        plan: CollectorPlan,
        *,
        num_threads: int,
        batches_ahead: int,
        wait_seconds: float,
        storing_device: torch.device | None = None,
        replay_buffer: Any = None,
    ) -> None:
        self.batches_ahead = batches_ahead
        self.wait_seconds = wait_seconds
        self.storing_device = storing_device
        self.replay_buffer = replay_buffer
        self.is_free = False  # to fill the buffer without being asked
        self.is_death_told = False
        self._changed = threading.Condition()  # of all that follows
        self._waiting: deque[TensorDictBase | None] = deque()  # batches that nobody has taken; None is in the buffer
        self._under_way = 0  # batches that were asked for and have not come
        self._landed = 0  # batches that have come
        self._has_ended = False  # there is no batch after those that have come
        self._has_failed = False  # and nothing begins there before more is asked for
        self._error: BaseException | None = None  # that the next call raises
        self._held_by: list[int] = []  # threads in a block of `held`
        self.worker = self._started(plan, num_threads)
        self.frames_per_batch, self.is_language, self.first_version = self.worker.call("about", seconds=wait_seconds)

    def _started(self, plan: CollectorPlan, num_threads: int) -> WorkerProcess:
        hear, wake = WeakMethod(self._hear), WeakMethod(self._wake)  # what nobody holds any more may go

        def on_event(kind: str, content: Any) -> None:
            if (mine := hear()) is not None:
                mine(kind, content)

        def on_death() -> None:
            if (mine := wake()) is not None:
                mine()

        try:
            worker = WorkerProcess(
                partial(CollectorHost, plan, num_threads),
                on_event=on_event,
                on_death=on_death,
                environment={"OMP_NUM_THREADS": str(num_threads)},
            )
        except Exception as error:
            raise TypeError(
                f"{unsendable(plan)} cannot be sent to the collector's process ({error}): build what it needs in "
                "create_env_fn or in policy_factory, which are called there"
            ) from error
        return worker.start()

    # Taking

    @property
    def wants_more(self) -> bool:
        """Whether there is a batch to take, as far as is known here."""
        return bool(self._waiting) or not self._has_ended

    @property
    def room(self) -> int:
        """For how many batches, beside those that wait or are under way."""
        waiting = len(self._waiting)
        if self.is_free and isinstance(self.replay_buffer, ReplayBuffer):
            waiting = self.replay_buffer.num_rows // self.frames_per_batch
        return self.batches_ahead - self._under_way - waiting

    def take(self) -> tuple[TensorDictBase | None] | None:
        """The next batch, None where it is in the buffer; None alone at the end.

        Raises what `check` does, PolicyError where none comes in `wait_seconds`, and RuntimeError where it would
        wait for one that this thread holds back.
        """
        with self._changed:
            self.check()
            if not self._waiting and threading.get_ident() in self._held_by:
                raise RuntimeError("no batch is collected inside a block of pause(): take it before or after the block")
            self._wait(lambda: bool(self._waiting) or self._has_ended)
            if not self._waiting:
                return None
            batch = self._waiting.popleft()
            self._ask_for_more()
            return (batch,)

    def wait_for_one(self) -> bool:
        """Return when one more has come to a buffer that is filled without being asked; False at the end."""
        with self._changed:
            self.check()
            before = self._landed
            self._ask_for_more(at_least=1)
            self._wait(lambda: self._landed > before or self._has_ended)
            return self._landed > before

    def free(self) -> None:
        """Fill the buffer without being asked from now on."""
        with self._changed:
            self.is_free = True
            self._waiting.clear()
            self._ask_for_more()

    def look_again(self) -> None:
        """Something was taken out of the buffer."""
        with self._changed:
            if self.is_free:
                self._ask_for_more()

    def check(self) -> None:
        """Raise what went wrong: an error once, a death always."""
        if (error := self.untold()) is not None:
            raise error
        if (failure := self.worker.failure) is not None:
            self.is_death_told = True
            raise PolicyError(*failure.args)

    def untold(self) -> BaseException | None:
        """What went wrong and was not raised yet; it is told herewith."""
        error, self._error = self._error, None
        return error

    # Asking

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block in which nothing is collected; the batch under way has come."""
        self.check()
        thread = threading.get_ident()
        try:
            self._call("hold")
            self._held_by.append(thread)
            yield
        finally:
            with suppress(ValueError):  # it was not held in time
                self._held_by.remove(thread)
            self.worker.submit("release")

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What a method of the collector there returns."""
        self.check()
        return self._call("ask", method, args, kwargs)

    def init_updater(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See `CollectorHost.init_updater`."""
        self.check()
        self._call("init_updater", args, kwargs)

    def _call(self, method: str, *args: Any) -> Any:
        """What a method of the host returns. Raises what it raised, PolicyError after `wait_seconds` or at a death."""
        try:
            return self.worker.call(method, *args, seconds=self.wait_seconds)
        except PolicyError:
            self.is_death_told = self.worker.failure is not None
            raise

    @property
    def waiting(self) -> list[TensorDictBase]:
        """The batches that nobody has taken."""
        with self._changed:
            return [batch for batch in self._waiting if batch is not None]

    def begin_anew(self, batches: Iterable[TensorDictBase] = ()) -> None:
        """Let `batches` wait in the place of those that do, and of those that were asked for; while it is held."""
        with self._changed:
            self._waiting = deque(batches)
            self._has_ended = False
            self.worker.submit("forget")
            self._under_way = 0
            if self.is_free:
                self._ask_for_more()
            self._changed.notify_all()

    # What the process says, in the thread that listens to it

    def _hear(self, kind: str, content: Any) -> None:
        error: BaseException | None = content if kind == "failed" else None
        if kind == "batch":
            try:
                content = content if self.storing_device is None else content.to(self.storing_device)
                if self.replay_buffer is not None:
                    self.replay_buffer.extend(content)
                    content = None
            except Exception as raised:  # noqa: BLE001  raised again by the next call
                error = raised
        with self._changed:
            self._error = self._error or error
            self._has_failed = self._has_failed or error is not None
            if kind == "ended":
                self._has_ended = True
            else:
                self._under_way -= 1
            if kind == "batch" and error is None:
                self._landed += 1
                if self.is_free:
                    self._ask_for_more()
                else:
                    self._waiting.append(content)
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # Waiting

    def _ask_for_more(self, at_least: int = 0) -> None:
        """Ask the process for as many batches as there is room for; nothing while an error waits to be raised."""
        if self._error is not None:
            return
        batches = max(0, self.room, at_least - self._under_way)
        if batches or self._has_failed:
            self._under_way += batches
            self._has_failed = False
            self.worker.submit("more", batches)

    def _wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.wait_seconds
        while not until():
            self.check()
            if not self.is_free:
                self._ask_for_more()
            if not self._changed.wait(deadline - time.monotonic()):
                raise PolicyError(
                    f"waited {self.wait_seconds:.0f} s for a batch of the collector's process: the policy or the "
                    "environment may hang"
                )
