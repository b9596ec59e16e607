"""A child process that answers lines of JSON, and all the ways in which it fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlpost.remote.lines import ChildError, Lines
from tests.processes import is_gone

LONG = 60.0  # seconds that no test waits
START = """
import json, os, subprocess, sys, time
def say(content):
    print(json.dumps(content), flush=True)
def other(*where):
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"], **dict(where)).pid
"""
ECHO = "for line in sys.stdin: say([os.getpid(), json.loads(line)])"


@pytest.fixture
def child() -> Iterator[Callable[..., Lines]]:
    started: list[Lines] = []

    def start(code: str) -> Lines:
        started.append(Lines([sys.executable, "-I", "-S", "-c", START + code], name="the child"))
        return started[-1]

    yield start
    for lines in started:
        lines.close()


def asked(lines: Lines, request: Any = None, seconds: float = LONG) -> Any:
    lines.send(request, seconds)
    return lines.receive(seconds)


def test_requests_are_answered_by_one_child(child: Callable[..., Lines]) -> None:
    lines = child(ECHO)
    answers = [asked(lines, {"n": 1}), asked(lines, ["ü" * 500_000])]
    assert answers == [[lines.pid, {"n": 1}], [lines.pid, ["ü" * 500_000]]]


def test_several_lines_that_come_at_once_are_several_answers(child: Callable[..., Lines]) -> None:
    lines = child("sys.stdin.readline(); sys.stdout.write('1\\n2\\n'); sys.stdout.flush(); sys.stdin.read()")
    assert [asked(lines), lines.receive(LONG)] == [1, 2]


def test_a_child_that_dies_is_named_with_its_end_and_replaced(child: Callable[..., Lines]) -> None:
    lines = child("""
for line in sys.stdin:
    if "die" in line:
        print("out of luck", file=sys.stderr)
        sys.exit(7)
    say(line)
""")
    with pytest.raises(ChildError, match=r"^the child ended with exit code 7; its stderr ends with: out of luck$"):
        asked(lines, "die")
    assert asked(lines, "live") == '"live"\n'


def test_a_child_that_is_killed_is_named_with_the_signal(child: Callable[..., Lines]) -> None:
    with pytest.raises(ChildError, match="was ended by SIGKILL, as the kernel does where memory runs out"):
        asked(child("sys.stdin.readline(); os.kill(os.getpid(), 9)"))


def test_a_late_child_is_killed_with_all_it_has_started(child: Callable[..., Lines]) -> None:
    lines = child("""
say([other(), other(("start_new_session", True))])
time.sleep(600)
""")
    lines.send(None, LONG)
    pid, others = lines.pid, lines.receive(LONG)
    with pytest.raises(ChildError, match=r"did not answer within 0\.1 s and was killed"):
        lines.receive(0.1)
    assert pid is not None
    assert all(is_gone(each) for each in (pid, *others))
    assert not lines.runs


def test_a_dead_child_is_noticed_though_another_process_holds_its_pipe(child: Callable[..., Lines]) -> None:
    lines = child("say(other()); sys.stdin.readline(); sys.exit(3)")
    lines.send(None, LONG)
    left = lines.receive(LONG)
    with pytest.raises(ChildError, match="exit code 3"):
        lines.receive(LONG)
    assert is_gone(left)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("while True: sys.stdout.write('x' * 4096)", "wrote a line of more than 100,000 bytes and was killed"),
        ("print('Loading ...', flush=True); time.sleep(600)", "a line that is not JSON, and was killed: 'Loading"),
        ("sys.stdout.close(); os.close(1); time.sleep(600)", "has closed its stdout and was killed"),
    ],
)
def test_what_is_no_answer_is_an_error_by_name(
    child: Callable[..., Lines], monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    monkeypatch.setattr("rlpost.remote.lines.LONGEST_LINE", 100_000)
    lines = child(code)
    lines.send(None, LONG)
    pid = lines.pid
    with pytest.raises(ChildError, match=why):
        lines.receive(LONG)
    assert pid is not None
    assert is_gone(pid)


def test_a_line_that_drips_without_end_is_late(child: Callable[..., Lines]) -> None:
    lines = child("while True: sys.stdout.write(' '); sys.stdout.flush(); time.sleep(0.001)")
    lines.send(None, LONG)
    with pytest.raises(ChildError, match="did not answer"):
        lines.receive(0.1)


def test_a_child_that_reads_nothing_is_late(child: Callable[..., Lines]) -> None:
    with pytest.raises(ChildError, match=r"read no request for 0\.1 s and was killed"):
        child("time.sleep(600)").send("x" * (1 << 20), 0.1)


def test_a_flood_of_stderr_blocks_nothing_and_its_end_is_kept(child: Callable[..., Lines]) -> None:
    lines = child("sys.stdin.readline(); sys.stderr.write('noise ' * 200_000 + 'the end'); sys.exit(1)")
    with pytest.raises(ChildError, match=r"noise the end$") as caught:
        asked(lines)
    assert len(str(caught.value)) < 1000


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(ChildError, match="the child cannot be started: /nowhere/python: No such file"):
        Lines(["/nowhere/python"], name="the child").send(None, LONG)


def test_closing_leaves_nothing_running(child: Callable[..., Lines]) -> None:
    lines = child("say(other()); sys.stdin.read()")
    lines.send(None, LONG)
    pid, left = lines.pid, lines.receive(LONG)
    lines.close()
    lines.close()
    assert pid is not None
    assert is_gone(pid)
    assert is_gone(left)
