"""A reply of the form `<think>...</think><answer>...</answer>`, scored against GSM8K's final answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlpost.rewards.numbers import canonical, last_number, only_number
from rlpost.rewards.score import Score

TIERS = (1.0, 0.1, 0.0)  # right answer, some other answer, none
ANSWER_MARK = "#### "  # in the dataset, between the worked solution and the final answer


@dataclass(frozen=True, slots=True)
class Verdict:
    """The parts of a reply: its first think and answer block (None where it has none), and if it is right.

    `found` is the answer that lenient extraction reads out of it, "" where there is none.
    """

    think: str | None
    answer: str | None
    right: bool
    right_lenient: bool
    found: str


def split_solution(answer: str) -> tuple[str, str]:
    """The worked solution and the final answer of a dataset's `answer` field.

    Raises ValueError without `#### ` or without a number after it.
    """
    solution, mark, final = answer.rpartition("####")
    if not mark or only_number(normalise(final)) is None:
        raise ValueError(f"has no '{ANSWER_MARK}' followed by a number at its end")
    return solution.strip(), final.strip()


def normalise(answer: str) -> str:
    """`answer` without white space around it, `,`, `$`, `%`, a final full stop and trailing decimal zeros."""
    text = answer.replace(",", "").replace("$", "").replace("%", "").strip().removesuffix(".").rstrip()
    number = re.fullmatch(r"(-?)([0-9]*\.?[0-9]+)", text)
    return canonical(number.group(2), negative=bool(number.group(1))) if number else text


def first_block(reply: str, tag: str) -> str | None:
    """The text between the first `<tag>` and the next `</tag>`, or None. Linear in the reply's length."""
    _, opened, rest = reply.partition(f"<{tag}>")
    inside, closed, _ = rest.partition(f"</{tag}>")
    return inside.strip() if opened and closed else None


def judge(reply: str, truth: str) -> Verdict:
    """The parts of `reply`, the model's own words only, compared with the final answer `truth`.

    Right is an answer block equal to the truth once both are normalised. Leniently right is that,
    or a last number, of the answer block where it has one, else of the reply, equal to the truth.
    """
    wanted = normalise(truth)
    answer = first_block(reply, "answer")
    right = answer is not None and normalise(answer) == wanted
    in_block = last_number(answer) if answer else None
    found = wanted if right else (last_number(reply) if in_block is None else in_block) or ""
    return Verdict(first_block(reply, "think"), answer, right, found == wanted, found)


def score(reply: str, truth: str, tiers: tuple[float, float, float] = TIERS) -> Score:
    """The tiered reward of `reply`: right answer, some other answer, no (or an empty) answer block.

    Its parts sum to it: `format` is what any answer earns, `right` what a right one earns on top.
    """
    verdict = judge(reply, truth)
    right_tier, wrong_tier, none_tier = tiers
    base = wrong_tier if verdict.answer else none_tier
    return Score(
        reward=right_tier if verdict.right else base,
        parts={"format": base, "right": right_tier - base if verdict.right else 0.0},
        accuracy_strict=float(verdict.right),
        accuracy_lenient=float(verdict.right_lenient),
        answer=verdict.found,
    )
