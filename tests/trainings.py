"""Trainings as the commands run them, in this process, and the figures that they leave."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyarrow.parquet import read_table

from rlpost.catalog import Command
from rlpost.config.compose import compose
from rlpost.settings.commands import RunRequest

TIMED = ("time/", "memory/")
FOUR_SUMS = ["env.digits=1", "env.limit=4", "env.held_out=0"]  # the same four in training and held out


def train_in(command: Command[Any], folder: Path, words: Sequence[str], resume: str | None = None) -> int:
    """Run or resume a training in `folder`; its exit code."""
    composed = compose(command, list(words))
    request = RunRequest(folder, resume, composed.overrides, ["rlpost", *command.verb.split()], composed.yaml)
    return command.train(composed.settings, request)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rollouts(folder: Path, step: int) -> list[dict[str, Any]]:
    """The rows of a step's rollouts."""
    return read_table(folder / "rollouts" / f"step-{step:06d}.parquet").to_pylist()


def untimed(folder: Path) -> list[dict[str, Any]]:
    """The same but for figures of time and memory, which differ from run to run."""
    return [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in metrics(folder)]


def weights(folder: Path) -> dict[str, Any]:
    """The weights of a run's newest checkpoint, by name."""
    from safetensors.torch import load_file

    files = (folder / "checkpoints/latest/model").glob("*.safetensors")
    return {name: weight for file in files for name, weight in load_file(file).items()}


def ends_alike(one: Path, other: Path) -> bool:
    """Whether two runs have the same figures and end with bitwise equal weights."""
    mine, its = weights(one), weights(other)
    same = mine.keys() == its.keys() and all(mine[name].equal(its[name]) for name in mine)
    return same and untimed(one) == untimed(other)


def train_in_parts(command: Command[Any], folder: Path, words: Sequence[str], steps: int = 4) -> tuple[Path, Path]:
    """Train these steps at once, and in two halves; the folders of both runs, `whole` and `parted`."""
    whole, parted = folder / "whole", folder / "parted"
    assert train_in(command, whole, [*words, f"steps={steps}"]) == 0
    assert train_in(command, parted, [*words, f"steps={steps // 2}"]) == 0
    assert train_in(command, parted, [*words, f"steps={steps}"], resume="latest") == 0
    return whole, parted


def printed(capsys: pytest.CaptureFixture[str], part: str) -> str:
    """The printed lines that contain `part`."""
    return "\n".join(line for line in capsys.readouterr().out.splitlines() if part in line)


def stand_in_for_grpo(monkeypatch: pytest.MonkeyPatch, train: Callable[..., int]) -> None:
    """Let `train(settings, request, assemble, learn)` take the place of every training, without importing torch."""
    loop: Any = ModuleType("rlpost.train.grpo")
    loop.assemble = loop.learn = None
    training: Any = ModuleType("rlpost.train.training")
    training.run = train
    monkeypatch.setitem(sys.modules, "rlpost.train.grpo", loop)
    monkeypatch.setitem(sys.modules, "rlpost.train.training", training)
