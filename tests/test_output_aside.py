"""What engines write while they load is seen only where loading fails."""

from __future__ import annotations

import subprocess
import sys

LOADING = """
import os, subprocess, sys
from rlpost.output import output_aside
print("before")
try:
    with output_aside():
        print("engine")
        os.write(2, b"bar 1%\\rbar 99%\\r\\x1b[2J\\n")
        subprocess.run(["echo", "child"])
        ENDS
except ValueError as error:
    print(error)
print("after")
"""


def load(ends: str) -> tuple[str, str]:
    command = [sys.executable, "-c", LOADING.replace("ENDS", ends)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def test_nothing_is_seen_of_a_loading_that_succeeds() -> None:
    assert load("pass") == ("before\nafter\n", "")


def test_a_loading_that_fails_is_shown_without_control_characters() -> None:
    out, err = load("raise ValueError('broken')")
    assert out == "before\nbroken\nafter\n"
    assert sorted(line for line in err.splitlines() if line) == ["\\x1b[2J", "bar 1%", "bar 99%", "child", "engine"]
