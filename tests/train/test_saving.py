"""Checkpoints are written while the next step samples, and nothing they hold changes meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlpost.catalog import TRAIN_GRPO
from rlpost.errors import CheckpointError
from rlpost.policies.transformers import TransformersWrapper
from rlpost.runs.checkpoint import verify
from rlpost.train import ranks, watchers
from tests.train.test_alarms import LETTERS, rewarded
from tests.trainings import metrics, train_in, untimed


def words(folder: Path) -> list[str]:
    small = ["policy=transformers", "env.max_completion_tokens=6", "prompts_per_step=2", "group_size=2", "steps=4"]
    kept = ["checkpoint.every=1", "checkpoint.keep_last=9", "optim.lr=1e-3", "deterministic=true"]
    return rewarded(folder, LETTERS, *small, *kept)


def test_step_samples_while_the_last_one_is_saved_then_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = words(tmp_path)
    assert train_in(TRAIN_GRPO, tmp_path / "plain", asked) == 0
    done: list[str] = []
    sampled, begun = threading.Event(), threading.Event()
    save, generate, update = watchers.save_checkpoint, TransformersWrapper.generate, ranks.update

    def slow(*given: Any, **how: Any) -> Path:
        sampled.clear()
        done.append("begin")
        begun.set()
        if done.count("begin") < 3:  # the last one has no step behind it
            assert sampled.wait(60)
        path = save(*given, **how)
        done.append("end")
        return path

    def noting(self: Any, *given: Any) -> Any:
        if done:  # the thread that writes the last step may be slow to begin
            assert begun.wait(60)
            begun.clear()
        done.append("sample")
        made = generate(self, *given)
        sampled.set()
        return made

    def learning(*given: Any, **how: Any) -> Any:
        done.append("learn")
        return update(*given, **how)

    monkeypatch.setattr(watchers, "save_checkpoint", slow)
    monkeypatch.setattr(TransformersWrapper, "generate", noting)
    monkeypatch.setattr(ranks, "update", learning)
    assert train_in(TRAIN_GRPO, tmp_path / "slow", [*asked, "gate.enabled=false"]) == 0
    first = ["sample", "learn", "begin", "sample", "end", "learn", "begin", "sample", "end", "learn"]
    assert done[: len(first)] == first
    assert untimed(tmp_path / "slow") == untimed(tmp_path / "plain")
    for step in range(1, 5):
        one, other = (tmp_path / name / f"checkpoints/step-{step:06d}" for name in ("slow", "plain"))
        verify(one)
        held = [load_file(folder / "model/model.safetensors") for folder in (one, other)]
        assert all(torch.equal(held[0][name], held[1][name]) for name in held[0])


@pytest.mark.parametrize(("last", "fails"), [(4, 2), (1, 1)], ids=["before the next step", "the last one"])
def test_failed_save_ends_the_run_before_it_learns_more(
    last: int, fails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = watchers.save_checkpoint

    def failing(folder: Path, step: int, **how: Any) -> Path:
        if step == fails:
            raise CheckpointError("the disk is full")
        return save(folder, step, **how)

    monkeypatch.setattr(watchers, "save_checkpoint", failing)
    with pytest.raises(CheckpointError, match="is full"):
        train_in(TRAIN_GRPO, tmp_path / "run", [*words(tmp_path), f"steps={last}"])
    assert metrics(tmp_path / "run")[-1]["step"] == fails
