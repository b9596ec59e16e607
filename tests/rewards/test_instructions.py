"""The reward made of verdicts on instructions."""

from __future__ import annotations

from itertools import product

import pytest

from rlpost.rewards.ifeval import Judged, best_reward, blocks, score


def test_the_reward_of_verdicts_is_their_weighted_sum() -> None:
    judged = Judged([True, False, False, False], [True, True, False, True], [], [])
    scored = score(judged, answer_only=False)
    assert scored.reward == pytest.approx(0.3 * 1 / 4 + 0.1 * 3 / 4)
    assert scored.parts == {
        "prompt_strict": 0.0,
        "instructions_strict": pytest.approx(0.075),
        "prompt_loose": 0.0,
        "instructions_loose": pytest.approx(0.075),
    }
    assert (scored.accuracy_strict, scored.accuracy_lenient) == (0.0, 0.0)
    loosely = score(Judged([True, False], [True, True], [], []), answer_only=False)
    assert loosely.reward == pytest.approx(0.3 / 2 + 0.2 + 0.1)
    assert (loosely.accuracy_strict, loosely.accuracy_lenient) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("thinks", "answers", "bonus"),
    [(1, 1, 0.15), (0, 1, 0.1), (1, 0, 0.05), (2, 1, 0.1), (1, 2, 0.05), (0, 0, 0.0), (3, 2, 0.0)],
)
def test_exactly_one_block_of_each_kind_earns_a_bonus(thinks: int, answers: int, bonus: float) -> None:
    judged = Judged([True, True], [True, True], ["t"] * thinks, ["a"] * answers)
    tagged = score(judged, answer_only=True)
    assert tagged.reward == pytest.approx(1.0 + bonus)
    assert sum(tagged.parts.values()) == pytest.approx(tagged.reward)
    assert score(judged, answer_only=False).reward == 1.0  # the form is nothing where it is not asked for


def test_blocks_are_complete_and_in_order() -> None:
    assert blocks("<a>1</a> <a>\n 2\n3 </a><a>4", "a") == ["1", "2\n3"]
    assert blocks("</a><a>1</a>", "a") == ["1"]
    assert blocks("<a><a>1</a></a>", "a") == ["<a>1"]
    assert blocks("none", "a") == []


def test_blocks_of_a_very_long_reply_take_no_time() -> None:
    assert blocks("<a>" * 200_000, "a") == []
    assert len(blocks("<a></a>" * 20_000, "a")) == 20_000


def test_rewards_stay_between_nothing_and_the_best() -> None:
    verdicts = [(False, False), (False, True), (True, True)]  # what is followed strictly is followed loosely
    for one, other in product(verdicts, repeat=2):
        for thinks, answers in product(range(3), repeat=2):
            judged = Judged([one[0], other[0]], [one[1], other[1]], [""] * thinks, [""] * answers)
            for answer_only in (False, True):
                reward = score(judged, answer_only=answer_only).reward
                assert 0.0 <= reward <= best_reward(answer_only=answer_only)
                assert (reward == 0.0) == (not any(one + other) and not (answer_only and 1 in (thinks, answers)))
