"""LoopThread: an asyncio loop in a thread of its own, which takes coroutines from any thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from rlpost.errors import ToolError

Result = TypeVar("Result")

_JOIN_SECONDS = 5.0


class LoopThread:
    """Runs coroutines for any number of threads; its own thread starts with the first one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether its thread runs."""
        return self._loop is not None

    def submit(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """Start `work` in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._started())

    def run(self, work: Coroutine[Any, Any, Result], seconds: float) -> Result:
        """Run `work` and wait for it; returns or raises as it does.

        `seconds` is a second line of defence: `work` keeps time limits of its own below it. Raises
        ToolError once they have passed.
        """
        future = self.submit(work)
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        if not done.wait(seconds):  # not future.result(seconds): its TimeoutError could be one of `work`
            future.cancel()
            raise ToolError(
                f"{self.name} did not come back within {seconds:g} s: its thread hangs; start the run again"
            )
        return future.result()

    def close(self) -> None:
        """Cancel all work and end the loop and its thread. A second call does nothing."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_turn, args=(self._loop,), name=self.name, daemon=True)
                self._thread.start()
            return self._loop


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then cancel the remaining tasks and close it."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
