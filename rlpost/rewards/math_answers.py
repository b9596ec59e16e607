r"""Answers to mathematics problems, `\boxed{...}`, compared as expressions and not as text.

The comparison is math-verify's, which parses LaTeX and computes with sympy: some answers keep it busy
for ever, or fill the memory. So it happens in processes that are killed when they are late, and a reply
that cannot be compared in time earns nothing and is counted, under the part `unverified`.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rlpost.imports import require
from rlpost.rewards.gsm8k import first_block
from rlpost.rewards.score import Score
from rlpost.rewards.workers import MEMORY_BYTES, Workers, limit_memory

TIERS = (1.0, 0.1, 0.0)  # right boxed answer, some other boxed answer, none
MAX_CHARACTERS = 500  # of an answer to compare, or of the end of a reply without a box
BOXES_TRIED = 10  # from the end of a reply, for one that is closed
MAX_DEPTH = 50  # of nested brackets; the parser recurses into each
PROCESSES = min(4, os.cpu_count() or 1)

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|([^\s{}$\\]))")
_DEAF = re.compile(r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\[!,;: ]|(?<!\d)\s+|\s+(?!\d)")  # without meaning

Question = tuple[str, str, bool]  # (right answer, text of the reply, whether to search that text for an answer)


@dataclass(frozen=True, slots=True)
class Reading:
    """The parts of a reply to compare: its last box (None without one), and the text to search otherwise."""

    box: str | None
    rest: str


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, `\fbox{...}` or `\boxed 5` of `text` that is closed, or None."""
    for match in reversed(deque(_BOX.finditer(text), maxlen=BOXES_TRIED)):
        if match.group(1):
            return match.group(1)
        start, depth = match.end(), 1
        too_far = start + MAX_CHARACTERS + 1
        for place in range(start, min(len(text), too_far)):
            depth += {"{": 1, "}": -1}.get(text[place], 0) if text[place - 1] != "\\" else 0
            if depth == 0:
                return text[start:place].strip()
        if len(text) >= too_far:
            return text[start:too_far]  # too long to be compared, whatever follows
    return None


def read(reply: str) -> Reading:
    """The part of `reply`, the model's own words only, to compare: its box, else its answer block, else its end."""
    box = last_box(reply)
    return Reading(box, box if box is not None else (first_block(reply, "answer") or reply)[-MAX_CHARACTERS:])


def same_text(one: str, other: str) -> bool:
    """Whether two answers are the same but for white space, `$`, `\\left`, `\\right` and the size of fractions."""

    def bare(answer: str) -> str:
        text = re.sub(r"\\[dt]frac", r"\\frac", answer.strip().strip("$").strip().removesuffix("."))
        return _DEAF.sub("", text)

    return bare(one) == bare(other)


class Verifier:
    """Compares replies with right answers, in `count` processes, each comparison at most `seconds` long.

    Raises MissingExtraError when it starts without math-verify.
    """

    def __init__(self, seconds: float = 5.0, count: int = PROCESSES) -> None:
        self.workers = Workers("rlpost.rewards.math_answers:comparer", count, seconds, arguments=[MEMORY_BYTES])
        self._readable: dict[str, str | None] = {}  # right answer -> why it cannot be compared with anything

    def start(self) -> None:
        """Begin to start the processes, which takes a second."""
        require("math_verify", "math", "env=math")
        self.workers.start()

    def close(self) -> None:
        """End the processes."""
        self.workers.close()

    def score(self, replies: Sequence[tuple[str, str]], tiers: tuple[float, float, float] = TIERS) -> list[Score]:
        """The score of each (reply, right answer).

        The reward is a tier: right in its last box, some other box, none; its parts `format` and `right`
        sum to it. `accuracy_strict` asks for a right box; `accuracy_lenient` takes a right answer in a box, in
        `<answer>` tags or at the end of the reply too. What cannot be compared earns 0. A right answer
        that cannot be compared even with itself is an error of the row, not of the reply.
        """
        readings = [(read(reply), gold) for reply, gold in replies]
        strict = self._compared([(gold, r.box, False) for r, gold in readings if r.box is not None])
        loose = self._compared(
            [(gold, r.rest, True) for r, gold in readings if r.box is None or strict[gold, r.box, False] is False]
        )
        scores = []
        for reading, gold in readings:
            boxed = False if reading.box is None else strict[gold, reading.box, False]
            lenient = boxed if boxed is not False else loose[gold, reading.rest, True]
            scores.append(self._scored(reading, gold, boxed, lenient, tiers))
        return scores

    def _scored(
        self, reading: Reading, gold: str, boxed: bool | None, lenient: bool | None, tiers: tuple[float, float, float]
    ) -> Score:
        if (boxed is None or lenient is None) and (why := self._unreadable(gold)):
            return Score(float("nan"), valid=False, error=f"the right answer {gold!r:.80} cannot be compared: {why}")
        right_tier, wrong_tier, none_tier = tiers
        base = none_tier if reading.box is None else 0.0 if boxed is None else wrong_tier
        return Score(
            reward=right_tier if boxed else base,
            parts={
                "format": base,
                "right": right_tier - base if boxed else 0.0,
                "unverified": float(boxed is None or lenient is None),
            },
            weights={"unverified": 0.0},
            accuracy_strict=float(boxed is True),
            accuracy_lenient=float(lenient is True),
            answer=gold if lenient else " ".join((reading.box or "").split()),
        )

    def _compared(self, questions: Iterable[Question]) -> dict[Question, bool | None]:
        """Whether each answer is right, each distinct question decided once; None: undecidable."""
        answers: dict[Question, bool | None] = {}
        undecided: list[Question] = []
        for question in dict.fromkeys(questions):
            gold, answer, _ = question
            if same_text(gold, answer):
                answers[question] = True
            elif not answer.strip():
                answers[question] = False
            elif len(answer) > MAX_CHARACTERS or _depth(answer) > MAX_DEPTH:
                answers[question] = None
            else:
                undecided.append(question)
        compared = self.workers.map(undecided)  # None where one was late or failed, as for a number of a million digits
        return answers | {question: outcome.value for question, outcome in zip(undecided, compared, strict=True)}

    def _unreadable(self, gold: str) -> str | None:
        """Why a right answer cannot be compared with itself, or None if it can."""
        if gold not in self._readable:
            outcome = self.workers.map([(gold, gold, False)])[0]
            wrong = None if outcome.value is True else "math-verify finds nothing to compare in it"
            self._readable[gold] = outcome.error or wrong
        return self._readable[gold]


def comparer(memory_bytes: int) -> tuple[Callable[[Question], bool | None], None]:
    """Decide one question, in a process of `Verifier`: see `Workers`."""
    import logging

    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it would tell each time that its timeout is off
    limit_memory(memory_bytes)

    def parsed(text: str) -> list[Any]:
        return parse(text, parsing_timeout=None)  # type: ignore[arg-type]  # its own needs SIGALRM; the process has ours

    def compare(question: Question) -> bool | None:
        gold, answer, is_text = question
        wanted = parsed(_as_latex(gold))
        if not wanted:
            return None
        return bool(verify(wanted, parsed(answer if is_text else _as_latex(answer)), timeout_seconds=None))

    return compare, None


def equal(reply: str, answer: str) -> bool:
    """Whether the answer of a reply is `answer`; for a process that can be killed, since it may take for ever."""
    reading = read(reply)
    given = reading.rest if reading.box is None else reading.box
    if same_text(answer, given):
        return True
    if not given.strip() or len(given) > MAX_CHARACTERS or _depth(given) > MAX_DEPTH:
        return False
    compare, _ = _comparer_here()
    return bool(compare((answer, given, reading.box is None)))


@cache
def _comparer_here() -> tuple[Callable[[Question], bool | None], None]:
    return comparer(MEMORY_BYTES)


def _as_latex(answer: str) -> str:
    bare = answer.replace("\\$", "").replace("$", "")
    return f"${bare}$"


def _depth(text: str) -> int:
    """How deeply brackets are nested at most."""
    depth = deepest = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    return deepest
