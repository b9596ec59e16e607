import inspect
import re

import pytest

from rlpost.errors import ConfigError
from rlpost.rewards.reasoning_tasks import (
    EVALUATE_EXPRESSIONS,
    EVALUATE_LISTS,
    MAX_CHARACTERS,
    checked_config,
    make_dataset,
    may_be_scored,
    tasks,
)

pytest.importorskip("reasoning_gym")


@pytest.mark.parametrize(
    "answer", ["['a', 'b']", "[[0, 1], [1, 0]]", "A B C", "ABC", "- 1 2", "", "[1, -2]", "[" * 3000]
)
def test_plain_lists_and_texts_are_scored(answer: str) -> None:
    assert all(may_be_scored(task, answer) for task in EVALUATE_LISTS)


@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').getpid()",
        "[print(1)]",
        "[x for x in range(10**9)]",
        "9**9**9",
        "'a' * 10**9",
        "().__class__",
        "(lambda: 1)()",
        "exit",  # a name alone runs nothing
    ],
)
def test_what_eval_would_run_is_not_scored(answer: str) -> None:
    assert [may_be_scored(task, answer) for task in EVALUATE_LISTS] == [answer == "exit"] * 4


@pytest.mark.parametrize("answer", ["(71 + 83) * 2", "x**2 - 4*x + C", "3*sin(x)/2 + exp(-x)", "2^3", "1.5*x"])
def test_plain_expressions_are_scored(answer: str) -> None:
    assert all(may_be_scored(task, answer) for task in EVALUATE_EXPRESSIONS)


@pytest.mark.parametrize(
    "answer",
    ["exec('1')", "().__class__", "x.y", "print(1)", "[1]", "x_1", "lambda: 1", "open(0)", "eval(x)", "1 if x else 2"],
)
def test_what_sympy_would_run_is_not_scored(answer: str) -> None:
    assert not any(may_be_scored(task, answer) for task in EVALUATE_EXPRESSIONS)


def test_no_answer_is_too_long_or_holds_a_nul() -> None:
    assert may_be_scored("leg_counting", "4" * MAX_CHARACTERS)
    assert not may_be_scored("leg_counting", "4" * (MAX_CHARACTERS + 1))
    assert not may_be_scored("n_queens", "\0")


def test_every_scorer_that_evaluates_its_answer_is_known() -> None:
    from reasoning_gym.factory import DATASETS

    evaluating = re.compile(r"\b(eval|exec|parse_expr|sympify)\(")
    found = {task for task in tasks() if evaluating.search(inspect.getsource(DATASETS[task][0].score_answer))}
    # number_sorting evaluates the right answer alone
    assert found - {"number_sorting"} == {*EVALUATE_LISTS, *EVALUATE_EXPRESSIONS}


@pytest.mark.parametrize(
    ("task", "config", "named"),
    [
        ("leg_countin", {}, "did you mean leg_counting?"),
        ("composite", {}, "env.task=composite"),
        ("leg_counting", {"min_animal": 2}, "did you mean min_animals?"),
        ("leg_counting", {"min_animals": "x"}, "min_animals to 'x'"),
        ("leg_counting", {"seed": 1}, "'seed'"),
        ("leg_counting", {"min_animals": 9, "max_animals": 3}, "max_animals"),
    ],
)
def test_a_task_or_setting_that_is_not_there_is_refused(task: str, config: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        make_dataset(task, checked_config(task, config), seed=0)


def test_a_list_becomes_the_tuple_that_the_generator_has() -> None:
    checked = checked_config("countdown", {"operators": ["+", "-"], "min_numbers": 2})
    assert checked == {"operators": ("+", "-"), "min_numbers": 2}
