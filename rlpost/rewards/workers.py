"""Functions called where they can be killed: in processes of their own, kept warm, each call with a deadline.

    with Workers("my_package.rewards:score", count=2, seconds=5.0) as workers:
        outcomes = workers.map(["a reply", "another"])  # score("a reply"), score("another")

The function takes one plain (picklable) argument and returns plain (JSON) data. Its output does not reach the
terminal; the beginning is kept for the outcome. A late process is killed with all processes it has started, and
one that has died is replaced; the time a process needs to start counts for no deadline.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import select
import signal
import subprocess
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

import rlpost.errors
from rlpost.errors import RewardError, RlpostError
from rlpost.remote.child import (
    ending,
    framed,
    guard,
    kill_group,
    kill_marked,
    put,
    python_module,
    readable_within,
    taken,
    unframed,
)
from rlpost.rewards.worker import Order

START_SECONDS = 600.0  # timeout of a process's imports
LOOK_SECONDS = 0.25  # between two checks that a process is alive: one it forked may hold its pipes open
STACK_SECONDS = 2.0  # timeout of the stack that a late process writes before it is killed
OUTPUT_KEPT = 2000  # bytes of a call's output
LONGEST_ANSWER = 1 << 28  # bytes
LONGEST_STACK = 1 << 20  # bytes
WORKER = "RLPOST_REWARD_WORKER"  # environment variable that marks the descendants of one worker


class Workers:
    """`count` processes that call one function of one argument, each call at most `seconds` long.

    See `Worker` for `function` and `arguments`. As a context manager it closes at the end.
    """

    def __init__(self, function: str, count: int = 1, seconds: float = 60.0, arguments: Sequence[Any] = ()) -> None:
        self.seconds = seconds
        self._workers = [Worker(function, arguments) for _ in range(count)]
        self._lock = threading.Lock()

    @property
    def pids(self) -> list[int | None]:
        """The ids of the processes; None for one that is not started."""
        return [worker.pid for worker in self._workers]

    def start(self) -> None:
        """Start the processes; returns at once, before they are ready."""
        for worker in self._workers:
            worker.start()

    def map(self, items: Sequence[Any]) -> list[Outcome]:
        """The outcome of the function for each item, in order; one call per process at a time.

        Raises an error of rlpost's that the function raised, and RewardError if it cannot be imported.
        """
        outcomes: dict[int, Outcome] = {}
        waiting = deque(enumerate(items))
        idle = list(self._workers)
        busy: dict[Worker, int] = {}
        with self._lock, _killed_if_interrupted(self._workers):
            while waiting or busy:
                while waiting and idle:
                    worker = idle.pop(0)
                    busy[worker], item = waiting.popleft()
                    worker.begin(item, self.seconds)
                for worker in wait(list(busy)):
                    assert worker.outcome is not None
                    outcomes[busy.pop(worker)] = worker.outcome
                    idle.append(worker)
        return [outcomes[place] for place in range(len(items))]

    def close(self) -> None:
        """Kill the processes."""
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call: its value, or an error that says why it has none.

    `lost` is whether the process died or was killed as `late`; `printed` is the beginning of its output;
    `stack` the Python stack of a late one.
    """

    value: Any = None
    error: str | None = None
    lost: bool = False
    late: bool = False
    printed: str = ""
    stack: str = ""

    def line_in(self, file: str) -> int | None:
        """The line of `file` at which a late call was, if it was in there."""
        found = re.search(rf'File "{re.escape(file)}", line (\d+)', self.stack)
        return int(found.group(1)) if found else None


def call_each(calls: Sequence[tuple[Worker, Any, float]]) -> list[Outcome]:
    """The outcome of each (worker, item, seconds) call, all at the same time; a worker occurs once.

    Raises an error of rlpost's own that a function raised, and RewardError where one cannot be imported.
    """
    workers = [worker for worker, _, _ in calls]
    with ExitStack() as held:
        for worker in sorted(workers, key=id):  # in one order, against deadlocks
            held.enter_context(worker.lock)
        held.enter_context(_killed_if_interrupted(workers))
        for worker, item, seconds in calls:
            worker.begin(item, seconds)
        while pending := [worker for worker in workers if worker.outcome is None]:
            wait(pending)
        return [worker.outcome for worker in workers if worker.outcome is not None]


def wait(workers: Sequence[Worker]) -> list[Worker]:
    """Wait until the call of at least one of `workers` is over; returns those."""
    while not (done := [worker for worker in workers if worker.outcome is not None]):
        _look(workers)
    return done


class Worker:
    """One process that calls one function, started by `start` or when it is first needed.

    `function` is `module:name`. With `arguments` it is called with them once, in the process, and
    returns the function to call and data `about` it. One thread at a time.
    """

    def __init__(
        self,
        function: str,
        arguments: Sequence[Any] = (),
        *,
        start_seconds: float = START_SECONDS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.function = function
        self.about: Any = None
        self.outcome: Outcome | None = None  # of the last call, once it is over
        self.lock = threading.Lock()
        self._order = Order(function, tuple(arguments))
        self._start_seconds = start_seconds
        self._environment = dict(environment or {})
        self._process: Process | None = None
        self._request: bytes | None = None  # waits for the process to be ready
        self._seconds = 0.0
        self._deadline = 0.0

    @property
    def pid(self) -> int | None:
        """The id of the process, if there is one."""
        return self._process.popen.pid if self._process else None

    def start(self) -> None:
        """Start the process unless it is there; returns at once, before it is ready."""
        if self._process is not None and (self._process.owner != os.getpid() or self._process.popen.poll() is not None):
            self.close()  # it belongs to the process this one was forked from, or is dead
        if self._process is None:
            self._process = Process.started(self._environment)
            weakref.finalize(self, self._process.end)
            self._process.outgoing += frame(self._order)
            self._deadline = time.monotonic() + self._start_seconds

    def ready(self) -> Any:
        """Wait until the process is ready; returns the data `about` the function.

        Raises an error of rlpost's from importing it, RewardError for any other failure.
        """
        self.start()
        assert self._process is not None
        with _killed_if_interrupted([self]):
            while not self._process.is_ready:
                _look([self])
        return self.about

    def begin(self, item: Any, seconds: float) -> None:
        """Request `function(item)`; `wait` returns its outcome, at most `seconds` after the process is ready."""
        self.start()
        self.outcome = None
        self._seconds = seconds
        self._request = frame((item,))
        self._send()

    def call(self, item: Any, seconds: float) -> Outcome:
        """`function(item)`, with a deadline. Raises an error of rlpost's own that it raised."""
        return call_each([(self, item, seconds)])[0]

    def close(self) -> None:
        """Kill the process and its descendants."""
        if self._process is not None:
            self._process.end()
        self._process = self._request = None

    # For `wait`

    def watched(self) -> Iterator[tuple[int, int]]:
        """The file descriptors to poll, and for what."""
        if self._process is not None:
            yield self._process.answers, select.POLLIN
            if self._process.output_is_open:
                yield self._process.output, select.POLLIN
            if self._process.outgoing:
                yield self._process.requests, select.POLLOUT

    def seconds_left(self) -> float:
        """Time left until the deadline of the pending call."""
        return self._deadline - time.monotonic()

    def attend(self, descriptor: int) -> None:
        """Read from or write to one of the `watched` descriptors."""
        process = self._process
        if process is None:
            return
        if descriptor == process.requests:
            process.send()
        elif descriptor == process.output:
            process.keep_output()
        elif descriptor == process.answers:
            answer = process.receive()
            if answer is not None:
                self._take(answer)
            elif process.has_hung_up:
                self._lose(process.ending())

    def check(self) -> None:
        """Detect a missed deadline, and a process that died without an answer."""
        process = self._process
        if process is None or self.outcome is not None:
            return
        if process.popen.poll() is not None and not readable_within(process.answers, 0):
            self._lose(process.ending())
        elif self.seconds_left() <= 0:
            waited = self._seconds if process.is_ready else self._start_seconds
            stack = process.stack()
            self._lose(f"did not return within {waited:g} s", stack, late=True)

    def _send(self) -> None:
        """Send the request that waits, if the process is ready for it."""
        assert self._process is not None
        if self._process.is_ready and self._request is not None:
            self._process.printed.clear()
            self._process.outgoing += self._request
            self._process.send()
            self._request = None
            self._deadline = time.monotonic() + self._seconds

    def _take(self, answer: Any) -> None:
        """Handle an answer. Raises the error of rlpost's that it carries."""
        assert self._process is not None
        process = self._process
        match answer:
            case {"value": value} if not process.is_ready:
                self.about = value
                process.is_ready = True
                self._send()
            case {"value": value}:
                self.outcome = Outcome(value, printed=process.what_was_printed())
            case {"raise": [str(kind), str(text)]}:
                if not process.is_ready:
                    self.close()
                raise _known_error(kind, text)
            case {"error": str(text)} if process.is_ready:
                self.outcome = Outcome(error=text, printed=process.what_was_printed())
            case {"error": str(text)}:
                self._lose(text)
            case _:
                self._lose("wrote what is no answer")

    def _lose(self, error: str, stack: str = "", *, late: bool = False) -> None:
        """Kill the process. Raises RewardError if it was never ready."""
        assert self._process is not None
        was_ready, printed = self._process.is_ready, self._process.what_was_printed()
        self.close()
        if not was_ready:
            said = f"; it printed: {printed.strip()[-300:]}" if printed.strip() else ""
            raise RewardError(f"the process of {self.function} could not begin: {error}{said}")
        self.outcome = Outcome(error=error, lost=True, late=late, printed=printed, stack=stack)


@dataclass
class Process:
    """A process and its pipes: requests to it, answers and output from it, and one whose closing ends it."""

    popen: subprocess.Popen[bytes]
    requests: int
    answers: int
    output: int
    life: int
    owner: int  # the process that started it
    mark: str  # its descendants inherit it
    is_ready: bool = False
    has_hung_up: bool = False
    output_is_open: bool = True
    outgoing: bytearray = field(default_factory=bytearray)
    incoming: bytearray = field(default_factory=bytearray)
    printed: bytearray = field(default_factory=bytearray)

    @classmethod
    def started(cls, environment: Mapping[str, str]) -> Process:
        """A new process, with `environment` added to this one's."""
        pipes = [os.pipe() for _ in range(4)]
        (its_requests, requests), (answers, its_answers), (output, its_output), (its_life, life) = pipes
        passed = (its_requests, its_answers, its_life)
        guard()
        mark = uuid.uuid4().hex
        popen = python_module(
            "rlpost.rewards.worker",
            *passed,
            environment={**environment, WORKER: mark},
            stdin=subprocess.DEVNULL,
            stdout=its_output,
            stderr=its_output,
            pass_fds=passed,
        )
        for end in (*passed, its_output):
            os.close(end)
        for end in (requests, output):
            os.set_blocking(end, False)
        return cls(popen, requests, answers, output, life, os.getpid(), mark)

    def send(self) -> None:
        """Send as much as fits into the pipe; a dead process is noticed at the pipe of its answers."""
        del self.outgoing[: put(self.requests, self.outgoing)]

    def receive(self) -> Any:
        """The next answer, None while it is incomplete; sets `has_hung_up` at the end."""
        received = os.read(self.answers, 1 << 20)
        self.has_hung_up = not received
        self.incoming += received
        try:
            content = unframed(self.incoming, LONGEST_ANSWER)
            return None if content is None else json.loads(content)
        except (ValueError, RecursionError):
            return ()  # not an answer of a worker

    def keep_output(self) -> bool:
        """Read output from the pipe and keep the beginning; returns whether there was any."""
        output = self._take_output()
        self.printed += output[: max(0, OUTPUT_KEPT - len(self.printed))]
        return bool(output)

    def what_was_printed(self) -> str:
        """The beginning of the output since the last request; empties the pipe."""
        for _ in range(64):  # more output comes from something that still runs
            if not self.keep_output():
                break
        return self.printed.decode(errors="replace")

    def stack(self) -> str:
        """The current Python stack, if the process still writes it."""
        self.what_was_printed()
        with suppress(ProcessLookupError):
            os.kill(self.popen.pid, signal.SIGUSR1)
        said = b""
        while self.output_is_open and len(said) < LONGEST_STACK:
            patience = STACK_SECONDS if not said else 0.2  # its lines follow at once
            if not readable_within(self.output, patience):
                break
            said += self._take_output()
        return said.decode(errors="replace")

    def _take_output(self) -> bytes:
        output = taken(self.output, 1 << 16)
        self.output_is_open = output is not None
        return output or b""

    def ending(self) -> str:
        """How the process ended, after it has closed its pipes."""
        try:
            return f"its process {ending(self.popen.wait(1.0))}"
        except subprocess.TimeoutExpired:
            return "closed the pipe of its answers"

    def end(self) -> None:
        """Kill the process and its descendants, and close the pipes; a second call does nothing."""
        if self.requests < 0:
            return
        if self.owner == os.getpid():  # a fork of the owner only has copies of the pipes
            kill_group(self.popen.pid)
            self.popen.wait()
            kill_marked(WORKER, self.mark)  # descendants that have left its group
        for end in (self.requests, self.answers, self.output, self.life):
            os.close(end)
        self.requests = -1


def frame(content: Any) -> bytes:
    """A request as bytes for the pipe."""
    return framed(pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL))


def _look(workers: Sequence[Worker]) -> None:
    """Poll the workers once, and handle their events."""
    poll = select.poll()
    owners: dict[int, Worker] = {}
    for worker in workers:
        for descriptor, events in worker.watched():
            poll.register(descriptor, events)
            owners[descriptor] = worker
    seconds = min(LOOK_SECONDS, *(worker.seconds_left() for worker in workers))
    for descriptor, _ in poll.poll(max(0.0, seconds) * 1000):
        if any(descriptor == watched for watched, _ in owners[descriptor].watched()):  # not closed since
            owners[descriptor].attend(descriptor)
    for worker in workers:
        worker.check()


@contextmanager
def _killed_if_interrupted(workers: Sequence[Worker]) -> Iterator[None]:
    """Kill the processes of `workers` if an error or Ctrl-C ends the block: their answers would come too late."""
    try:
        yield
    except BaseException:
        for worker in workers:
            worker.close()
        raise


def _known_error(kind: str, text: str) -> RlpostError:
    """An error of rlpost's that was raised in a process."""
    found = getattr(rlpost.errors, kind, None)
    return found(text) if isinstance(found, type) and issubclass(found, RlpostError) else RewardError(text)
