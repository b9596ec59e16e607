"""A tracker in a thread: told exactly what metrics.jsonl says, and never able to stop a run."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlpost.tracking.trackers import Status, Tracking
from tests.tracking.recording import RecordingTracker, WrongTracker

CONFIG = {"steps": 4, "optim": {"lr": 1e-5}}


@pytest.fixture(autouse=True)
def no_wait_is_felt(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a thread that ends at once takes a while too, which is not to be announced."""
    monkeypatch.setattr("rlpost.tracking.trackers.SILENT_SECONDS", 60.0)


def tracker(folder: Path, what: str = "", where: str = "", timeout: float = 20.0) -> Tracking:
    folder.mkdir(exist_ok=True)
    file = folder / "calls"
    return Tracking(WrongTracker(file, where, what) if what else RecordingTracker(file), folder, CONFIG, timeout)


def write(folder: Path, *lines: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)


def calls(folder: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def wait_until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def track(folder: Path, *steps: int, kept: int = -1, value: float = 0.5) -> None:
    """One whole attempt that records `steps`."""
    following = tracker(folder)
    write(folder, {"step": steps[0], "reward/mean": value})
    following.start(kept)
    write(folder, *({"step": step, "reward/mean": value} for step in steps[1:]))
    assert following.close(Status.finished, pytest.fail) is None


def no_note(text: str) -> None:
    """For waits that may be announced or not."""


def test_a_tracker_logs_lines_written_before_and_after_its_start(tmp_path: Path) -> None:
    folder = tmp_path / "my-run"
    following = tracker(folder)
    write(folder, {"step": 0, "eval/reward": 0.25})
    following.start(-1)
    with (folder / "metrics.jsonl").open("a") as stream:  # a line that is seen before it is whole
        stream.write('{"step": 1, "reward/mean": 0.5, "accuracy')
        stream.flush()
        wait_until(lambda: len(calls(folder)) == 2 if (folder / "calls").exists() else False, "step 0 was not told")
        stream.write('/strict": null, "tokens/generated": 64.0}\n')
    write(folder, {"step": 2, "reward/mean": 0.1 + 0.2})
    assert following.close(Status.finished, pytest.fail) is None
    assert calls(folder) == [
        ["start", "my-run", str(folder), CONFIG, None, 0],
        ["log", 0, {"eval/reward": 0.25}],
        ["log", 1, {"reward/mean": 0.5, "tokens/generated": 64.0}],
        ["log", 2, {"reward/mean": 0.30000000000000004}],
        ["finish", "finished"],
    ]
    assert following.last_step() == 2


@pytest.mark.parametrize("where", ["start", "log"])
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("raise", "ConnectionError: nobody answers"),
        ("exit", "SystemExit: asked for a login"),
        ("hang", "within 1 s"),
    ],
)
def test_a_failure_is_known_while_the_run_goes_on(tmp_path: Path, where: str, what: str, reason: str) -> None:
    following = tracker(tmp_path, what, where, timeout=1.0)
    write(tmp_path, {"step": 1, "lr": 1.0}, {"step": 2, "lr": 1.0}, {"step": 3, "lr": 1.0})
    following.start(-1)
    if what == "hang":  # and `start` does not wait for it
        assert "rlpost-tracking" in {thread.name for thread in threading.enumerate()}
    wait_until(following.failure, "the failure was not seen")
    given = following.failure()
    assert given is not None
    assert reason in given
    if what in ("raise", "hang"):
        assert {"start": "start", "log": "logging step 2"}[where] in given
    assert "\n" not in given
    assert following.close(Status.finished, pytest.fail) == given
    assert following.last_step() == (None if where == "start" else 1)
    assert ["finish", "finished"] not in (calls(tmp_path) if (tmp_path / "calls").exists() else [])


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("raise", "finish: ConnectionError: nobody answers"),
        ("hang", "no answer to finish within 1 s"),
    ],
)
def test_a_failure_at_the_end_is_told_at_the_end(tmp_path: Path, what: str, reason: str) -> None:
    following = tracker(tmp_path, what, "finish", timeout=1.0)
    write(tmp_path, {"step": 1, "lr": 1.0})
    following.start(-1)
    began = time.monotonic()
    assert following.close(Status.finished, no_note) == reason
    assert time.monotonic() - began < 30


def test_a_long_wait_is_announced_and_ctrl_c_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.tracking.trackers.SILENT_SECONDS", 2.0)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    following = tracker(tmp_path, "hang", "finish")
    write(tmp_path, {"step": 1, "lr": 1.0})
    following.start(-1)
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        signal.setitimer(signal.ITIMER_REAL, 0.5)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        assert following.close(Status.finished, note) == "the wait for it was interrupted"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert notes == ["waiting for fake to finish, at most 20 s; Ctrl-C leaves without it"]


def test_a_resumed_run_keeps_its_id_and_logs_only_undone_steps_again(tmp_path: Path) -> None:
    track(tmp_path, 0, 1, 2, 3)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("".join(line + "\n" for line in lines[:2]))  # back to the checkpoint of 1
    (tmp_path / "calls").unlink()
    track(tmp_path, 2, 3, 4, kept=1, value=0.75)
    assert calls(tmp_path)[0][-2:] == ["its own id", 2]
    assert [call[1:] for call in calls(tmp_path) if call[0] == "log"] == [
        [step, {"reward/mean": 0.75}] for step in (2, 3, 4)
    ]


def test_a_tracker_that_was_lost_gets_what_it_missed_on_resuming(tmp_path: Path) -> None:
    following = tracker(tmp_path, "raise", "log")
    write(tmp_path, *({"step": step, "reward/mean": 0.5} for step in range(5)))
    following.start(-1)
    following.close(Status.stopped, no_note)
    assert following.last_step() == 1
    (tmp_path / "calls").unlink()
    track(tmp_path, 5, kept=4)
    assert [call[1] for call in calls(tmp_path) if call[0] == "log"] == [2, 3, 4, 5]


def test_tracking_that_is_asked_for_on_resuming_begins_with_the_first_step(tmp_path: Path) -> None:
    write(tmp_path, {"step": 0, "lr": 0.0}, {"step": 1, "lr": 0.0})
    track(tmp_path, 2, kept=1)
    assert calls(tmp_path)[0][-2:] == [None, 0]
    assert [call[1] for call in calls(tmp_path) if call[0] == "log"] == [0, 1, 2]
