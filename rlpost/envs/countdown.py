"""Countdown: make a target out of a few numbers, each used exactly once."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from rlpost.data.conversation import Conversation
from rlpost.envs.chat import Task
from rlpost.envs.endless import EndlessEnv, EndlessProblems
from rlpost.rewards import countdown
from rlpost.rewards.score import Score
from rlpost.settings import CountdownOperation, CountdownSettings
from rlpost.settings.base import member

PROMPT_TEMPLATE = (
    "Make {target} out of the numbers {numbers}: use each of them exactly once, with the operations {operations} and "
    "parentheses. Write the expression alone between <answer> and </answer>, such as "
    "<answer>(7 + 1) - 2</answer>."
)


class CountdownEnv(EndlessEnv):
    """One turn on each target: `min_numbers` to `max_numbers` numbers from 1 to `max_number`.

    A task has `target`, `numbers`, `operations` ("+ - *") and `solution`, an expression that makes the
    target: problems begin as their solution, so each has one. Reward and accuracies are those of
    `rlpost.rewards.countdown`, `tiers` the rewards of a right answer, of another, and of none. Other
    arguments are `DatasetChatEnv`'s. Raises ConfigError for settings that leave no problem.
    """

    def __init__(
        self,
        *,
        min_numbers: int = 3,
        max_numbers: int = 3,
        max_number: int = 25,
        max_target: int = 100,
        operations: Sequence[str] = tuple(CountdownOperation.__members__),
        tiers: tuple[float, float, float] = countdown.TIERS,
        prompt_template: str = PROMPT_TEMPLATE,
        **chat: Any,
    ) -> None:
        chosen = [member(CountdownOperation, "env.operations", name) for name in operations]
        CountdownSettings(  # refuses what cannot be
            min_numbers=min_numbers,
            max_numbers=max_numbers,
            max_number=max_number,
            max_target=max_target,
            operations=chosen,
        )
        super().__init__(prompt_template=prompt_template, **chat)
        self.num_numbers = (min_numbers, max_numbers)
        self.max_number = max_number
        self.max_target = max_target
        self.signs = "".join(operation.value for operation in CountdownOperation if operation in chosen)
        self.tiers = tiers
        self.max_reward = tiers[0]

    def open_rows(self, seed: int) -> CountdownProblems:
        """See `DatasetChatEnv.open_rows`."""
        return CountdownProblems(self, seed)

    def score(self, conversation: Conversation) -> Score:
        """Only the reply is read, never the prompt, whose own answer block would count."""
        task = conversation.task
        return countdown.score(conversation.reply, task["numbers"], task["target"], self.signs, self.tiers)

    def gold_reply(self, task: Mapping[str, Any]) -> str:
        """See `EnvBase.gold_reply`."""
        return f"<answer>{task['solution']}</answer>"

    def corrupted_replies(self, task: Mapping[str, Any]) -> list[str]:
        """See `EnvBase.corrupted_replies`: no answer, other numbers, a number too few or too many, a bare result."""
        solution, first = task["solution"], task["numbers"][0]
        wrong = [
            "",
            str(task["target"]),
            f"{solution} + {first} - {first}",
            f"{solution} {self.signs[0]} ",
            solution.replace(str(first), str(first + 1), 1),
            f"{first} / (1 - 1)",
            f"{first} ** 99999999",
        ]
        return ["", "I do not know.", *[f"<answer>{answer}</answer>" for answer in wrong]]


class CountdownProblems(EndlessProblems):
    """Numbers joined two by two, in ways that give a positive whole number, until the target is left."""

    def make(self, number: int) -> Task | None:
        """See `EndlessProblems.make`; None where the numbers as they were joined make no target small enough."""
        env, rng = self.env, random.Random(f"{self.seed}/{number}")
        numbers = [rng.randint(1, env.max_number) for _ in range(rng.randint(*env.num_numbers))]
        parts = [(value, str(value)) for value in numbers]
        while len(parts) > 1:
            one, other = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
            bound = env.max_target if not parts else env.max_target * env.max_number
            joined = [join for sign in env.signs for join in _joins(one, sign, other) if join[0] <= bound]
            if not joined:
                return None
            value, text = rng.choice(joined)
            parts.append((value, f"({text})" if parts else text))
        target, solution = parts[0]
        return {"target": target, "numbers": numbers, "operations": " ".join(env.signs), "solution": solution}

    def identity(self, task: Task) -> str:
        """See `EndlessProblems.identity`: the numbers in any order, and the target."""
        return f"{sorted(task['numbers'])} {task['target']}"

    def describe(self) -> str:
        """See `EndlessProblems.describe`."""
        env = self.env
        least, most = env.num_numbers
        return f"{least} to {most} numbers up to {env.max_number}, targets up to {env.max_target}, {env.signs}"


def _joins(one: tuple[int, str], sign: str, other: tuple[int, str]) -> list[tuple[int, str]]:
    """Value and text of each way to join two expressions by `sign` that gives a positive whole number."""
    (low, low_text), (high, high_text) = sorted((one, other))
    if sign in "+*":
        return [(low + high if sign == "+" else low * high, f"{one[1]} {sign} {other[1]}")]
    if sign == "-":
        return [(high - low, f"{high_text} - {low_text}")] if high > low else []
    return [(high // low, f"{high_text} / {low_text}")] if high % low == 0 else []
