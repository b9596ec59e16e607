"""Rewards that need no file: does a reply say what its row's answer says?

Each is a reward function like one of your own: lists in, a list of 1 and 0 out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.rewards import numbers
from rlpost.rewards.numbers import last_number
from rlpost.rewards.score import Score

Completion = str | Sequence[dict[str, Any]]  # a text, or the messages that answer a prompt of messages


def exact(completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 where the reply is the answer, white space around them aside."""
    return [best(_exact, text, answers).reward for text, answers in _pairs(completions, answer)]


def number(completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 where the last numbers of reply and answer are equal."""
    return [best(_number, text, answers).reward for text, answers in _pairs(completions, answer)]


def contains(completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 if the reply contains the answer, else 0."""
    return [float(any(each.strip() in text for each in answers)) for text, answers in _pairs(completions, answer)]


def math(completions: Sequence[Completion], answer: Sequence[Any]) -> list[float]:
    r"""1 where the reply's answer, in its last `\boxed{}` or at its end, equals the row's by math-verify."""
    from rlpost.rewards.math_answers import equal

    return [float(any(equal(text, each) for each in answers)) for text, answers in _pairs(completions, answer)]


@dataclass(frozen=True)
class BuiltIn:
    """A built-in reward.

    `judge` measures accuracy too, of one reply against one answer, where the reward does more than that;
    `complaint` says what is wrong with an answer that nothing could equal, or None. One that `needs` a package (its
    module, and rlpost's extra) runs in a process of its own, which can be killed; what it returns is the accuracy too.
    """

    function: Callable[..., list[float]]
    judge: Callable[[str, str], Score] | None = None
    complaint: Callable[[str], str | None] = lambda answer: None
    needs: tuple[str, str] | None = None

    @property
    def measures_accuracy(self) -> bool:
        """Whether accuracy is measured too."""
        return self.judge is not None or self.needs is not None


def _exact(reply: str, answer: str) -> Score:
    """Strict accuracy is the reward; lenient accuracy also forgives case, inner white space and a final full stop."""
    right = float(reply.strip() == answer.strip())
    loosened = _loosened(reply)
    return Score(right, accuracy_strict=right, accuracy_lenient=float(loosened == _loosened(answer)), answer=loosened)


def _number(reply: str, answer: str) -> Score:
    """Lenient accuracy is the reward; strict accuracy asks that the reply be the number and nothing else."""
    return numbers.score(reply, last_number(answer) or "")


def best(judge: Callable[[str, str], Score], reply: str, answers: Sequence[str]) -> Score:
    """The score of a reply against the answer that suits it best; against "" without answers."""
    return max((judge(reply, answer) for answer in answers or [""]), key=lambda score: score.accuracy_lenient or 0.0)


# a number as part of something else: a fraction, a time, a date, a ratio, a power of ten, a sum
_PART_OF_MORE = re.compile(r"\d\s*[/:^*+×–]\s*[\d(]|\d[-−]\d|\d[eE][+-]?\d|\\frac|[_^]\{?\d")


def _no_number(answer: str) -> str | None:
    last = answer.rpartition("####")[2]
    if last_number(last) is None:
        return "has no number, which the reward number looks for"
    if _PART_OF_MORE.search(last):
        return (
            f"is not one number but {last.strip()[:40]!r}, and the reward number would read {last_number(last)}: take "
            "env.reward=math"
        )
    return None


def _loosened(text: str) -> str:
    return " ".join(text.split()).removesuffix(".").casefold()


def _pairs(completions: Sequence[Completion], answers: Sequence[Any]) -> list[tuple[str, list[str]]]:
    """Each reply with its right answers: one, or a list of them."""
    texts = [c if isinstance(c, str) else str(c[-1]["content"]) for c in completions]
    right = [list(map(str, answer)) if isinstance(answer, list) else [str(answer)] for answer in answers]
    return list(zip(texts, right, strict=True))


BUILT_IN = {
    "exact": BuiltIn(exact, _exact),
    "number": BuiltIn(number, _number, _no_number),
    "contains": BuiltIn(contains),
    "math": BuiltIn(math, needs=("math_verify", "math")),
}
