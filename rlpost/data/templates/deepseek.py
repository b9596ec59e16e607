"""The format of DeepSeek V3 and R1, and of the models distilled from R1."""

from __future__ import annotations

import json
import re
from typing import Any

from rlpost.data.conversation import Message
from rlpost.data.templates.parsing import UnparsedTextError, as_json, read_blocks, shown

BEGIN, END, FILLER = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_NAME, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
RESULTS_BEGIN, RESULTS_END = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
RESULT_BEGIN, RESULT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
_TURNS = re.compile("|".join((USER, ASSISTANT, RESULTS_BEGIN, RESULTS_END, END, BEGIN)))


def parse_deepseek(text: str) -> list[Message]:
    """The messages of a DeepSeek text.

    Arguments that the template would write differently stay the text they are. A message of the
    user has no end of its own, so the last one counts as complete.
    """
    body = text
    while body.startswith(FILLER) or body.endswith(FILLER):
        body = body.removeprefix(FILLER).removesuffix(FILLER)
    body = body.removeprefix(BEGIN)
    first = _TURNS.search(body)
    if first is None:
        raise UnparsedTextError(f"no {USER} or {ASSISTANT} is in it")
    place = first.start()
    messages: list[Message] = [{"role": "system", "content": body[:place]}] if place else []
    while place < len(body):
        place = _read_turn(place, body, messages)
    return messages


def _read_turn(place: int, body: str, messages: list[Message]) -> int:
    """Add to `messages` what the turn at `place` says; the place where the next one begins."""
    token = _TURNS.match(body, place)
    after_tool = bool(messages) and messages[-1]["role"] == "tool" and messages[-1].get("is_complete", True)
    if token and token.group() == RESULTS_BEGIN and not after_tool:
        return _read_results(token.end(), body, messages)
    if token and token.group() == USER:
        begin, role = token.end(), "user"
    elif token and token.group() == ASSISTANT and not after_tool:
        begin, role = token.end(), "assistant"
    elif after_tool and (token is None or token.group() == END):
        begin, role = place, "assistant"
    else:
        raise UnparsedTextError(f"{shown(body[place:])} stands outside of any message")
    stop = _TURNS.search(body, begin)
    content = body[begin : stop.start() if stop else len(body)]
    if role == "user":
        messages.append({"role": role, "content": content})
        return stop.start() if stop else len(body)
    is_complete = stop is not None and stop.group() == END
    message: Message = {"role": role, **_with_calls(content)}
    messages.append(message if is_complete else {**message, "is_complete": False})
    return len(body) if stop is None else stop.end() if is_complete else stop.start()


def _read_results(begin: int, body: str, messages: list[Message]) -> int:
    """Add a message for each of a tool's results that begin at `begin`; the place behind them."""
    end = body.find(RESULTS_END, begin)
    results = read_blocks(body[begin:end], RESULT_BEGIN, "\n", RESULT_END) if end >= 0 else None
    if results is None:
        raise UnparsedTextError(f"{shown(body[begin:])} are no whole results of tools")
    messages.extend({"role": "tool", "content": result} for result in results)
    return end + len(RESULTS_END)


def _with_calls(content: str) -> dict[str, Any]:
    """The entries of the assistant's message: its calls out of the content where all are well formed."""
    said, found, written = content.partition(CALLS_BEGIN)
    blocks = None
    if found and written.endswith(CALLS_END):
        opening, closing = f"{CALL_BEGIN}function{CALL_NAME}", f"\n```{CALL_END}"
        blocks = read_blocks(written.removesuffix(CALLS_END), opening, "\n", closing)
    calls = [_call(block) for block in blocks or []]
    if not calls or None in calls:
        return {"content": content}
    return {"content": said, "tool_calls": calls}


def _call(block: str) -> dict[str, Any] | None:
    """The call of a name with its arguments below it, fenced as json; None where they are no JSON object."""
    name, found, written = block.partition("\n```json\n")
    try:
        arguments = json.loads(written)
    except (ValueError, RecursionError):
        return None
    if not found or not isinstance(arguments, dict):
        return None
    same = as_json(arguments) == written
    return {"type": "function", "function": {"name": name, "arguments": arguments if same else written}}
