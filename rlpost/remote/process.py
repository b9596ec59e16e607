"""RemoteObject: an object in another process, on this machine (WorkerProcess) or on another (JoinedProcess).

`Host` serves it there. Helpers for ports and connections are at the end.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Self

import cloudpickle

from rlpost.errors import PolicyError
from rlpost.remote.child import ending, guard, kill_group, kill_marked, python_module
from rlpost.remote.exchange import sweep_exchange

START_SECONDS = 900.0  # longest wait for the object to be built: a large model takes minutes to load
SILENT_SECONDS = 180.0  # without a sign of life, after which the process is taken to hang
END_SECONDS = 20.0  # for the object to close in order, before it is killed
LOOK_SECONDS = 1.0
OWN_MARK = "RLPOST_PROCESS"  # environment variable that marks what one process has started
BEAT_SECONDS = 1.0
LEAVE_SECONDS = 10.0  # for the object to close in order once its owner is gone
WHY_KILLED: dict[int, str] = {
    signal.SIGKILL: ", as the kernel does where memory runs out",
    signal.SIGBUS: ", as the kernel does where /dev/shm is full: give the container more (docker run --shm-size=8g)",
}


class NotReady(PolicyError):
    """A process was not ready in time."""


class RemoteObject(ABC):
    """An object that lives in another process, `build()` there, whose methods are called from here.

    `build` is sent by cloudpickle, so it may be a lambda. Calls run in their order on that process's main thread; a
    method that returns a Future lets the next one begin. `on_event` is called with the events of the object, in a
    thread of this class. When the process dies, or gives no sign of life for too long, whoever waits for it gets a
    PolicyError that says how it ended.
    """

    def __init__(
        self,
        build: Callable[[], Any],
        *,
        name: str,
        on_event: Callable[[str, Any], None] = lambda kind, content: None,
        on_death: Callable[[], None] = lambda: None,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self.name = name
        self.on_event = on_event
        self.on_death = on_death
        self._build = cloudpickle.dumps(build)
        self._silent_seconds = silent_seconds
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()  # of `_waiting` and `ended`
        self._writing = threading.Lock()
        self.ended: str | None = None  # how the process ended; None while it lives
        self._last_sign = 0.0  # when the process gave its last sign of life

    # How the process is reached

    @abstractmethod
    def _open(self, seconds: float) -> None:
        """Start the process within `seconds`; `take` is called with its messages from then on."""

    @abstractmethod
    def _write(self, message: bytes) -> None:
        """Send a message. Raises nothing if the process is gone, which is noticed elsewhere."""

    @property
    @abstractmethod
    def _is_open(self) -> bool:
        """Whether `_open` was called."""

    @abstractmethod
    def _end(self) -> None:
        """End the process and all it has started, at once; does nothing if it has ended."""

    def lost(self) -> None:
        """Note that the connection to the process has ended."""
        self._fail("was lost: its connection has ended")

    def bring(self, folder: Path) -> Path:
        """The path under which the process finds `folder` of this machine, until `release_copy`."""
        return folder

    def release_copy(self, folder: Path) -> None:  # noqa: B027  most bring nothing anywhere
        """Release the copy that `bring` made, if any."""

    # Calls

    def start(self, seconds: float = START_SECONDS) -> Self:
        """Start the process and wait until the object is built. Raises what building raises, NotReady, or its death."""
        until = time.monotonic() + seconds
        try:
            self.begin(seconds).result(max(0.0, until - time.monotonic()))
        except FutureTimeout:
            self.kill(f"was not ready within {seconds:.0f} s")
            raise NotReady(*(self.failure or PolicyError("it ended")).args) from None
        except BaseException:
            self.kill("was not wanted any more")
            raise
        return self

    def begin(self, seconds: float = START_SECONDS) -> Future[None]:
        """Start the process, which takes `seconds` at most; done when the object is built."""
        self._open(seconds)
        return self._ask("build", self._build)

    @property
    def failure(self) -> PolicyError | None:
        """The error that calls raise once the process has ended; None while it lives."""
        return None if self.ended is None else PolicyError(f"{self.name} {self.ended}")

    def submit(self, method: str, *arguments: Any, **named: Any) -> Future[Any]:
        """Call a method of the object; the future of its result."""
        return self._ask("call", cloudpickle.dumps((method, arguments, named)))

    def call(self, method: str, *arguments: Any, seconds: float | None = None, **named: Any) -> Any:
        """Call a method of the object and wait. Raises its error, PolicyError after `seconds` or at a death."""
        try:
            return self.submit(method, *arguments, **named).result(seconds)
        except FutureTimeout:
            raise PolicyError(
                f"waited {seconds:.0f} s for {method} of {self.name}: the policy or the environment may hang"
            ) from None

    def close(self, seconds: float = END_SECONDS) -> None:
        """Close the object, then end the process and all it has started; a second call does nothing."""
        if not self._is_open:
            return
        if self.ended is None:
            with suppress(PolicyError, FutureTimeout):
                self._ask("close", b"").result(seconds)
        self.kill("was closed")

    def kill(self, why: str) -> None:
        """End the process and all it has started at once; calls from now on raise a PolicyError with `why`."""
        self._fail(why)
        if self._is_open:
            self._end()

    def lose(self, why: str) -> None:
        """As `kill`, for a process that is out of reach and cannot be ended from here."""
        self._fail(why)

    def _ask(self, kind: str, content: bytes) -> Future[Any]:
        future: Future[Any] = Future()
        if self.ended is None and not self._is_open:
            raise PolicyError(f"{self.name} was not started: call start()")
        with self._writing:  # which may take long, and must not keep `kill` from ending the process
            with self._lock:
                number = next(self._numbers)
                if self.ended is None:
                    self._waiting[number] = future
            if number in self._waiting:
                self._write(cloudpickle.dumps((number, kind, content)))
        if (failure := self.failure) is not None:
            with suppress(InvalidStateError):
                future.set_exception(failure)
        return future

    def take(self, message: bytes | None) -> None:
        """One message: (number of a call, whether it went well, result), or (None, kind, content) of an event.

        None: no message came for a while. A process that has been silent for too long is killed.
        """
        if message is None:
            if (silent := time.monotonic() - self._last_sign) > self._silent_seconds:
                self.kill(
                    f"gave no sign of life for {silent:.0f} s and was killed: it hangs, or the machine is too busy"
                )
            return
        self._last_sign = time.monotonic()
        number, kind, content = cloudpickle.loads(message)
        if number is None:
            if kind != "beat":
                self.on_event(kind, content)
            return
        with self._lock:
            future = self._waiting.pop(number, None)
        if future is not None:
            if not kind:
                content.add_note(f"raised in {self.name}")
            with suppress(InvalidStateError):  # the caller may have cancelled it
                future.set_result(content) if kind else future.set_exception(content)

    def _fail(self, why: str) -> None:
        """Note how the process ended, and fail all pending calls with it."""
        with self._lock:
            first, self.ended = self.ended is None, self.ended or why
            waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(PolicyError(f"{self.name} {why}"))
        if first:
            self.on_death()


class ConnectedObject(RemoteObject):
    """A `RemoteObject` that is reached by a connection."""

    _connection: Connection

    def _open(self, seconds: float) -> None:
        self._last_sign = time.monotonic()
        threading.Thread(target=_listen, args=(weakref.ref(self), self._connection), daemon=True).start()

    def _write(self, message: bytes) -> None:
        with suppress(OSError):  # its death is noticed where it is read from
            self._connection.send_bytes(message)


class WorkerProcess(ConnectedObject):
    """A `RemoteObject` in a Python process of its own on this machine.

    The process has a session of its own: Ctrl-C does not reach it. It ends, with all it has started, when this
    process ends or closes it. It prints to the file descriptor `output`, or to this process's output.
    """

    def __init__(
        self,
        build: Callable[[], Any],
        *,
        name: str = "the collector's process",
        environment: Mapping[str, str] | None = None,
        output: int | None = None,
        **how: Any,
    ) -> None:
        super().__init__(build, name=name, **how)
        self.environment = dict(environment or {})
        self._output = output
        self._popen: subprocess.Popen[Any] | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None before `start`."""
        return self._popen and self._popen.pid

    @property
    def _is_open(self) -> bool:
        return self._popen is not None

    def _open(self, seconds: float) -> None:
        mark = uuid.uuid4().hex
        self._popen, self._connection = worker_process({**self.environment, OWN_MARK: mark}, self.name, self._output)
        self._finalizer = weakref.finalize(self, kill_worker, self._popen, mark, os.getpid())
        atexit.register(self._finalizer)
        super()._open(seconds)

    def _end(self) -> None:
        self._finalizer()
        atexit.unregister(self._finalizer)

    def take(self, message: bytes | None) -> None:
        """See `RemoteObject.take`; notices the end of a process whose own children hold its connection open."""
        if message is None and self._popen is not None and self._popen.poll() is not None:
            self.lost()
        else:
            super().take(message)

    def lost(self) -> None:
        """See `RemoteObject.lost`: notes how the process ended."""
        assert self._popen is not None
        self._fail(last_of(self._popen))
        self._end()


def carry_out(work: Callable[[], Any], future: Future[Any]) -> None:
    """Give `future` the result or the error of `work`."""
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  raised again where the result is asked for
        future.set_exception(error)


def output_of(command: Sequence[str], seconds: float) -> str:
    """The stdout of `command`. Raises OSError if it cannot be run, or does not end within `seconds`."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False).stdout
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(*error.args) from error


def worker_process(
    environment: Mapping[str, str], name: str, output: int | None = None
) -> tuple[subprocess.Popen[Any], Connection]:
    """Start a process that builds an object and calls its methods, see `Host`; with its connection.

    `name` appears in the list of processes.
    """
    guard()
    mine, theirs = socket.socketpair()
    with theirs:
        popen = python_module(
            "rlpost.remote.process",
            theirs.fileno(),
            name,
            environment=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    return popen, Connection(mine.detach())


def _listen(held: weakref.ref[RemoteObject], connection: Connection) -> None:
    while True:
        try:
            message = connection.recv_bytes() if connection.poll(LOOK_SECONDS) else None
        except (EOFError, OSError):
            if (remote := held()) is not None:
                remote.lost()
            return
        remote = held()
        if remote is None or remote.ended is not None:
            connection.close()
            return
        remote.take(message)
        del remote


def kill_worker(popen: subprocess.Popen[Any], mark: str, owner: int) -> None:
    """Kill the process and all it has started, in its group or with its mark; only in the process that owns it."""
    if owner != os.getpid():  # a fork of the owner
        return
    kill_group(popen.pid)
    with suppress(subprocess.TimeoutExpired):
        popen.wait(END_SECONDS)
    kill_marked(OWN_MARK, mark)


def last_of(popen: subprocess.Popen[Any]) -> str:
    """How a process ended that has closed its connection, with the likely cause; it is killed if it does not end."""
    try:
        code = popen.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        kill_group(popen.pid)
        return "has closed its connection and did not end"
    return ending(code) + WHY_KILLED.get(-code, "")


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
                carry_out(work, future)

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
        """The owner is gone: close the object within `LEAVE_SECONDS`, then end this process and all it has started."""
        if self._ended:
            return
        if self._orphaned is not None:
            self._orphaned()
        closing = threading.Thread(target=self._close, daemon=True)
        closing.start()
        closing.join(LEAVE_SECONDS)
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


# Over a network


def reach(host: str, port: int, seconds: float) -> None:
    """Raise OSError unless something takes connections at `host:port` within `seconds`."""
    socket.create_connection((host, port), seconds).close()


def free_port(address: str) -> int:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def connected(host: str, port: int, secret: str) -> Connection:
    """A connection to the process that waits at `host:port` and knows the same `secret`."""
    connection = Client((host, port), authkey=secret.encode())
    _keep_alive(connection)
    return connection


@contextmanager
def listening(host: str, port: int, secret: str) -> Iterator[tuple[int, Callable[[float], Connection]]]:
    """A block in which processes that know `secret` can connect; yields the port and a function for connections.

    The function returns the next connection, or raises TimeoutError at the deadline it is given (`time.monotonic`).
    An empty `host` means every address of this machine, port 0 any free port.
    """
    with socket.create_server((host, port)) as server:

        def accepted(until: float) -> Connection:
            server.settimeout(max(0.1, until - time.monotonic()))
            came, _ = server.accept()
            connection = Connection(came.detach())
            deliver_challenge(connection, secret.encode())
            answer_challenge(connection, secret.encode())
            _keep_alive(connection)
            return connection

        yield server.getsockname()[1], accepted


def _keep_alive(connection: Connection) -> None:
    """Have the kernel notice within half a minute that the machine at the other end is gone."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class JoinedProcess(ConnectedObject):
    """A process that somebody else has started and that has connected to this one."""

    def __init__(self, build: Any, connection: Connection, **how: Any) -> None:
        super().__init__(build, **how)
        self._connection = connection

    @property
    def _is_open(self) -> bool:
        return True

    def _end(self) -> None:
        with suppress(OSError):
            self._connection.close()  # then the other side ends itself


def main() -> None:
    """Serve the connection whose file descriptor the command line names."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal is for the owner
    Host(Connection(int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
