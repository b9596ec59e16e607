"""What `rlpost.remote.child` says of processes and pipes."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from rlpost.remote.child import (
    ending,
    kill_group,
    put,
    python_module,
    shell_code,
)


@pytest.mark.parametrize(
    ("code", "said", "of_a_shell"),
    [
        (0, "ended with exit code 0", 0),
        (3, "ended with exit code 3", 3),
        (-9, "was ended by SIGKILL", 137),
        (-127, "was ended by signal 127", 255),
    ],
)
def test_an_ending_names_the_exit_code_or_the_signal(code: int, said: str, of_a_shell: int) -> None:
    assert (ending(code), shell_code(code)) == (said, of_a_shell)


def test_a_module_is_started_in_a_group_that_can_be_killed() -> None:
    process = python_module("timeit", "-n", 1, "__import__('time').sleep(60)", stdout=subprocess.DEVNULL)
    assert os.getpgid(process.pid) == process.pid
    kill_group(process.pid)
    assert process.wait(30) == -signal.SIGKILL
    kill_group(process.pid, signal.SIGTERM)  # nobody is left


def test_a_module_is_started_with_more_variables() -> None:
    code = "import os; print(os.environ['FACT'])"
    process = python_module("timeit", "-n1", "-r1", code, environment={"FACT": "seen"}, stdout=subprocess.PIPE)
    assert b"seen" in process.communicate(timeout=30)[0]


def test_a_full_pipe_takes_nothing_and_an_unread_one_all() -> None:
    inside, outside = os.pipe()
    os.set_blocking(outside, False)
    room = put(outside, bytes(1 << 21))
    assert 0 < room < 1 << 21
    assert put(outside, b"more") == 0
    os.close(inside)
    assert put(outside, b"more") == 4
    os.close(outside)
