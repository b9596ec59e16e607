import time

import pytest

from rlpost.rewards.gsm8k import first_block, judge, normalise, score, split_solution


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        (" 72 ", "72"),
        ("1,000", "1000"),
        ("$18", "18"),
        ("25%", "25"),
        ("10.", "10"),
        ("5.00", "5"),
        ("-3.50", "-3.5"),
        ("100", "100"),
        ("seven", "seven"),
        ("72 dollars", "72 dollars"),
    ],
)
def test_normalising_removes_what_does_not_change_the_number(answer: str, normal: str) -> None:
    assert normalise(answer) == normal


@pytest.mark.parametrize(
    ("reply", "reward", "strict", "lenient"),
    [
        ("<think>48/2=24</think><answer>72</answer>", 1.0, 1.0, 1.0),
        ("<answer>$72.00</answer>", 1.0, 1.0, 1.0),
        ("<answer>72</answer> and then <answer>73</answer> 5", 1.0, 1.0, 1.0),  # the first block counts
        ("<answer>72 clips</answer>", 0.1, 0.0, 1.0),
        ("<answer>73</answer>", 0.1, 0.0, 0.0),
        ("It is 72 <answer>unknown</answer>", 0.1, 0.0, 1.0),
        ("The answer is 72.", 0.0, 0.0, 1.0),
        ("<answer></answer>", 0.0, 0.0, 0.0),
        ("<answer>72", 0.0, 0.0, 1.0),
        ("</answer>72<answer>", 0.0, 0.0, 1.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_tiers_and_accuracies(reply: str, reward: float, strict: float, lenient: float) -> None:
    scored = score(reply, "72")
    assert (scored.reward, scored.accuracy_strict, scored.accuracy_lenient) == (reward, strict, lenient)
    assert sum(scored.parts.values()) == pytest.approx(reward)


def test_parts_are_what_format_and_right_answer_earned() -> None:
    assert score("<answer>72</answer>", "72").parts == {"format": 0.1, "right": 0.9}
    assert score("<answer>7</answer>", "72", tiers=(2.0, 0.5, -1.0)).parts == {"format": 0.5, "right": 0.0}
    assert score("seven", "72", tiers=(2.0, 0.5, -1.0)).parts == {"format": -1.0, "right": 0.0}


def test_a_think_block_is_found_wherever_it_stands() -> None:
    verdict = judge("so <think> a\nb </think> <answer>3</answer>", "3")
    assert (verdict.think, verdict.answer, verdict.right) == ("a\nb", "3", True)
    assert judge("<think>a", "3").think is None


def test_an_answer_is_what_follows_the_last_mark() -> None:
    assert split_solution("2+2 = <<2+2=4>>4\n#### 1,004") == ("2+2 = <<2+2=4>>4", "1,004")


@pytest.mark.parametrize("answer", ["no mark 4", "#### ", "#### four"])
def test_a_dataset_answer_without_final_number_is_refused(answer: str) -> None:
    with pytest.raises(ValueError, match="####"):
        split_solution(answer)


@pytest.mark.parametrize("piece", ["<answer>", "</answer>", "<think><answer>", "<answer></answer>", "1,"])
def test_hostile_replies_take_linear_time(piece: str) -> None:
    reply = piece * (100_000 // len(piece))
    started = time.process_time()
    score(reply, "1")
    assert time.process_time() - started < 1  # quadratic time would be minutes
    assert first_block(reply, "nothing") is None
