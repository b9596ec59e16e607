"""Trainings of the tiny model that are really sick, noticed by their own figures within ten steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.errors import DivergedError
from rlpost.runs.checkpoint import verify
from rlpost.runs.diagnosis import Symptom
from rlpost.train import watchers
from tests.trainings import metrics, train_in

WORDS = ["model=tiny", "policy=transformers", "eval.enabled=false", "prompts_per_step=4", "group_size=4", "steps=12"]
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
    return [*WORDS, *env, "env.max_completion_tokens=12", *words]


SICK = {
    "dead reward": (NOTHING, []),
    "rate too high": (LETTERS, ["optim.lr=0.5"]),
    "clip saturation": (LETTERS, ["optim.lr=0.05", "passes=4"]),
    "no spread": (BY_PROMPT, []),
    "drift": (LETTERS, ["optim.lr=0.03", "loss.kl_coef=1e-6", "passes=2"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_says_so_within_ten_steps(name: str, tmp_path: Path) -> None:
    body, words = SICK[name]
    assert train_in(TRAIN_GRPO, tmp_path / "run", rewarded(tmp_path, body, *words)) == 0
    log = (tmp_path / "run/log.txt").read_text()
    said = [line for line in log.splitlines() if f"WARNING {name} (steps" in line]
    assert len(said) == 1, log
    assert int(said[0].partition("(steps ")[2].partition(")")[0].partition("-")[2]) <= 10


def test_an_alarm_stops_a_run_whose_step_is_saved_and_that_goes_on_when_told(tmp_path: Path) -> None:
    words = rewarded(tmp_path, NOTHING)
    folder = tmp_path / "run"
    with pytest.raises(
        DivergedError, match=r"stopped after step 8 by diagnosis\.on_alarm=stop: dead reward \(steps 1-8\)"
    ):
        train_in(TRAIN_GRPO, folder, [*words, "diagnosis.on_alarm=stop"])
    verify(folder / "checkpoints/step-000008")
    assert train_in(TRAIN_GRPO, folder, [*words, "diagnosis.on_alarm=stop"], resume="auto") == 0
    assert metrics(folder)[-1]["step"] == 12


def test_an_alarm_saves_the_step_where_that_is_asked_for_and_says_nothing_where_it_is_off(tmp_path: Path) -> None:
    words = rewarded(tmp_path, NOTHING, "checkpoint.keep_last=9", "steps=10")
    assert train_in(TRAIN_GRPO, tmp_path / "saved", [*words, "diagnosis.on_alarm=checkpoint"]) == 0
    assert (tmp_path / "saved/checkpoints/step-000008").is_dir()
    assert train_in(TRAIN_GRPO, tmp_path / "off", [*words, "diagnosis.on_alarm=off"]) == 0
    assert "dead reward" not in (tmp_path / "off/log.txt").read_text()


def test_an_alarm_sees_the_evaluation_after_its_step(tmp_path: Path) -> None:
    words = ["steps=8", "group_size=2", "env.max_completion_tokens=4", "env.eval_limit=4", "eval.enabled=true"]
    with pytest.raises(DivergedError, match=r"100% -> 100% of the held-out completions were truncated"):
        train_in(TRAIN_GRPO, tmp_path / "run", [*WORDS, *words, "diagnosis.on_alarm=stop"])
    verify(tmp_path / "run/checkpoints/step-000008")


def test_what_was_told_before_a_stop_is_not_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looping = Symptom("repeated text", (10, 10), "16 of 16 completions repeat themselves", "lower optim.lr")
    monkeypatch.setattr(watchers, "repeated_text", lambda step, texts, prompts: looping if step == 10 else None)
    words = rewarded(tmp_path, LETTERS, "steps=10", "diagnosis.on_alarm=stop")
    with pytest.raises(DivergedError, match=r"stopped after step 10 .*repeated text"):
        train_in(TRAIN_GRPO, tmp_path / "run", words)
    monkeypatch.setattr(watchers, "repeated_text", lambda step, texts, prompts: looping)
    assert train_in(TRAIN_GRPO, tmp_path / "run", [*words, "steps=15"], resume="auto") == 0
