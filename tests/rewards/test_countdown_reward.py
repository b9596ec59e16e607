from fractions import Fraction
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpost.rewards.countdown import MAX_CHARACTERS, score, value_of


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("25 / 5 / 2", Fraction(5, 2)),
        ("((25)) + 5 * 2", 35),
        ("(25 + 5) × 2", 60),
        ("25 − 5 ÷ 2", Fraction(45, 2)),
        ("025 + 5 * 2", 35),
    ],
)
def test_values_are_exact_however_they_are_written(expression: str, value: Fraction | int) -> None:
    assert value_of(expression, [25, 5, 2]) == value


@pytest.mark.parametrize(
    "expression",
    [
        "25 + 25 + 5 + 5",  # each once only
        "25 + 5",  # and none left out
        "",
        "252 + 5",
        "25 + 5 ** 2",
        "25 // 5 * 2",
        "25 + 5 * 2 +",
        "-25 + 5 * 2",
        "(25 + 5 * 2",
        "(25 + 5)(2)",
        "5 / (25 - 25)",
        "(25 + 5) * 2 = 60",
        "(25 + 5) * 2.0",
        "25e0 + 5 * 2",
        "__import__('os').getpid()",
        "(25 + 5) * 2" + " " * MAX_CHARACTERS + "+",
        "9" * 900,
    ],
)
def test_a_wrong_expression_has_no_value(expression: str) -> None:
    assert value_of(expression, [25, 5, 2]) is None


@pytest.mark.parametrize(
    ("expression", "numbers", "signs", "value"),
    [
        ("4 / (2 - 2)", [4, 2, 2], "+-*/", None),
        ("4 * 2", [4, 2], "+-", None),
        ("4 * 2", [4, 2], "*", 8),
        ("3 + 3", [3, 3], "+-*/", 6),  # as many equal numbers as there are
        ("3 + 3", [3], "+-*/", None),
        ("3 * 1 + 3", [3, 3, 1], "+-*/", 6),
    ],
)
def test_numbers_and_operations_are_those_allowed(
    expression: str, numbers: list[int], signs: str, value: int | None
) -> None:
    assert value_of(expression, numbers, signs) == value


def test_deep_parentheses_end_at_once() -> None:
    assert value_of("(" * 100 + "3 + 3" + ")" * 100, [3, 3]) == 6
    assert value_of("(" * 450 + "3 + 3" + ")" * 450, [3, 3]) is None
    assert value_of("-" * 990 + "3 + 3", [3, 3]) is None
    assert value_of("+".join("3" * 500), [3] * 500) == 1500
    assert value_of("(" * 900, [3, 3]) is None


@given(st.text(alphabet="0123456789+-*/() ", max_size=30))
def test_every_text_has_a_value_only_where_python_finds_the_same(text: str) -> None:
    value = value_of(text, [1, 2, 3])
    if value is not None:
        assert float(value) == pytest.approx(eval(text, {}, {}))


def test_all_expressions_of_three_numbers_agree_with_python() -> None:
    shapes = ("{} {} {} {} {}", "({} {} {}) {} {}", "{} {} ({} {} {})")
    for shape, (a, b, c), (x, y) in product(shapes, permutations((2, 5, 7)), product("+-*/", repeat=2)):
        text = shape.format(a, x, b, y, c)
        value = value_of(text, [2, 5, 7])
        assert value is not None
        assert float(value) == pytest.approx(eval(text))


@pytest.mark.parametrize(
    ("reply", "reward", "strict", "lenient"),
    [
        ("<answer>(25 + 5) * 2</answer>", 1.0, 1.0, 1.0),
        ("<think>30 * 2</think>\n<answer> (25+5)*2 </answer>", 1.0, 1.0, 1.0),
        ("<answer>(25 + 5) * 2 = 60</answer>", 0.1, 0.0, 1.0),
        ("<answer>It is (25 + 5) * 2.</answer>", 0.1, 0.0, 1.0),
        ("So (25 + 5) * 2 = 60", 0.0, 0.0, 1.0),
        ("<answer>25 + 5 * 2</answer>", 0.1, 0.0, 0.0),
        ("<answer>25 + 5 + 5 + 25</answer>", 0.1, 0.0, 0.0),
        ("<answer>import os</answer>", 0.1, 0.0, 0.0),
        ("(25 + 5) * 2 was wrong, so <answer>25 * 2 + 5</answer>", 0.1, 0.0, 0.0),
        ("<answer></answer>", 0.0, 0.0, 0.0),
        ("60", 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_tiers_and_accuracies(reply: str, reward: float, strict: float, lenient: float) -> None:
    scored = score(reply, [25, 5, 2], 60)
    assert (scored.reward, scored.accuracy_strict, scored.accuracy_lenient) == (reward, strict, lenient)
    assert sum(scored.parts.values()) == pytest.approx(reward)


def test_a_long_reply_is_read_in_an_instant() -> None:
    assert score("(1 + " * 200_000, [1, 2], 3).reward == 0.0
    assert score("<answer>" + "(1 + 2" * 200_000 + "</answer>", [1, 2], 3).reward == 0.1
