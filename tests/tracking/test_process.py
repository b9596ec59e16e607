"""A tracker in its own process: told exactly what metrics.jsonl says, and never able to stop or slow a run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlpost.tracking.trackers import Status, TrackerChoice, TrackerProcess

CONFIG = {"steps": 4, "optim": {"lr": 1e-5}}


@pytest.fixture(autouse=True)
def no_wait_is_felt(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a process that ends at once takes a while too, which is not to be announced."""
    monkeypatch.setattr("rlpost.tracking.trackers.SILENT_SECONDS", 60.0)


def tracker(folder: Path, what: str = "", where: str = "", timeout: float = 20.0) -> TrackerProcess:
    folder.mkdir(exist_ok=True)
    options = {"file": str(folder / "calls")} | ({"where": where, "what": what} if what else {})
    factory = "recording:WrongTracker" if what else "recording:RecordingTracker"
    return TrackerProcess(TrackerChoice("fake", factory, options, timeout), folder, CONFIG)


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


@pytest.mark.parametrize("status", list(Status))
def test_it_learns_how_the_run_ended(tmp_path: Path, status: Status) -> None:
    following = tracker(tmp_path)
    write(tmp_path, {"step": 1, "lr": 1.0})
    following.start(-1)
    assert following.close(status, pytest.fail) is None
    assert calls(tmp_path)[-1] == ["finish", status.value]


@pytest.mark.parametrize("where", ["start", "log"])
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("raise", "ConnectionError: nobody answers"),
        ("exit", "SystemExit: asked for a login"),
        ("leave", "its process ended with exit code 7"),
        ("hang", "within 1 s"),
    ],
)
def test_a_failure_is_known_while_the_run_goes_on(tmp_path: Path, where: str, what: str, reason: str) -> None:
    following = tracker(tmp_path, what, where, timeout=1.0)
    write(tmp_path, {"step": 1, "lr": 1.0}, {"step": 2, "lr": 1.0}, {"step": 3, "lr": 1.0})
    following.start(-1)
    assert following.failure() is None  # it is not waited for
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
        ("leave", "its process ended with exit code 7"),
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


def test_a_process_that_a_tracker_leaves_behind_is_ended_and_not_waited_for(tmp_path: Path) -> None:
    following = tracker(tmp_path / "r", "fork", "finish")
    write(tmp_path / "r", {"step": 1})
    following.start(-1)
    began = time.monotonic()
    assert following.close(Status.finished, no_note) is None
    assert time.monotonic() - began < 20


def test_the_traceback_and_what_is_printed_go_to_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for what in ("print", "raise"):
        following = tracker(tmp_path, what, "finish")
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
        write(tmp_path, {"step": 1, "lr": 1.0})
        following.start(-1)
        following.close(Status.finished, no_note)
    log = (tmp_path / "log.txt").read_text()
    assert "printed by the tracker\nprinted by what it starts\n" in log
    assert "ConnectionError: nobody\nanswers." in log
    assert capfd.readouterr() == ("", "")


def test_a_tracker_that_cannot_be_made_is_a_failure_too(tmp_path: Path) -> None:
    following = TrackerProcess(TrackerChoice("fake", "recording:Nothing", {}, 20.0), tmp_path, CONFIG)
    write(tmp_path, {"step": 1, "lr": 1.0})
    following.start(-1)
    reason = following.close(Status.finished, no_note)
    assert reason is not None
    assert "AttributeError" in reason


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


def test_a_run_that_begins_anew_in_its_folder_is_a_new_one(tmp_path: Path) -> None:
    track(tmp_path, 1, 2)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "calls").unlink()
    track(tmp_path, 1)
    assert calls(tmp_path)[0][-2:] == [None, 0]


def test_a_run_that_is_killed_ends_as_failed(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path\n"
        "from rlpost.tracking.trackers import TrackerChoice; from rlpost.tracking.trackers import TrackerProcess\n"
        "folder = Path(sys.argv[1])\n"
        "(folder / 'metrics.jsonl').write_text('{\"step\": 1, \"lr\": 1.0}\\n')\n"
        "choice = TrackerChoice('fake', 'recording:RecordingTracker', {'file': str(folder / 'calls')}, 20.0)\n"
        "TrackerProcess(choice, folder, {}).start(-1)\n"
        "os._exit(1)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env={"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 1
    wait_until(lambda: (tmp_path / "calls").exists() and len(calls(tmp_path)) == 3, "the tracker did not finish")
    assert calls(tmp_path)[1:] == [["log", 1, {"lr": 1.0}], ["finish", "failed"]]
