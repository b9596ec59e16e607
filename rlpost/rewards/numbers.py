"""Numbers in free text, in a canonical form, and the reward of a sum: is the last number of a reply the answer?

Everything here works on strings, in linear time: a reply may hold a number of a hundred thousand
digits, which `int` refuses and `float` cannot tell from its neighbours.
"""

from __future__ import annotations

import re
from collections import deque

from rlpost.rewards.score import Score

_MINUS = "-\N{MINUS SIGN}"
_NUMBER = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+")
_ONLY_A_NUMBER = re.compile(rf"([+{re.escape(_MINUS)}]?)({_NUMBER.pattern})\.?")
_OPERAND_ENDS = ")]}%"  # a minus after one of these, or after a digit, is between operands


def last_number(text: str) -> str | None:
    """The last number of `text` in canonical form, or None.

    Thousands commas and decimals belong to a number, a full stop after it does not. A minus is its
    sign where it touches the number (or its $) and does not stand between operands or inside a word:
    `12 - 5`, `12 -5`, `12-5` and `step-5` end in 5, `= -5` and `is -5` in -5.
    """
    last = deque(_NUMBER.finditer(text, _start_of_last_run(text)), maxlen=1)
    if not last:
        return None
    return canonical(last[0].group(), negative=_has_sign(text, last[0].start()))


def only_number(text: str) -> str | None:
    """The number that `text` is, but for white space around it and a full stop after it; else None."""
    match = _ONLY_A_NUMBER.fullmatch(text.strip())
    return canonical(match.group(2), negative=match.group(1) in tuple(_MINUS)) if match else None


def canonical(number: str, negative: bool = False) -> str:
    """`number` without commas, superfluous zeros and the sign of a zero: "1,050.50" is "1050.5"."""
    whole, _, decimals = number.replace(",", "").partition(".")
    whole, decimals = whole.lstrip("0") or "0", decimals.rstrip("0")
    value = f"{whole}.{decimals}" if decimals else whole
    return f"-{value}" if negative and value != "0" else value


def _start_of_last_run(text: str) -> int:
    """The start of the last unbroken run of digits, commas and points that holds a digit."""
    last = re.search("[0-9]", text[::-1])
    end = len(text) - last.start() if last else 0
    return len(text[:end].rstrip("0123456789,."))


def _has_sign(text: str, start: int) -> bool:
    """Whether the number at `start` is negative: see `last_number`."""
    at = start - 1
    if at >= 0 and text[at] == "$":
        at -= 1
    if at < 0 or text[at] not in _MINUS:
        return False
    before = text[:at]
    if before and (before[-1].isalnum() or before[-1] == "_"):
        return False
    before = before.rstrip()
    return not before or not (before[-1].isdigit() or before[-1] in _OPERAND_ENDS)


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
