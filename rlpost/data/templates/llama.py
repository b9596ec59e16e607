"""The formats of Llama 3 (3.1 to 3.3) and Llama 4."""

from __future__ import annotations

import json
from collections.abc import Callable

from rlpost.data.conversation import Message
from rlpost.data.templates.parsing import HeadedTurns, JsonCalls, Turn, UnparsedTextError, as_json

TURNS_3 = HeadedTurns(
    "<|start_header_id|>",
    "<|end_header_id|>\n\n",
    "<|eot_id|>",
    begin="<|begin_of_text|>",
    text_end="<|end_of_text|>",
    filler="<|finetune_right_pad_id|>",
)
TURNS_4 = HeadedTurns(
    "<|header_start|>",
    "<|header_end|>\n\n",
    "<|eot|>",
    begin="<|begin_of_text|>",
    text_end="<|end_of_text|>",
    filler="<|finetune_right_pad|>",
)
CALLS = JsonCalls("parameters")


def parse_llama3(text: str) -> list[Message]:
    """The messages of a Llama 3 text; an answer that is one call alone becomes its `tool_calls`."""
    return [_message(turn, _alone) for turn in TURNS_3.read(text)]


def parse_llama4(text: str) -> list[Message]:
    """The messages of a Llama 4 text; the calls behind `<|python_end|>` become `tool_calls`."""
    return [_message(turn, _behind_python) for turn in TURNS_4.read(text)]


def _message(turn: Turn, with_calls: Callable[[Turn], Message]) -> Message:
    if turn.role == "assistant":
        return with_calls(turn)
    if turn.role == "tool":
        raise UnparsedTextError("it has a turn of role tool, which this format calls ipython")
    return _result(turn) if turn.role == "ipython" else turn.message()


def _alone(turn: Turn) -> Message:
    call = CALLS.read(turn.content)
    return turn.message() if call is None else turn.message(content="", tool_calls=[call])


def _behind_python(turn: Turn) -> Message:
    opening, closing = "<|python_start|>", "<|python_end|>"
    if turn.content.startswith(opening) and closing in turn.content:
        content, _, written = turn.content.removeprefix(opening).partition(closing)
        calls = CALLS.read_all(written, separator="")
        if calls is not None:
            return turn.message(content=content, tool_calls=calls)
    return turn.message()


def _result(turn: Turn) -> Message:
    """A tool's message where the turn holds its words as a JSON string, as the template writes them."""
    try:
        said = json.loads(turn.content)
    except (ValueError, RecursionError):
        said = None
    if turn.is_complete and isinstance(said, str) and as_json(said) == turn.content:
        return {"role": "tool", "content": said}
    return turn.message()
