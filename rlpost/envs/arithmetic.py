"""Sums made on the spot: a task on which a small model learns in minutes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from rlpost.data.conversation import Conversation
from rlpost.data.order import mixed
from rlpost.envs.endless import HELD_OUT_PROBLEMS, EndlessEnv
from rlpost.errors import DataError
from rlpost.rewards import numbers
from rlpost.rewards.score import Score
from rlpost.settings import ArithmeticSettings, Operation
from rlpost.settings.base import member

PROMPT_TEMPLATE = "What is {question}?"
PROVED_AT_MOST = 10_000  # problems that `rlpost env test` tries
COUNTED_OPERANDS = 1000  # a million pairs take half a second


class ArithmeticEnv(EndlessEnv):
    """One turn on `a + b`, `a - b` or `a * b`, operands of `digits` digits each.

    A task has `question` ("34 + 57"), `answer` ("91"), `a`, `b` and `operation`. `held_out` is the
    share of the pairs of operands that make up the split test: train and test share none of them, in
    either order, whatever the operation. With 0 both splits are all problems. Reward and accuracies
    are those of `rlpost.rewards.numbers`. Other arguments are `DatasetChatEnv`'s.
    """

    def __init__(
        self,
        *,
        operations: Sequence[str] = ("add",),
        digits: int = 2,
        prompt_template: str = PROMPT_TEMPLATE,
        max_completion_tokens: int = 48,
        **chat: Any,
    ) -> None:
        chosen = [member(Operation, "env.operations", name) for name in operations]
        ArithmeticSettings(operations=chosen, digits=digits)  # refuses what cannot be
        super().__init__(prompt_template=prompt_template, max_completion_tokens=max_completion_tokens, **chat)
        self.operations = tuple(operations)
        self.digits = digits

    def open_rows(self, seed: int) -> Problems:
        """See `DatasetChatEnv.open_rows`."""
        return Problems(self.operations, self.digits, self.split, seed, self.limit, self.held_out)

    def score(self, conversation: Conversation) -> Score:
        """Only the reply is read, never the prompt."""
        return numbers.score(conversation.reply, conversation.task["answer"])

    def all_tasks(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """See `EnvBase.all_tasks`; the first 10,000 problems at most."""
        for task in islice(self.open_rows(self.seed).epoch(0), PROVED_AT_MOST):
            yield task["question"], task

    def gold_reply(self, task: Mapping[str, Any]) -> str:
        """See `EnvBase.gold_reply`."""
        return task["answer"]

    def corrupted_replies(self, task: Mapping[str, Any]) -> list[str]:
        """See `EnvBase.corrupted_replies`."""
        right = int(task["answer"])
        return ["", "I do not know.", str(right + 1), f"{right}1", str(-right or 1), f"It is {right}, or {right - 1}."]


class Problems:
    """The problems of one split, without end, each once an epoch, in an order of its own in each.

    Nothing is listed: the i-th problem of an epoch is the i-th of a keyed permutation of all
    problems that falls on this side of the split; with `held_out=0` every problem is on both sides.
    With a `limit` every epoch is the first `limit` problems.
    """

    def __init__(
        self,
        operations: Sequence[str],
        digits: int,
        split: str,
        seed: int,
        limit: int | None = None,
        held_out: float = HELD_OUT_PROBLEMS,
    ) -> None:
        self.operations = operations
        self.lowest = 10 ** (digits - 1) if digits > 1 else 0
        self.num_operands = 10**digits - self.lowest
        self.split = split
        self.seed = seed
        self.limit = limit
        self.held_out = held_out

    def iter_from(self, position: int) -> Iterator[dict[str, Any]]:
        """The problems from `position` on; the ones before it are made and passed over."""
        return islice(self._endless(), position, None)

    def _endless(self) -> Iterator[dict[str, Any]]:
        epoch = 0
        while True:
            yield from self.epoch(epoch)
            epoch += 1

    def epoch(self, number: int) -> Iterator[dict[str, Any]]:
        """Every problem of the split once, `limit` at most. Raises DataError if there is none."""
        size = len(self.operations) * self.num_operands**2
        key = mixed(mixed(self.seed) + (number if self.limit is None else 0))
        made = 0
        for index in range(size):
            rest, b = divmod(permuted(index, size, key), self.num_operands)
            which, a = divmod(rest, self.num_operands)
            a, b = a + self.lowest, b + self.lowest
            if self._has(a, b):
                yield problem(self.operations[which], a, b)
                made += 1
                if made == self.limit:
                    return
        if not made:
            raise DataError(
                f"env.held_out={self.held_out:g} leaves the {self.split} split of these problems empty: change it, or "
                "raise env.digits"
            )

    def _has(self, a: int, b: int) -> bool:
        """Whether the problems about `a` and `b` are on this side of the split."""
        return self.held_out == 0 or is_held_out(a, b, self.held_out) == (self.split == "test")

    def count(self) -> int:
        """How many different problems there are: exact up to three digits, to one in a thousand beyond."""
        pairs = self.num_operands**2
        if self.num_operands <= COUNTED_OPERANDS:
            operands = range(self.lowest, self.lowest + self.num_operands)
            own = sum(self._has(a, b) * (1 if a == b else 2) for a in operands for b in range(a, operands.stop))
        elif self.held_out == 0:
            own = pairs
        else:
            own = round(pairs * (self.held_out if self.split == "test" else 1 - self.held_out))
        count = len(self.operations) * own
        return count if self.limit is None else min(count, self.limit)

    def fingerprint(self, served: int) -> str:
        """Everything besides the seed that a saved position depends on, in words."""
        problems = f"{', '.join(self.operations)} of {self.lowest} to {self.lowest + self.num_operands - 1}"
        return f"{self.split} problems: {problems}, {self.held_out:g} held out, limit {self.limit}"


def problem(operation: str, a: int, b: int) -> dict[str, Any]:
    """The task `a operation b`."""
    answer = {"add": a + b, "subtract": a - b, "multiply": a * b}[operation]
    return {
        "question": f"{a} {Operation[operation].value} {b}",
        "answer": str(answer),
        "a": a,
        "b": b,
        "operation": operation,
    }


def is_held_out(a: int, b: int, share: float = HELD_OUT_PROBLEMS) -> bool:
    """Whether the pair belongs to the test split: a fixed function of the two numbers in either order.

    What a smaller `share` holds out, a larger one does too.
    """
    finer, fifth = divmod(mixed(min(a, b) * 10**9 + max(a, b)), 5)  # the default share is one of the fifths
    return (fifth + finer % 2**32 / 2**32) / 5 < share


def permuted(index: int, size: int, key: int) -> int:
    """The image of `index` under a permutation of range(size) chosen by `key`: a Feistel network.

    It permutes the next power of four; what falls outside the range is sent on until it is inside.
    """
    half = (max(size - 1, 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            left, right = right, left ^ (mixed(right + (key ^ turn)) & mask)
        index = left << half | right
        if index < size:
            return index
