"""Scores that an environment gives itself: what raises, leaves or hangs is an error of its conversation."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable

import pytest

from rlpost.data.conversation import Conversation
from rlpost.envs.chat import record_scores
from rlpost.errors import DataError
from rlpost.rewards.score import Score

Make = Callable[..., Conversation]


def scored(make: Make, texts: list[str], seconds: float = 0.2) -> list[Conversation]:
    conversations = [make(0, i, text=text, reward=None) for i, text in enumerate(texts)]
    record_scores(conversations, score, seconds)
    return conversations


def score(conversation: Conversation) -> Score | None:
    text = conversation.response_text
    if text == "raises":
        raise KeyError("x")
    if text == "leaves":
        sys.exit(3)
    if text == "hangs":
        try:
            time.sleep(30)
        except Exception:  # noqa: BLE001  as a client that tries again does
            return Score(5.0)
    if text == "data":
        raise DataError("the answers cannot be read")
    return Score({"nan": math.nan, "huge": 1e40}.get(text, float(len(text))))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raises", "KeyError: 'x'"),
        ("leaves", "SystemExit: 3"),
        ("nan", "the reward is nan, which is not a finite number"),
        ("huge", "the reward is 1e+40, which is infinite in float32, where rewards are trained on: scale it down"),
        ("hangs", "score did not return within 0.2 s"),
    ],
)
def test_what_fails_is_no_reward_of_0(conversation: Make, text: str, error: str) -> None:
    good, bad, other = scored(conversation, ["a", text, "abc"])
    assert (good.reward, good.valid, other.reward, other.valid) == (1.0, True, 3.0, True)
    assert (bad.reward, bad.valid, bad.error) == (None, False, error)


def test_a_score_that_always_hangs_is_given_up_soon(conversation: Make) -> None:
    began = time.monotonic()
    played = scored(conversation, ["hangs"] * 150)
    assert time.monotonic() - began < 25.0  # three deadlines, not a hundred and fifty: 30 s
    assert [c.error for c in played[:3]] == ["score did not return within 0.2 s"] * 3
    assert {c.error for c in played[3:]} == {"not tried after 3 others were lost: score did not return within 0.2 s"}
    assert not any(c.valid for c in played)


def test_errors_of_data_pass_through(conversation: Make) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        scored(conversation, ["a", "data"])


def test_failures_are_counted_and_named_in_the_log(conversation: Make, caplog: pytest.LogCaptureFixture) -> None:
    scored(conversation, ["a", "raises", "nan"])
    scored(conversation, ["a", "b"])
    [told] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == "2 of 3 rewards failed; the first: KeyError: 'x'"
