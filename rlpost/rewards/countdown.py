"""Countdown: does an expression make the target out of the numbers, each used exactly once?

The arithmetic is exact (fractions). An expression that holds only numbers, operations and parentheses is parsed by
`ast` and computed here: a reply is never given to `eval`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
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


def value_of(expression: str, numbers: Sequence[int], signs: str = SIGNS) -> Fraction | None:
    """The exact value of an expression of all of `numbers` with the operations `signs`; None for anything else.

    ×, ÷ and − are read as *, / and -; a sign before a number is not an operation. The numbers are
    checked before anything is computed, so that nothing large ever is.
    """
    text = expression.translate(_SPELLINGS).strip()
    tokens = _TOKENS.findall(text)
    if len(text) > MAX_CHARACTERS or "".join(tokens) != "".join(text.split()):
        return None
    tokens = [token.lstrip("0") or "0" if token.isdigit() else token for token in tokens]
    used = Counter(token for token in tokens if token.isdigit())
    if used != Counter(map(str, numbers)) or any(token in SIGNS and token not in signs for token in tokens):
        return None
    try:
        return _computed(ast.parse(" ".join(tokens), mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        return None


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
    right = value_of(block or "", numbers, signs) == target
    found = _last_expression(block or reply)
    value = target if right else value_of(found, numbers, signs)
    base = wrong_tier if block else none_tier
    return Score(
        reward=right_tier if right else base,
        parts={"format": base, "right": right_tier - base if right else 0.0},
        accuracy_strict=float(right),
        accuracy_lenient=float(value == target),
        answer=found[:MAX_CHARACTERS] if value is None else str(value),
    )


def _last_expression(text: str) -> str:
    """The last piece of `text` that looks like an expression with an operation in it, or ""."""
    found = [piece.rstrip() for piece in _EXPRESSION.findall(text.translate(_SPELLINGS))]
    return next((piece for piece in reversed(found) if any(sign in piece for sign in SIGNS)), "")


def _computed(node: ast.AST) -> Fraction:
    """The value of a parsed expression. Raises ZeroDivisionError, and SyntaxError for a malformed one."""
    if isinstance(node, ast.BinOp) and type(node.op) in _APPLY:
        return _APPLY[type(node.op)](_computed(node.left), _computed(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    raise SyntaxError("no well-formed expression")
