"""Prompts weighed by how their last groups did: the shares of draws, the loop, and resuming."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.data.order import OrderedRows
from rlpost.envs.difficulty import WeighedRows
from rlpost.errors import ConfigError
from rlpost.settings.commands import RunRequest

TRAINED = ["model=tiny", "policy=transformers", "model.autocast=none", "prompts_per_step=4", "group_size=2"]
TRAINED += ["env.max_completion_tokens=4", "eval.enabled=false", "deterministic=true", "difficulty.enabled=true"]


def rows(size: int, least: float = 0.2, seed: int = 0) -> WeighedRows:
    return WeighedRows(OrderedRows(range(size), shuffle=False, seed=0), seed, least)


def test_every_prompt_is_drawn_once_before_any_comes_again() -> None:
    drawn = list(islice(rows(50), 50))
    assert drawn == list(range(50))


def test_prompts_are_drawn_in_proportion_to_their_weights() -> None:
    """Of 30 prompts 10 are never right, 10 always, 10 half of the time: weights 0.2, 0.2 and 1, so 1 : 1 : 5."""
    weighed = rows(30)
    means = [0.0] * 10 + [1.0] * 10 + [0.5] * 10
    drawn: Counter[float] = Counter()
    for draw, prompt in enumerate(islice(weighed, 7000)):
        weighed.learn(draw, means[prompt])
        drawn[means[prompt]] += 1
    assert drawn[0.5] / 7000 == pytest.approx(5 / 7, abs=0.01)
    assert drawn[0.0] / 7000 == pytest.approx(1 / 7, abs=0.01)
    shares = weighed.take_shares()
    assert shares["difficulty/middle"] == pytest.approx(5 / 7, abs=0.01)
    assert shares["difficulty/new"] == 30 / 7000
    assert weighed.take_shares() == {}


def test_a_prompt_of_one_right_in_four_weighs_three_quarters_of_the_way_up() -> None:
    weighed = rows(2)
    next(iter(weighed))
    assert weighed.weight(0) == 1.0  # not known yet
    weighed.learn(0, 0.25)
    assert weighed.weight(0) == pytest.approx(0.2 + 0.8 * 0.75)


def test_another_process_goes_on_with_the_same_draws() -> None:
    weighed = rows(7, seed=3)
    for draw, prompt in enumerate(islice(weighed, 20)):
        weighed.learn(draw, (prompt % 3) / 2)
    other = rows(7, seed=3)
    other.restore(json.loads(json.dumps(weighed.state())))
    assert list(islice(other.iter_from(20), 30)) == list(islice(weighed.iter_from(20), 30))
    assert list(islice(other.iter_from(15), 5)) == [weighed.number_of(draw) for draw in range(15, 20)]


def run(folder: Path, *words: str, resume: str | None = None) -> list[dict[str, Any]]:
    composed = compose(TRAIN_GRPO, [*TRAINED, *words])
    request = RunRequest(folder, resume, composed.overrides, ["rlpost", "train", "grpo"], composed.yaml)
    assert TRAIN_GRPO.train(composed.settings, request) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def some_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model is never right, so replies with small ids are, and sums whose answer ends in 0 never."""
    from rlpost.envs.arithmetic import ArithmeticEnv
    from rlpost.rewards.score import Score

    def score(self: ArithmeticEnv, conversation: Any) -> Score:
        right = float(conversation.response_ids[0] < 130 and not str(conversation.answer or "").endswith("0"))
        return Score(reward=right, accuracy_strict=right, accuracy_lenient=right)

    monkeypatch.setattr(ArithmeticEnv, "score", score)


def untimed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]


@pytest.mark.usefixtures("some_right")
@pytest.mark.parametrize("dynamic", ["false", "true"])
def test_a_resumed_run_draws_what_the_unbroken_one_does(tmp_path: Path, dynamic: str) -> None:
    words = ["env.limit=6", f"dynamic.enabled={dynamic}"]
    whole = run(tmp_path / "whole", *words, "steps=6")
    run(tmp_path / "broken", *words, "steps=3", "optim.schedule=constant")
    broken = run(tmp_path / "broken", *words, "steps=6", "optim.schedule=constant", resume="latest")
    same = run(tmp_path / "same", *words, "steps=6", "optim.schedule=constant")
    assert untimed(broken) == untimed(same)
    assert whole[0]["difficulty/new"] > 0.5
    assert whole[-1]["difficulty/new"] == 0.0


def test_it_needs_prompts_that_come_again_and_stays_as_the_run_began(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"every prompt is new: add env\.limit=200"):
        run(tmp_path / "r", "steps=1", "env=countdown")
    run(tmp_path / "s", "steps=1", "env.limit=6")
    with pytest.raises(ConfigError, match=r"the run began with difficulty\.enabled=true; keep that"):
        run(tmp_path / "s", "steps=2", "env.limit=6", "difficulty.enabled=false", resume="latest")
