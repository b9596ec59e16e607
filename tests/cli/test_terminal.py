"""What reaches the terminal."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from rlpost.cli.terminal import print_error, table


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_columns_are_aligned() -> None:
    assert table([("a", "bb", "c"), ("ddd", "e", "")]) == ["  a    bb  c", "  ddd  e"]


def test_the_label_is_red_only_where_someone_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for no_color, stream, expected in [
        ("", Terminal(), "\x1b[31merror:\x1b[0m x\n"),
        ("1", Terminal(), "error: x\n"),
        ("", io.StringIO(), "error: x\n"),
    ]:
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setattr(sys, "stderr", stream)
        print_error("x")
        assert stream.getvalue() == expected


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
