"""How a training answers signals: after the step in progress, at once at the second, or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpost.screen import Screen
from rlpost.train.signals import Signals
from tests.says import Says
from tests.screen.vt import Session


@pytest.fixture
def signals() -> Iterator[Signals]:
    """Of this process, in a step."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    caught = Signals(Screen())
    caught.catch()
    caught.steps_begin()
    yield caught
    caught.release()
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"])
def test_signal_in_a_step_stops_the_run_with_its_code(
    number: signal.Signals, code: int, signals: Signals, capfd: pytest.CaptureFixture[str], says: Says
) -> None:
    os.kill(os.getpid(), number)
    assert (signals.stopping, signals.exit_code) == (True, code)
    says("train", capfd.readouterr().err)


STUBBORN = """
import sys, time
from rlpost.screen import Screen
from rlpost.train.signals import Signals
signals = Signals(Screen())
signals.catch()
signals.steps_begin()
print("started", flush=True)
while not signals.stopping:
    time.sleep(0.01)
print("stopping", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("first", "second", "code"), [("INT", "INT", 130), ("TERM", "TERM", 143), ("INT", "TERM", 143)]
)
def test_second_signal_leaves_at_once(first: str, second: str, code: int) -> None:
    command = [sys.executable, "-c", STUBBORN]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.Signals[f"SIG{first}"])
    assert process.stdout.readline() == "stopping\n"
    process.send_signal(signal.Signals[f"SIG{second}"])
    out, _ = process.communicate(timeout=45)  # the step would have gone on for a minute
    assert (out, process.returncode) == ("", code)


def test_repeated_sighup_is_one_request_and_another_signal_leaves(
    signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):  # as the end of a session sends them
        os.kill(os.getpid(), number)
    assert left == []
    os.kill(os.getpid(), signal.SIGTERM)
    assert (left, signals.exit_code) == ([143], 129)


def test_under_nohup_a_closed_terminal_changes_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals = Signals(Screen())
    try:
        signals.catch()
        os.kill(os.getpid(), signal.SIGHUP)
        assert not signals.stopping
    finally:
        signals.release()
        signal.signal(signal.SIGHUP, before)


def test_signal_after_the_last_step_stops_nothing(
    signals: Signals, capfd: pytest.CaptureFixture[str], says: Says
) -> None:
    signals.steps_end()
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.exit_code == 0
    says("train", capfd.readouterr().err)


ON_A_TERMINAL = """
import sys, time
from pathlib import Path
from rlpost.screen import Screen
from rlpost.train.signals import Signals
folder = Path(sys.argv[1])
with Screen() as screen:
    signals = Signals(screen)
    signals.catch()
    screen.open(title="a run", about="", total_steps=1, log=folder / "log.txt")
    signals.steps_begin()
    screen.note("in the step")  # not print(): the terminal closes as soon as its first bytes are seen
    while not signals.stopping:
        time.sleep(0.01)
    screen.step(1, 1, {"reward/mean": 1.0}, None)
    screen.note("saved")
    print("saved", flush=True)
    (folder / "saved").write_text("")
screen.line("stopped")
print("stopped")
sys.exit(signals.exit_code)
"""


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_closed_terminal_does_not_keep_a_run_from_saving(tmp_path: Path, term: str) -> None:
    running = Session(ON_A_TERMINAL, [str(tmp_path)], TERM=term)
    running.until_shown("in the step")
    running.hang_up()
    running.process.send_signal(signal.SIGHUP)
    assert running.process.wait(120) == 129
    assert (tmp_path / "saved").is_file()
