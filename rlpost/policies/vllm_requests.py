"""Requests that vLLM works on at once, each with the future of its completion."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rlpost.data.conversation import Completion
from rlpost.errors import PolicyError
from rlpost.policies.vllm_engines import VLLMEngine
from rlpost.policies.vllm_process import first_line

LOOK_EVERY = 0.5  # seconds


class RequestsUnderWay:
    """Those of one engine. Each future is ended once: by what vLLM answered, or by `end`, together with all others.

    A thread looks after them while there are any: it calls `failed`, which is to `end` them, once the engine
    has died, for vLLM can forget a request then, or where nothing came of any of them for `timeout_seconds`.
    """

    def __init__(self, timeout_seconds: float, failed: Callable[[BaseException], None]) -> None:
        self._timeout = timeout_seconds
        self._failed = failed
        self._lock = threading.Lock()  # of all that follows
        self._asked: dict[Future[Completion], Future[Any]] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._look = threading.Event()  # set: now, rather than in a while

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestsUnderWay, (self._timeout, self._failed)

    def __len__(self) -> int:
        return len(self._asked)

    def add(self, engine: VLLMEngine, asked: Future[Any], completed: Callable[[Any], Completion]) -> Future[Completion]:
        """The future of what `completed` makes of the answer to `asked`, which is cancelled where that future is."""
        future: Future[Completion] = Future()
        with self._lock:
            self._asked[future] = asked
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._look_after, args=(engine,), name="rlpost-vllm-requests", daemon=True
                )
                self._thread.start()
        future.add_done_callback(lambda done: done.cancelled() and asked.cancel())
        asked.add_done_callback(lambda answer: self._answered(future, answer, completed))
        return future

    def end(self, error: PolicyError) -> None:
        """End every future that has not ended with `error`, and abort its request."""
        with self._lock:
            left, self._asked = self._asked, {}
        for future, asked in left.items():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            asked.cancel()

    def _answered(
        self, future: Future[Completion], answer: Future[Any], completed: Callable[[Any], Completion]
    ) -> None:
        error = None if answer.cancelled() else answer.exception()
        if type(error).__name__ == "EngineDeadError":
            self._failure = error
            self._look.set()  # and all end by one error
            return
        with self._lock:
            if self._asked.pop(future, None) is None:
                return
        if not future.set_running_or_notify_cancel():
            return
        try:
            if answer.cancelled():
                raise PolicyError("vLLM's thread ended before this completion was sampled")
            if error is not None:
                raise PolicyError(f"vLLM failed at a completion: {first_line(error)}") from error
            future.set_result(completed(answer.result()))
        except Exception as failure:  # noqa: BLE001  raised again in the thread that waits
            future.set_exception(failure)

    def _look_after(self, engine: VLLMEngine) -> None:
        seen, since = None, time.monotonic()
        while True:
            self._look.wait(LOOK_EVERY)
            self._look.clear()
            with self._lock:
                if not self._asked:
                    self._thread = None
                    return
            failure = self._failure
            if failure is None and engine.died():
                failure = RuntimeError("the engine's process died")
            progress = engine.progress()
            if progress != seen:
                seen, since = progress, time.monotonic()
            elif time.monotonic() - since > self._timeout:
                failure = TimeoutError(
                    f"nothing came of {len(self)} requests for {self._timeout:.0f} s; policy.timeout_seconds sets the "
                    "limit"
                )
            if failure is not None:
                with self._lock:
                    self._thread, self._failure = None, None
                self._failed(failure)
                return
