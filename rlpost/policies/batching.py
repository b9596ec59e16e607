"""Requests that come one by one, from any thread, and are sampled together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rlpost.data.conversation import Completion
from rlpost.errors import PolicyError
from rlpost.settings import SamplingSettings

QUIET_SECONDS = 0.002  # without a further request before a batch begins, so that what comes together is sampled so
CLOSE_SECONDS = 10.0  # longest wait for the batch under way when the policy is closed


@dataclass(slots=True)
class Request:
    """One completion to sample: the prompt's ids, how many ids at most, and the seed of its randomness."""

    prompt_ids: list[int]
    max_tokens: int
    seed: int


Generate = Callable[[Sequence[Request], SamplingSettings], list[Completion]]
Waiting = tuple[Future[Completion], Request, SamplingSettings]


class Batching:
    """The requests of one policy that wait, and the lock under which it samples and takes up weights.

    One thread samples all that waits with one call, those of equal sampling settings together, again and
    again; it ends when nothing waits any more. A copy, in another process too, begins with nothing waiting.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._changed = threading.Condition()  # of all that follows
        self._waiting: list[Waiting] = []
        self._at_work: list[Future[Completion]] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Batching, ()

    def submit(self, generate: Generate, request: Request, sampling: SamplingSettings) -> Future[Completion]:
        """The completion that `generate` makes of `request`, with what waits. Raises PolicyError once closed."""
        future: Future[Completion] = Future()
        with self._changed:
            if self._closed:
                raise PolicyError("the policy is closed and samples no more: build another")
            self._waiting.append((future, request, sampling))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, args=(generate,), name="rlpost-batches", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return future

    def close(self) -> None:
        """End what waits with PolicyError, and the batch under way too where it takes longer than `CLOSE_SECONDS`."""
        with self._changed:
            self._closed = True
            left = [future for future, _, _ in self._waiting if future.set_running_or_notify_cancel()]
            self._waiting.clear()
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():  # whose batch ends by what it raises
            thread.join(CLOSE_SECONDS)
            with self._changed:
                left += self._at_work
                self._at_work = []
        for future in left:
            future.set_exception(PolicyError("the policy was closed before this completion was sampled"))

    def _run(self, generate: Generate) -> None:
        while batch := self._next_batch():
            try:
                made = generate([request for _, request, _ in batch], batch[0][2])
                if len(made) != len(batch):
                    raise PolicyError(f"the policy gave {len(made)} completions for {len(batch)} requests")
            except BaseException as error:  # noqa: BLE001  raised again in the threads that wait
                failure = error
                self._settle(lambda future, _, failure=failure: future.set_exception(failure))
            else:
                self._settle(lambda future, i, made=made: future.set_result(made[i]))

    def _next_batch(self) -> list[Waiting]:
        """What waits with the settings of the first of it, cancelled ones left out; nothing where the thread ends."""
        with self._changed:
            while self._waiting:
                known = 0
                while known < len(self._waiting):
                    known = len(self._waiting)
                    self._changed.wait(QUIET_SECONDS)
                if not self._waiting:
                    break  # closed meanwhile
                sampling = self._waiting[0][2]
                together = [one for one in self._waiting if one[2] == sampling]
                self._waiting = [one for one in self._waiting if one[2] != sampling]
                if batch := [one for one in together if one[0].set_running_or_notify_cancel()]:
                    self._at_work = [future for future, _, _ in batch]
                    return batch
            self._thread = None
            return []

    def _settle(self, end: Callable[[Future[Completion], int], None]) -> None:
        """End each future of the batch under way; `close` may have done so."""
        with self._changed:
            ended, self._at_work = self._at_work, []
        for i, future in enumerate(ended):
            end(future, i)
