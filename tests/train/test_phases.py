"""What a training tells its screen: never a moment without a name."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.envs.arithmetic import ArithmeticEnv
from rlpost.rewards.score import Score
from rlpost.runs import checkpoint
from rlpost.screen import Screen
from tests.trainings import train_in

WORDS = ["model=tiny", "policy=transformers", "prompts_per_step=2", "group_size=2"]
WORDS += ["env.max_completion_tokens=4", "env.eval_limit=8", "steps=2"]


def test_every_part_of_a_training_is_named_as_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArithmeticEnv, "score", lambda self, c: Score(reward=float(c.sample), parts={}))
    told: list[tuple[str, str, int | None, int | None]] = []

    def phase(
        self: Screen, kind: str, what: str = "", done: int | None = None, total: int | None = None, tokens: int = 0
    ) -> None:
        told.append((kind, what, done, total))

    monkeypatch.setattr(Screen, "phase", phase)
    monkeypatch.setattr(checkpoint, "MOMENT", 60.0)  # a disk may be slow
    assert train_in(TRAIN_GRPO, tmp_path / "r", WORDS) == 0
    step = ["sampling", "scoring", "building", "training", "pushing weights", "checking"]
    assert [kind for kind, _ in groupby(told, key=lambda each: each[0])] == [
        "evaluating",
        "checking",
        *[*step, "recording"],
        *[*step, "evaluating", "recording", "saving checkpoint"],
        "closing",
    ]
    first = [done or 0 for _, _, done, _ in told[: told.index(("evaluating", "", 8, 8)) + 1]]
    assert first[0] == 0
    assert first == sorted(first)  # completions are counted as they end
    assert ("sampling", "4 completions", None, None) in told
    assert ("training", "", 4, 4) in told
