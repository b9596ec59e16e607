"""A training with a tracker: the same numbers, and the same training whatever becomes of the tracker."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.settings.commands import RunRequest
from rlpost.tracking.trackers import Tracking
from rlpost.train import run, watchers
from tests.tracking.recording import RecordingTracker, WrongTracker

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


def train(folder: Path, *words: str, resume: str | None = None) -> int:
    composed = compose(TRAIN_GRPO, [*TINY, *words])
    request = RunRequest(folder, resume, composed.overrides, ["rlpost", "train", "grpo"], composed.yaml)
    return TRAIN_GRPO.train(composed.settings, request)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def use(patch: pytest.MonkeyPatch, tracker: type[RecordingTracker], **options: str) -> None:
    """Put a tracker of recording.py in the place of the configured one."""

    def build(settings: object, request: RunRequest) -> Tracking:
        return Tracking(tracker(request.folder / "calls", **options), request.folder, {"a": 1}, 2.0)

    patch.setattr(run, "build_tracking", build)


def logged(folder: Path) -> list[dict[str, Any]]:
    calls = [json.loads(line) for line in (folder / "calls").read_text().splitlines()]
    return [{"step": call[1], **call[2]} for call in calls if call[0] == "log"]


def finite(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: number for name, number in line.items() if number is not None} for line in lines]


def test_a_tracker_gets_every_step_and_the_first_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, RecordingTracker)
    assert train(tmp_path / "r") == 0
    assert [line["step"] for line in logged(tmp_path / "r")] == [0, 1, 2, 3]
    assert logged(tmp_path / "r") == finite(metrics(tmp_path / "r"))


def test_tracking_on_the_command_line_reaches_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train(tmp_path / "r", "tracking=tensorboard", "tracking.completions=2") == 0
    events = EventAccumulator(str(tmp_path / "r" / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    for line in metrics(tmp_path / "r"):
        for name, number in finite([line])[0].items():
            if name != "step":
                [value] = [event.value for event in events.Scalars(name) if event.step == line["step"]]
                assert value == pytest.approx(number, rel=1e-6)
    assert b"steps | 3" in events.Tensors("config")[0].tensor_proto.string_val[0]
    tables = {event.step: event.tensor_proto.string_val[0] for event in events.Tensors("completions")}
    assert [(step, table.count(b"What is")) for step, table in tables.items()] == [(1, 2), (2, 2), (3, 2)]


def test_after_a_resume_each_step_is_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, RecordingTracker)
    folder = tmp_path / "r"
    assert train(folder, "steps=2") == 0
    assert train(folder, "steps=4", "eval.enabled=false", resume="latest") == 0
    assert logged(folder) == finite(metrics(folder))
    starts = [line for line in (folder / "calls").read_text().splitlines() if line.startswith('["start"')]
    assert [json.loads(line)[-2:] for line in starts] == [[None, 0], ["its own id", 3]]


@pytest.mark.parametrize("where", ["start", "log", "finish"])
@pytest.mark.parametrize("what", ["raise", "hang"])
def test_whatever_becomes_of_the_tracker_the_training_is_the_same(
    where: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "r"
    use(monkeypatch, WrongTracker, where=where, what=what)
    began = time.monotonic()
    assert train(folder) == 0
    assert time.monotonic() - began < 60  # for which a tracker hangs
    assert [line["step"] for line in metrics(folder)] == [0, 1, 2, 3]
    assert (folder / "checkpoints" / "step-000003").is_dir()
    reason = {"raise": "ConnectionError: nobody answers", "hang": "within 2 s"}[what]
    extent = {"start": "nothing of this run", "log": "this run up to step 1 only", "finish": "up to step 3 only"}[where]
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fake has ")]
    assert extent in line
    assert reason in line
    log = (folder / "log.txt").read_text()
    assert line in log
    assert log.splitlines()[-1].endswith("the run finished")


def test_a_tracker_that_fails_meanwhile_is_named_once_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, WrongTracker, where="start", what="raise")
    original = Tracking.failure

    def failure(self: Tracking) -> str | None:
        until = time.monotonic() + 60
        while (found := original(self)) is None and time.monotonic() < until:  # so that it is seen at the first step
            time.sleep(0.01)
        return found

    monkeypatch.setattr(Tracking, "failure", failure)
    assert train(tmp_path / "r") == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "fake" in line]
    assert said[1:] == [
        "tracking with fake has ended: start: ConnectionError: nobody answers; the training goes on",
        "fake has nothing of this run: start: ConnectionError: nobody answers; log.txt says more",
    ]
    assert said[0].endswith("fake follows")


def test_a_run_that_ends_with_an_error_is_failed_for_the_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, RecordingTracker)

    def broken(*parts: object, **named: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(watchers, "save_checkpoint", broken)
    with pytest.raises(ValueError, match="broken"):
        train(tmp_path / "r")
    assert (tmp_path / "r" / "calls").read_text().splitlines()[-1] == '["finish", "failed"]'
