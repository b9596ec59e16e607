"""ChatML, and the format of Qwen 2.5 and 3, which adds tool calls and their results to it."""

from __future__ import annotations

from rlpost.data.conversation import Message
from rlpost.data.templates.parsing import HeadedTurns, JsonCalls, Turn, UnparsedTextError, read_blocks

TURNS = HeadedTurns("<|im_start|>", "\n", "<|im_end|>", behind="\n", text_end="<|endoftext|>")
CALLS = JsonCalls("arguments")


def parse_chatml(text: str) -> list[Message]:
    """The messages of a ChatML text; a tool call in it is part of the content."""
    return [turn.message() for turn in TURNS.read(text)]


def parse_qwen(text: str) -> list[Message]:
    """The messages of a Qwen text: the calls that end an answer as its `tool_calls`, each result as a tool's.

    A call whose JSON is bad, and one with words behind it, stays in the content, as does a turn of
    results right behind another, which the template would write as one.
    """
    messages: list[Message] = []
    for turn in TURNS.read(text):
        if turn.role == "tool":
            raise UnparsedTextError("it has a turn of role tool, whose results this format gives to the user's")
        results = None
        if turn.role == "user" and turn.is_complete and not (messages and messages[-1]["role"] == "tool"):
            results = read_blocks(turn.content, "<tool_response>\n", "\n", "\n</tool_response>")
        if results is not None:
            messages.extend({"role": "tool", "content": result} for result in results)
        else:
            messages.append(_with_calls(turn) if turn.role == "assistant" else turn.message())
    return messages


def _with_calls(turn: Turn) -> Message:
    """The assistant's turn as a message, the calls at its end taken out of the content."""
    opening, closing = "<tool_call>\n", "\n</tool_call>"
    content, calls = turn.content, []
    while content.endswith(closing):
        begin = content.rfind(opening)
        call = CALLS.read(content[begin + len(opening) : -len(closing)]) if begin >= 0 else None
        # a line break stands between what is said and a call, and none before a call at the beginning
        if call is None or (begin > 0 and content[begin - 1] != "\n") or begin == 1:
            break
        calls.insert(0, call)
        content = content[: max(0, begin - 1)]
    return turn.message(content=content, tool_calls=calls) if calls else turn.message()
