"""GSM8K: grade-school word problems, one turn each, answered in `<think>` and `<answer>` tags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlpost.data.conversation import Conversation
from rlpost.data.datasets import LocatedRows
from rlpost.data.rows import Row
from rlpost.envs.chat import DatasetChatEnv
from rlpost.envs.row_checks import read_gsm8k
from rlpost.rewards import gsm8k
from rlpost.rewards.numbers import last_number
from rlpost.rewards.score import Score

HUB_ID = "openai/gsm8k"
HUB_CONFIG = "main"
SYSTEM_PROMPT = (
    "You solve math problems. First work through the problem step by step between <think> and </think>. "
    "Then write the final number, without units, between <answer> and </answer>. "
    "For example: <think>3 apples and 4 apples are 3 + 4 = 7 apples.</think><answer>7</answer>"
)
CALCULATOR = re.compile(r"<<[^<>]*>>")


class GSM8KEnv(DatasetChatEnv):
    """One turn on each GSM8K question.

    `dataset` is the hub's id, a folder with train.jsonl and test.jsonl, one file, or a sequence of
    rows with `question` and `answer`; of a path without a file for test a share `held_out` of the
    questions is the split test. A task has the row's fields, `answer` being the final number
    and `solution` what the dataset reasons before it. With `compute_reward=False` replies are not
    scored. Other arguments are `DatasetChatEnv`'s.

    >>> from rlpost.envs import GSM8KEnv
    >>> env = GSM8KEnv([{"question": "How much is 3 + 4?", "answer": "#### 7"}], num_envs=2)
    >>> asked = env.reset()
    >>> asked["text_response"] = ["<answer>7</answer>", "It is 8."]
    >>> env.step(asked)["next", "reward"].squeeze(-1).tolist()
    [1.0, 0.0]
    """

    def __init__(
        self,
        dataset: str | Sequence[Mapping[str, Any]] = HUB_ID,
        *,
        system_prompt: str | None = SYSTEM_PROMPT,
        tiers: tuple[float, float, float] = gsm8k.TIERS,
        compute_reward: bool = True,
        **chat: Any,
    ) -> None:
        super().__init__(dataset, system_prompt=system_prompt, **chat)
        self.config = HUB_CONFIG if dataset == HUB_ID else None
        self.tiers = tiers
        self.compute_reward = compute_reward
        self.max_reward = tiers[0]

    def load(self, split: str) -> LocatedRows:
        """See `DatasetChatEnv.load`; raises DataError for a row without a final answer."""
        return self.located(split, read_gsm8k, prepare=_task)

    def score(self, conversation: Conversation) -> Score | None:
        """Only the reply is read, never the system prompt's example."""
        if not self.compute_reward:
            return None
        return gsm8k.score(conversation.reply, conversation.task["answer"], self.tiers)

    def gold_reply(self, task: Mapping[str, Any]) -> str:
        """See `EnvBase.gold_reply`: the dataset's solution, without the calls of a calculator (`<<48/2=24>>`) in it."""
        return f"<think>{CALCULATOR.sub('', task['solution'])}</think><answer>{task['answer']}</answer>"

    def corrupted_replies(self, task: Mapping[str, Any]) -> list[str]:
        """See `EnvBase.corrupted_replies`."""
        right = last_number(task["answer"]) or ""
        wrong = [f"{right}1", f"1{right.lstrip('-')}", "", "unknown"]
        if right != "0":
            wrong.append(right.removeprefix("-") if right.startswith("-") else f"-{right}")
        tagged = [f"<think></think><answer>{answer}</answer>" for answer in wrong]
        return ["", f"{task['solution']}\nThe answer is {right}1.", *tagged]


def _task(row: Row) -> Row:
    solution, answer = gsm8k.split_solution(row["answer"])
    return {**row, "solution": solution, "answer": answer}
