from __future__ import annotations

from typing import Any

import pytest

from rlpost.data.demonstrations import Demonstration
from rlpost.data.faults import FormatError
from rlpost.data.formats import RowReader, Wanted
from rlpost.data.messages import read_messages
from rlpost.settings import DatasetSettings

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


def reader(wanted: Wanted = Wanted.demonstration, **settings: Any) -> RowReader:
    return RowReader(DatasetSettings(path="rows", reward=[], **settings), wanted)


def read(row: dict[str, Any], wanted: Wanted = Wanted.demonstration, **settings: Any) -> Demonstration:
    return reader(wanted, **settings).read("row 1", row)


def told(row: dict[str, Any], prompt: str | None = None, completion: str | None = None) -> tuple[Any, ...]:
    """The columns of (chat, prompt, completion, text)."""
    found = reader(prompt_column=prompt, completion_column=completion)
    found.look(row)
    return found.chat, found.prompt, found.reply, found.text


def test_the_columns_of_a_row_tell_its_format() -> None:
    assert told({"messages": CHAT, "prompt": "Hi"}) == ("messages", None, None, None)
    assert told({"conversations": CHAT}) == ("conversations", None, None, None)
    assert told({"prompt": "Hi", "completion": "Ho"}) == (None, "prompt", "completion", None)
    assert told({"question": "Hi", "completion": "Ho", "text": "x"}) == (None, "question", "completion", None)
    assert told({"text": "x"}) == (None, None, None, "text")


def test_columns_that_are_named_count_for_more() -> None:
    row = {"messages": CHAT, "instruction": "Hi", "output": "Ho", "prompt": "x"}
    assert told(row, "instruction", "output") == (None, "instruction", "output", None)
    assert told(row, None, "output") == (None, "prompt", "output", None)
    assert told({"chat": CHAT}, "chat") == ("chat", None, None, None)


def test_a_row_of_no_known_format_names_the_nearest_column_and_the_keys_to_set() -> None:
    with pytest.raises(FormatError) as raised:
        read({"mesages": CHAT})
    column, wrong = raised.value.field, raised.value.wrong
    assert column == "messages"
    assert wrong.startswith("missing; did you mean mesages?")
    assert wrong.endswith("name its columns with env.prompt_column and env.completion_column")
    with pytest.raises(FormatError, match=r"^field 'completion': missing"):
        read({"prompt": "Hi", "reply": "Ho"})


def test_a_question_and_its_answer_are_a_demonstration() -> None:
    assert told({"question": "Hi", "answer": "Ho"}) == (None, "question", "answer", None)
    assert told({"prompt": "Hi", "answer": "Ho", "text": "x"}) == (None, "prompt", "answer", None)
    assert told({"prompt": "Hi", "completion": "Ho", "answer": "x"}) == (None, "prompt", "completion", None)
    assert told({"ask": "Hi", "answer": "Ho"}, "ask") == (None, "ask", "answer", None)
    assert told({"ask": CHAT, "answer": "Ho"}, "ask") == ("ask", None, None, None)


def test_preferences_are_named_with_what_they_can_be_used_for() -> None:
    def complaint(row: dict[str, Any]) -> str:
        with pytest.raises(FormatError) as raised:
            read(row)
        return raised.value.wrong

    assert complaint({"prompt": "Hi", "chosen": "Ho", "rejected": "No"}) == (
        "these are preferences (chosen, rejected): learn from them with rlpost train dpo, fine-tune on the "
        "chosen ones with rlpost train sft env.completion_column=chosen, or use the prompts with rlpost train grpo"
    )
    assert complaint({"chosen": CHAT, "rejected": CHAT}).endswith(
        "fine-tune on the chosen ones with rlpost train sft env.prompt_column=chosen, or use the prompts "
        "env.prompt_column=chosen with rlpost train grpo"
    )


def test_share_gpt_becomes_roles() -> None:
    spoken = [{"from": "system", "value": "S"}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    assert read_messages(spoken, "conversations") == [{"role": "system", "content": "S"}, *CHAT]


def test_messages_may_be_json_as_a_csv_file_has_them() -> None:
    assert read_messages('[{"role": "user", "content": "Hi"}]', "messages") == CHAT[:1]
    with pytest.raises(FormatError, match="'hello' is not JSON"):
        read_messages("hello", "messages")


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ('"\\ud800"', "holds half of a character (a lone surrogate): remove it"),
    ],
    ids=["surrogate"],
)
def test_json_written_as_text_holds_no_more_than_a_row_may(content: str, wrong: str) -> None:
    text = f'[{{"role": "user", "content": {content}}}]'
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}
    for reading in (
        lambda: read_messages(text, "messages"),
        lambda: read_messages([call], "messages"),
        lambda: read({"messages": CHAT, "tools": text}),
    ):
        with pytest.raises(FormatError) as raised:
            reading()
        assert raised.value.field in ("messages", "tools")
        assert raised.value.wrong == f"{text[:40]!r} {wrong}"


def test_parts_of_text_are_joined_and_what_is_null_left_out() -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert read_messages([{"role": "user", "content": parts, "name": None}], "messages") == CHAT[:1]


def test_an_answer_alone_is_no_prompt() -> None:
    with pytest.raises(FormatError) as raised:
        reader(Wanted.prompt)({"messages": CHAT[1:]})
    assert str(raised.value) == "field 'messages': has to end with a user's message, which an assistant's may follow"


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
    ("messages", "wrong"),
    [
        (None, "must be a list of messages, and is null"),
        ([], "has no messages"),
        (["Hi"], "message 1 is not an object with role and content but text"),
        ([{"role": "bot", "content": "x"}], "message 1 has the role 'bot': it must be one of system, developer, user"),
        ([{"role": "user"}], "message 1 has no content"),
        ([{"role": "user", "content": 3}], "message 1 must have text as its content, and has int"),
        ([{"role": "user", "content": [{"type": "image"}]}], "has content of type image: rlpost trains on text only"),
        ([{"role": "assistant", "tool_calls": "f()"}], "message 1 has malformed tool_calls: write a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], "message 1 has malformed tool_calls"),
    ],
)
def test_a_malformed_message_is_named(messages: Any, wrong: str) -> None:
    with pytest.raises(FormatError) as raised:
        read_messages(messages, "messages")
    assert raised.value.field == "messages"
    assert wrong in raised.value.wrong
