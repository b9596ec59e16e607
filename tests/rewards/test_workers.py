"""Processes that can be killed: the outcome of each kind of failure, and that no process is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlpost.errors import DataError, RewardError
from rlpost.rewards.workers import Outcome, Worker, Workers
from tests.processes import is_gone

FUNCTIONS = """
import ctypes, os, subprocess, sys, time

def act(item):
    kind, value = item
    if kind == "double":
        return value * 2
    if kind == "raise":
        raise KeyError(value)
    if kind == "exit":
        sys.exit(value)
    if kind == "leave":
        os._exit(value)
    if kind == "crash":
        ctypes.string_at(0)
    if kind == "sleep":
        time.sleep(value)
    if kind == "power":
        return len(str(7 ** 10 ** 9))
    if kind == "print":
        print("first line")
        for _ in range(value):
            print("x" * 1_000_000)
        return "printed"
    if kind == "forks":
        if os.fork() == 0:
            time.sleep(60)
        os._exit(value)
    if kind in ("daemon", "daemon and sleep"):
        child = subprocess.Popen(["sleep", "60"], start_new_session=True)
        open(value, "w").write(str(child.pid))
        time.sleep(60 if "sleep" in kind else 0)
    if kind == "memory":
        return len(bytearray(10 ** 15))
    if kind == "set":
        return {value}
    if kind == "pid":
        return os.getpid()
    if kind == "data error":
        from rlpost.errors import DataError
        raise DataError("no answers")
    if kind == "closed":
        sys.stdout.close()
        os.close(1)
        return value

def made(first, second):
    return lambda item: [first, second, item], {"made of": [first, second]}

NAME = None
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Names a function of a module that the processes can import."""
    name = f"acts_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda function: f"{name}:{function}"


@pytest.fixture
def act(module: Callable[[str], str]) -> Iterator[Workers]:
    """Two workers; where a call is to be late, the test shortens their deadline."""
    with Workers(module("act"), 2, 60.0) as workers:
        yield workers


def test_answers_come_in_the_order_of_the_items(act: Workers) -> None:
    assert [outcome.value for outcome in act.map([("double", n) for n in range(7)])] == [0, 2, 4, 6, 8, 10, 12]
    assert act.map([]) == []


def test_a_process_stays_warm(act: Workers) -> None:
    pids = {outcome.value for _ in range(5) for outcome in act.map([("pid", None)] * 2)}
    assert len(pids) == 2
    assert os.getpid() not in pids


@pytest.mark.parametrize(
    ("item", "error"),
    [
        (("raise", "a"), "KeyError: 'a'"),
        (("exit", 3), "SystemExit: 3"),
        (("memory", None), "MemoryError"),
        (("set", 1), "its answer is not plain data: TypeError: Object of type set is not JSON serializable"),
    ],
)
def test_what_raises_keeps_its_process(act: Workers, item: Any, error: str) -> None:
    before = {outcome.value for outcome in act.map([("pid", None)] * 2)}
    assert act.map([item]) == [Outcome(error=error)]
    assert {outcome.value for outcome in act.map([("pid", None)] * 2)} <= before


@pytest.mark.parametrize(
    ("item", "error"),
    [
        (("leave", 0), "its process ended with exit code 0"),
        (("crash", None), "its process was ended by SIGSEGV"),
        (("forks", 4), "its process ended with exit code 4"),
    ],
)
def test_what_ends_its_process_is_an_error_of_its_item_alone(act: Workers, item: Any, error: str) -> None:
    lost, kept, after = act.map([item, ("double", 1), ("double", 2)])
    assert (lost.error, lost.lost, lost.late) == (error, True, False)
    assert (kept.value, after.value) == (2, 4)
    assert act.map([("double", 3)] * 3) == [Outcome(6)] * 3


def test_what_left_the_group_of_its_process_ends_with_it(module: Callable[[str], str], tmp_path: Path) -> None:
    note = tmp_path / "child"
    with Workers(module("act"), 1, 3.0) as workers:  # the child is begun and noted by then
        [late] = workers.map([("daemon and sleep", str(note))])
        assert late.late
        assert is_gone(int(note.read_text()))
        workers.map([("daemon", str(note))])
        assert not is_gone(int(note.read_text()), 1.0)
    assert is_gone(int(note.read_text()))


def test_100_megabytes_of_output_are_read_and_the_first_kept(
    module: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    with Workers(module("act"), 1, 60.0) as workers:
        loud, quiet = workers.map([("print", 100), ("double", 1)])
    assert (loud.value, loud.printed[:20], len(loud.printed)) == ("printed", "first line\n" + "x" * 9, 2000)
    assert quiet == Outcome(2)
    assert capfd.readouterr() == ("", "")


def test_closing_stdout_loses_no_answer(act: Workers) -> None:
    assert [outcome.value for outcome in act.map([("closed", 1), ("closed", 2)])] == [1, 2]
    assert act.map([("double", 4)] * 2) == [Outcome(8)] * 2


def test_what_is_sent_may_be_larger_than_a_pipe(module: Callable[[str], str]) -> None:
    text = "long " * 200_000
    with Workers(module("act"), 1, 60.0) as patient:  # a busy machine takes its time
        assert patient.map([("double", text)])[0].value == text * 2


def test_a_process_that_reads_nothing_is_killed_at_the_deadline(module: Callable[[str], str]) -> None:
    worker = Worker(module("act"))
    worker.ready()
    os.kill(worker.pid or 0, signal.SIGSTOP)
    late = worker.call(("double", "long " * 1_000_000), 0.5)
    assert (late.lost, late.late, "0.5 s" in (late.error or "")) == (True, True, True)
    assert worker.call(("double", 4), 60.0) == Outcome(8)
    worker.close()


def test_an_error_of_rlposts_own_is_raised_and_stops_other_calls(act: Workers) -> None:
    began = time.monotonic()
    with pytest.raises(DataError, match=r"^no answers"):
        act.map([("sleep", 60), ("data error", None), ("double", 1)])
    assert time.monotonic() - began < 50.0
    assert act.map([("double", 1)]) == [Outcome(2)]


def test_a_function_can_be_made_in_the_process(module: Callable[[str], str]) -> None:
    worker = Worker(module("made"), ["a", {"b": 1}])
    assert worker.ready() == {"made of": ["a", {"b": 1}]}
    assert worker.call("c", 60.0).value == ["a", {"b": 1}, "c"]
    worker.close()


@pytest.mark.parametrize("function", ["missing", "NAME.no"])
def test_a_function_that_is_not_there_is_an_error(module: Callable[[str], str], function: str) -> None:
    with pytest.raises(RewardError, match=r"acts_.*: AttributeError"):
        Worker(module(function), start_seconds=20.0).ready()


def test_importing_has_a_deadline_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(1.5)\ndef f(x): return x\n")
    (tmp_path / "never_imported.py").write_text("import time\nprint('waiting')\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Workers("slow_to_import:f", 1, 1.0) as workers:
        assert workers.map([1]) == [Outcome(1)]
    with pytest.raises(RewardError, match=r" 4 s; .*: waiting"):
        Worker("never_imported:f", start_seconds=4.0).ready()


def test_a_process_ends_with_the_last_that_holds_it(module: Callable[[str], str]) -> None:
    worker = Worker(module("act"))
    worker.ready()
    pid = worker.pid or 0
    assert Path(f"/proc/{pid}").exists()
    del worker
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


Program = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def ended(tmp_path: Path, module: Callable[[str], str]) -> Program:
    """Runs a program that has a `worker` with the function `act`, and waits for its end."""
    begin = f"""
import os, signal, sys, threading, time
sys.path.insert(0, {str(tmp_path)!r})
from rlpost.rewards.workers import Worker
worker = Worker({module("act")!r})
worker.ready()
print(worker.pid, flush=True)
"""

    def run(program: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", begin + program]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    return run


@pytest.mark.parametrize("call", ["('sleep', 60)", "('power', None)"])
def test_nothing_outlives_a_process_that_is_killed(call: str, ended: Program) -> None:
    done = ended(f"""
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
worker.call({call}, 60.0)
""")
    assert done.returncode == -signal.SIGKILL
    assert is_gone(int(done.stdout))


def test_what_left_the_group_ends_with_a_killed_process(tmp_path: Path, ended: Program) -> None:
    note = tmp_path / "child"
    done = ended(f"""
worker.call(("daemon", {str(note)!r}), 60.0)
os.kill(os.getpid(), signal.SIGKILL)
""")
    assert done.returncode == -signal.SIGKILL
    assert is_gone(int(note.read_text()), 60.0)


def test_ctrl_c_ends_the_call_and_the_process(tmp_path: Path, ended: Program) -> None:
    note = tmp_path / "child"
    done = ended(f"""
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite run in the background ignores it
def interrupt():
    while not os.path.exists({str(note)!r}):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
try:
    worker.call(("daemon and sleep", {str(note)!r}), 60.0)
except KeyboardInterrupt:
    print(worker.pid, worker.call(("double", 2), 60.0).value, flush=True)
""")
    first, second = done.stdout.splitlines()
    assert second == "None 4"
    assert is_gone(int(first))


def test_a_fork_leaves_the_process_of_its_parent_alone(module: Callable[[str], str]) -> None:
    worker = Worker(module("act"))
    parents = worker.call(("pid", None), 60.0).value
    inside, outside = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(outside, str(worker.call(("pid", None), 60.0).value).encode())
            worker.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(outside)
    childs = int(os.read(inside, 100))
    os.close(inside)
    assert childs != parents
    assert worker.call(("pid", None), 60.0).value == parents
    worker.close()
