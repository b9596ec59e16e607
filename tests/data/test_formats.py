from __future__ import annotations

from typing import Any

import pytest

from rlpost.data.demonstrations import Demonstration
from rlpost.data.faults import FormatError
from rlpost.data.formats import RowReader, Wanted
from rlpost.data.messages import read_messages
from rlpost.settings import DatasetSettings
from tests.says import Says

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
MANY = {"messages": CHAT, "instruction": "Hi", "output": "Ho", "prompt": "x"}


def reader(wanted: Wanted = Wanted.demonstration, **settings: Any) -> RowReader:
    return RowReader(DatasetSettings(path="rows", reward=[], **settings), wanted)


def read(row: dict[str, Any], wanted: Wanted = Wanted.demonstration, **settings: Any) -> Demonstration:
    return reader(wanted, **settings).read("row 1", row)


COLUMNS: list[tuple[dict[str, Any], tuple[str | None, ...], tuple[str | None, ...]]] = [
    # row, (env.prompt_column, env.completion_column), columns of (chat, prompt, completion, text)
    ({"messages": CHAT, "prompt": "Hi"}, (), ("messages", None, None, None)),
    ({"conversations": CHAT}, (), ("conversations", None, None, None)),
    ({"prompt": "Hi", "completion": "Ho"}, (), (None, "prompt", "completion", None)),
    ({"question": "Hi", "completion": "Ho", "text": "x"}, (), (None, "question", "completion", None)),
    ({"text": "x"}, (), (None, None, None, "text")),
    ({"question": "Hi", "answer": "Ho"}, (), (None, "question", "answer", None)),
    ({"prompt": "Hi", "answer": "Ho", "text": "x"}, (), (None, "prompt", "answer", None)),
    ({"prompt": "Hi", "completion": "Ho", "answer": "x"}, (), (None, "prompt", "completion", None)),
    ({"ask": "Hi", "answer": "Ho"}, ("ask",), (None, "ask", "answer", None)),
    ({"ask": CHAT, "answer": "Ho"}, ("ask",), ("ask", None, None, None)),
    (MANY, ("instruction", "output"), (None, "instruction", "output", None)),
    (MANY, (None, "output"), (None, "prompt", "output", None)),
    ({"chat": CHAT}, ("chat",), ("chat", None, None, None)),
]


@pytest.mark.parametrize(("row", "named", "found"), COLUMNS)
def test_the_row_tells_its_columns_unless_they_are_named(
    row: dict[str, Any], named: tuple[str | None, ...], found: tuple[str | None, ...]
) -> None:
    each = reader(**dict(zip(("prompt_column", "completion_column"), named, strict=False)))
    each.look(row)
    assert (each.chat, each.prompt, each.reply, each.text) == found


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"mesages": CHAT}, "messages"),
        ({"prompt": "Hi", "reply": "Ho"}, "completion"),
        ({"prompt": "Hi", "chosen": "Ho", "rejected": "No"}, "chosen"),
        ({"chosen": CHAT, "rejected": CHAT}, "chosen"),
    ],
    ids=["misspelt", "no reply", "pair", "pair of chats"],
)
def test_a_row_of_no_demonstration_is_refused_with_what_to_do(row: dict[str, Any], column: str, says: Says) -> None:
    with says.refused("data", FormatError, f"field '{column}'"):
        read(row)


def test_share_gpt_becomes_roles() -> None:
    spoken = [{"from": "system", "value": "S"}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    assert read_messages(spoken, "conversations") == [{"role": "system", "content": "S"}, *CHAT]


def test_messages_may_be_json_as_a_csv_file_has_them() -> None:
    assert read_messages('[{"role": "user", "content": "Hi"}]', "messages") == CHAT[:1]


def test_parts_of_text_are_joined_and_what_is_null_left_out() -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert read_messages([{"role": "user", "content": parts, "name": None}], "messages") == CHAT[:1]


def test_a_prompts_own_answers_are_not_trained() -> None:
    row = {"prompt": [*CHAT, CHAT[0]], "completion": "Ho"}
    assert read(row) == Demonstration("row 1", [CHAT[0], CHAT[1] | {"weight": 0}, CHAT[0], CHAT[1]])
    assert read(row | {"completion": CHAT[1:]}) == read(row)


def test_tools_are_schemas_or_their_json() -> None:
    def tools(value: Any) -> Any:
        return read({"messages": CHAT, "tools": value}).tools

    assert tools('[{"name": "f"}]') == [{"name": "f"}]
    assert tools([{"name": "f", "default": None}]) == [{"name": "f", "default": None}]
    assert tools(None) is tools([]) is tools("") is read({"messages": CHAT}).tools is None


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hello",
        ["Hi"],
        [{"role": "bot", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image"}]}],
        [{"role": "assistant", "tool_calls": "f()"}],
        [{"role": "assistant", "tool_calls": [{}]}],
    ],
    ids=str,
)
def test_a_malformed_message_is_named(messages: Any, says: Says) -> None:
    with says.refused("data", FormatError, "field 'messages'"):
        read_messages(messages, "messages")


def test_an_answer_alone_is_no_prompt(says: Says) -> None:
    with says.refused("data", FormatError, "field 'messages'"):
        reader(Wanted.prompt)({"messages": CHAT[1:]})
