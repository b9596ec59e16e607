"""What `WorkerProcess` does, with its object on a thread of this process: for what needs no process to be seen."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Self

import cloudpickle


class Here:
    """Takes calls as `WorkerProcess` does; everything goes over as a copy."""

    failure = None
    name = "the collector's process"

    def __init__(self, build: Any, **how: Any) -> None:
        self.build, self.how = cloudpickle.dumps(build), how
        self.work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def start(self, seconds: float) -> Self:
        self.object = cloudpickle.loads(self.build)()
        threading.Thread(target=lambda: [each() for each in iter(self.work.get, None)], daemon=True).start()
        return self

    def in_main_thread(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  raised where the result is asked for
                future.set_exception(error)

        self.work.put(run)
        return future

    def submit(self, method: str, *arguments: Any, **named: Any) -> Future[Any]:
        arguments, named = copied((arguments, named))
        return self.in_main_thread(lambda: copied(getattr(self.object, method)(*arguments, **named)))

    def call(self, method: str, *arguments: Any, seconds: float | None = None, **named: Any) -> Any:
        return self.submit(method, *arguments, **named).result(seconds)

    def bring(self, folder: Any) -> Any:
        return folder

    def release_copy(self, folder: Any) -> None:
        pass

    def close(self, seconds: float = 0.0) -> None:
        self.work.put(None)

    def kill(self, why: str) -> None:
        self.work.put(None)


def copied(content: Any) -> Any:
    return content if isinstance(content, BaseException) else cloudpickle.loads(cloudpickle.dumps(content))


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)
