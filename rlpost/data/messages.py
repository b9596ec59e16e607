"""Messages of other people's rows, as chat templates read them.

Each has a role and content (OpenAI), or a speaker and a value (ShareGPT); both may be written as JSON text. Calls stand
in `tool_calls`, in OpenAI's old `function_call`, or as a message of their own (`function_call` of LlamaFactory,
`tool_call` of ms-swift). Thoughts stand under `reasoning_content`, `reasoning` or `thinking`. A turn is not trained if
its `weight` is 0, or `loss`, `train` or `training` is false.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlpost.data.conversation import Message
from rlpost.data.faults import FormatError
from rlpost.data.habits import THOUGHT_KEYS, THOUGHTS
from rlpost.data.rows import kind_of, parsed

ROLES = ("system", "developer", "user", "assistant", "tool")
SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "function_response": "tool",
    "observation": "tool",
    "tool_response": "tool",
}
CALLING = ("function_call", "tool_call")  # roles of messages that are a call, as JSON
UNTRAINED = ("loss", "train", "training")  # entries of axolotl and ms-swift: false means weight 0
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
READ = ("role", "content", "weight", "tool_calls", "tool_call_id", THOUGHTS)
_SPOKEN = re.compile(r"\n\n(Human|Assistant):[ \t]*")


def messages_in(value: Any) -> list[Any] | None:
    """The messages that a value holds, also as JSON text or a single one; None if it holds none."""
    if isinstance(value, str):
        value = parsed(value) if value.lstrip().startswith("[") else None
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(m, Mapping) and ("role" in m or "from" in m) for m in value):
        return None
    return value or None


def read_messages(value: Any, column: str, unused: set[str] | None = None) -> list[Message]:
    """A column's messages as chat templates read them; entries that nothing reads are added to `unused`.

    Raises FormatError with message and fault.
    """
    if isinstance(value, str):
        value = from_json(value, column)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise FormatError(column, f"must be a list of messages, and is {kind_of(value)}")
    if not value:
        raise FormatError(column, "has no messages")
    messages: list[Message] = []
    for number, given in enumerate(value, start=1):
        read = _message(given, number, column, set() if unused is None else unused)
        last = messages[-1] if messages else {}
        if isinstance(given, Mapping) and _role(given) in CALLING and last.get("role") == "assistant":
            last["tool_calls"] = [*last.get("tool_calls", []), *read["tool_calls"]]
        else:
            messages.append(read)
    return messages


def transcript(text: str) -> list[Message] | None:
    """The messages of a text in which Human and Assistant speak in turn, as in Anthropic's pairs; None of any other."""
    before, *parts = _SPOKEN.split(f"\n\n{text.lstrip()}")
    if before or len(parts) < 4:
        return None
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": content} for who, content in zip(parts[::2], parts[1::2], strict=True)]


def _role(message: Mapping[str, Any]) -> Any:
    return message.get("role", message.get("from"))


def _message(message: Any, number: int, column: str, unused: set[str]) -> Message:
    if not isinstance(message, Mapping):
        raise FormatError(column, f"message {number} is not an object with role and content but {kind_of(message)}")
    given = {str(name): value for name, value in message.items() if value is not None}
    if "role" not in given and "from" in given:
        given["role"], given["content"] = given.pop("from"), given.pop("value", "")
    role = given.get("role")
    try:
        if role in CALLING:
            given |= {"role": "assistant", "content": "", "tool_calls": _written_calls(given.get("content"), column)}
        elif "function_call" in given:
            given["tool_calls"] = [given.pop("function_call")]
        if "tool_calls" in given:
            given["tool_calls"] = [_tool_call(call, column) for call in given["tool_calls"]]
    except (TypeError, LookupError, AttributeError) as error:
        wrong = f"message {number} has malformed tool_calls: write a list of {{name, arguments}} objects"
        raise FormatError(column, wrong) from error
    given["role"] = role = SPEAKERS.get(given.get("role", ""), given.get("role"))
    if role not in ROLES:
        raise FormatError(column, f"message {number} has the role {role!r:.40}: it must be one of {', '.join(ROLES)}")
    if "tool_calls" not in given and "content" not in given:
        raise FormatError(column, f"message {number} has no content: give it text")
    given["content"] = _content(given.get("content", ""), number, column)
    if media := next((name for name in MEDIA if given.get(name)), None):
        raise FormatError(column, f"message {number} has {media}: rlpost trains on text only")
    thoughts = [given.pop(key) for key in THOUGHT_KEYS if isinstance(given.get(key), str)]
    if any(thoughts):
        given[THOUGHTS] = next(filter(None, thoughts))
    _set_weight(given, number, column)
    kept = (*READ, "name") if role == "tool" else READ
    unused |= {f"{name} of messages" for name, value in given.items() if name not in kept and value not in ("", [], {})}
    return {name: value for name, value in given.items() if name in kept}


def _set_weight(message: Message, number: int, column: str) -> None:
    """Leave `weight: 0` in a turn that is not trained, and no other word for it."""
    words = [message.pop(name) for name in UNTRAINED if isinstance(message.get(name), bool | int)]
    weight = message.pop("weight", 1)
    if weight not in (0, 1):
        raise FormatError(column, f"message {number} has the weight {weight}: a turn is trained (1) or not (0)")
    if not (weight and all(words)):
        message["weight"] = 0


def _content(content: Any, number: int, column: str) -> str:
    """Text, or the texts of a list of parts, joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FormatError(column, f"message {number} must have text as its content, and has {kind_of(content)}")
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
            raise FormatError(column, f"message {number} has content of type {kind}: rlpost trains on text only")
    return "".join(part["text"] for part in content)


def _written_calls(content: Any, column: str) -> list[Any]:
    value = from_json(content, column) if isinstance(content, str) else content
    return value if isinstance(value, list) else [value]


def _tool_call(call: Mapping[str, Any], column: str) -> dict[str, Any]:
    """A call with its arguments as an object: OpenAI writes JSON text, templates read objects."""
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = from_json(arguments, column) or {}
    rest = {name: value for name, value in call.items() if name in ("id", "type") and value is not None}
    return {"type": "function", **rest, "function": {"name": function["name"], "arguments": dict(arguments)}}


def from_json(text: str, column: str) -> Any:
    """The value of a JSON text. Raises FormatError if it is malformed."""
    value = parsed(text)
    if isinstance(value, FormatError):
        raise FormatError(column, f"{text[:40]!r} {value.wrong}")
    return value
