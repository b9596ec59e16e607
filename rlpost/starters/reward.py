"""my_reward: a reward of your own. It works as it is; change it.

python ./my_reward.py                             tries it on the replies at the end of this file
rlpost reward test ./my_reward.py:my_reward       attacks it, before a model does
rlpost train grpo env=dataset env.path=ROWS.jsonl env.reward=./my_reward.py:my_reward
"""

from __future__ import annotations

import re
from typing import Any


def my_reward(completions: list[str], answer: list[Any], **others: Any) -> list[float | None]:
    """1 where the reply ends in the right number, 0.1 where it ends in another, 0 where it has none.

    It is called once for a batch of replies, and every argument is a list with one entry for each:

    completions  what the model said (a list of one message each, if your prompts are messages)
    answer       the column `answer` of your rows: name any of your columns and it is given to you
    others       the rest: prompts, completion_ids, every other column, and log_metric(name, number)

    Return a number for each reply, or None where this reward does not apply to it. A reply that you
    cannot read is worth 0; what raises is an error, and that reply is left out. It may be `async`.
    """
    rewards: list[float | None] = []
    for reply, wanted in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?[0-9]+", reply)
        if not numbers:
            rewards.append(0.0)
        elif numbers[-1] == str(wanted):
            rewards.append(1.0)
        else:
            rewards.append(0.1)
    return rewards


if __name__ == "__main__":
    replies = ["It is 12.", "It is 13.", "I do not know."]
    for reply, value in zip(replies, my_reward(replies, [12, 12, 12]), strict=True):
        print(f"{value}  {reply}")
