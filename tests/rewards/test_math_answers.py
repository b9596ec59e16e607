import time
from collections.abc import Iterator

import pytest

from rlpost.errors import MissingExtraError
from rlpost.rewards.math_answers import MAX_CHARACTERS, Verifier, last_box, read, same_text
from tests.processes import children
from tests.says import Says

pytest.importorskip("math_verify")

HOSTILE = ["9^{9^{9^9}}", "10^{100000000}", "2^{2^{40}}"]


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    verifier = Verifier(seconds=60.0, count=1)
    yield verifier
    verifier.close()


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{\frac{1}{2}} and \boxed{ \sqrt{3} }.", r"\sqrt{3}"),
        (r"\boxed 7", "7"),
        (r"\fbox{8}", "8"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} but \boxed{2", "1"),
        (r"\boxed{}", ""),
        ("no box", None),
        (r"\boxed{", None),
        (r"\boxed{(" * 5, None),
        (r"\boxed{" * 300_000, None),  # read in an instant
        (r"\boxed{" + "1" * 10**6, "1" * (MAX_CHARACTERS + 1)),
    ],
    ids=range(12),
)
def test_the_last_closed_box_counts(text: str, box: str | None) -> None:
    assert last_box(text) == box


@pytest.mark.parametrize(
    ("reply", "rest"),
    [
        ("<answer>3</answer> and so on", "3"),
        ("It is 3.", "It is 3."),
        (r"<answer>3</answer> \boxed{4}", "4"),
        ("y" + "x" * MAX_CHARACTERS, "x" * MAX_CHARACTERS),
    ],
    ids=["block", "end", "box", "long"],
)
def test_the_box_the_answer_block_or_the_end_is_compared(reply: str, rest: str) -> None:
    assert read(reply).rest == rest


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
        (r"\left( 3, \pi \right)", r"(3,\pi)", True),
        ("$5$", "5.", True),
        (r"1,\!000", "1,000", True),
        ("12", "1 2", False),
        (r"\leftarrow", "arrow", False),
        ("5", "6", False),
    ],
)
def test_texts_are_the_same_but_for_what_says_nothing(one: str, other: str, same: bool) -> None:
    assert same_text(one, other) is same


@pytest.mark.parametrize(
    ("gold", "box", "right"),
    [
        (r"\frac{1}{2}", "0.5", True),
        ("2k+2", "2(k+1)", True),
        (r"10\%", "10", True),
        (r"\$32,\!348", "32348", True),
        ("5", "x = 5", True),
        (r"\text{(B)}", "B", True),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ \frac{4}{2} \end{pmatrix}", True),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("(1,2)", "(2,1)", False),
        ("[1,2)", "(1,2]", False),
        ("7", "8", False),
        (r"\text{yes}", r"\text{no}", False),
    ],
)
def test_answers_are_compared_as_expressions(verifier: Verifier, gold: str, box: str, right: bool) -> None:
    score = verifier.score([(rf"It is \boxed{{{box}}}.", gold)])[0]
    assert (score.reward, score.accuracy_strict, score.accuracy_lenient) == ((1.0, 1.0, 1.0) if right else (0.1, 0, 0))
    assert score.answer == (gold if right else " ".join(box.split()))


@pytest.mark.parametrize(
    ("reply", "reward", "lenient"),
    [
        (r"\boxed{\frac{3}{4}}", 1.0, 1.0),
        (r"\boxed{0.75} no, \boxed{1}", 0.1, 0.0),
        ("<answer>3/4</answer>", 0.0, 1.0),
        (r"so the answer is $\frac{6}{8}$", 0.0, 1.0),
        ("so it is 0.75", 0.0, 1.0),
        ("so it is 0.8", 0.0, 0.0),
        (r"\boxed{}", 0.1, 0.0),
        ("I do not know.", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_tiers_and_accuracies(verifier: Verifier, reply: str, reward: float, lenient: float) -> None:
    score = verifier.score([(reply, r"\frac{3}{4}")])[0]
    assert (score.reward, score.accuracy_strict, score.accuracy_lenient) == (reward, float(reward == 1.0), lenient)
    assert score.parts["format"] + score.parts["right"] == pytest.approx(reward)
    assert score.parts["unverified"] == 0.0


COMPARER = "rlpost.rewards.math_answers:comparer"  # in the command of its process


def test_hundreds_of_replies_are_compared_by_one_process(verifier: Verifier) -> None:
    replies = [(rf"\boxed{{{number}}}", "5") for number in range(200)] + [(f"It is {n}", "5") for n in range(200)]
    before = {process for process, command in children().items() if COMPARER in command}
    scores = verifier.score(replies)
    assert [score.accuracy_lenient for score in scores] == [float(n == 5) for n in range(200)] * 2
    assert [score.accuracy_strict for score in scores] == [float(n == 5) for n in range(200)] + [0.0] * 200
    assert {process for process, command in children().items() if COMPARER in command} == before


def test_hostile_answers_earn_nothing_and_are_counted() -> None:
    verifier = Verifier(seconds=3.0, count=2)  # long enough for the first comparison of a new process
    try:
        verifier.score([(r"\boxed{0.5}", r"\frac12")] * 2)  # both processes are there
        replies = [(rf"\boxed{{{box}}}", "5") for box in [*HOSTILE, "5", r"\frac{10}{2}", "4"]]
        began = time.monotonic()
        scores = verifier.score([*replies, *replies])  # equal ones are compared once
        assert time.monotonic() - began < 60
    finally:
        verifier.close()
    assert [score.reward for score in scores] == [0.0, 0.0, 0.0, 1.0, 1.0, 0.1] * 2
    assert [score.parts["unverified"] for score in scores] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0] * 2
    assert all(score.valid for score in scores)


def test_what_is_too_long_or_too_deep_is_not_even_tried(verifier: Verifier) -> None:
    for box in ("1" * (MAX_CHARACTERS + 1), "(" * 60 + "1" + ")" * 60, r"\sqrt{" * 60 + "1" + "}" * 60):
        score = verifier.score([(rf"\boxed{{{box}}}", "5")])[0]
        assert (score.reward, score.parts["unverified"], score.valid) == (0.0, 1.0, True)


def test_an_incomparable_right_answer_is_an_error_of_its_row(verifier: Verifier, says: Says) -> None:
    score = verifier.score([(r"\boxed{3}", "$")])[0]
    assert not score.valid
    says("reward", score.error)


def test_without_math_verify_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.imports.is_installed", lambda package: False)
    with pytest.raises(MissingExtraError, match=r"rlpost\[math\]"):
        Verifier().start()
