"""The terminal: exact lines, and nothing that the model could do to it."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from tensordict import TensorDict

from rlpost.screen import Screen, clock, step_line

Batch = Callable[..., TensorDict]
HOSTILE = "\x1b[2J\x1b]0;owned\x07[bold red]hi[/] \u202e\x9b31m\ud800\r0"
INERT = "\\x1b[2J\\x1b]0;owned\\x07[bold red]hi[/] \\u202e\\x9b31m\\ud800\\r0"
FIGURES = {
    "reward/mean": 0.5449,
    "accuracy/lenient": 0.875,
    "completion/tokens_mean": 11.6,
    "sampler/logprob_gap": 0.01234,
    "grad_norm": 1.239,
    "tokens/generated": 744.0,
    "time/rollout": 4.0,
    "time/train": 6.25,
    "time/sync": 0.55,
}


def terminal(width: int = 60) -> Screen:
    """A screen that believes somebody is looking."""
    return Screen(Console(file=io.StringIO(), force_terminal=True, width=width, highlight=False, soft_wrap=True))


def file() -> Screen:
    return Screen(Console(file=io.StringIO(), highlight=False, soft_wrap=True))


def shown(screen: Screen) -> str:
    assert isinstance(screen.console.file, io.StringIO)
    return screen.console.file.getvalue()


@pytest.fixture(autouse=True)
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


# Lines


def test_a_step_is_one_line_of_these_figures() -> None:
    assert step_line(7, 60, FIGURES, "3:05") == (
        "step  7/60  reward 0.54  accuracy  88%  tokens 12  gap 0.012  grad 1.24  186 tok/s  "
        "rollout 4.0s train 6.2s  left 3:05"
    )


def test_figures_that_are_missing_or_no_number_are_left_out() -> None:
    figures = FIGURES | {"accuracy/lenient": math.nan, "sampler/logprob_gap": math.nan, "time/rollout": 0.0}
    del figures["grad_norm"]
    figures["tokens/generated"] = 0.0
    assert step_line(1, 5, figures, "0:00") == (
        "step 1/5  reward 0.54  tokens 12  0 tok/s  rollout 0.0s train 6.2s  left 0:00"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (0.6, "0:01"), (59.4, "0:59"), (59.6, "1:00"), (65, "1:05"), (3599.6, "1:00:00"), (3700, "1:01:40")],
)
def test_time_is_told_in_minutes_and_hours(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_the_time_left_is_that_of_the_last_steps(monkeypatch: pytest.MonkeyPatch, batch: Batch) -> None:
    now = [100.0]
    monkeypatch.setattr("rlpost.screen.time.monotonic", lambda: now[0])
    screen = file()
    screen.begin(done=0, total=40)
    for step in range(1, 21):
        now[0] += 90.0 if step <= 10 else 10.0  # the first steps were slow; eight later they are forgotten
        screen.step(step, 40, FIGURES, batch())
    lines = [line for line in shown(screen).splitlines() if line.startswith("step")]
    assert lines[0].endswith("left 58:30")  # 39 steps of 90 s
    assert lines[10].endswith("left 38:40")  # 29 steps of (7 * 90 + 10) / 8 = 80 s
    assert lines[19].endswith("left 3:20")  # 20 steps of 10 s


def test_a_sample_is_shown_at_the_first_step_and_every_tenth(batch: Batch) -> None:
    screen = file()
    screen.begin(done=0, total=20)
    for step in range(1, 21):
        screen.step(step, 20, FIGURES, batch(reward=0.5, text=f"reply {step}"))
    samples = [line for line in shown(screen).splitlines() if "|" in line]
    assert samples == ["    | reply 1", "    | reply 10", "    | reply 20"]


def test_a_sample_says_what_was_asked_answered_and_earned(batch: Batch) -> None:
    screen = file()
    screen.sample(batch(query="What is 1 + 1?", text="two\nlines", reward=0.25, finish_reason="length"))
    assert shown(screen) == "    What is 1 + 1?\n    | two\n    | lines\n    reward 0.25, length\n"


def test_a_long_or_empty_sample_has_at_most_eight_lines_and_at_least_one(batch: Batch) -> None:
    screen = file()
    screen.sample(batch(text="\n".join(map(str, range(20)))))
    assert [line for line in shown(screen).splitlines() if "|" in line] == [f"    | {i}" for i in range(8)]
    screen = file()
    screen.sample(batch(text=""))
    assert "    | \n" in shown(screen)


def test_figures_without_a_batch_are_no_line() -> None:
    screen = file()
    screen.step(0, 5, {"eval/reward": 0.5}, None)
    assert shown(screen) == ""


# What the model says stays text


@pytest.mark.parametrize("make", [terminal, file])
def test_hostile_text_is_shown_and_does_nothing(make: Callable[[], Screen]) -> None:
    screen = make()
    screen.line(HOSTILE)
    assert shown(screen) == INERT + "\n"


def test_a_hostile_sample_is_inert_in_prompt_and_reply(batch: Batch) -> None:
    screen = file()
    hostile = HOSTILE.replace("\ud800", "")
    screen.sample(batch(query=hostile, text=hostile))
    inert = INERT.replace("\\ud800", "")
    # the carriage return ends a line of the reply; none of it reaches the terminal
    reply = inert.removesuffix("\\r0")
    assert shown(screen) == f"    {inert}\n    | {reply}\n    | 0\n    reward 1, stop\n"


def test_long_lines_are_not_cut_or_folded() -> None:
    for screen in (terminal(20), file()):
        screen.line("x" * 300)
        assert shown(screen) == "x" * 300 + "\n"


# Colour and bar only where somebody looks


def test_a_terminal_has_colour_and_a_bar_that_goes_away() -> None:
    screen = terminal()
    screen.begin(done=2, total=8)
    screen.note("careful")
    screen.step(3, 8, {}, None)
    screen.end()
    assert "\x1b[33mcareful" in shown(screen)
    assert "training" in shown(screen)
    assert "3/8" in shown(screen)
    screen.end()  # a second time does nothing


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_with_no_color_or_a_dumb_terminal_there_are_plain_lines(
    monkeypatch: pytest.MonkeyPatch, batch: Batch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    screen = terminal()
    assert_plain(screen, batch)


def test_without_a_terminal_there_are_plain_lines(batch: Batch) -> None:
    assert_plain(file(), batch)


def assert_plain(screen: Screen, batch: Batch) -> None:
    screen.begin(done=0, total=4)
    screen.note("careful")
    screen.step(1, 4, FIGURES, batch())
    screen.end()
    assert "\x1b" not in shown(screen)
    assert "training" not in shown(screen)
    assert shown(screen).startswith("careful\nstep 1/4  reward 0.54")


# Output of others


def test_everything_written_meanwhile_goes_to_the_file(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("before\n")
    program = (
        "import os, subprocess, sys\n"
        "from pathlib import Path\n"
        "from rlpost.screen import output_into\n"
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
