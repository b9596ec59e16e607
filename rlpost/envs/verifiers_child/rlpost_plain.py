"""Refusals, and prompts as plain data, for both interfaces of verifiers. Imports nothing of rlpost."""

from __future__ import annotations

from typing import Any

ONE_REPLY = "rlpost trains on one reply a task: choose a taskset that asks once and scores the reply"


class RefusedError(Exception):
    """The taskset cannot work here; the message is for the user."""


def refuse_if(wrong: Any, why: str) -> None:
    """Raise RefusedError, which says `why`, where `wrong` holds."""
    if wrong:
        raise RefusedError(why)


def plain_messages(prompt: Any, number: Any) -> list[dict[str, str]]:
    """The messages of a prompt, with their role and text alone. Raises RefusedError where that is not all of them."""
    messages = []
    for message in [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt:
        found = message if isinstance(message, dict) else message.model_dump(mode="json")
        content = found.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        refuse_if(
            found.get("tool_calls") or found["role"] == "tool" or any(part.get("type") != "text" for part in parts),
            f"the prompt of task {number} has images or calls of tools, and rlpost asks in text",
        )
        messages.append({"role": found["role"], "content": "".join(part["text"] for part in parts)})
    refuse_if(
        not messages or messages[-1]["role"] != "user",
        f"the prompt of task {number} does not end with a message of the user",
    )
    return messages
