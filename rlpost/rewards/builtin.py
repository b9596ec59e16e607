"""Rewards that need no file: does a reply say what its row's answer says?

Each is a reward function like one of your own: lists in, a list of 1 and 0 out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.rewards import numbers
from rlpost.rewards.numbers import last_number
from rlpost.rewards.score import Score

Completion = str | Sequence[dict[str, Any]]  # a text, or the messages that answer a prompt of messages


def exact(completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 where the reply is the answer, white space around them aside."""
    return [_exact(text, wanted).reward for text, wanted in _pairs(completions, answer)]


def number(completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 where the last numbers of reply and answer are equal."""
    return [_number(text, wanted).reward for text, wanted in _pairs(completions, answer)]


def contains(completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 if the reply contains the answer, else 0."""
    return [float(wanted.strip() in text) for text, wanted in _pairs(completions, answer)]


@dataclass(frozen=True)
class BuiltIn:
    """A built-in reward.

    `judge` measures accuracy too, of one reply against its answer, where the reward does;
    `complaint` says what is wrong with an answer that nothing could equal, or None.
    """

    function: Callable[..., list[float]]
    judge: Callable[[str, str], Score] | None = None
    complaint: Callable[[str], str | None] = lambda answer: None


def _exact(reply: str, answer: str) -> Score:
    """Strict accuracy is the reward; lenient accuracy also forgives case, inner white space and a final full stop."""
    right = float(reply.strip() == answer.strip())
    said = _loosened(reply)
    return Score(right, accuracy_strict=right, accuracy_lenient=float(said == _loosened(answer)), answer=said)


def _number(reply: str, answer: str) -> Score:
    """Lenient accuracy is the reward; strict accuracy asks that the reply be the number and nothing else."""
    return numbers.score(reply, last_number(answer) or "")


def _no_number(answer: str) -> str | None:
    return None if last_number(answer) is not None else "has no number, which the reward number looks for"


def _loosened(text: str) -> str:
    return " ".join(text.split()).removesuffix(".").casefold()


def _pairs(completions: Sequence[Completion], answers: Sequence[Any]) -> list[tuple[str, str]]:
    texts = [c if isinstance(c, str) else str(c[-1]["content"]) for c in completions]
    return [(text, str(answer)) for text, answer in zip(texts, answers, strict=True)]


BUILT_IN = {
    "exact": BuiltIn(exact, _exact),
    "number": BuiltIn(number, _number, _no_number),
    "contains": BuiltIn(contains),
}
