"""Processes that can be killed: the outcome of each kind of failure, and that no process is left behind."""

from __future__ import annotations

import multiprocessing
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

pytestmark = pytest.mark.thorough

FUNCTIONS = """
import os, subprocess, sys, time
from rlpost.errors import DataError

def act(statements):
    scope = dict(globals())
    exec(statements, scope)
    return scope.get("answer")

NAME = None
"""
PID = "answer = os.getpid()"


def double(value: Any) -> str:
    return f"answer = {value!r} * 2"


def daemon(note: Path, seconds: int) -> str:
    """Statements that start a process outside the group, write its id to `note`, and sleep."""
    child = 'subprocess.Popen(["sleep", "60"], start_new_session=True)'
    return f"open({str(note)!r}, 'w').write(str({child}.pid)); time.sleep({seconds})"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Names a function of a module that the processes can import."""
    name = f"acts_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda function: f"{name}:{function}"


@pytest.fixture
def act(module: Callable[[str], str]) -> Iterator[Workers]:
    """Two workers that carry out statements."""
    with Workers(module("act"), 2, 60.0) as workers:
        yield workers


def test_answers_come_in_the_order_of_the_items(act: Workers) -> None:
    assert [outcome.value for outcome in act.map([double(n) for n in range(7)])] == [0, 2, 4, 6, 8, 10, 12]
    assert act.map([]) == []


def test_a_process_stays_warm(act: Workers) -> None:
    pids = {outcome.value for _ in range(5) for outcome in act.map([PID] * 2)}
    assert len(pids) == 2
    assert os.getpid() not in pids


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("raise KeyError('a')", "KeyError: 'a'"),
        ("sys.exit(3)", "SystemExit: 3"),
        ("bytearray(10 ** 15)", "MemoryError"),
        ("answer = {1}", "its answer is not plain data: TypeError: Object of type set is not JSON serializable"),
    ],
)
def test_what_raises_keeps_its_process(act: Workers, statement: str, error: str) -> None:
    before = {outcome.value for outcome in act.map([PID] * 2)}
    assert act.map([statement]) == [Outcome(error=error)]
    assert {outcome.value for outcome in act.map([PID] * 2)} <= before


@pytest.mark.parametrize(
    ("statements", "error"),
    [
        ("os._exit(0)", "its process ended with exit code 0"),
        ("os.fork() == 0 and time.sleep(60)\nos._exit(4)", "its process ended with exit code 4"),
    ],
)
def test_what_ends_its_process_is_an_error_of_its_item_alone(act: Workers, statements: str, error: str) -> None:
    lost, kept, after = act.map([statements, double(1), double(2)])
    assert (lost.error, lost.lost, lost.late) == (error, True, False)
    assert (kept.value, after.value) == (2, 4)
    assert act.map([double(3)] * 3) == [Outcome(6)] * 3


def test_what_left_the_group_of_its_process_ends_with_it(module: Callable[[str], str], tmp_path: Path) -> None:
    note = tmp_path / "child"
    with Workers(module("act"), 1, 3.0) as workers:  # the child is begun and noted by then
        [late] = workers.map([daemon(note, 60)])
        assert late.late
        assert is_gone(int(note.read_text()))
        workers.map([daemon(note, 0)])
        assert not is_gone(int(note.read_text()), 1.0)
    assert is_gone(int(note.read_text()))


def test_100_megabytes_of_output_are_read_and_the_first_kept(
    module: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    with Workers(module("act"), 1, 60.0) as workers:
        flood = "print('said')\nfor _ in range(100): print('x' * 1_000_000)\nsys.stdout.flush(); time.sleep(2)"
        loud, quiet = workers.map([f"{flood}\nanswer = os.fstat(1).st_size", double(1)])
    assert loud.value == 2000  # the disk is not filled
    assert (loud.error, loud.printed[:8], len(loud.printed)) == (None, "said\nxxx", 2000)
    assert quiet == Outcome(2)
    assert capfd.readouterr() == ("", "")


def test_closing_stdout_loses_no_answer(act: Workers) -> None:
    closing = "sys.stdout.close(); os.close(1); answer = 1"
    assert [outcome.value for outcome in act.map([closing, closing])] == [1, 1]
    assert act.map([double(4)] * 2) == [Outcome(8)] * 2


def test_what_is_sent_may_be_larger_than_a_pipe(act: Workers) -> None:
    text = "long " * 200_000
    assert act.map([double(text)])[0].value == text * 2


def test_a_process_that_reads_nothing_is_killed_at_the_deadline(module: Callable[[str], str]) -> None:
    worker = Worker(module("act"))
    worker.ready()
    os.kill(worker.pid or 0, signal.SIGSTOP)
    late = worker.call(double("long " * 1_000_000), 0.5)
    assert (late.lost, late.late, "0.5 s" in (late.error or "")) == (True, True, True)
    assert worker.call(double(4), 60.0) == Outcome(8)
    worker.close()


def test_an_error_of_rlposts_own_is_raised_and_stops_other_calls(act: Workers) -> None:
    began = time.monotonic()
    with pytest.raises(DataError, match=r"^no answers"):
        act.map(["time.sleep(60)", "raise DataError('no answers')", double(1)])
    assert time.monotonic() - began < 50.0
    assert act.map([double(1)]) == [Outcome(2)]


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


@pytest.mark.parametrize("statement", ["time.sleep(60)", "7 ** 10 ** 9"])
def test_nothing_outlives_a_process_that_is_killed(statement: str, ended: Program) -> None:
    done = ended(f"""
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
worker.call({statement!r}, 60.0)
""")
    assert done.returncode == -signal.SIGKILL
    assert is_gone(int(done.stdout))


def test_what_left_the_group_ends_with_a_killed_process(tmp_path: Path, ended: Program) -> None:
    note = tmp_path / "child"
    done = ended(f"""
worker.call({daemon(note, 0)!r}, 60.0)
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
    worker.call({daemon(note, 60)!r}, 60.0)
except KeyboardInterrupt:
    print(worker.pid, worker.call({double(2)!r}, 60.0).value, flush=True)
""")
    first, second = done.stdout.splitlines()
    assert second == "None 4"
    assert is_gone(int(first))


def test_a_fork_leaves_the_process_of_its_parent_alone(module: Callable[[str], str]) -> None:
    worker, context = Worker(module("act")), multiprocessing.get_context("fork")
    parents, answers = worker.call(PID, 60.0).value, context.SimpleQueue()

    def ask() -> None:
        answers.put(worker.call(PID, 60.0).value)
        worker.close()

    child = context.Process(target=ask)
    child.start()
    child.join()
    assert answers.get() != parents
    assert worker.call(PID, 60.0).value == parents
    worker.close()
