"""The process at the other end of `WorkerProcess`: builds one object and calls its methods."""

from __future__ import annotations

import gc
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from rlpost.errors import PolicyError
from rlpost.remote.child import kill_group
from rlpost.remote.exchange import sweep_exchange

BEAT_SECONDS = 1.0
END_SECONDS = 10.0  # for the object to close in order once its owner is gone


class Host:
    """Holds the object, and the connection to its owner.

    If the object has an attribute `host`, it is set to this host before the object's first call.
    """

    def __init__(self, connection: Connection, orphaned: Callable[[], None] | None = None) -> None:
        self._connection = connection
        self._orphaned = orphaned  # called first when the owner is gone
        self._writing = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.object: Any = None
        self._ended = False

    def tell(self, kind: str, content: Any) -> None:
        """Send an event; see `RemoteObject.on_event`."""
        self._send(None, kind, content)

    def in_main_thread(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` on the main thread when that is free: signals reach it there."""
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001  raised again where the result is asked for
                    future.set_exception(error)

        self._work.put(run)
        return future

    def serve(self) -> None:
        """Carry out calls until the owner closes or is gone."""
        for each in (self._listen, self._beat):
            threading.Thread(target=each, daemon=True).start()
        while not self._ended:
            self._work.get()()

    def _listen(self) -> None:
        while True:
            try:
                number, kind, content = cloudpickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                self._leave()
                return
            self._work.put(lambda n=number, k=kind, c=content: self._answer(n, k, c))

    def _beat(self) -> None:
        while not self._ended:
            self._send(None, "beat", None)
            threading.Event().wait(BEAT_SECONDS)

    def _answer(self, number: int, kind: str, content: bytes) -> None:
        """Carry out one call, and send its result or error."""
        try:
            result = self._carried_out(kind, content)
        except BaseException as error:  # noqa: BLE001  raised again in the process that asked
            self._send(number, False, error)
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda done: self._send_future(number, done))
        else:
            self._send(number, True, result)

    def _carried_out(self, kind: str, content: bytes) -> Any:
        if kind == "build":
            self.object = cloudpickle.loads(content)()
            if hasattr(self.object, "host"):
                self.object.host = self
            gc.collect()
            gc.freeze()  # loaded modules stay: a collection that visits them stops every thread for 0.1 s
            return None
        if kind == "close":
            self._ended = True
            self._close()
            return None
        method, arguments, named = cloudpickle.loads(content)
        return getattr(self.object, method)(*arguments, **named)

    def _send_future(self, number: int, done: Future[Any]) -> None:
        error = done.exception() if not done.cancelled() else PolicyError("it was cancelled")
        self._send(number, error is None, done.result() if error is None else error)

    def _send(self, number: int | None, kind: Any, content: Any) -> None:
        if isinstance(content, BaseException):
            content = _sendable(content)
        message = cloudpickle.dumps((number, kind, content))
        with self._writing, suppress(OSError):  # `_listen` notices an owner that is gone
            self._connection.send_bytes(message)

    def _close(self) -> None:
        if hasattr(self.object, "close"):
            self.object.close()

    def _leave(self) -> None:
        """The owner is gone: close the object within `END_SECONDS`, then end this process and all it has started."""
        if self._ended:
            return
        if self._orphaned is not None:
            self._orphaned()
        closing = threading.Thread(target=self._close, daemon=True)
        closing.start()
        closing.join(END_SECONDS)
        with suppress(Exception):  # whatever happens, this process ends
            sweep_exchange()  # the owner may have been killed in the middle of a push
        kill_group(os.getpid())


def _sendable(error: BaseException) -> BaseException:
    """The error with its traceback as a note, or a PolicyError of the same text if it cannot be pickled."""
    error.add_note("in the other process:\n" + "".join(traceback.format_exception(error)))
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001  any failure of a stranger's class to be pickled
        return PolicyError(f"{type(error).__name__}: {error}")
    return error


def main() -> None:
    """Serve the connection whose file descriptor the command line names."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal is for the owner
    Host(Connection(int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
