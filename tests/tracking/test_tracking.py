"""A tracker in a thread: told exactly what metrics.jsonl says, and never able to stop or change a training."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.settings.commands import RunRequest
from rlpost.tracking.trackers import SILENT_SECONDS, Status, Tracker, Tracking
from rlpost.train import run, watchers
from tests.processes import wait_until
from tests.says import Says
from tests.trainings import train_in

pytestmark = pytest.mark.thorough

CONFIG = {"steps": 4, "optim": {"lr": 1e-5}}


class RecordingTracker(Tracker):
    """Appends every call to `file` as a JSON list.

    In the call `where` (`log` means that of step 2) it does `what` instead: raise, hang or exit.
    """

    name = "fake"

    def __init__(self, file: Path, where: str = "", what: str = "") -> None:
        self.file, self.where, self.what = file, where, what

    def start(self, folder: Path, config: dict[str, Any], known_as: str | None, first_step: int) -> str:
        self.write("start", str(folder), config, known_as, first_step)
        return known_as or "own-id"

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Sequence[Any]]) -> None:
        self.write("log", step, dict(metrics))

    def finish(self, status: Status) -> None:
        self.write("finish", status)

    def write(self, *call: Any) -> None:
        if call[0] == self.where and (call[0] != "log" or call[1] == 2):
            if self.what == "raise":
                raise ConnectionError("nobody\nanswers.")
            if self.what == "hang":
                time.sleep(60)
            if self.what == "exit":
                raise SystemExit("asked for a login")
        with self.file.open("a") as stream:
            stream.write(json.dumps(call) + "\n")


def calls(folder: Path) -> list[list[Any]]:
    """The calls that a tracker has written to `calls` in `folder`."""
    file = folder / "calls"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


# The thread


def write(folder: Path, *lines: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)


def write_steps(folder: Path, *steps: int, value: float = 0.5) -> None:
    write(folder, *({"step": step, "reward/mean": value} for step in steps))


def started(folder: Path, where: str = "", what: str = "", *, kept: int = -1, timeout: float = 20.0) -> Tracking:
    following = Tracking(RecordingTracker(folder / "calls", where, what), folder, CONFIG, timeout)
    following.start(kept)
    return following


def any_note(text: str) -> None:
    """Waits may be announced or not: on a busy machine a thread takes a while to end."""


def logged_by_a_whole_attempt(folder: Path, *steps: int, kept: int, value: float = 0.5) -> list[Any]:
    """(step, value) of what an attempt logs that begins behind the step `kept` and records `steps`."""
    write_steps(folder, steps[0], value=value)
    following = started(folder, kept=kept)
    write_steps(folder, *steps[1:], value=value)
    assert following.close("finished", any_note) is None
    return [(call[1], call[2]["reward/mean"]) for call in calls(folder) if call[0] == "log"]


def test_a_tracker_logs_lines_written_before_and_after_its_start(tmp_path: Path) -> None:
    folder = tmp_path / "my-run"
    folder.mkdir()
    write(folder, {"step": 0, "eval/reward": 0.25})
    following = started(folder)
    with (folder / "metrics.jsonl").open("a") as stream:  # a line that is seen before it is whole
        stream.write('{"step": 1, "reward/mean": 0.5, "accuracy')
        stream.flush()
        wait_until(lambda: len(calls(folder)) == 2)
        stream.write('/strict": null, "tokens/generated": 64.0}\n')
    write_steps(folder, 2, value=0.1 + 0.2)
    assert following.close("finished", any_note) is None
    assert calls(folder) == [
        ["start", str(folder), {**CONFIG, "run_folder": str(folder)}, None, 0],
        ["log", 0, {"eval/reward": 0.25}],
        ["log", 1, {"reward/mean": 0.5, "tokens/generated": 64.0}],
        ["log", 2, {"reward/mean": 0.30000000000000004}],
        ["finish", "finished"],
    ]
    assert following.last_step == 2


@pytest.mark.parametrize("where", ["start", "log"])
@pytest.mark.parametrize("what", ["raise", "exit", "hang"])
def test_a_failure_is_known_while_the_run_goes_on(tmp_path: Path, says: Says, where: str, what: str) -> None:
    write_steps(tmp_path, 1, 2, 3)
    following = started(tmp_path, where, what, timeout=1.0)
    if what == "hang":  # and `start` does not wait for it
        assert "rlpost-tracking" in {thread.name for thread in threading.enumerate()}
    wait_until(following.failure)
    given = following.failure()
    says("train", given)
    assert following.close("finished", any_note) == given
    assert following.last_step == (-1 if where == "start" else 1)
    assert ["finish", "finished"] not in calls(tmp_path)


@pytest.mark.parametrize("what", ["raise", "hang"])
def test_a_failure_at_the_end_is_told_at_the_end(tmp_path: Path, says: Says, what: str) -> None:
    write_steps(tmp_path, 1)
    following = started(tmp_path, "finish", what, timeout=1.0)
    began = time.monotonic()
    says("train", following.close("finished", any_note))
    assert time.monotonic() - began < 30


def test_a_long_wait_is_announced_and_ctrl_c_ends_it(tmp_path: Path, says: Says) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    write_steps(tmp_path, 1)
    following = started(tmp_path, "finish", "hang")
    notes: list[str] = []
    began = time.monotonic()

    def note(text: str) -> None:
        notes.append(text)
        assert time.monotonic() - began > SILENT_SECONDS
        signal.setitimer(signal.ITIMER_REAL, 0.5)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        reason = following.close("finished", note)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    says("train", "\n".join([*notes, str(reason)]))


def test_a_resumed_run_keeps_its_id_and_logs_undone_steps_again(tmp_path: Path) -> None:
    logged_by_a_whole_attempt(tmp_path, 0, 1, 2, 3, kept=-1)
    (tmp_path / "metrics.jsonl").unlink()
    write_steps(tmp_path, 0, 1)  # back to the checkpoint of 1
    (tmp_path / "calls").unlink()
    logged = logged_by_a_whole_attempt(tmp_path, 2, 3, 4, kept=1, value=0.75)
    assert logged == [(2, 0.75), (3, 0.75), (4, 0.75)]
    assert calls(tmp_path)[0][-2:] == ["own-id", 2]


def test_a_tracker_that_was_lost_gets_what_it_missed_on_resuming(tmp_path: Path) -> None:
    write_steps(tmp_path, *range(5))
    following = started(tmp_path, "log", "raise")
    following.close("stopped", any_note)
    assert following.last_step == 1
    (tmp_path / "calls").unlink()
    assert [step for step, _ in logged_by_a_whole_attempt(tmp_path, 5, kept=4)] == [2, 3, 4, 5]


def test_tracking_that_is_new_on_resuming_begins_with_step_0(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 1)
    assert [step for step, _ in logged_by_a_whole_attempt(tmp_path, 2, kept=1)] == [0, 1, 2]
    assert calls(tmp_path)[0][-2:] == [None, 0]


# A training

TINY = [
    "model=tiny",
    "policy=transformers",
    "model.autocast=none",
    "steps=3",
    "prompts_per_step=2",
    "group_size=2",
    "env.max_completion_tokens=4",
    "eval.limit=2",
    "deterministic=true",
]
Use = Callable[..., None]


def train(folder: Path, *words: str, resume: str | None = None) -> int:
    return train_in(TRAIN_GRPO, folder, [*TINY, *words], resume)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Puts a tracker of recording.py in the place of the configured one: no setting leads to it."""

    def use_tracker(**options: str) -> None:
        def build(settings: object, request: RunRequest) -> Tracking:
            tracker = RecordingTracker(request.folder / "calls", **options)
            return Tracking(tracker, request.folder, {"a": 1}, 2.0)

        monkeypatch.setattr(run, "build_tracking", build)

    return use_tracker


def finite_metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: number for name, number in line.items() if number is not None} for line in lines]


def logged(folder: Path) -> list[dict[str, Any]]:
    return [{"step": call[1], **call[2]} for call in calls(folder) if call[0] == "log"]


def test_tracking_on_the_command_line_reaches_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train(tmp_path / "r", "tracking=tensorboard", "tracking.completions=2") == 0
    events = EventAccumulator(str(tmp_path / "r" / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    for line in finite_metrics(tmp_path / "r"):
        step = line.pop("step")
        for name, number in line.items():
            [value] = [event.value for event in events.Scalars(name) if event.step == step]
            assert value == pytest.approx(number, rel=1e-6)
    assert b"steps | 3" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    tables = {event.step: event.tensor_proto.string_val[0] for event in events.Tensors("completions/text_summary")}
    assert [(step, table.count(b"What is")) for step, table in tables.items()] == [(1, 2), (2, 2), (3, 2)]


def test_every_step_is_tracked_once_after_a_resume_too(tmp_path: Path, use: Use) -> None:
    use()
    folder = tmp_path / "r"
    assert train(folder, "steps=2") == 0
    assert [line["step"] for line in logged(folder)] == [0, 1, 2]  # 0: the first evaluation
    assert train(folder, "steps=4", "eval.enabled=false", resume="latest") == 0
    assert logged(folder) == finite_metrics(folder)
    assert [call[-2:] for call in calls(folder) if call[0] == "start"] == [[None, 0], ["own-id", 3]]


@pytest.mark.parametrize(
    ("where", "what", "reaches"),
    [("start", "raise", None), ("log", "raise", 1), ("log", "hang", 1), ("finish", "raise", 3), ("finish", "hang", 3)],
)
def test_a_training_is_the_same_whatever_its_tracker_does(
    tmp_path: Path, use: Use, capsys: pytest.CaptureFixture[str], where: str, what: str, reaches: int | None
) -> None:
    folder = tmp_path / "r"
    use(where=where, what=what)
    began = time.monotonic()
    assert train(folder) == 0
    assert time.monotonic() - began < 60  # for which a tracker hangs
    assert [line["step"] for line in finite_metrics(folder)] == [0, 1, 2, 3]
    assert (folder / "checkpoints" / "step-000003").is_dir()
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fake has ")]
    assert re.findall(r"step (\d) only", line) == ([] if reaches is None else [str(reaches)])
    assert ("ConnectionError" if what == "raise" else "2 s") in line
    log = (folder / "log.txt").read_text()
    assert line in log
    assert log.splitlines()[-1].endswith("finished")


def test_a_tracker_that_fails_is_named_once_at_the_next_step(
    tmp_path: Path, use: Use, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    use(where="start", what="raise")
    original = Tracking.failure

    def failure(self: Tracking) -> str | None:
        wait_until(lambda: original(self))  # so that it is seen at the first step
        return original(self)

    monkeypatch.setattr(Tracking, "failure", failure)
    assert train(tmp_path / "r") == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "fake" in line]
    assert said[0].endswith("fake follows")
    says("train", "\n".join(said[1:]))


def test_a_run_that_ends_with_an_error_is_failed_for_the_tracker(
    tmp_path: Path, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*parts: object, **named: object) -> None:
        raise ValueError("broken")

    use()
    monkeypatch.setattr(watchers, "save_checkpoint", broken)
    with pytest.raises(ValueError, match="broken"):
        train(tmp_path / "r")
    assert calls(tmp_path / "r")[-1] == ["finish", "failed"]
