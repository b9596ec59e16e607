"""scripts/bench_memory: what is made of the samples, and a limit that a peak can break. The measuring is no test."""

from __future__ import annotations

from typing import Self

import bench_memory as bench
import pytest

PEAKS = [1.0e9, 4.321e9, 2.0e9]  # bytes held, one look after another


class Command:
    """Stands for a command that is looked at as often as there are figures in PEAKS, and then has ended."""

    pid = 7

    def __init__(self, command: list[str], exit_code: int) -> None:
        self.command = command
        self.returncode = exit_code
        self.stdout = iter(["step 1/1\n"])
        self._looks = len(PEAKS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def poll(self) -> int | None:
        self._looks -= 1
        return None if self._looks >= 0 else self.returncode


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """The commands that were started; each holds what PEAKS says and ends with 0, or with 5 where `fails` is in it."""
    commands: list[Command] = []
    held = iter(PEAKS * 9)

    def start(command: list[str], **how: object) -> Command:
        commands.append(Command(command, 5 if "fails" in command else 0))
        return commands[-1]

    def held_by(pid: int) -> dict[str, float]:
        size = next(held)
        return {"processes": 2, "Pss": size, "Pss_Anon": size - 0.5e9, "Pss_File": 0.4e9, "Pss_Shmem": 0.1e9}

    monkeypatch.setattr(bench.subprocess, "Popen", start)
    monkeypatch.setattr(bench, "held_by", held_by)
    monkeypatch.setattr(bench, "LOOK_EVERY", 0)
    return commands


@pytest.mark.parametrize(
    ("at_most", "code", "said"),
    [
        (None, 0, ""),
        ("4.5", 0, ""),
        ("4.321", 0, ""),  # not above
        ("4.32", 1, "error: the peak of 4.321 GB is above the 4.32 GB of --at-most\n"),
        ("4", 1, "error: the peak of 4.321 GB is above the 4 GB of --at-most\n"),
    ],
)
def test_a_peak_above_the_limit_is_exit_code_1_and_one_line(
    at_most: str | None,
    code: int,
    said: str,
    started: list[Command],
    capsys: pytest.CaptureFixture[str],
) -> None:
    limit = [] if at_most is None else ["--at-most", at_most]
    assert bench.main([*limit, "train", "grpo"]) == code
    captured = capsys.readouterr()
    assert captured.err == said
    assert "peak     4.32 GB" in captured.out  # the figures are printed all the same
