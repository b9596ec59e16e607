"""The rewards that need no file: reward, strict and lenient accuracy of a reply, and answers that cannot be right."""

from __future__ import annotations

import pytest

from rlpost.rewards.builtin import BUILT_IN, contains, exact, number
from rlpost.rewards.functions import Finished, load_rewards
from rlpost.settings import DatasetSettings
from rlpost.settings.base import BUILT_IN_REWARDS

# reply, right answers, reward, strict and lenient accuracy
REPLIES = {
    "exact": [
        ("Paris", ["Paris"], 1.0, 1.0, 1.0),
        (" Paris\n", ["Paris"], 1.0, 1.0, 1.0),
        ("paris", ["Paris"], 0.0, 0.0, 1.0),
        ("new  york.", ["New York"], 0.0, 0.0, 1.0),
        ("", ["Paris"], 0.0, 0.0, 0.0),
        ("five", ["5", "five"], 1.0, 1.0, 1.0),
        ("6", ["5", "five"], 0.0, 0.0, 0.0),
    ],
    "number": [
        ("7.", ["7"], 1.0, 1.0, 1.0),
        ("It is 7", ["7"], 1.0, 0.0, 1.0),
        ("7 or 8", ["It is 8."], 1.0, 0.0, 1.0),
        ("none", ["7"], 0.0, 0.0, 0.0),
        ("$1,007", ["1007.00"], 1.0, 0.0, 1.0),
        ("it is 5", ["4", "5"], 1.0, 0.0, 1.0),
    ],
    "contains": [
        ("It is Paris!", [" Paris "], 1.0, None, None),
        ("It is paris", [" Paris "], 0.0, None, None),
        ("Par is", [" Paris "], 0.0, None, None),
        ("I say five", ["5", "five"], 1.0, None, None),
    ],
    "math": [
        ("so \\boxed{0.5}", ["\\frac{1}{2}"], 1.0, 1.0, 1.0),
        ("\\boxed{2/3}", ["\\frac{1}{2}"], 0.0, 0.0, 0.0),
        ("it is 1/2", ["\\frac{1}{2}"], 1.0, 1.0, 1.0),
        ("", ["\\frac{1}{2}"], 0.0, 0.0, 0.0),
    ],
}


@pytest.mark.parametrize("name", BUILT_IN_REWARDS)
def test_rewards_and_accuracies_of_replies(name: str) -> None:
    assert tuple(REPLIES) == tuple(BUILT_IN) == BUILT_IN_REWARDS
    if name == "math":
        pytest.importorskip("math_verify")
    rewards = load_rewards(DatasetSettings(path="rows", reward=[name]))
    assert rewards is not None
    scores = rewards.score([Finished("p?", reply, [1], {}, answers) for reply, answers, *_ in REPLIES[name]])
    rewards.close()
    found = [(score.reward, score.accuracy_strict, score.accuracy_lenient) for score in scores]
    assert found == [tuple(expected) for _, _, *expected in REPLIES[name]]


def test_answers_may_be_numbers_and_completions_messages() -> None:
    message = [{"role": "assistant", "content": "12"}]
    assert [f([message], [12]) for f in (exact, number, contains)] == [[1.0], [1.0], [1.0]]


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


def test_an_answer_without_a_number_suits_exact_alone() -> None:
    assert "no number" in (BUILT_IN["number"].complaint("none") or "")
    assert BUILT_IN["exact"].complaint("none") is None
