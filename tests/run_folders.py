"""Run folders as training leaves them, written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpost.files import MANIFEST
from rlpost.record import BEGAN, FINISHED

STEP = {
    "reward/std": 0.5,
    "completion/tokens_mean": 12.0,
    "grad_norm": 1.5,
    "tokens/generated": 100.0,
    "time/rollout": 2.0,
    "time/train": 1.0,
    "time/step": 4.0,
}


def evaluation(value: float, low: float, high: float) -> dict[str, float]:
    """Metrics of a held-out evaluation."""
    measured = {"eval/accuracy_lenient": value, "eval/accuracy_lenient_low": low, "eval/accuracy_lenient_high": high}
    return {"eval/prompts": 50.0, **measured}


def step_row(step: int, reward: float | None, accuracy: float = 0.5, **more: float) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    return {"step": step, **STEP, "reward/mean": reward, "accuracy/lenient": accuracy, **more}


def rows_worth(batch: Any, *advantages: float) -> list[Any]:
    """The rows of `batch` with these advantages."""
    from rlpost.model.packing import rows_of  # not at the top, since it takes long

    rows = rows_of(batch)
    for row, advantage in zip(rows, advantages, strict=True):
        row.advantage = advantage
    return rows


def verdict(words: str) -> str:
    """A line of log.txt."""
    return f"2026-11-21 12:06:12,127 INFO {words}\n"


def make_run(
    folder: Path,
    rows: Sequence[Mapping[str, Any]] = (),
    *,
    steps: int = 2,
    log: str = verdict(f"{BEGAN}: rlpost train grpo") + verdict(FINISHED),
    overrides: Sequence[str] = ("model=tiny",),
) -> Path:
    """A run folder with these metrics."""
    folder.mkdir(parents=True)
    (folder / "command.txt").write_text(f"rlpost train grpo {' '.join(overrides)}\n")
    (folder / "overrides.txt").write_text("".join(f"{word}\n" for word in overrides))
    (folder / "config.yaml").write_text(f"model:\n  path: builtin:tiny\nsteps: {steps}\nseed: 7\n")
    packages = {"torch": "2.13.0", "vllm": None}
    environment = {"rlpost": "0.1.0", "python": "3.11.7", "packages": packages, "cpu_count": 2, "cuda": None}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "log.txt").write_text(log)
    return folder


def add_checkpoint(run: Path, step: int) -> Path:
    """The folder of a checkpoint that passes for whole as long as nothing is loaded."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / MANIFEST).write_text("{}")
    return folder


def save_checkpoint_of(run: Path, step: int, **changes: Any) -> Path:
    """Write a whole checkpoint of a run, of a few bytes; `changes` are arguments of `save_checkpoint`."""
    import torch  # not at the top, since it takes long

    from rlpost.runs.checkpoint import save_checkpoint

    def write_model(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    what: dict[str, Any] = {"write_model": write_model, "tensors": {"a": torch.ones(2)}, "state": {}, "keep_last": 9}
    return save_checkpoint(run / "checkpoints", step, **{**what, **changes})
