"""A few sums to attack a reward with where no rows are given, in every form that rows have."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from rlpost.rewards.apart import WorkerReward
from rlpost.rewards.attack import Attack, Case

ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "target", "label")  # what rows call it
COLUMNS = ("prompt", "question", *ANSWER_COLUMNS)
_SUMS = ((12, 30), (7, 8), (45, 6), (100, 23), (9, 81), (64, 64))


def sample_attack(reward: WorkerReward, *, built_in: bool, seconds: float) -> Attack:
    """An attack with the form of the sums that the function knows what to do with, else with the first.

    It does where right answers can be scored and earn more than wrong ones.
    """
    first = None
    for cases in sample_cases():
        attack = Attack(reward, cases, COLUMNS, built_in, seconds)
        first = first or attack
        if attack.score_gold() is None:
            wrong = [value for value in attack.values([case.wrong for case in cases]).values if value is not None]
            if wrong and fmean(attack.gold) > fmean(wrong):
                return attack
    assert first is not None
    return first


def sample_cases() -> Iterator[list[Case]]:
    """The sums: texts or messages as prompts, answers as text or as numbers."""
    for as_messages in (False, True):
        for as_number in (False, True):
            yield [_case(a, b, as_messages=as_messages, as_number=as_number) for a, b in _SUMS]


def _case(a: int, b: int, *, as_messages: bool, as_number: bool) -> Case:
    question, right = f"What is {a} + {b}?", a + b
    answer = right if as_number else str(right)
    columns = {"prompt": question, "question": question, **dict.fromkeys(ANSWER_COLUMNS, answer)}
    prompt = [{"role": "user", "content": question}] if as_messages else question
    return Case(f"{a} + {b}", prompt, str(right), [str(right + 1), str(-right)], columns, str(right))
