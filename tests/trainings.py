"""Trainings as the commands run them, in this process, and the figures that they leave."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlpost.catalog import TRAIN_DISTILL, TRAIN_DPO, TRAIN_EXPERT_ITERATION, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.config.compose import compose
from rlpost.settings.commands import RunRequest
from rlpost.train import distill, dpo, expert_iteration, grpo, sft

LOOPS: dict[Command[Any], Any] = {
    TRAIN_GRPO: grpo,
    TRAIN_SFT: sft,
    TRAIN_DPO: dpo,
    TRAIN_EXPERT_ITERATION: expert_iteration,
    TRAIN_DISTILL: distill,
}
TIMED = ("time/", "memory/")


def train_in(command: Command[Any], folder: Path, words: Sequence[str], resume: str | None = None) -> int:
    """Run or resume a training in `folder`; its exit code."""
    composed = compose(command, list(words))
    request = RunRequest(folder, resume, composed.overrides, ["rlpost", *command.verb.split()], composed.yaml)
    return LOOPS[command].train(composed.settings, request)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(folder: Path) -> list[dict[str, Any]]:
    """The same but for figures of time and memory, which differ from run to run."""
    return [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in metrics(folder)]
