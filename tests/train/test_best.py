"""The best checkpoint: by held-out accuracy or reward, kept whatever is removed, and the same after resuming."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.paths import resolve_model_path
from rlpost.evaluation.play import EvalResult
from rlpost.evaluation.statistics import Share
from rlpost.settings.commands import HeldOutSettings
from rlpost.train.parts import HeldOut
from rlpost.train.progress import BestSoFar, Progress, why_ended
from rlpost.train.sampling import SamplingParts
from tests.says import Says
from tests.trainings import printed, train_in

SMALL = [
    *["model=tiny", "policy=scripted", "prompts_per_step=1", "group_size=2", "env.max_completion_tokens=4"],
    *["env.eval_limit=2", "eval.every=1", "checkpoint.every=0", "checkpoint.keep_last=1"],
]


def run(folder: Path, *words: str, resume: str | None = None) -> int:
    return train_in(TRAIN_GRPO, folder, [*SMALL, *words], resume)


def result(accuracy: float | None, reward: float = 0.0) -> EvalResult:
    share = None if accuracy is None else Share.of([1.0] * round(100 * accuracy) + [0.0] * round(100 * (1 - accuracy)))
    return EvalResult(100, 1, 0, 0.0, share, share, Share.of([0.0] * 100), reward, None, None, {}, 4.0)


def step_of(when: str) -> int:
    return 0 if when == "before training" else int(when.removeprefix("after step "))


@pytest.fixture
def accuracies(monkeypatch: pytest.MonkeyPatch) -> dict[str, Sequence[float | None]]:
    """What evaluations find: that before training, then after each step; the reward says the opposite."""
    found: dict[str, Sequence[float | None]] = {}

    def measure(parts: Any, ranks: Any, screen: Any, when: str) -> HeldOut:
        accuracy = found["all"][step_of(when)]
        return HeldOut(result(accuracy, reward=1 - (accuracy or 0.0)).metrics(), [])

    monkeypatch.setattr(SamplingParts, "measure", measure)
    return found


def folders(run_folder: Path) -> list[str]:
    return sorted(path.name for path in (run_folder / "checkpoints").glob("step-*"))


def best(run_folder: Path) -> str:
    return os.readlink(run_folder / "checkpoints" / "best")


def test_best_is_the_earliest_of_the_highest_accuracy(
    tmp_path: Path, accuracies: dict[str, Sequence[float | None]], capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    accuracies["all"] = [0.1, 0.25, 0.75, 0.75, 0.5, 0.5]
    folder = tmp_path / "r"
    assert run(folder, "steps=5") == 0
    assert folders(folder) == ["step-000002", "step-000005"]
    assert best(folder) == "step-000002"
    assert os.readlink(folder / "checkpoints" / "latest") == "step-000005"
    says("train", printed(capsys, "best: after"))
    assert resolve_model_path(f"{folder}/checkpoints/best") == f"{folder}/checkpoints/best/model"
    assert resolve_model_path(str(folder)) == f"{folder}/checkpoints/latest/model"


def test_step_within_chance_of_the_start_is_not_printed_as_best(
    tmp_path: Path, accuracies: dict[str, Sequence[float | None]], capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    accuracies["all"] = [0.5, 0.52, 0.4, 0.4]
    assert run(tmp_path / "r", "steps=2") == 0
    said = printed(capsys, "best")
    assert "best: after" not in said
    says("train", said)


def test_resumed_run_knows_its_best(tmp_path: Path, accuracies: dict[str, Sequence[float | None]]) -> None:
    accuracies["all"] = [0.1, 0.25, 0.75, 0.5, 0.75, 0.5, 0.5]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(whole, "steps=6") == 0
    assert run(parts, "steps=3") == 0
    assert run(parts, "steps=6", resume="latest") == 0
    for folder in (whole, parts):
        assert (folders(folder), best(folder)) == (["step-000002", "step-000006"], "step-000002")
        state = json.loads((folder / "checkpoints/latest/state/state.json").read_text())["progress"]
        assert (state["best_step"], state["best_accuracy"]) == (2, 0.75)


def test_run_resumed_from_an_earlier_step_forgets_later_bests(
    tmp_path: Path, accuracies: dict[str, Sequence[float | None]]
) -> None:
    accuracies["all"] = [0.1, 0.25, 0.5, 0.75]
    folder, kept = tmp_path / "r", ["checkpoint.every=1", "checkpoint.keep_last=9"]
    assert run(folder, "steps=2", *kept) == 0
    whole = folder / "checkpoints/step-000002"
    shutil.copytree(whole, tmp_path / "whole")
    assert run(folder, "steps=3", *kept, resume="latest") == 0
    assert best(folder) == "step-000003"
    accuracies["all"] = [0.1, 0.25, 0.5, 0.3]
    assert not (whole / "state").exists()
    shutil.rmtree(whole)
    shutil.move(tmp_path / "whole", whole)
    assert run(folder, "steps=3", *kept, resume=f"{folder}/checkpoints/step-000002") == 0
    assert best(folder) == "step-000002"


def test_missing_best_checkpoint_is_reported(
    tmp_path: Path, accuracies: dict[str, Sequence[float | None]], capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    accuracies["all"] = [0.1, 0.75, 0.5, 0.5]
    folder = tmp_path / "r"
    assert run(folder, "steps=2") == 0
    shutil.rmtree(folder / "checkpoints/step-000001")
    capsys.readouterr()
    assert run(folder, "steps=3", resume="latest") == 0
    says("train", printed(capsys, "step 1, the best"))
    assert not (folder / "checkpoints/best").is_symlink()


def test_without_accuracy_best_has_the_highest_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    rewards = [0.1, 0.25, 0.75, 0.5, 0.6]

    def measure(parts: Any, ranks: Any, screen: Any, when: str) -> HeldOut:
        reward = rewards[step_of(when)]
        ends = {"eval/reward_low": reward - 0.05, "eval/reward_high": reward + 0.05}
        return HeldOut({"eval/prompts": 100.0, "eval/reward": reward, **ends}, [])

    monkeypatch.setattr(SamplingParts, "measure", measure)
    folder = tmp_path / "r"
    assert run(folder, "steps=3") == 0
    assert best(folder) == "step-000002"
    says("train", printed(capsys, "["))
    assert run(folder, "steps=4", resume="latest") == 0
    assert best(folder) == "step-000002"


def test_strict_accuracy_below_lenient_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    half, fifth = Share.of([1.0, 0.0] * 50), Share.of([1.0, 0.0, 0.0, 0.0, 0.0] * 20)
    found = replace(result(0.0, 0.5), accuracy_lenient=half, accuracy_strict=fifth)
    monkeypatch.setattr(SamplingParts, "measure", lambda parts, ranks, screen, when: HeldOut(found.metrics(), []))
    assert run(tmp_path / "r", "steps=1") == 0
    says("train", printed(capsys, "strict "))


def test_evaluation_without_a_measure_is_not_the_best() -> None:
    so_far = BestSoFar()
    assert not so_far.is_new_best(1, {})
    assert so_far.is_new_best(2, {"eval/accuracy_lenient": 0.0})
    assert not so_far.is_new_best(3, {"eval/reward": 5.0})
    assert so_far.best_step == 2


def test_where_no_reply_is_scored_the_lowest_loss_is_best() -> None:
    progress = Progress()
    found = [progress.is_new_best(step, {"eval/loss": loss}) for step, loss in enumerate([2.0, 1.5, 1.6, 1.5, 1.4], 1)]
    assert found == [True, True, False, False, True]
    assert (progress.best_step, progress.best_loss) == (5, 1.4)


def test_loss_that_stops_falling_ends_training(says: Says) -> None:
    progress, settings = Progress(), HeldOutSettings(every=1, patience=2)
    for step, loss in enumerate([1.5, 1.6, 1.7], start=1):
        assert why_ended(settings, progress) == ""
        progress.eval_after = {"eval/loss": loss}
        progress.is_new_best(step, progress.eval_after)
    says("train", why_ended(settings, progress))
