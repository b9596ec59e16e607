"""my_env: an environment of your own. It works as it is; change it piece by piece.

rlpost config explain env=my_env plugin=./my_env.py    its settings, as you wrote them below
rlpost env test my_env plugin=./my_env.py              proves that right answers earn full marks, and wrong ones do not
rlpost train grpo env=my_env plugin=./my_env.py
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import rlpost
from rlpost.data.conversation import Conversation
from rlpost.envs import DatasetChatEnv
from rlpost.errors import ConfigError
from rlpost.rewards.numbers import last_number, only_number
from rlpost.rewards.score import Score
from rlpost.settings import EnvSettings, doc


# 1. The settings. Each field is a key of the command line (env.numbers=5); the text beside it is what
#    `rlpost config explain env=my_env` says of it, and the first line below what `rlpost config list env` says of all
#    of it.
@dataclass
class MyEnvSettings(EnvSettings):
    """Which of a few numbers is the largest?"""

    numbers: int = doc(3, "to choose from")
    highest: int = doc(99, "number that can occur")
    questions: int = doc(1000, "different ones, a fifth of them for test")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.numbers <= self.highest + 1:
            raise ConfigError(f"env.numbers={self.numbers} is out of range: it must lie between 2 and env.highest + 1")


class MyEnv(DatasetChatEnv):
    """One turn on each question; the reward is 1 for the right number."""

    def __init__(self, settings: MyEnvSettings, **common: Any) -> None:
        # common is what every environment has: split, limit, seed, system_prompt, max_prompt_tokens ...
        super().__init__((), **common)
        self.settings = settings

    # 2. The tasks. `question` is what the user says; other fields are yours. The splits train and test must not
    #    share a question, or your accuracy is not measured on held-out prompts.
    def load(self, split: str) -> list[dict[str, Any]]:
        """The tasks of one split, `self.limit` at most."""
        draw = random.Random(0)  # always the same questions; in which order they come is not decided here
        made = [
            draw.sample(range(self.settings.highest + 1), self.settings.numbers) for _ in range(self.settings.questions)
        ]
        different = sorted({tuple(sorted(numbers)) for numbers in made})
        draw.shuffle(different)
        cut = max(1, len(different) // 5)
        chosen = different[:cut] if split == "test" else different[cut:]
        return [self._task(draw.sample(numbers, len(numbers))) for numbers in chosen][: self.limit]

    def _task(self, numbers: list[int]) -> dict[str, Any]:
        *others, last = map(str, numbers)
        return {"question": f"Which number is the largest: {', '.join(others)} or {last}?", "answer": str(max(numbers))}

    # 3. The reward. `reward` is what is trained on and `parts` what it is made of; accuracy is your task's own 0/1
    #    measure, so that a reward you change later leaves it comparable. What raises here is an error, never a 0.
    def score(self, conversation: Conversation) -> Score:
        """1 where the last number of the reply is the right one."""
        reply, answer = conversation.reply, conversation.task["answer"]
        right = float(last_number(reply) == answer)
        bare = float(only_number(reply) == answer)
        return Score(reward=right, parts={"right": right}, accuracy_strict=bare, accuracy_lenient=right)

    # 4. The proof, for `rlpost env test`: a reply that earns everything, and some like it that must not.
    def all_tasks(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The place of each task of the split, and the task."""
        for number, task in enumerate(self.load(self.split), start=1):
            yield f"{self.split} task {number}", task

    def gold_reply(self, task: Mapping[str, Any]) -> str:
        """A perfect reply."""
        return task["answer"]

    def corrupted_replies(self, task: Mapping[str, Any]) -> list[str]:
        """Wrong replies that a careless reward might take for right."""
        return ["", "I do not know.", f"{task['answer']}1", f"It is {task['answer']}, or {int(task['answer']) + 1}."]


# 5. The name, for env=my_env.
rlpost.register_env("my_env", MyEnvSettings, MyEnv)
