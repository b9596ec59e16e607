from itertools import islice
from typing import Any

import pytest

from rlpost.envs.countdown import CountdownEnv
from rlpost.envs.proof import prove
from rlpost.errors import ConfigError, DataError
from rlpost.rewards.countdown import value_of
from rlpost.settings import CountdownSettings


def tasks(count: int, **settings: Any) -> list[dict[str, Any]]:
    return list(islice(CountdownEnv(**settings).open_rows(settings.get("seed", 0)).iter_from(0), count))


def identities(found: list[dict[str, Any]]) -> set[str]:
    return {f"{sorted(task['numbers'])} {task['target']}" for task in found}


def test_every_problem_is_solved_by_its_solution() -> None:
    for task in tasks(500, min_numbers=2, max_numbers=6, max_number=100, max_target=999):
        assert value_of(task["solution"], task["numbers"]) == task["target"]


def test_train_and_test_share_no_problem_whatever_the_seed() -> None:
    train = identities(tasks(2000, split="train", max_number=9, seed=1))
    test = identities(tasks(500, split="test", max_number=9, seed=2))
    assert len(train) > 500
    assert len(test) > 100
    assert not train & test


def test_with_nothing_held_out_both_splits_are_the_same_and_that_is_known() -> None:
    assert tasks(50, split="train", held_out=0) == tasks(50, split="test", held_out=0)
    train, test = (CountdownEnv(split=split, held_out=0, limit=30) for split in ("train", "test"))
    assert test.prompts_shared_with(train) == 30
    assert CountdownEnv(split="test").prompts_shared_with(CountdownEnv()) == 0


def test_any_position_is_reached_at_once_and_a_run_resumes_there() -> None:
    rows = CountdownEnv(seed=3).open_rows(3)
    assert list(islice(rows.iter_from(10**12), 3)) == [rows.at(10**12 + i) for i in range(3)]
    env = CountdownEnv(num_envs=2, repeats=4, group_repeats=True, seed=5)
    env.draw()
    resumed = CountdownEnv(num_envs=2, repeats=4, group_repeats=True, seed=5)
    resumed.load_state_dict(env.state_dict())
    assert env.draw() == resumed.draw()
    with pytest.raises(DataError, match="targets up to 100"):
        CountdownEnv(max_target=50).load_state_dict(env.state_dict())


@pytest.mark.parametrize("numbers", [(2, 2, 9), (3, 6, 100)])
def test_gold_answers_score_full_marks_and_corrupted_ones_do_not(numbers: tuple[int, int, int]) -> None:
    least, most, highest = numbers
    env = CountdownEnv(min_numbers=least, max_numbers=most, max_number=highest, max_target=999, split="test", limit=200)
    proof = prove(env)
    assert proof.holds, proof.lines()
    assert proof.replies == 10 * proof.checked


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"env.operations=power is unknown: it is one of add, subtract, multiply, divide"
    ):
        CountdownEnv(operations=("power",))
    with pytest.raises(ConfigError, match=r"env.max_number=0"):
        CountdownEnv(max_number=0)
    with pytest.raises(ConfigError, match=r"env.min_numbers=1"):
        CountdownSettings(min_numbers=1)
    with pytest.raises(DataError, match=r"2000 tries made no problem of the train split .*env.held_out=0.2"):
        CountdownEnv(min_numbers=10, max_numbers=10, max_target=5, operations=("add",)).start()
