"""The last number of a reply, the reply that is a number alone, and the reward made of both."""

import time

import pytest

from rlpost.rewards.numbers import canonical, last_number, only_number, score


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("34 + 57 = 91", "91"),
        ("The answer is 12.", "12"),
        ("It costs $1,234.50 in all", "1234.5"),
        ("-$1,000.00", "-1000"),
        ("3.140", "3.14"),
        ("007", "7"),
        ("first 1,2,3", "3"),
        ("in 2024,100", "100"),
        ("at least .5", "0.5"),
        ("-0.0", "0"),
        ("nothing here", None),
        ("", None),
        ("... , ,", None),
    ],
)
def test_last_number_is_written_canonically(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    "text", ["12 - 5", "12 -5", "12-5", "(12) -5", "x-5", "step-5", "50% -5", "12 \N{MINUS SIGN} 5"]
)
def test_a_minus_between_operands_is_no_sign(text: str) -> None:
    assert last_number(text) == "5"


@pytest.mark.parametrize("text", ["-5", "= -5", "is -5.", "$-5", "-$5", "(-5)", "12 * -5", "= \N{MINUS SIGN}5"])
def test_a_minus_that_touches_its_number_is_a_sign(text: str) -> None:
    assert last_number(text) == "-5"


@pytest.mark.parametrize("text", ["91 apples", "= 91", "91..", "9 1", "2024,100", "--5", "", "- 5"])
def test_anything_beside_the_number_makes_it_not_alone(text: str) -> None:
    assert only_number(text) is None


def test_a_number_too_long_for_int_is_compared_as_text() -> None:
    assert last_number("1" * 100_000) == "1" * 100_000
    assert canonical("0" * 5000 + "1") == "1"


@pytest.mark.parametrize("piece", ["1", "1,", ",.", "1.1.", "-", "1,111", "$", " ", "<answer>"])
def test_hostile_replies_take_linear_time(piece: str) -> None:
    def seconds(length: int) -> float:
        text = (piece * length)[:length]
        started = time.process_time()
        last_number(text)
        only_number(text)
        return time.process_time() - started

    assert min(seconds(100_000) for _ in range(3)) < 1  # quadratic time would be minutes


@pytest.mark.parametrize(
    ("reply", "answer", "strict", "lenient"),
    [
        ("91", "91", 1.0, 1.0),
        (" 91.\n", "91", 1.0, 1.0),
        ("34 + 57 = 91", "91", 0.0, 1.0),
        ("91 is 34 + 57", "91", 0.0, 0.0),
        ("910", "91", 0.0, 0.0),
        ("", "91", 0.0, 0.0),
        ("34 - 57 = -23", "-23", 0.0, 1.0),
        ("34 - 57 = 23", "-23", 0.0, 0.0),
        ("It is 34 - 23", "-23", 0.0, 0.0),
    ],
)
def test_the_reward_is_the_last_number_and_strict_the_reply(
    reply: str, answer: str, strict: float, lenient: float
) -> None:
    scored = score(reply, answer)
    assert (scored.reward, scored.parts) == (lenient, {"answer": lenient})
    assert (scored.accuracy_strict, scored.accuracy_lenient) == (strict, lenient)
