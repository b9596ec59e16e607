"""Functions called where they can be killed: in processes of their own, kept warm, each call with a deadline.

    with Workers("my_package.rewards:score", count=2, seconds=5.0) as workers:
        outcomes = workers.map(["a reply", "another"])  # score("a reply"), score("another")

The function takes one plain (picklable) argument and returns plain (JSON) data. Its output does not reach the
terminal; the beginning is kept for the outcome. A late process is killed with all processes it has started, and
one that has died is replaced; the time a process needs to start counts for no deadline.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import re
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from rlpost.errors import RewardError, RlpostError, named
from rlpost.remote.process import WorkerProcess

START_SECONDS = 600.0  # timeout of a process's imports
LOOK_SECONDS = 0.1  # between two looks whether a call is late
STACK_SECONDS = 2.0  # timeout of the stack that a late process writes before it is killed
OUTPUT_KEPT = 2000  # bytes of a call's output
LONGEST_STACK = 1 << 20  # bytes
MEMORY_BYTES = 4 << 30  # enough for sympy and NumPy; a number of a billion digits fails instead of filling the machine


class Workers:
    """`count` processes that call one function of one argument, each call at most `seconds` long.

    See `Worker` for `function` and `arguments`. As a context manager it closes at the end.
    """

    def __init__(self, function: str, count: int = 1, seconds: float = 60.0, arguments: Sequence[Any] = ()) -> None:
        self.seconds = seconds
        self._workers = [Worker(function, arguments) for _ in range(count)]
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the processes; returns at once, before they are ready."""
        for worker in self._workers:
            worker.start()

    def map(self, items: Sequence[Any]) -> list[Outcome]:
        """The outcome of the function for each item, in order; one call per process at a time.

        Raises an error of rlpost's that the function raised, and RewardError if it cannot be imported.
        """
        tasks = iter([(place, item, self.seconds) for place, item in enumerate(items)])
        with self._lock:
            return _carried_out(dict.fromkeys(self._workers, tasks))

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
    with ExitStack() as held:
        for worker in sorted((worker for worker, _, _ in calls), key=id):  # in one order, against deadlocks
            held.enter_context(worker.lock)
        tasks = {worker: iter([(place, item, seconds)]) for place, (worker, item, seconds) in enumerate(calls)}
        return _carried_out(tasks)


def _carried_out(tasks: Mapping[Worker, Iterator[tuple[int, Any, float]]]) -> list[Outcome]:
    """The outcomes of all tasks by their places; each is (place, item, seconds). Raises as `call_each`."""
    outcomes: dict[int, Outcome] = {}
    busy: dict[Future[Outcome], tuple[Worker, int]] = {}
    with ThreadPoolExecutor(max(1, len(tasks))) as pool, _killed_if_interrupted(tasks):

        def begin(worker: Worker) -> None:
            if (task := next(tasks[worker], None)) is not None:
                place, item, seconds = task
                busy[pool.submit(worker.carry_out, item, seconds)] = worker, place

        for worker in tasks:
            begin(worker)
        while busy:
            for done in wait_for(busy, LOOK_SECONDS, FIRST_COMPLETED).done:
                worker, place = busy.pop(done)
                outcomes[place] = done.result()
                begin(worker)
            for worker, _ in busy.values():
                worker.kill_if_late()
    return [outcomes[place] for place in range(len(outcomes))]


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
        self.lock = threading.Lock()
        self._build = partial(FunctionHost, function, tuple(arguments))
        self._start_seconds = start_seconds
        self._environment = dict(environment or {})
        self._process: WorkerProcess | None = None
        self._owner = 0  # the process that started it
        self._begun: Future[None]
        self._is_ready = False
        self._output: KeptOutput
        self._deadline = math.inf
        self._stack: str | None = None  # of a late call

    @property
    def pid(self) -> int | None:
        """The id of the process, if any."""
        return self._process and self._process.pid

    def start(self) -> None:
        """Start the process unless it is there; returns at once, before it is ready."""
        if self._process is not None and (self._owner != os.getpid() or self._process.ended is not None):
            self._process = None  # it belongs to the process this one was forked from, or is dead
        if self._process is None:
            self._is_ready = False
            self._output = KeptOutput()
            self._process = WorkerProcess(
                self._build,
                name=f"the process of {self.function}",
                environment=self._environment,
                output=self._output.descriptor,
                silent_seconds=math.inf,  # a call has a deadline of its own
            )
            self._owner = os.getpid()
            self._begun = self._process.begin()
            self._output.begin()

    def ready(self) -> Any:
        """Wait until the process is ready; returns the data `about` the function.

        Raises an error of rlpost's from importing it, RewardError for any other failure.
        """
        self.start()
        assert self._process is not None
        if self._is_ready:
            return self.about
        with _killed_if_interrupted([self]):
            try:
                if wait_for([self._begun], self._start_seconds).not_done:
                    raise self._could_not_begin(f"did not return within {self._start_seconds:g} s")
                self._begun.result()
                self.about = self._process.submit("about").result(self._start_seconds)
                self._is_ready = True
            except RlpostError as error:
                if self._process.ended is None:  # the import raised it, or took too long
                    raise
                raise self._could_not_begin(f"its process {self._process.ended}") from error
            except Exception as error:
                raise self._could_not_begin(named(error)) from error
        return self.about

    def _could_not_begin(self, why: str) -> RewardError:
        printed = self._output.text().strip()
        suffix = f"; it printed: {printed[-300:]}" if printed else ""
        return RewardError(f"the process of {self.function} could not begin: {why}{suffix}")

    def call(self, item: Any, seconds: float) -> Outcome:
        """`function(item)`, with a deadline. Raises an error of rlpost's own that it raised."""
        return call_each([(self, item, seconds)])[0]

    def carry_out(self, item: Any, seconds: float) -> Outcome:
        """`function(item)`, while another thread calls `kill_if_late`; raises as `call`."""
        self.ready()
        process, output = self._process, self._output
        assert process is not None
        output.begin()
        self._stack = None
        self._deadline = time.monotonic() + seconds
        try:
            answer = json.loads(process.submit("call", item).result())
        except RlpostError:
            if process.ended is None:  # the function raised it
                raise
            if self._stack is None:
                return Outcome(error=f"its process {process.ended}", lost=True, printed=output.text())
            late = f"did not return within {seconds:g} s"
            return Outcome(error=late, lost=True, late=True, printed=output.text(), stack=self._stack)
        finally:
            self._deadline = math.inf
        return Outcome(**answer, printed=output.text())

    def kill_if_late(self) -> None:
        """Kill the process if the call has missed its deadline."""
        process = self._process
        if process and process.pid and time.monotonic() > self._deadline:
            self._deadline = math.inf
            self._stack = self._output.stack_of(process.pid)
            process.kill("was late")

    def close(self) -> None:
        """Kill the process and its descendants."""
        if self._process is not None:
            self._process.kill("was closed")
        self._process = None


class KeptOutput:
    """Reads what a process prints to `descriptor`, and keeps the beginning until the next `begin`."""

    def __init__(self) -> None:
        self._pipe, self.descriptor = os.pipe()
        os.set_blocking(self._pipe, False)
        self._lock = threading.Lock()
        self._kept = bytearray()
        self._most = OUTPUT_KEPT
        self._poll = select.poll()
        self._poll.register(self._pipe, select.POLLIN)

    def begin(self) -> None:
        """Drop the kept output. Call it first after the process has started: it closes `descriptor` here."""
        self._take()
        with self._lock:
            self._kept.clear()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            threading.Thread(target=self._drain, daemon=True).start()

    def text(self) -> str:
        """The beginning of the output since the last `begin`."""
        self._take()
        with self._lock:
            return self._kept.decode(errors="replace")

    def stack_of(self, pid: int) -> str:
        """The Python stack of process `pid`, whose `FunctionHost` writes it here; "" if it does not."""
        printed = len(self.text())
        self._most += LONGEST_STACK
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        until, stack = time.monotonic() + STACK_SECONDS, ""
        while time.monotonic() < until:
            before, stack = stack, self.text()[printed:]
            if stack and stack == before:  # its lines follow at once
                break
            time.sleep(0.1)
        with self._lock:
            del self._kept[printed:]
        self._most = OUTPUT_KEPT
        return stack

    def _take(self) -> bool:
        """Read the pending output; False once all writers have closed the pipe."""
        for _ in range(64):  # more comes from something that still runs
            with self._lock:
                if self._pipe < 0:
                    return False
                try:
                    came = os.read(self._pipe, 1 << 16)
                except BlockingIOError:
                    return True
                self._kept += came[: max(0, self._most - len(self._kept))]
                if not came and self.descriptor < 0:
                    os.close(self._pipe)
                    self._pipe = -1
        return True

    def _drain(self) -> None:
        while self._take():
            self._poll.poll()


@contextmanager
def _killed_if_interrupted(workers: Mapping[Worker, Any] | Sequence[Worker]) -> Iterator[None]:
    """Kill the processes of `workers` if an error or Ctrl-C ends the block: their answers would come too late."""
    try:
        yield
    except BaseException:
        for worker in workers:
            worker.close()
        raise


# In the process


class FunctionHost:
    """Imports a function and calls it; with `arguments` it is called with them once and returns (function, about)."""

    def __init__(self, function: str, arguments: tuple[Any, ...]) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with suppress(OSError):  # only Linux has it: the first to be killed where memory runs out
            Path("/proc/self/oom_score_adj").write_text("1000")
        faulthandler.register(signal.SIGUSR1, file=os.dup(2), all_threads=True)
        module, _, name = function.partition(":")
        found = getattr(import_module(module), name)
        self._function, self._about = found(*arguments) if arguments else (found, None)

    def about(self) -> Any:
        """Data about the function."""
        return self._about

    def call(self, item: Any) -> str:
        """The outcome of a call as JSON, its value or its error: the owner reads plain data alone.

        Raises an error of rlpost's own that the function raised.
        """
        try:
            answer: dict[str, Any] = {"value": self._function(item)}
        except RlpostError:
            raise
        except BaseException as error:  # noqa: BLE001  SystemExit too: any exception is reported
            answer = {"error": named(error)}
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # closed or replaced by the function
                stream.flush()
        try:
            return json.dumps(answer)
        except (TypeError, ValueError, RecursionError) as error:
            return json.dumps({"error": f"its answer is not plain data: {named(error)}"})


def limit_memory(num_bytes: int = MEMORY_BYTES) -> None:
    """Let every later request for more memory than this fail, with a MemoryError."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))
