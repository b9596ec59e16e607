"""Files of rows, environments that read them, and replies to their prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlpost.data.conversation import Completion, Conversation
from rlpost.envs import ChatEnv
from rlpost.envs.build import build_env
from rlpost.settings import DatasetSettings


def write_rows(folder: Path, rows: Sequence[Any], name: str = "rows.jsonl") -> Path:
    """A file in `folder` with one JSON value a line."""
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def env_of(folder: Path, rows: Sequence[Any], **settings: Any) -> Any:
    """The environment of `rows` in a file, in their order, all of them for training and scored by `exact`."""
    usual = {"path": str(write_rows(folder, rows)), "reward": ["exact"], "held_out": 0.0, "shuffle": False}
    return build_env(DatasetSettings(**{**usual, **settings}))


def answer(env: ChatEnv, conversations: Sequence[Conversation], *replies: str, finish_reason: str = "stop") -> None:
    """Let the policy say one of `replies` in each conversation, and the environment go on."""
    for conversation, reply in zip(conversations, replies, strict=True):
        conversation.add_completion(Completion([7], [-0.5], reply, finish_reason, 0))
    env.advance(conversations)


def answered(env: ChatEnv, *replies: str, finish_reason: str = "stop") -> list[Conversation]:
    """The next conversations, one for each of `replies`."""
    conversations = env.draw(len(replies))
    answer(env, conversations, *replies, finish_reason=finish_reason)
    return conversations
