"""An object that lives in a process of its own, called from this one: what AsyncCollector and its like work with."""

from __future__ import annotations

import atexit
import itertools
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Self

import cloudpickle

from rlpost.child import ending, kill_group, python_module
from rlpost.errors import PolicyError

START_SECONDS = 900.0  # longest wait for the object to be built: a large model takes minutes to load
SILENT_SECONDS = 180.0  # without a sign of life, after which the process is taken to hang
END_SECONDS = 20.0  # for the object to close in order, before it is killed
LOOK_SECONDS = 1.0


class WorkerProcess:
    """A Python process that holds one object, `build()`, and calls its methods when it is told to.

    `build` goes over by cloudpickle, so it may be a lambda. The process is no child of a terminal: Ctrl-C does
    not reach it, and it ends, with all it has started, when this process ends or closes it. Calls are carried out
    in their order on its main thread; a method that returns a Future lets the next one begin. `on_event` is told
    what the object says unasked, in a thread of this class. Whoever waits when the process dies is woken with a
    PolicyError that says how it ended; so is one that waits for a process that gives no sign of life. What it
    prints goes to the file descriptor `output`, or where this process's output goes when it starts.
    """

    def __init__(
        self,
        build: Callable[[], Any],
        *,
        name: str = "the collector's process",
        on_event: Callable[[str, Any], None] = lambda kind, content: None,
        on_death: Callable[[], None] = lambda: None,
        environment: Mapping[str, str] | None = None,
        silent_seconds: float = SILENT_SECONDS,
        output: int | None = None,
    ) -> None:
        self.name = name
        self.on_event = on_event
        self.on_death = on_death
        self._build = cloudpickle.dumps(build)
        self._environment = dict(environment or {})
        self._silent_seconds = silent_seconds
        self._output = output
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()  # of what is waited for, and of writing
        self._popen: subprocess.Popen[Any] | None = None
        self._failure: PolicyError | None = None

    def start(self, seconds: float = START_SECONDS) -> Self:
        """Start the process and wait until the object is built. Raises what building it raised, or PolicyError."""
        mine, theirs = socket.socketpair()
        with theirs:
            self._popen = python_module(
                "rlpost.collectors.worker",
                theirs.fileno(),
                environment=self._environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
            )
        self._connection = Connection(mine.detach())
        self._end = weakref.finalize(self, _end, self._popen)
        atexit.register(self._end)
        threading.Thread(target=_listen, args=(weakref.ref(self), self._connection), daemon=True).start()
        try:
            self._ask("build", self._build).result(seconds)
        except FutureTimeout as error:
            self.kill(f"was not ready within {seconds:.0f} s")
            raise self.failure or error from None
        except BaseException:
            self.kill("was not wanted any more")
            raise
        return self

    @property
    def pid(self) -> int | None:
        """Of the process; None before it was started."""
        return self._popen and self._popen.pid

    @property
    def failure(self) -> PolicyError | None:
        """Why the process is of no more use; None while it lives."""
        return self._failure

    def submit(self, method: str, *arguments: Any, **named: Any) -> Future[Any]:
        """The result of a method of the object, once it is there."""
        return self._ask("call", cloudpickle.dumps((method, arguments, named)))

    def call(self, method: str, *arguments: Any, seconds: float | None = None, **named: Any) -> Any:
        """What a method of the object returns. Raises what it raised, PolicyError after `seconds` or at its death."""
        try:
            return self.submit(method, *arguments, **named).result(seconds)
        except FutureTimeout:
            raise PolicyError(
                f"waited {seconds:.0f} s for {method} of {self.name}: the policy or the environment may hang"
            ) from None

    def close(self, seconds: float = END_SECONDS) -> None:
        """Let the object close, then end the process and all it has started; a second call does nothing."""
        if self._popen is None:
            return
        if self._failure is None and self._popen.poll() is None:
            with suppress(PolicyError, FutureTimeout):
                self._ask("close", b"").result(seconds)
        self.kill("was closed")
        atexit.unregister(self._end)

    def kill(self, why: str) -> None:
        """End the process and all it has started at once; `why` is what calls from now on are told."""
        self._fail(f"{self.name} {why}")
        if self._popen is not None:
            self._end()

    def _ask(self, kind: str, content: bytes) -> Future[Any]:
        future: Future[Any] = Future()
        if self._failure is None and self._popen is None:
            raise PolicyError(f"{self.name} was not started: call start()")
        with self._lock:
            if self._failure is None:
                number = next(self._numbers)
                self._waiting[number] = future
                with suppress(OSError):  # its death is noticed where it is read from
                    self._connection.send_bytes(cloudpickle.dumps((number, kind, content)))
                return future
        future.set_exception(PolicyError(*self._failure.args))
        return future

    def _take(self, message: bytes) -> None:
        """One message: (number of a call, whether it went well, result), or (None, kind, content) of an event."""
        number, kind, content = cloudpickle.loads(message)
        if number is None:
            if kind != "beat":
                self.on_event(kind, content)
            return
        with self._lock:
            future = self._waiting.pop(number, None)
        if future is not None:
            with suppress(InvalidStateError):  # whoever asked may have given up
                future.set_result(content) if kind else future.set_exception(content)

    def _fail(self, why: str) -> None:
        """Wake whoever waits."""
        with self._lock:
            first, self._failure = self._failure is None, self._failure or PolicyError(why)
            waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(PolicyError(why))
        if first:
            self.on_death()

    def _lost(self) -> None:
        """The connection has ended: say how the process did."""
        assert self._popen is not None
        try:
            code = self._popen.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill("has closed its connection and did not end")
            return
        likely = ", as the kernel does where memory runs out" if code == -signal.SIGKILL else ""
        self._fail(f"{self.name} {ending(code)}{likely}")
        self._end()


def _listen(worker: weakref.ref[WorkerProcess], connection: Connection) -> None:
    """Take what comes until the process ends or nobody holds the worker any more."""
    heard = time.monotonic()
    while True:
        try:
            message = connection.recv_bytes() if connection.poll(LOOK_SECONDS) else None
        except (EOFError, OSError):
            if (mine := worker()) is not None:
                mine._lost()
            return
        mine = worker()
        if mine is None or mine.failure is not None:
            connection.close()
            return
        if message is not None:
            heard = time.monotonic()
            mine._take(message)
        elif (silent := time.monotonic() - heard) > mine._silent_seconds:
            mine.kill(f"gave no sign of life for {silent:.0f} s and was killed: it hangs, or the machine is too busy")
            return
        del mine


def _end(popen: subprocess.Popen[Any]) -> None:
    """Kill the process and what it has started; what it leaves behind is in its group."""
    kill_group(popen.pid)
    with suppress(subprocess.TimeoutExpired):
        popen.wait(END_SECONDS)
