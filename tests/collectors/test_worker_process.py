"""WorkerProcess: an object in a process of its own, called, failing and dying."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from rlpost.errors import DataError, PolicyError
from rlpost.remote.child import kill_group
from rlpost.remote.process import WorkerProcess, last_of


def counter() -> Any:
    """What is built in the process: made in a function, so that it goes over by value."""
    import signal as signals
    import subprocess
    import threading
    import time

    from rlpost.errors import DataError

    class Counter:
        host: Any = None

        def __init__(self) -> None:
            self.count = 0
            self.pending: Future[str] = Future()

        def add(self, number: int, *, times: int = 1) -> int:
            self.count += number * times
            return self.count

        def later(self) -> Future[str]:
            self.pending = Future()
            return self.pending

        def come(self) -> None:
            self.pending.set_result("came later")

        def fail(self, kind: str) -> None:
            if kind == "data":
                raise DataError("row 3 is empty: remove it")
            raise type("Odd", (Exception,), {"lock": threading.Lock()})("cannot be sent")

        def say(self, words: str) -> None:
            self.host.tell("said", words)

        def on_main(self) -> Future[bool]:
            return self.host.in_main_thread(lambda: threading.current_thread() is threading.main_thread())

        def child(self) -> int:
            return subprocess.Popen(["sleep", "1000"]).pid

        def sleep(self, seconds: float) -> None:
            time.sleep(seconds)

        def stop(self) -> None:
            signals.raise_signal(signals.SIGSTOP)

    return Counter()


@pytest.fixture(scope="module")
def shared() -> Iterator[WorkerProcess]:
    worker = WorkerProcess(counter).start()
    yield worker
    worker.close()


def is_there(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not waited for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_methods_are_called_in_order_and_a_future_lets_the_next_begin(shared: WorkerProcess) -> None:
    later = shared.submit("later")
    assert shared.call("add", 2, times=3) == 6
    assert shared.call("add", 1) == 7
    assert not later.done()
    shared.call("come")
    assert later.result(30) == "came later"
    assert shared.call("on_main") is True


def test_an_error_comes_back_as_it_was_raised_or_in_words(shared: WorkerProcess) -> None:
    with pytest.raises(DataError, match="row 3 is empty") as caught:
        shared.call("fail", "data")
    assert "in fail" in caught.value.__notes__[0]  # where it arose
    with pytest.raises(PolicyError, match="Odd: cannot be sent"):
        shared.call("fail", "odd")
    with pytest.raises(AttributeError, match="no attribute 'fly'"):
        shared.call("fly")


def test_a_call_has_a_deadline_that_names_it(shared: WorkerProcess) -> None:
    with pytest.raises(PolicyError, match="waited 0 s for later of the collector's process"):
        shared.call("later", seconds=0.1)
    shared.call("come")


def test_its_death_is_named_wakes_whoever_waits_and_takes_what_it_started_along() -> None:
    died = Event()
    worker = WorkerProcess(counter, name="the player", on_death=died.set).start()
    child = worker.call("child")
    waiting = worker.submit("sleep", 1000)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(PolicyError, match="the player was ended by SIGKILL"):
        waiting.result(30)
    assert died.wait(30)
    wait_until(lambda: not is_there(child))
    with pytest.raises(PolicyError, match="was ended by SIGKILL"):
        worker.call("add", 1)
    worker.close()


def test_one_that_gives_no_sign_of_life_is_killed_and_named() -> None:
    worker = WorkerProcess(counter, silent_seconds=4.0).start()
    stopped = worker.submit("stop")
    with pytest.raises(PolicyError, match=r"gave no sign of life for \d+ s and was killed"):
        stopped.result(30)


def test_what_cannot_be_built_is_raised_and_nothing_is_left() -> None:
    def build() -> Any:
        raise DataError("there is no such environment: name another")

    worker = WorkerProcess(build)
    with pytest.raises(DataError, match="no such environment"):
        worker.start()
    assert worker.pid is not None
    wait_until(lambda: not is_there(worker.pid or 0))
    with pytest.raises(PolicyError, match="was not started"):
        WorkerProcess(build).call("add")


def test_it_ends_with_its_owner() -> None:
    owner = WorkerProcess(_owner).start()
    inner, child = owner.call("ids")
    assert (is_there(inner), is_there(child)) == (True, True)
    assert owner.pid is not None
    kill_group(owner.pid)
    wait_until(lambda: not is_there(inner) and not is_there(child))
    owner.close()


def _owner() -> Any:
    from rlpost.remote.process import WorkerProcess

    class Owner:
        def __init__(self) -> None:
            self.inner = WorkerProcess(counter).start()

        def ids(self) -> tuple[int | None, int]:
            return self.inner.pid, self.inner.call("child")

    return Owner()


def test_a_process_that_closes_its_connection_and_goes_on_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.remote.process.END_SECONDS", 0.1)
    hanging = subprocess.Popen(["sleep", "60"], start_new_session=True)
    assert last_of(hanging) == "has closed its connection and did not end"
    assert hanging.wait(10) == -signal.SIGKILL
