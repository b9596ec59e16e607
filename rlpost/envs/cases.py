"""The rows of an environment as cases to attack a reward with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from rlpost.data.conversation import Message
from rlpost.envs.dataset import DatasetEnv, as_answer
from rlpost.envs.dataset_chat import DatasetChatEnv
from rlpost.errors import DataError
from rlpost.rewards.attack import STAND_IN, Case


def cases_of(env: DatasetChatEnv, count: int) -> list[Case]:
    """The first `count` rows of the environment's split, with its gold answers where it has any.

    Raises DataError where it has none and the environment's replies are right or wrong.
    """
    env.start()
    if not env.has_gold:
        rows: Sequence[Mapping[str, Any]] = env.rows[:count]
        return [Case(env.where(number), _prompt(env, row), *STAND_IN, row, None) for number, row in enumerate(rows)]
    cases = [_case(env, where, task) for where, task in islice(env.all_tasks(), count)]
    if not cases:
        raise DataError(f"{type(env).__name__} has no row with a gold answer to attack with")
    return cases


def _case(env: DatasetChatEnv, where: str, task: Mapping[str, Any]) -> Case:
    gold, *corrupted = map(_last, (env.gold_reply(task), *env.corrupted_replies(task)))
    column = env.settings.answer_column or "answer" if isinstance(env, DatasetEnv) else "answer"
    answer = as_answer(task.get(column))
    return Case(where, _prompt(env, task), gold, corrupted, task, gold if answer is None else answer)


def _prompt(env: DatasetChatEnv, task: Mapping[str, Any]) -> str | list[Message]:
    return env.prompt_of(task) if isinstance(env, DatasetEnv) else env.user_message(task)


def _last(reply: str | Sequence[str]) -> str:
    """What a reward reads of a reply: the text of the last turn."""
    return reply if isinstance(reply, str) else reply[-1]
