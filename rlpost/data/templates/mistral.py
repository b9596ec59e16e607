"""The format of Mistral's instruct models, version 7 of its tokenizers (Small 3, Large 2411)."""

from __future__ import annotations

import re

from rlpost.data.conversation import Message
from rlpost.data.templates.parsing import JsonCalls, UnparsedTextError, shown

CALLS = JsonCalls("arguments", with_id=True)
BEGIN, END = "<s>", "</s>"

# how each role's message stands in the text; what stands in none of these is the assistant's
_BRACKETS = {
    "[SYSTEM_PROMPT]": ("system", "[/SYSTEM_PROMPT]"),
    "[AVAILABLE_TOOLS]": ("available_tools", "[/AVAILABLE_TOOLS]"),
    "[INST]": ("user", "[/INST]"),
    "[TOOL_RESULTS]": ("tool", "[/TOOL_RESULTS]"),
}
_TOKENS = re.compile("|".join(re.escape(t) for o, (_, c) in _BRACKETS.items() for t in (o, c)) + f"|{END}|{BEGIN}")


def parse_mistral(text: str) -> list[Message]:
    """The messages of a Mistral text; older versions' spaces behind `[INST]` and `[/INST]` are part of the content.

    A description of tools comes back as a message of role "available_tools", a result with its
    `tool_call_id`. The format has no header before an answer: one of no words and no end is none.
    """
    text = text.removeprefix(BEGIN)
    messages: list[Message] = []
    place = 0
    while place < len(text):
        token = _TOKENS.match(text, place)
        bracket = _BRACKETS.get(token.group()) if token else None
        if token and bracket:
            role, closing = bracket
            place = token.end()
        elif token and token.group() != END:
            raise UnparsedTextError(f"{shown(text[place:])} stands outside of any message")
        else:
            role, closing = "assistant", END
        stop = _TOKENS.search(text, place)
        content = text[place : stop.start() if stop else len(text)]
        is_complete = stop is not None and stop.group() == closing
        messages.append(_message(role, content, is_complete))
        place = len(text) if stop is None else stop.end() if is_complete else stop.start()
    if not messages:
        raise UnparsedTextError("nothing is in it")
    return messages


def _message(role: str, content: str, is_complete: bool) -> Message:
    message: Message = {"role": role, "content": content}
    if role == "assistant":
        said, found, written = content.partition("[TOOL_CALLS][")
        calls = CALLS.read_all(written.removesuffix("]"), separator=", ") if found and written.endswith("]") else None
        message |= {"content": said, "tool_calls": calls} if calls is not None else {}
    elif role == "tool":
        number, found, said = content.partition("[TOOL_CONTENT]")
        if not found:
            raise UnparsedTextError(f"{shown(content)} is a tool's result without [TOOL_CONTENT]")
        message |= {"content": said, "tool_call_id": number} if number else {"content": said}
    return message if is_complete else {**message, "is_complete": False}
