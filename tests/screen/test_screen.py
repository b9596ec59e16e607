"""The screen as the loop sees it: plain lines in pipes, a picture on terminals, and the terminal given back."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from vt import Session, Terminal

from rlpost.screen import Screen
from rlpost.screen.screen import Line, worth_keeping
from rlpost.screen.state import STOPPING
from rlpost.text import printable
from tests.says import Says

pytestmark = pytest.mark.thorough

HOSTILE = "\x1b[2J\x1b]0;owned\x07[bold red]hi[/] \u202e\x9b31m\ud800\r0"
FIGURES = {
    "reward/mean": 0.5449,
    "accuracy/lenient": 0.875,
    "completion/tokens_mean": 11.6,
    "tokens/generated": 744.0,
    "time/rollout": 4.0,
    "time/train": 6.25,
    "time/step": 10.0,
}
# a training that makes a step whenever it reads a line; `what` happens in the third
PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
from rlpost.screen import Screen
import rlpost.screen.screen as module
from rlpost.screen import picture
from rlpost.screen.state import Shown

log, what, text = Path(sys.argv[1]), sys.argv[2], sys.argv[3].encode().decode("unicode_escape")
module.Shown = SimpleNamespace(some_of=lambda step, batch: [Shown(step, text, text, 1.0, {text[:50]: 1.0}, "stop")])
screen = Screen(plain=what == "plain")
asked = []

def interrupted(number, frame):
    if asked:
        screen.leave_at_once("left at once")
        os._exit(130)
    asked.append(None)
    screen.show_stopping()

signal.signal(signal.SIGINT, interrupted)
screen.line("what runs")
with screen.waiting("loading"):
    time.sleep(0.1)
with screen:
    screen.open(title="my-run", about="a model", total_steps=3, log=log)
    screen.begin(0, 3)
    print("from a library")
    os.write(2, b"from C\\n")
    subprocess.run(["echo", "from a child"])
    for step in (1, 2, 3):
        screen.begin_step()
        screen.phase("sampling", "64 completions")
        if what != "at once":
            sys.stdin.readline()
        if step == 3 and what == "raise":
            raise ValueError("broken")
        if step == 3 and what == "fail":
            picture.frame = None
        if step == 2:
            screen.note("careful: " + text[:50])
        screen.step(step, 3, FIGURES, object())
print("concluded")
"""
PROGRAM = f"FIGURES = {FIGURES}\n{PROGRAM}"


def session(tmp_path: Path, what: str = "", *, text: str = "a reply", **options: str | int) -> Session:
    escaped = text.encode("unicode_escape").decode()
    return Session(PROGRAM, [str(tmp_path / "log.txt"), what, escaped], **options)  # type: ignore[arg-type]


def step(running: Session, count: int = 1) -> None:
    running.type("\n" * count)


def ended(running: Session, code: int) -> None:
    """The program ends with `code`, and the terminal is as before."""
    assert running.end() == code
    assert not running.terminal.alternate
    assert running.terminal.cursor_shown


def in_order(terminal: Terminal, *texts: str) -> None:
    """Each of `texts` stands on the screen, below the one before."""
    at = 0
    for text in texts:
        found = [i for i, line in enumerate(terminal.shown) if text in line and i >= at]
        assert found, f"{text!r} is not below line {at} of\n" + "\n".join(terminal.shown)
        at = found[0] + 1


# On a terminal


def test_a_terminal_has_a_picture_and_keeps_what_matters_of_it(tmp_path: Path) -> None:
    running = session(tmp_path)
    running.until_shown("sampling 64 completions")
    assert running.terminal.alternate
    assert not running.terminal.cursor_shown
    step(running)
    for text in ("1/3 steps", "reward    0.54", "│ a reply"):
        running.until_shown(text)
    step(running)
    running.until_shown("careful: a reply")
    assert running.terminal.coloured
    step(running)
    ended(running, 0)
    in_order(running.terminal, "what runs", "step 1/3  reward 0.54", "careful", "step 2/3", "step 3/3", "concluded")
    assert not any("from" in line or "loading" in line for line in running.terminal.shown)
    log = (tmp_path / "log.txt").read_text()
    assert all(text in log for text in ("from a library", "from C", "from a child", "careful", "step 3/3  reward"))


def test_the_picture_follows_the_size_of_the_terminal(tmp_path: Path) -> None:
    running = session(tmp_path)
    step(running)
    running.until_shown("1/3 steps")
    for columns, lines in [(120, 40), (40, 12), (20, 5), (80, 24)]:
        running.resize(columns, lines)
        # the second line reaches from edge to edge, and nothing is left of another size
        running.until(
            lambda t: (
                len(t.shown[1]) == t.columns - 1
                and t.shown[1].endswith("left")
                and sum("my-run" in line for line in t.shown) == 1
                and sum("Ctrl-C" in line for line in t.shown) == (t.lines >= 20)
            )
        )
    step(running, 2)
    assert running.end() == 0


def test_no_color_takes_the_colours_alone(tmp_path: Path) -> None:
    running = session(tmp_path, NO_COLOR="1")
    step(running)
    running.until_shown("1/3 steps")
    assert running.terminal.alternate
    step(running, 2)
    assert running.end() == 0
    assert not running.terminal.coloured


@pytest.mark.parametrize(("what", "term"), [("plain", "xterm-256color"), ("", "dumb")])
def test_a_dumb_terminal_and_who_asks_for_it_have_plain_lines(tmp_path: Path, what: str, term: str) -> None:
    running = session(tmp_path, what, TERM=term, NO_COLOR="1")
    running.until_shown("from a child")
    for number in (1, 2, 3):
        step(running)
        running.until_shown(f"step {number}/3")
    assert running.end() == 0
    in_order(running.terminal, "what runs", "loading ...", "from a library", "step 1/3", "    | a reply", "concluded")


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[2J\x1b]0;owned\x07[bold red]hi[/] [/foo] \u202e\x9b31m\r0",
        "日本語" * 500,
        "e" + "\u0301" * 5000,
        "שלום 👩\u200d👧 🇩🇪 ❤️ " * 99,
    ],
)
def test_hostile_text_leaves_the_picture_as_it_is(tmp_path: Path, text: str) -> None:
    running = session(tmp_path, text=text[:40_000])
    step(running)
    running.until_shown("1/3 steps")
    step(running)
    running.until(  # a picture may come in several parts
        lambda t: (
            t.shown[0].startswith(" my-run")
            and t.shown[-1] == " Ctrl-C finishes the step, saves and stops"
            and any(line.startswith(" careful:") for line in t.shown[-4:-1])
        )
    )
    step(running)
    assert running.end() == 0


# The terminal is given back


@pytest.mark.parametrize(
    ("what", "code", "left"),
    [
        ("raise", 1, ["step 1/3", "step 2/3", "Traceback", "ValueError: broken"]),
        ("fail", 0, ["step 1/3", "step 3/3", "concluded"]),  # the picture fails, which the training survives
    ],
)
def test_after_an_error_the_terminal_is_as_before(tmp_path: Path, what: str, code: int, left: list[str]) -> None:
    running = session(tmp_path, what)
    for number in (1, 2):
        step(running)
        running.until_shown(f"{number}/3 steps")
    step(running)
    ended(running, code)
    in_order(running.terminal, *left)


def test_a_full_disk_hides_neither_the_error_nor_the_lines() -> None:
    program = """
from pathlib import Path
from rlpost.screen import Screen
with Screen() as screen:
    screen.open(title="my-run", about="a model", total_steps=3, log=Path("/dev/full"))
    screen.note("careful")
    raise ValueError("the disk is full")
"""
    running = Session(program)
    assert running.end() == 1
    in_order(running.terminal, "careful", "ValueError: the disk is full")
    assert not any("OSError" in line for line in running.terminal.shown)


def test_the_first_ctrl_c_is_answered_and_the_second_leaves(tmp_path: Path) -> None:
    running = session(tmp_path)
    running.until_shown("sampling 64")
    running.process.send_signal(signal.SIGINT)
    running.until_shown(STOPPING)
    assert running.terminal.alternate
    running.process.send_signal(signal.SIGINT)
    ended(running, 130)
    in_order(running.terminal, "what runs", "left at once")


# Elsewhere


def plain() -> tuple[Screen, io.StringIO]:
    shown = io.StringIO()
    return Screen(Console(file=shown, highlight=False, soft_wrap=True)), shown


def test_a_pipe_gets_no_control_character(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "log.txt"), "at once", r"\x1b[31mred\u202e"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "TERM": "xterm"})
    assert done.stderr == "from C\n"
    assert [c for c in done.stdout if not c.isprintable() and c != "\n"] == []
    assert done.stdout.splitlines()[:2] == ["what runs", "loading ..."]
    assert "    | \\x1b[31mred\\u202e" in done.stdout.splitlines()
    assert max(map(len, done.stdout.splitlines())) <= 100
    log = (tmp_path / "log.txt").read_text().splitlines()
    begun = [line.split("  ")[0] for line in log if not line.startswith(" ")]
    assert begun == ["words", "step 1/3", r"careful: \x1b[31mred\u202e", "step 2/3", "step 3/3"]


def test_what_the_encoding_does_not_have_is_escaped(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "log.txt"), "at once", r"\u65e5"]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, check=True, env=environment)
    assert b"    | \\u65e5" in done.stdout.splitlines()


def test_lines_are_whole_and_do_nothing(says: Says) -> None:
    screen, shown = plain()
    screen.line("x" * 300)
    screen.note(HOSTILE)
    assert shown.getvalue() == "x" * 300 + "\n" + printable(HOSTILE) + "\n"
    screen.evaluated(0, {"eval/reward": 0.5})
    screen.evaluated(3, {"eval/reward": 0.25})
    says("train", "\n".join(shown.getvalue().splitlines()[2:]))


# What stays on the terminal after the picture


def test_few_lines_all_stay_in_their_order() -> None:
    lines = [Line("before"), Line("1", is_step=True), Line("between", "yellow"), Line("2", is_step=True)]
    assert worth_keeping(lines) == lines


def test_of_many_steps_some_stay() -> None:
    steps = [Line(str(step), is_step=True) for step in range(1, 61)]
    assert [line.text for line in worth_keeping(steps)] == [*map(str, range(1, 56, 6)), "60"]
