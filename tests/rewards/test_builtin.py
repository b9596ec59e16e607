from __future__ import annotations

import pytest

from rlpost.rewards.builtin import BUILT_IN, contains, exact, number
from rlpost.rewards.functions import Finished, load_rewards
from rlpost.settings import DatasetSettings
from rlpost.settings.base import BUILT_IN_REWARDS


def accuracies(name: str, reply: str, answer: str) -> tuple[float | None, float | None]:
    judge = BUILT_IN[name].judge
    assert judge is not None
    score = judge(reply, answer)
    return score.accuracy_strict, score.accuracy_lenient


def test_the_settings_know_the_names() -> None:
    assert tuple(BUILT_IN) == BUILT_IN_REWARDS


def test_exact_leaves_white_space_around_out_and_nothing_else() -> None:
    assert exact([" Paris\n", "paris", "Paris.", ""], ["Paris"] * 4) == [1.0, 0.0, 0.0, 0.0]


def test_number_compares_last_numbers_as_values() -> None:
    replies = ["3 + 4 = 7.0", "7 or 8", "-7", "none", "$1,007"]
    assert number(replies, ["7", "It is 8.", "7", "7", "1007.00"]) == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_contains_looks_for_the_letters() -> None:
    assert contains(["It is Paris!", "It is paris", "Par is"], [" Paris "] * 3) == [1.0, 0.0, 0.0]


def test_answers_may_be_numbers_and_completions_messages() -> None:
    message = [{"role": "assistant", "content": "12"}]
    assert [f([message], [12]) for f in (exact, number, contains)] == [[1.0], [1.0], [1.0]]


@pytest.mark.parametrize(
    ("name", "reply", "answer", "strict_and_lenient"),
    [
        ("exact", "Paris", "Paris", (1.0, 1.0)),
        ("exact", "new  york.", "New York", (0.0, 1.0)),
        ("exact", "York", "New York", (0.0, 0.0)),
        ("number", "7.", "7", (1.0, 1.0)),
        ("number", "It is 7", "7", (0.0, 1.0)),
        ("number", "It is 8", "7", (0.0, 0.0)),
    ],
)
def test_accuracies_are_strict_and_lenient(
    name: str, reply: str, answer: str, strict_and_lenient: tuple[float, float]
) -> None:
    assert accuracies(name, reply, answer) == strict_and_lenient


def test_an_answer_that_no_reply_could_equal_is_complained_of() -> None:
    assert "has no number" in (BUILT_IN["number"].complaint("none") or "")
    assert BUILT_IN["number"].complaint("#### 7") is None
    assert BUILT_IN["exact"].complaint("none") is None


@pytest.mark.parametrize(
    "answer", ["3/4", "2:30 pm", "1e5", "2019-05-07", "5:3", "\\frac{1}{2}", "x^2", "so\n#### 3/4"]
)
def test_an_answer_that_is_not_one_number_is_named(answer: str) -> None:
    assert "env.reward=math" in (BUILT_IN["number"].complaint(answer) or "")


@pytest.mark.parametrize(
    "answer", ["7", "-3", "$1,050.50", "12%", "7 apples", "2 + 2 = 4\n#### 4", "x = 5.", "12 - 5 is 7"]
)
def test_an_answer_that_ends_in_one_number_is_taken(answer: str) -> None:
    assert BUILT_IN["number"].complaint(answer) is None


def test_any_of_several_answers_is_right() -> None:
    assert exact(["five", "6"], answer=[["5", "five"], ["5", "five"]]) == [1.0, 0.0]
    assert number(["it is 5", "6"], answer=[["4", "5"], ["5"]]) == [1.0, 0.0]
    assert contains(["I say five", "six"], answer=[["5", "five"], ["five"]]) == [1.0, 0.0]


def test_math_compares_as_mathematics_does_and_measures_accuracy() -> None:
    pytest.importorskip("math_verify")
    settings = DatasetSettings(path="rows", reward=["math"])
    rewards = load_rewards(settings)
    assert rewards is not None
    replies = ["so \\boxed{0.5}", "\\boxed{2/3}", "it is 1/2", ""]
    scores = rewards.score([Finished("p?", reply, [1], {}, ["\\frac{1}{2}"]) for reply in replies])
    rewards.close()
    assert [score.reward for score in scores] == [1.0, 0.0, 1.0, 0.0]
    assert [score.accuracy_lenient for score in scores] == [1.0, 0.0, 1.0, 0.0]
