"""Output of others goes where it is sent, that of C++ and subprocesses too, and is seen if loading fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_everything_written_meanwhile_goes_to_the_file(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("before\n")
    program = (
        "import os, subprocess, sys\n"
        "from pathlib import Path\n"
        "from rlpost.output import output_into\n"
        "print('first')\n"
        "with output_into(Path(sys.argv[1])):\n"
        "    print('engine')\n"
        "    os.write(2, b'from C\\n')\n"
        "    subprocess.run(['echo', 'child'])\n"
        "try:\n"
        "    with output_into(Path(sys.argv[1])):\n"
        "        raise ValueError('broken')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "print('last')\n"
    )
    command = [sys.executable, "-c", program, str(log)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    assert (done.stdout, done.stderr) == ("first\nbroken\nlast\n", "")
    assert log.read_text().splitlines()[0] == "before"
    assert sorted(log.read_text().splitlines()[1:]) == ["child", "engine", "from C"]


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
