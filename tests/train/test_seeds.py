"""What a seed decides of a training."""

from __future__ import annotations

from pathlib import Path

from rlpost.catalog import TRAIN_GRPO
from tests.trainings import train_in, untimed

WORDS = ["model=tiny", "policy=transformers", "env.digits=1", "env.max_completion_tokens=6", "prompts_per_step=2"]


def test_one_seed_gives_one_run_and_another_another(tmp_path: Path) -> None:
    words = [*WORDS, "group_size=2", "steps=3", "deterministic=true", "eval.limit=8"]
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        assert train_in(TRAIN_GRPO, tmp_path / name, [*words, f"seed={seed}"]) == 0
    assert untimed(tmp_path / "a") == untimed(tmp_path / "b")
    assert untimed(tmp_path / "a") != untimed(tmp_path / "c")
