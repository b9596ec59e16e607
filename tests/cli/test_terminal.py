"""What reaches the terminal."""

from __future__ import annotations

import os
import subprocess
import sys

from rlpost.cli.terminal import table


def test_columns_are_aligned() -> None:
    assert table([("a", "bb", "c"), ("ddd", "e", "")]) == ["  a    bb  c", "  ddd  e"]


def test_everything_goes_to_stderr_meanwhile_even_a_subprocess() -> None:
    program = (
        "import subprocess\n"
        "from rlpost.cli.terminal import stdout_on_stderr\n"
        "with stdout_on_stderr():\n"
        "    print('engine')\n"
        "    subprocess.run(['echo', 'child'])\n"
        "print('result')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "result\n"
    assert sorted(done.stderr.split()) == ["child", "engine"]
