"""Is the sum right? A reply to an arithmetic question, scored by its last number."""

from __future__ import annotations

from rlpost.rewards.numbers import last_number, only_number
from rlpost.rewards.score import Score


def score(reply: str, answer: str) -> Score:
    """Reward 1 (part `answer`) when the last number of `reply` is `answer`, else 0.

    `answer` is an integer as Python writes it. `accuracy_lenient` is the same measure;
    `accuracy_strict` asks that the reply be the number and nothing else, a final full stop allowed.
    """
    found = last_number(reply)
    right = float(found == answer)
    strict = float(only_number(reply) == answer)
    return Score(
        reward=right, parts={"answer": right}, accuracy_strict=strict, accuracy_lenient=right, answer=found or ""
    )
