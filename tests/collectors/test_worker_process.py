"""WorkerProcess: an object in a process of its own, called, failing and dying."""

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from threading import Event
from typing import Any

import pytest

from rlpost.errors import DataError, PolicyError
from rlpost.remote.child import kill_group
from rlpost.remote.process import WorkerProcess, last_of
from tests.processes import is_gone


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


def test_methods_are_called_in_order_and_a_future_lets_the_next_begin(shared: WorkerProcess) -> None:
    later = shared.submit("later")
    assert shared.call("add", 2, times=3) == 6
    assert shared.call("add", 1) == 7
    assert not later.done()
    shared.call("come")
    assert later.result(30) == "came later"
    assert shared.call("on_main") is True


def test_an_error_comes_back_as_it_was_raised_or_in_words(shared: WorkerProcess) -> None:
    with pytest.raises(DataError, match="row 3") as caught:
        shared.call("fail", "data")
    assert "in fail" in caught.value.__notes__[0]  # where it arose
    with pytest.raises(PolicyError, match="Odd"):
        shared.call("fail", "odd")
    with pytest.raises(AttributeError, match="fly"):
        shared.call("fly")


def test_a_call_has_a_deadline_that_names_it(shared: WorkerProcess) -> None:
    with pytest.raises(PolicyError, match="later"):
        shared.call("later", seconds=0.1)
    shared.call("come")


def test_a_death_is_named_wakes_who_waits_and_leaves_nothing() -> None:
    died = Event()
    worker = WorkerProcess(counter, name="the player", on_death=died.set).start()
    child = worker.call("child")
    waiting = worker.submit("sleep", 1000)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(PolicyError, match=r"player .* SIGKILL"):
        waiting.result(30)
    assert died.wait(30)
    assert is_gone(child)
    with pytest.raises(PolicyError, match="SIGKILL"):
        worker.call("add", 1)
    worker.close()


def test_one_that_gives_no_sign_of_life_is_killed_and_named() -> None:
    worker = WorkerProcess(counter, silent_seconds=4.0).start()
    stopped = worker.submit("stop")
    with pytest.raises(PolicyError, match=r"life for \d+ s"):
        stopped.result(30)


def test_what_cannot_be_built_is_raised_and_nothing_is_left() -> None:
    def build() -> Any:
        raise DataError("no such environment")

    worker = WorkerProcess(build)
    with pytest.raises(DataError, match="environment"):
        worker.start()
    assert worker.pid is not None
    assert is_gone(worker.pid)
    with pytest.raises(PolicyError, match=r"start\(\)"):
        WorkerProcess(build).call("add")


def test_it_ends_with_its_owner() -> None:
    owner = WorkerProcess(_owner).start()
    inner, child = owner.call("ids")
    assert not any(is_gone(pid, 0) for pid in (inner, child))
    assert owner.pid is not None
    kill_group(owner.pid)
    assert all(is_gone(pid) for pid in (inner, child))
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
    assert "closed" in last_of(hanging)
    assert hanging.wait(10) == -signal.SIGKILL
