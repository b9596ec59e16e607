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
    scorer,
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
    evaluating = re.compile(r"\b(eval|exec|parse_expr|sympify)\(")
    found = {task for task in tasks() if evaluating.search(inspect.getsource(_dataset_class(task).score_answer))}
    # number_sorting evaluates the right answer alone
    assert found - {"number_sorting"} == {*EVALUATE_LISTS, *EVALUATE_EXPRESSIONS}


def _dataset_class(task: str) -> type:
    from reasoning_gym.factory import DATASETS

    return DATASETS[task][0]


def test_the_score_is_the_generators_own_partial_credit_included(monkeypatch: pytest.MonkeyPatch) -> None:
    import base64
    import pickle

    # a process of its own holds itself to some memory; this one runs other tests too
    monkeypatch.setattr("rlpost.rewards.reasoning_tasks.limit_memory", lambda num_bytes: None)
    entry = make_dataset("leg_counting", {}, seed=1)[0]
    score, _ = scorer("leg_counting", {})
    pickled = base64.b64encode(pickle.dumps(entry)).decode()
    wanted = entry["answer"]
    assert score((wanted, pickled)) == 1.0
    assert score((f"{wanted} legs", pickled)) == pytest.approx(len(wanted) / len(f"{wanted} legs"))
    assert score(("none", pickled)) == 0.0


@pytest.mark.parametrize(
    ("task", "config", "message"),
    [
        ("leg_countin", {}, "env.task=leg_countin is none of reasoning-gym's generators; did you mean leg_counting?"),
        ("composite", {}, "env.task=composite is none of"),
        ("leg_counting", {"min_animal": 2}, "sets min_animal, which env.task=leg_counting does not have; did you mean"),
        ("leg_counting", {"min_animals": "x"}, "sets min_animals to 'x': env.task=leg_counting wants a value like"),
        ("leg_counting", {"seed": 1}, "multiple values for keyword argument 'seed'"),
        ("leg_counting", {"min_animals": 9, "max_animals": 3}, "does not fit env.task=leg_counting: max_animals must"),
    ],
)
def test_a_task_or_setting_that_is_not_there_is_refused(task: str, config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_dataset(task, checked_config(task, config), seed=0)
    assert message in str(raised.value)


def test_a_list_becomes_the_tuple_that_the_generator_has() -> None:
    assert checked_config("countdown", {"operators": ["+", "-"], "min_numbers": 2}) == {
        "operators": ("+", "-"),
        "min_numbers": 2,
    }
