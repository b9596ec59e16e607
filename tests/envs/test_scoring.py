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
from tests.says import Says

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
        raise DataError("no answers")
    return Score({"nan": math.nan, "huge": 1e40}.get(text, float(len(text))))


@pytest.mark.parametrize("text", ["raises", "leaves", "nan", "huge", "hangs"])
def test_what_fails_is_no_reward_of_0(conversation: Make, text: str, says: Says) -> None:
    good, bad, other = scored(conversation, ["a", text, "abc"])
    assert (good.reward, good.valid, other.reward, other.valid) == (1.0, True, 3.0, True)
    assert (bad.reward, bad.valid) == (None, False)
    says("train", bad.error)


def test_a_score_that_always_hangs_is_given_up_soon(conversation: Make, says: Says) -> None:
    began = time.monotonic()
    played = scored(conversation, ["hangs"] * 150)
    assert time.monotonic() - began < 25.0  # three deadlines, not a hundred and fifty: 30 s
    assert not any(c.valid for c in played)
    [late], [not_tried] = ({c.error for c in part} for part in (played[:3], played[3:]))
    says("train", f"{late}\n{not_tried}")


def test_errors_of_data_pass_through(conversation: Make) -> None:
    with pytest.raises(DataError, match="no answers"):
        scored(conversation, ["a", "data"])


def test_failures_are_counted_and_named_in_the_log(conversation: Make, caplog: pytest.LogCaptureFixture) -> None:
    scored(conversation, ["a", "raises", "nan"])
    scored(conversation, ["a", "b"])
    [told] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told.startswith("2 of 3 ")
    assert told.endswith("KeyError: 'x'")
