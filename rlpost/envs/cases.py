"""The rows of an environment as cases to attack a reward with."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from rlpost.envs.dataset import DatasetEnv, as_answer
from rlpost.envs.dataset_chat import DatasetChatEnv
from rlpost.errors import DataError
from rlpost.rewards.attack import Case


def cases_of(env: DatasetChatEnv, count: int) -> list[Case]:
    """The first `count` rows of the environment's split that have a gold answer.

    Raises DataError where there is none.
    """
    env.start()
    cases = [_case(env, where, task) for where, task in islice(env.all_tasks(), count)]
    if not cases:
        raise DataError(f"{type(env).__name__} has no row with a gold answer to attack with")
    return cases


def _case(env: DatasetChatEnv, where: str, task: Mapping[str, Any]) -> Case:
    gold = env.gold_reply(task)
    column = env.settings.answer_column or "answer" if isinstance(env, DatasetEnv) else "answer"
    answer = as_answer(task.get(column))
    prompt = env.prompt_of(task) if isinstance(env, DatasetEnv) else env.user_message(task)
    return Case(where, prompt, gold, env.corrupted_replies(task), task, gold if answer is None else answer)
