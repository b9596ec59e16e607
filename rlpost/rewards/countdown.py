"""Countdown: does an expression make the target out of the numbers, each used exactly once?

The arithmetic is exact (fractions). Python parses what holds nothing but the numbers, operations and parentheses, and
the values are computed here: a reply is never given to `eval`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from rlpost.rewards.gsm8k import first_block
from rlpost.rewards.score import Score

TIERS = (1.0, 0.1, 0.0)  # right expression, some other answer, none
SIGNS = "+-*/"
MAX_CHARACTERS = 1000  # of an expression; thirty numbers with parentheses around each need less

_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})
_TOKENS = re.compile(r"\s*([0-9]+|[-+*/()])")
_EXPRESSION = re.compile(r"[0-9(][-+*/()0-9 \t]*")  # in free text
_APPLY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Fault(Enum):
    """Why an expression is not worth the target."""

    too_long = "too long"
    characters = "other characters than numbers, operations and parentheses"
    operation = "an operation that is not allowed"
    numbers = "not every number exactly once"
    malformed = "no well-formed expression"
    division_by_zero = "a division by zero"
    other_value = "another value than the target"


@dataclass(frozen=True, slots=True)
class Verdict:
    """An expression as it was read, its exact value if it has one, and its fault (None: none)."""

    expression: str
    value: Fraction | None
    fault: Fault | None


def judge(expression: str, numbers: Sequence[int], target: int, signs: str = SIGNS) -> Verdict:
    """Whether `expression` makes `target` out of all of `numbers` with the operations `signs`.

    ×, ÷ and − are read as *, / and -; a sign before a number is not an operation. The numbers are
    checked before anything is computed, so that nothing large ever is.
    """
    text = expression.translate(_SPELLINGS).strip()
    if len(text) > MAX_CHARACTERS:
        return Verdict(text[:MAX_CHARACTERS], None, Fault.too_long)
    tokens = _TOKENS.findall(text)
    if "".join(tokens) != "".join(text.split()):
        return Verdict(text, None, Fault.characters)
    if any(token in SIGNS and token not in signs for token in tokens):
        return Verdict(text, None, Fault.operation)
    tokens = [token.lstrip("0") or "0" if token.isdigit() else token for token in tokens]
    if Counter(token for token in tokens if token.isdigit()) != Counter(map(str, numbers)):
        return Verdict(text, None, Fault.numbers)
    try:
        value = _value_of(ast.parse(" ".join(tokens), mode="eval").body)
    except ZeroDivisionError:
        return Verdict(text, None, Fault.division_by_zero)
    except SyntaxError:
        return Verdict(text, None, Fault.malformed)
    return Verdict(text, value, None if value == target else Fault.other_value)


def score(
    reply: str,
    numbers: Sequence[int],
    target: int,
    signs: str = SIGNS,
    tiers: tuple[float, float, float] = TIERS,
) -> Score:
    """The tiered reward of `reply`: right expression in its answer block, some other answer, no or an empty block.

    Its parts sum to it: `format` is what any answer earns, `right` what a right one earns on top.
    `accuracy_lenient` also takes an expression outside the block (the last of the reply, where there
    is none), one inside a sentence, and one before an equals sign.
    """
    right_tier, wrong_tier, none_tier = tiers
    block = first_block(reply, "answer")
    strict = judge(block or "", numbers, target, signs)
    right = strict.fault is None
    lenient = strict if right else judge(_last_expression(block or reply), numbers, target, signs)
    base = wrong_tier if block else none_tier
    return Score(
        reward=right_tier if right else base,
        parts={"format": base, "right": right_tier - base if right else 0.0},
        accuracy_strict=float(right),
        accuracy_lenient=float(lenient.fault is None),
        answer=lenient.expression if lenient.value is None else str(lenient.value),
    )


def _last_expression(text: str) -> str:
    """The last piece of `text` that looks like an expression with an operation in it, or ""."""
    found = [piece.rstrip() for piece in _EXPRESSION.findall(text.translate(_SPELLINGS))]
    return next((piece for piece in reversed(found) if any(sign in piece for sign in SIGNS)), "")


def _value_of(node: ast.AST) -> Fraction:
    """The value of a parsed expression. Raises ZeroDivisionError, and SyntaxError for a malformed one."""
    if isinstance(node, ast.BinOp) and type(node.op) in _APPLY:
        return _APPLY[type(node.op)](_value_of(node.left), _value_of(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    raise SyntaxError("no well-formed expression")
