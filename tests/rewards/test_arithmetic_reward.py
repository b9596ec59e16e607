import pytest

from rlpost.rewards.numbers import score


@pytest.mark.parametrize(
    ("reply", "strict", "lenient"),
    [
        ("91", 1.0, 1.0),
        (" 91.\n", 1.0, 1.0),
        ("34 + 57 = 91", 0.0, 1.0),
        ("91 is 34 + 57", 0.0, 0.0),
        ("-91", 0.0, 0.0),
        ("910", 0.0, 0.0),
        ("ninety-one", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_reward_is_the_last_number_and_strict_the_whole_reply(reply: str, strict: float, lenient: float) -> None:
    scored = score(reply, "91")
    assert (scored.reward, scored.parts) == (lenient, {"answer": lenient})
    assert (scored.accuracy_strict, scored.accuracy_lenient) == (strict, lenient)


def test_a_negative_answer_needs_its_sign() -> None:
    assert score("34 - 57 = -23", "-23").reward == 1.0
    assert score("34 - 57 = 23", "-23").reward == 0.0
    assert score("It is 34 - 23", "-23").reward == 0.0
