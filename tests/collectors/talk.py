"""A small environment of several turns, and a collector that plays it with scripted replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from tensordict import TensorDictBase

from rlpost.collectors import LLMCollector
from rlpost.data.conversation import Conversation
from rlpost.envs import DatasetChatEnv
from rlpost.envs.base import EnvBase
from rlpost.model.conversion import tiny_tokenizer
from rlpost.policies import ScriptedPolicy
from rlpost.rewards.score import Score
from rlpost.settings import SamplingSettings

ROWS = [{"question": f"q{i}", "turns": turns} for i, turns in enumerate([1, 3, 2, 1, 1, 2])]
ONE_TURN = [{"question": f"q{i}", "turns": 1} for i in range(6)]


class Talk(DatasetChatEnv):
    """Asks for more until the task's number of turns, three at most; the reward is that number."""

    def next_message(self, conversation: Conversation) -> str | None:
        return None if conversation.turns == conversation.task["turns"] else f"more {conversation.turns}"

    def score(self, conversation: Conversation) -> Score:
        return Score(float(conversation.turns), {"turns": float(conversation.turns)})


def talk(size: int = 2, repeats: int = 1, rows: Sequence[Any] = ROWS) -> Talk:
    return Talk(rows, shuffle=False, num_envs=size, repeats=repeats, max_steps=3)


@cache
def tokenizer() -> Any:
    """The tokenizer of every scripted policy here."""
    return tiny_tokenizer()


def scripted(*replies: str) -> ScriptedPolicy:
    """Answers the i-th request of a call with the i-th reply."""
    return ScriptedPolicy(replies, tokenizer(), sampling=SamplingSettings())


def make(env: EnvBase | Callable[[], EnvBase], **options: Any) -> LLMCollector:
    """A collector; unless told otherwise its policy says "a" in the first place and "b" in the second."""
    if not {"policy", "policy_factory"} & set(options):
        options["policy"] = scripted("a", "b")
    return LLMCollector(env, **options)


def next_of(collector: LLMCollector) -> TensorDictBase:
    batch = next(iter(collector))
    assert batch is not None
    return batch


def told(batch: TensorDictBase) -> list[tuple[str, int]]:
    """(query, turns the conversation had by then) of each row."""
    chats = batch["history"].to_chats()
    return [(q, sum(m["role"] == "assistant" for m in c)) for q, c in zip(batch["query"], chats, strict=True)]
