"""Prompts weighed by how their last groups did: the shares of draws, the loop, and resuming."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.data.order import OrderedRows
from rlpost.envs.difficulty import WeighedRows
from rlpost.errors import ConfigError
from tests.envs.own_rows import write_rows
from tests.trainings import metrics, train_in, train_in_parts, untimed

TRAINED = ["model=tiny", "policy=transformers", "model.autocast=none", "prompts_per_step=4", "group_size=2"]
TRAINED += ["env.max_completion_tokens=4", "eval.enabled=false", "deterministic=true", "difficulty.enabled=true"]
TRAINED += ["optim.schedule=constant"]


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


def test_one_right_in_four_weighs_three_quarters_of_the_way_up() -> None:
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


REWARD = """
def score(completions, never, **columns):
    return [float(not no and len(text) % 2) for text, no in zip(completions, never, strict=True)]
"""


@pytest.mark.parametrize("dynamic", ["false", "true"])
def test_a_resumed_run_draws_what_the_unbroken_one_does(tmp_path: Path, dynamic: str) -> None:
    """Of six prompts two never earn anything, and the others as the length of a reply wills."""
    path = write_rows(tmp_path, [{"prompt": f"Say {number}.", "never": number < 2} for number in range(6)])
    (tmp_path / "r.py").write_text(REWARD)
    own = ["env=dataset", f"env.path={path}", f"env.reward={tmp_path}/r.py:score", "env.held_out=0"]
    whole, parted = train_in_parts(TRAIN_GRPO, tmp_path, [*TRAINED, *own, f"dynamic.enabled={dynamic}"])
    assert untimed(parted) == untimed(whole)
    shares = [line["difficulty/new"] for line in metrics(whole)]
    assert shares[0] > 0.5
    assert shares[-1] == 0.0


def test_it_needs_prompts_that_repeat_and_stays_as_it_began(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.limit=200"):
        train_in(TRAIN_GRPO, tmp_path / "r", [*TRAINED, "steps=1", "env=countdown"])
    train_in(TRAIN_GRPO, tmp_path / "s", [*TRAINED, "steps=1", "env.limit=6"])
    again = [*TRAINED, "steps=2", "env.limit=6", "difficulty.enabled=false"]
    with pytest.raises(ConfigError, match=r"difficulty\.enabled=true; keep"):
        train_in(TRAIN_GRPO, tmp_path / "s", again, resume="latest")
