"""Functions called where they can be killed: in processes of their own, kept warm, each call with a deadline.

    with Workers("my_package.rewards:score", count=2, seconds=5.0) as workers:
        outcomes = workers.map(["a reply", "another"])  # score("a reply"), score("another")

The function takes one plain (picklable) argument and returns plain (JSON) data. Its output does not reach the
terminal; the beginning is kept for the outcome. A late process is killed with all processes it has started, and
one that has died is replaced; the time a process needs to start counts for no deadline.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import math
import os
import queue
import re
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TypeVar

from rlpost.errors import RewardError, RlpostError, named
from rlpost.remote.process import WorkerProcess

START_SECONDS = 600.0  # timeout of a process's imports
STACK_SECONDS = 0.5  # for a late process to write its stack before it is killed
OUTPUT_KEPT = 2000  # bytes of a call's output
LONGEST_OUTPUT = 16 << 20  # bytes on the disk; a longer output is shortened to its beginning
LOOK_SECONDS = 0.2  # between two looks at the length of the output
LONGEST_STACK = 1 << 20  # bytes
MEMORY_BYTES = 4 << 30  # enough for sympy and NumPy; a number of a billion digits fails instead of filling the machine
Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """`count` processes that call one function of one argument, each call at most `seconds` long.

    See `Worker` for `function` and `arguments`. As a context manager it closes at the end.
    """

    def __init__(self, function: str, count: int = 1, seconds: float = 60.0, arguments: Sequence[Any] = ()) -> None:
        self.seconds = seconds
        self._workers = [Worker(function, arguments) for _ in range(count)]

    def start(self) -> None:
        """Start the processes; returns at once, before they are ready."""
        for worker in self._workers:
            worker.start()

    def map(self, items: Sequence[Any]) -> list[Outcome]:
        """The outcome of the function for each item, in order; one call per process at a time.

        Raises an error of rlpost's that the function raised, and RewardError if it cannot be imported.
        """
        free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            free.put(worker)

        def call(item: Any) -> Outcome:
            worker = free.get()
            try:
                return worker.call(item, self.seconds)
            finally:
                free.put(worker)

        return at_once(call, items, self._workers)

    def close(self) -> None:
        """Kill the processes."""
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def at_once(call: Callable[[Item], Result], items: Sequence[Item], workers: Sequence[Worker]) -> list[Result]:
    """`call` of each item, as many at the same time as there are `workers`, which it uses.

    Raises the first error, with the workers closed, so that no call is waited for.
    """
    with ThreadPoolExecutor(max(1, len(workers))) as pool, _closed_on_error(workers):
        answers = [pool.submit(call, item) for item in items]
        try:
            for done in as_completed(answers):
                done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return [answer.result() for answer in answers]


@contextmanager
def _closed_on_error(workers: Sequence[Worker]) -> Iterator[None]:
    """Kill the processes of `workers` if an error or Ctrl-C ends the block: their answers would come too late."""
    try:
        yield
    except BaseException:
        for worker in workers:
            worker.close()
        raise


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
        environment: dict[str, str] | None = None,
    ) -> None:
        self.function = function
        self._build = partial(FunctionHost, function, tuple(arguments))
        self._start_seconds = start_seconds
        self._environment = environment
        self._lock = threading.RLock()
        self._process: WorkerProcess | None = None
        self._owner = 0  # the process that started it
        self._begun: Future[None]
        self._about: Future[Any]
        self._output: _Output

    @property
    def pid(self) -> int | None:
        """The id of the process, if any."""
        return self._process and self._process.pid

    def start(self) -> None:
        """Start the process unless it is there; returns at once, before it is ready."""
        if self._process is not None and self._process.ended is None and self._owner == os.getpid():
            return  # else it is dead, or belongs to the process that this one was forked from
        self._output = _Output()
        self._process = WorkerProcess(
            self._build,
            name=f"the process of {self.function}",
            environment=self._environment,
            output=self._output.descriptor,
            silent_seconds=math.inf,  # a call has a deadline of its own
        )
        self._owner = os.getpid()
        self._begun = self._process.begin()
        self._about = self._process.submit("about")

    def ready(self) -> Any:
        """Wait until the process is ready; returns the data `about` the function.

        Raises an error of rlpost's from importing it, RewardError for any other failure.
        """
        with self._lock, _closed_on_error([self]):
            self.start()
            for answer in (self._begun, self._about):
                outcome = self._outcome(lambda answer=answer: answer, self._start_seconds)
                if outcome.error:
                    printed = outcome.printed.strip()
                    suffix = f"; it printed: {printed[-300:]}" if printed else ""
                    raise RewardError(f"the process of {self.function} could not begin: {outcome.error}{suffix}")
            return self._about.result()

    def call(self, item: Any, seconds: float) -> Outcome:
        """`function(item)`, with a deadline. Raises an error of rlpost's own that it raised."""
        with self._lock, _closed_on_error([self]):
            self.ready()
            assert self._process is not None
            self._output.begin()
            outcome = self._outcome(partial(self._process.submit, "call", item), seconds)
            return outcome if outcome.error else replace(outcome, **json.loads(outcome.value))

    def close(self) -> None:
        """Kill the process and its descendants; a call that another thread waits for raises RewardError."""
        process, self._process = self._process, None
        if process is not None:
            process.kill("was closed")

    def _outcome(self, ask: Callable[[], Future[Any]], seconds: float) -> Outcome:
        """The outcome of a call of the process, which is killed if it is late. Raises an error of rlpost's own."""
        process, output, pid = self._process, self._output, self.pid
        assert process is not None
        assert pid is not None
        late: list[Outcome] = []

        def kill() -> None:
            printed = output.text()
            output.begin()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)  # `FunctionHost` has it write the Python stack
            time.sleep(STACK_SECONDS)
            stack = output.text(LONGEST_STACK)
            late.append(Outcome(None, f"did not return within {seconds:g} s", True, True, printed, stack))
            process.kill("was late")

        timer = threading.Timer(seconds, kill)  # a process that reads nothing may make `ask` wait too
        timer.start()
        try:
            answer = ask()
            while wait_for([answer], LOOK_SECONDS).not_done:
                output.shorten()
        finally:
            timer.cancel()
            timer.join()
        if late:
            return late[0]
        try:
            return Outcome(answer.result(), printed=output.text())
        except RlpostError as error:
            if process.ended is None:  # the function raised it
                raise
            if self._process is not process:
                raise RewardError(f"{process.name} was closed") from error
            return Outcome(error=f"its process {process.ended}", lost=True, printed=output.text())
        except Exception as error:  # noqa: BLE001  of the import, where any exception is reported
            return Outcome(error=named(error), printed=output.text())


class _Output:
    """A file that a process prints to; its beginning is read."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  closed with this object
        self.descriptor = self._file.fileno()
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, os.O_APPEND)  # so that what is printed after a `begin` is all there

    def begin(self) -> None:
        """Empty the file, so that it holds the output of the next call alone."""
        os.ftruncate(self.descriptor, 0)

    def shorten(self) -> None:
        """Keep the beginning alone of a long output: a function that prints without end would fill the disk."""
        if os.fstat(self.descriptor).st_size > LONGEST_OUTPUT:
            os.ftruncate(self.descriptor, OUTPUT_KEPT)

    def text(self, most: int = OUTPUT_KEPT) -> str:
        """The first `most` bytes that were printed since the last `begin`."""
        return os.pread(self.descriptor, most, 0).decode(errors="replace")


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
        """The value or the error of a call as JSON: the owner reads plain data alone.

        Raises an error of rlpost's own that the function raised.
        """
        try:
            answer: dict[str, Any] = {"value": self._function(item)}
        except RlpostError:
            raise
        except BaseException as error:  # noqa: BLE001  SystemExit too: any exception is reported
            answer = {"value": None, "error": named(error)}
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # closed or replaced by the function
                stream.flush()
        try:
            return json.dumps(answer)
        except (TypeError, ValueError, RecursionError) as error:
            return json.dumps({"value": None, "error": f"its answer is not plain data: {named(error)}"})


def limit_memory(num_bytes: int = MEMORY_BYTES) -> None:
    """Let every later request for more memory than this fail, with a MemoryError."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))
