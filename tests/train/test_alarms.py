"""Trainings of the tiny model that are really sick, noticed by their own figures within ten steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.errors import DivergedError
from rlpost.runs.checkpoint import verify
from tests.says import Says
from tests.trainings import metrics, train_in

WORDS = ["model=tiny", "eval.enabled=false", "prompts_per_step=4", "group_size=4", "steps=12"]
SAMPLED = ["policy=transformers", "env.max_completion_tokens=12"]
LETTERS = (
    "def score(completions, **kept):\n    return [float(sum(c.isalpha() for c in text)) / 6 for text in completions]\n"
)
BY_PROMPT = "def score(prompts, **kept):\n    return [float(any(n in str(p) for n in '135')) for p in prompts]\n"
NOTHING = "def score(completions, **kept):\n    return [0.25 for _ in completions]\n"


def rewarded(folder: Path, body: str, *words: str) -> list[str]:
    """A training with a reward of this body."""
    (folder / "mine.py").write_text(body)
    (folder / "rows.jsonl").write_text("".join(f'{{"question": "Say {n}."}}\n' for n in range(8)))
    env = ["env=dataset", f"env.path={folder}/rows.jsonl", f"env.reward={folder}/mine.py:score", "env.held_out=0"]
    return [*WORDS, *env, *words]


SICK = {
    "dead reward": (NOTHING, []),
    "rate too high": (LETTERS, ["optim.lr=0.5"]),
    "clip saturation": (LETTERS, ["optim.lr=0.05", "passes=4"]),
    "no spread": (BY_PROMPT, []),
    "drift": (LETTERS, ["optim.lr=0.03", "loss.kl_coef=1e-6", "passes=2"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SICK)
def test_sick_run_warns_once_within_ten_steps(name: str, tmp_path: Path) -> None:
    body, words = SICK[name]
    assert train_in(TRAIN_GRPO, tmp_path / "run", rewarded(tmp_path, body, *SAMPLED, *words)) == 0
    log = (tmp_path / "run/log.txt").read_text()
    [warning] = [line for line in log.splitlines() if f"WARNING {name} (steps" in line]
    assert int(warning.partition("(steps ")[2].partition(")")[0].partition("-")[2]) <= 10


def test_alarm_stops_the_run_once_and_saves_the_step(tmp_path: Path, says: Says) -> None:
    words = [*rewarded(tmp_path, NOTHING, *SAMPLED), "diagnosis.on_alarm=stop"]
    folder = tmp_path / "run"
    with says.refused("train", DivergedError, "(steps 1-8)"):
        train_in(TRAIN_GRPO, folder, words)
    verify(folder / "checkpoints/step-000008")
    assert train_in(TRAIN_GRPO, folder, words, resume="auto") == 0
    assert metrics(folder)[-1]["step"] == 12


def test_alarm_only_saves_the_step_or_is_off(tmp_path: Path) -> None:
    words = rewarded(tmp_path, NOTHING, *SAMPLED, "checkpoint.keep_last=9", "steps=10")
    for name, is_saved in (("checkpoint", True), ("off", False)):
        assert train_in(TRAIN_GRPO, tmp_path / name, [*words, f"diagnosis.on_alarm={name}"]) == 0
        assert (tmp_path / name / "checkpoints/step-000008").is_dir() == is_saved


def test_alarm_sees_the_evaluation_after_its_step(tmp_path: Path) -> None:
    words = ["steps=8", "group_size=2", "env.max_completion_tokens=4", "env.eval_limit=4", "eval.enabled=true"]
    with pytest.raises(DivergedError, match="100% -> 100%"):
        train_in(TRAIN_GRPO, tmp_path / "run", [*WORDS, "policy=transformers", *words, "diagnosis.on_alarm=stop"])
    verify(tmp_path / "run/checkpoints/step-000008")


def test_repeated_text_stops_a_run_and_not_its_resumption(tmp_path: Path) -> None:
    replies = f"policy.replies=[{'a' * 210},{'a' * 220}]"
    words = rewarded(tmp_path, LETTERS, "policy=scripted", replies, "env.max_completion_tokens=256")
    words += ["prompts_per_step=1", "group_size=2", "steps=10", "diagnosis.on_alarm=stop"]
    with pytest.raises(DivergedError, match="repeated text"):
        train_in(TRAIN_GRPO, tmp_path / "run", words)
    assert (tmp_path / "run/checkpoints/latest").resolve().name == "step-000010"
    assert train_in(TRAIN_GRPO, tmp_path / "run", [*words, "steps=15"], resume="auto") == 0
