"""The forms in which people keep demonstrations, read into messages.

The columns of the first row say which of six it is: `messages` (role and content, tool calls as OpenAI writes them) or
`conversations` (ShareGPT's from and value); a prompt and a completion, each a text or messages; a question and an
answer; Alpaca's `instruction`, `input` and `output`; plain `text`. A column of messages may be JSON text, as in a CSV
file. Thoughts of a message are under `reasoning_content`, `reasoning` or `thinking`. Preferences (`chosen` and
`rejected`) are recognised, and left to `rlpost.data.pairs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlpost.data.demonstrations import ChatMessage
from rlpost.data.habits import THOUGHT_KEYS, THOUGHTS
from rlpost.data.rows import (
    LONE_SURROGATE,
    Complaint,
    Row,
    Unreadable,
    has_lone_surrogate,
    kind_of,
    missing,
    parsed,
)

CHAT_COLUMNS = ("messages", "conversations")
PROMPT_COLUMNS = ("prompt", "question")
COMPLETION_COLUMN = "completion"
ANSWER_COLUMN = "answer"  # serves as completion if that column is missing
PREFERENCE_COLUMNS = ("chosen", "rejected")
ALPACA_COLUMNS = ("instruction", "input", "output")  # the second may be missing or empty
TEXT_COLUMN = "text"
TOOLS_COLUMN = "tools"
ROLES = ("system", "developer", "user", "assistant", "tool")
SHARE_GPT = {  # speaker -> role
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "function_response": "tool",
    "observation": "tool",
    "tool_response": "tool",
}
PAIRS = "these are preferences (chosen, rejected): learn from them with rlpost train dpo"


class FormatError(ValueError):
    """A row that is not a demonstration: `complaint` is the column and its fault."""

    def __init__(self, column: str, wrong: str) -> None:
        super().__init__(f"{column}: {wrong}")
        self.complaint: Complaint = (column, wrong)


class RowFormat:
    """The columns in which the rows of one dataset keep demonstrations.

    Either `chat` is set, or `completion` (with `prompt`, unless a template writes that), or `text`.
    """

    def __init__(
        self, first_row: Row, prompt_column: str | None, completion_column: str | None, *, templated: bool = False
    ) -> None:
        """Read the columns off the first row, unless they are named; `templated` prompts need no column.

        Raises FormatError for a row in an unknown form.
        """
        self.chat: str | None = None
        self.prompt: str | None = None
        self.completion: str | None = None
        self.text: str | None = None
        prompt = prompt_column or next((name for name in PROMPT_COLUMNS if name in first_row), None)
        chat = next((name for name in CHAT_COLUMNS if name in first_row), None)
        completion = next((name for name in (COMPLETION_COLUMN, ANSWER_COLUMN) if name in first_row), None)
        if completion == ANSWER_COLUMN and isinstance(first_row.get(prompt_column or ""), list):
            completion = None  # a conversation, whose answer is for a reward
        if completion_column is not None or (prompt_column is not None and completion is not None):
            self.completion = completion_column or completion
            self.prompt = prompt or (None if templated else PROMPT_COLUMNS[0])
        elif prompt_column is not None:
            self.chat = prompt_column
        elif chat is not None:
            self.chat = chat
        elif COMPLETION_COLUMN in first_row and (prompt is not None or templated):
            self.prompt, self.completion = prompt, COMPLETION_COLUMN
        elif is_alpaca(first_row):
            self.prompt, _, self.completion = ALPACA_COLUMNS
        elif ANSWER_COLUMN in first_row and (prompt is not None or templated):
            self.prompt, self.completion = prompt, ANSWER_COLUMN
        elif TEXT_COLUMN in first_row:
            self.text = TEXT_COLUMN
        elif is_preference(first_row):
            raise FormatError(PREFERENCE_COLUMNS[0], f"{PAIRS}, {chosen_only(first_row)}")
        else:
            wanted = (
                "a demonstration has messages, prompt and completion, question and answer, instruction and output, "
            )
            wanted += "or text: name its columns with env.prompt_column and env.completion_column"
            column = CHAT_COLUMNS[0] if prompt is None else COMPLETION_COLUMN
            raise FormatError(column, f"{missing(column, first_row)}; {wanted}")

    def messages(self, row: Row) -> list[ChatMessage]:
        """The conversation of a row with `chat`. Raises FormatError."""
        assert self.chat is not None
        return read_messages(_present(row, self.chat), self.chat)

    def asked(self, row: Row) -> str | list[ChatMessage]:
        """The prompt of a row with `prompt`: a text, or messages that are not trained. Raises FormatError."""
        assert self.prompt is not None
        value = _present(row, self.prompt)
        if isinstance(value, str):
            if not value.strip():
                raise FormatError(self.prompt, "is empty")
            return with_input(row) if (self.prompt, self.completion) == ALPACA_COLUMNS[::2] else value
        messages = read_messages(value, self.prompt)
        return [message | {"weight": 0} if message["role"] == "assistant" else message for message in messages]

    def answer(self, row: Row) -> list[ChatMessage]:
        """The completion of a row as messages. Raises FormatError."""
        assert self.completion is not None
        value = _present(row, self.completion)
        if isinstance(value, str):
            return [{"role": "assistant", "content": value}]
        if isinstance(value, list):
            return read_messages(value, self.completion)
        raise FormatError(self.completion, f"must be text or a list of messages, and is {kind_of(value)}")

    def plain_text(self, row: Row) -> str:
        """The text of a row with `text`. Raises FormatError."""
        assert self.text is not None
        value = _present(row, self.text)
        if not isinstance(value, str):
            raise FormatError(self.text, f"must be text, and is {kind_of(value)}")
        return value

    def tools(self, row: Row) -> list[dict[str, Any]] | None:
        """The functions that a row's conversation may call; None without any. Raises FormatError."""
        return read_tools(row)


def is_alpaca(row: Row) -> bool:
    """Whether a row has an instruction and its output."""
    return ALPACA_COLUMNS[0] in row and ALPACA_COLUMNS[2] in row


def with_input(row: Row) -> str:
    """The prompt of an Alpaca row: its instruction, and its input below if there is any."""
    instruction, given = (row.get(name) for name in ALPACA_COLUMNS[:2])
    return f"{instruction}\n\n{given}" if isinstance(given, str) and given.strip() else str(instruction)


def is_preference(row: Row) -> bool:
    """Whether a row has a chosen and a rejected reply."""
    return all(name in row for name in PREFERENCE_COLUMNS)


def chosen_column(row: Row) -> str:
    """The setting that makes demonstrations of chosen replies: `prompt_column` if they are whole chats."""
    chosen = row[PREFERENCE_COLUMNS[0]]
    whole = isinstance(chosen, list) and any(isinstance(m, Mapping) and m.get("role") == "user" for m in chosen)
    return "prompt_column" if whole else "completion_column"


def chosen_only(row: Row) -> str:
    """The advice about preferences."""
    setting = f"env.{chosen_column(row)}={PREFERENCE_COLUMNS[0]}"
    prompts = f" {setting}" if chosen_column(row) == "prompt_column" else ""
    fine_tune = f"fine-tune on the chosen ones with rlpost train sft {setting}"
    return f"{fine_tune}, or use the prompts{prompts} with rlpost train grpo"


def read_tools(row: Row) -> list[dict[str, Any]] | None:
    """The functions in a row's `tools`; None without any. Raises FormatError."""
    value = row.get(TOOLS_COLUMN)
    if isinstance(value, str):
        value = _from_json(value, TOOLS_COLUMN) if value.strip() else None
    return None if value is None or value == [] else _without_nulls(value)


def read_messages(value: Any, column: str) -> list[ChatMessage]:
    """A column's messages as chat templates read them. Raises FormatError with message and fault."""
    value = written_out(value, column)
    if not isinstance(value, list):
        raise FormatError(column, f"must be a list of messages, and is {kind_of(value)}")
    if not value:
        raise FormatError(column, "has no messages")
    return [_message(message, number, column) for number, message in enumerate(value, start=1)]


def written_out(value: Any, column: str) -> Any:
    """A column's messages: JSON text is parsed, and ShareGPT's speakers become roles. Raises FormatError."""
    if isinstance(value, str):
        value = _from_json(value, column)
    return [_with_role(message) for message in value] if isinstance(value, list) else value


def _with_role(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    read = dict(message)
    if "role" not in read and "from" in read:
        read = {"role": read.pop("from"), "content": read.pop("value", ""), **read}
    role = read.get("role")
    return {**read, "role": SHARE_GPT.get(role, role)} if isinstance(role, str) else read


def _message(message: Any, number: int, column: str) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise FormatError(column, f"message {number} is not an object with role and content but {kind_of(message)}")
    read = {str(name): value for name, value in message.items() if value is not None}
    role = read.get("role")
    if role not in ROLES:
        raise FormatError(column, f"message {number} has the role {role!r:.40}: it must be one of {', '.join(ROLES)}")
    if "tool_calls" in read:
        read["tool_calls"] = _tool_calls(read["tool_calls"], number, column)
    elif "content" not in read:
        raise FormatError(column, f"message {number} has no content: give it text")
    read["content"] = _content(read.get("content", ""), number, column)
    thoughts = [read.pop(key) for key in THOUGHT_KEYS if isinstance(read.get(key), str)]
    if any(thoughts):
        read[THOUGHTS] = next(filter(None, thoughts))
    return read


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


def _tool_calls(calls: Any, number: int, column: str) -> list[dict[str, Any]]:
    """Calls with their arguments as objects: OpenAI writes JSON text, templates read objects."""
    try:
        return [_tool_call(call, column) for call in calls]
    except (TypeError, LookupError, AttributeError) as error:
        wrong = f"message {number} has malformed tool_calls: write a list of {{name, arguments}} objects"
        raise FormatError(column, wrong) from error


def _tool_call(call: Mapping[str, Any], column: str) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    arguments = _from_json(arguments, column) if isinstance(arguments, str) else _without_nulls(arguments)
    rest = {name: value for name, value in call.items() if name in ("id", "type") and value is not None}
    return {"type": "function", **rest, "function": {"name": function["name"], "arguments": dict(arguments)}}


def _without_nulls(value: Any) -> Any:
    """Objects without the entries that are null: Parquet gives each object the fields of all others in its column."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _from_json(text: str, column: str) -> Any:
    """The value of a JSON text. Raises FormatError if it is malformed."""
    value = parsed(text)
    if isinstance(value, Unreadable):
        wrong = value.wrong
    elif has_lone_surrogate(value):
        wrong = LONE_SURROGATE
    else:
        return value
    raise FormatError(column, f"{text[:40]!r} {wrong}")


def _present(row: Row, column: str) -> Any:
    if column not in row:
        raise FormatError(column, missing(column, row))
    return row[column]
