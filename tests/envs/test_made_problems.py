"""Problems made on the spot: sums, and countdown."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from rlpost.envs import ArithmeticEnv
from rlpost.envs.arithmetic import Problems, is_held_out, permuted, problem
from rlpost.envs.countdown import CountdownEnv
from rlpost.envs.proof import prove
from rlpost.errors import ConfigError, DataError
from tests.says import Says

ALL = ("add", "subtract", "multiply")
MAKERS = pytest.mark.parametrize("make", [ArithmeticEnv, CountdownEnv])


def pairs(problems: Problems) -> list[tuple[int, int]]:
    return [(task["a"], task["b"]) for task in problems.epoch(0)]


# Both


@MAKERS
def test_with_nothing_held_out_both_splits_are_the_same(make: type[ArithmeticEnv | CountdownEnv]) -> None:
    train, test = (make(split=split, held_out=0, limit=30) for split in ("train", "test"))
    assert [c.task for c in train.draw(30)] == [c.task for c in test.draw(30)]
    assert test.prompts_shared_with(train) == 30
    assert make(split="test").prompts_shared_with(make()) == 0


@MAKERS
def test_a_run_resumes_at_the_same_problem(make: type[ArithmeticEnv | CountdownEnv]) -> None:
    env, resumed = (make(num_envs=2, repeats=4, group_repeats=True, seed=5) for _ in range(2))
    env.draw()
    resumed.load_state_dict(env.state_dict())
    assert env.draw() == resumed.draw()


@pytest.mark.parametrize(
    ("make", "settings", "replies"),
    [
        (ArithmeticEnv, {"operations": ALL, "digits": 1}, 7),
        (ArithmeticEnv, {"operations": ALL, "digits": 4}, 7),
        (CountdownEnv, {"min_numbers": 2, "max_numbers": 2, "max_number": 9, "max_target": 999}, 10),
        (CountdownEnv, {"min_numbers": 3, "max_numbers": 6, "max_number": 100, "max_target": 999}, 10),
    ],
)
def test_gold_answers_score_full_marks_and_corrupted_ones_do_not(make: Any, settings: Any, replies: int) -> None:
    proof = prove(make(split="test", limit=200, **settings))
    assert proof.holds, proof.lines()
    assert proof.replies == replies * proof.checked


def test_what_leaves_no_problem_is_refused(says: Says) -> None:
    with says.refused("env", DataError, "env.held_out=0.0001"):
        ArithmeticEnv(digits=1, held_out=0.0001, split="test").start()
    with says.refused("env", DataError, "env.held_out=0.2"):
        CountdownEnv(min_numbers=10, max_numbers=10, max_target=5, operations=("add",)).start()
    with says.refused("env", ConfigError, "env.operations=power"):
        CountdownEnv(operations=("power",))
    with pytest.raises(ConfigError, match=r"env\.max_number=0"):
        CountdownEnv(max_number=0)


def test_a_saved_position_belongs_to_its_settings() -> None:
    with pytest.raises(DataError, match=r"0\.2 held out"):
        ArithmeticEnv(held_out=0.5).load_state_dict(ArithmeticEnv().state_dict())
    with pytest.raises(DataError, match=r"targets .* 100,"):
        CountdownEnv(max_target=50).load_state_dict(CountdownEnv().state_dict())


# Sums


@pytest.mark.parametrize(
    ("operation", "question", "answer"),
    [("add", "34 + 57", "91"), ("subtract", "34 - 57", "-23"), ("multiply", "34 * 57", "1938")],
)
def test_answers_are_worked_out_by_operation(operation: str, question: str, answer: str) -> None:
    asked = {"question": question, "answer": answer, "a": 34, "b": 57, "operation": operation}
    assert problem(operation, 34, 57) == asked


def test_the_question_is_asked_without_a_system_message() -> None:
    conversation = ArithmeticEnv().draw()[0]
    assert conversation.messages == [{"role": "user", "content": f"What is {conversation.task['question']}?"}]
    assert conversation.max_completion_tokens == 48


def test_every_problem_is_in_one_split_once_an_epoch() -> None:
    train, test = (pairs(Problems(("add",), 2, split, seed=0)) for split in ("train", "test"))
    assert len(train) + len(test) == 8100
    assert {*train, *test} == {(a, b) for a in range(10, 100) for b in range(10, 100)}
    assert len(test) == pytest.approx(8100 / 5, rel=0.1)
    other = pairs(Problems(("add",), 2, "test", seed=1))
    assert (sorted(other), other == test) == (sorted(test), False)


def test_a_pair_and_its_mirror_are_in_the_same_split() -> None:
    train, test = (set(pairs(Problems(ALL, 2, split, seed=0))) for split in ("train", "test"))
    assert not train & test
    assert not train & {(b, a) for a, b in test}
    assert is_held_out(12, 34) == is_held_out(34, 12)


def test_epochs_differ_in_order_and_resume_anywhere() -> None:
    problems = Problems(("add",), 1, "test", seed=0)
    size = problems.count()
    drawn = list(islice(problems.iter_from(0), 3 * size))
    assert drawn[:size] != drawn[size : 2 * size]
    assert list(islice(problems.iter_from(size + 3), 5)) == drawn[size + 3 : size + 8]


def test_a_limit_repeats_the_first_problems() -> None:
    drawn = [task["question"] for task in islice(Problems(ALL, 9, "train", seed=0, limit=3).iter_from(0), 9)]
    assert drawn[:3] == drawn[3:6] == drawn[6:]
    assert len(set(drawn)) == 3


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("operations", [("add",), ALL])
def test_counting_is_exact_where_it_can_be_checked(split: str, operations: tuple[str, ...]) -> None:
    problems = Problems(operations, 2, split, seed=0)
    assert problems.count() == sum(1 for _ in problems.epoch(0))


@pytest.mark.parametrize("size", [1, 2, 3, 100, 1000])
def test_permuting_hits_every_number_once(size: int) -> None:
    assert sorted(permuted(i, size, key=5) for i in range(size)) == list(range(size))


# Countdown


def test_train_and_test_share_no_problem_whatever_the_seed() -> None:
    envs = CountdownEnv(split="train", max_number=9, seed=1), CountdownEnv(split="test", max_number=9, seed=2)
    tasks = [[conversation.task for conversation in env.draw(2000)] for env in envs]
    train, test = ({f"{sorted(task['numbers'])} {task['target']}" for task in own} for own in tasks)
    assert len(train) > 500
    assert len(test) > 100
    assert not train & test


def test_any_position_is_reached_at_once() -> None:
    rows = CountdownEnv(seed=3).open_rows(3)
    assert list(islice(rows.iter_from(10**12), 3)) == [rows.at(10**12 + i) for i in range(3)]
