"""Histories as text, ids and masks."""

from functools import partial
from typing import Any

import pytest
import torch

from rlpost.data import ContentBase, History
from rlpost.data.chat import MaskError
from rlpost.data.ragged import ragged_rows
from rlpost.errors import DataError
from rlpost.model.conversion import tiny_tokenizer
from tests.chat_templates import BY_NAME, FAMILIES, bytes_tokenizer

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
CUT = {"role": "assistant", "content": "Hel", "is_complete": False}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
RESULT = {"role": "tool", "content": "1"}


def said(name: str, *chats: list[dict[str, Any]], **options: Any) -> list[str]:
    """Of each chat what the assistant mask is True on, as text."""
    tokenizer = bytes_tokenizer(BY_NAME[name])
    given = History.from_chats(chats).apply_chat_template(
        tokenizer, chat_template_name=name, return_dict=True, return_assistant_tokens_mask=True, **options
    )
    pairs = zip(ragged_rows(given["input_ids"]), ragged_rows(given["assistant_masks"]), strict=True)
    return [tokenizer.decode(ids[mask]) for ids, mask in pairs]


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "plain"])
def test_the_assistant_mask_holds_what_is_said_and_its_end(name: str) -> None:
    end = "<end_of_turn>" if name == "gemma" else BY_NAME[name].eos
    two_turns = [USER, ASSISTANT, USER, {"role": "assistant", "content": "\nBye "}]
    unfinished = [USER, CUT]
    mixed = [USER, ASSISTANT, USER, CUT]
    empty = [USER, {"role": "assistant", "content": ""}]
    expected = [f"Hello{end}\nBye {end}", "Hel", f"Hello{end}Hel", end, ""]
    for prompted in (True, False):
        assert said(name, two_turns, unfinished, mixed, empty, [USER], add_generation_prompt=prompted) == expected


def test_the_assistant_mask_holds_calls_and_no_results() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert said("qwen", [USER, CALL, RESULT, ASSISTANT]) == [call + "Hello<|im_end|>"]
    assert said("llama3", [USER, CALL, RESULT, ASSISTANT]) == [
        '{"name": "add", "parameters": {"a": 1}}<|eot_id|>Hello<|eot_id|>'
    ]


def test_a_mask_that_cannot_be_found_is_refused() -> None:
    with pytest.raises(MaskError, match="message 1 "):
        said("chatml", [USER], [ASSISTANT])


def test_ids_come_ragged_or_padded_on_the_left() -> None:
    tokenizer = tiny_tokenizer()
    history = History.from_chats([[USER, ASSISTANT], [USER]])
    render = partial(history.apply_chat_template, tokenizer, add_generation_prompt=False)
    masked = partial(render, return_dict=True, return_assistant_tokens_mask=True)
    rows, ragged = render(tokenize=True), masked()
    assert [row.tolist() for row in ragged_rows(ragged["input_ids"])] == rows
    assert [row.tolist() for row in ragged_rows(ragged["attention_mask"])] == [[1] * len(row) for row in rows]
    padded = masked(padding=True)
    missing = len(rows[0]) - len(rows[1])
    assert padded["input_ids"].tolist() == [rows[0], [tokenizer.pad_token_id] * missing + rows[1]]
    assert padded["attention_mask"].tolist() == [[1] * len(rows[0]), [0] * missing + [1] * len(rows[1])]
    masks = [row.tolist() for row in ragged_rows(ragged["assistant_masks"])]
    assert padded["assistant_masks"].tolist() == [masks[0], [False] * len(rows[0])]
    assert padded["assistant_masks"].dtype == torch.bool
    assert torch.equal(render(tokenize=True, padding=True), padded["input_ids"])
    assert set(render(return_dict=True).keys()) == {"input_ids", "attention_mask"}
    row = History.from_chats([[USER]])[0].apply_chat_template(tokenizer, return_dict=True)
    assert tokenizer.decode(row["input_ids"]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_strips_content_ends_an_unfinished_message_as_it_strips_it() -> None:
    cut = {**CUT, "content": "Hel "}
    text = History.from_chats([[USER, cut]]).apply_chat_template(bytes_tokenizer(FAMILIES["gemma"]))[0]
    assert text == "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHel"


def test_a_message_that_cannot_be_left_unfinished_is_refused() -> None:
    history = History.from_chats([[USER, CALL, {**RESULT, "is_complete": False}, RESULT]])
    with pytest.raises(DataError, match=r"message 3 .* is_complete=True"):
        history.apply_chat_template(tiny_tokenizer(), chat_template_name="qwen")


def test_tool_responses_are_written_as_messages_of_tools() -> None:
    together = {"role": "tool", "content": "", "tool_responses": ["1", {"content": "2", "tool_call_id": "b"}]}
    behind = {**USER, "tool_responses": ["1"]}
    apart = [USER, CALL, RESULT, {"role": "tool", "content": "2", "tool_call_id": "b"}]
    for name in ("qwen", "mistral"):
        one, other, third, fourth = History.from_chats(
            [[USER, CALL, together], apart, [behind], [USER, RESULT]]
        ).apply_chat_template(tiny_tokenizer(), chat_template_name=name)
        assert one == other
        assert third == fourth


def test_tools_and_variables_reach_the_template() -> None:
    history = History.from_chats([[USER]])
    tools = [{"type": "function", "function": {"name": "add"}}]
    shown = "{{ tools[0].function.name }} {{ mood }}"
    options: dict[str, Any] = {"tools": tools, "chat_template": shown, "template_kwargs": {"mood": "calm"}}
    assert history.apply_chat_template(tiny_tokenizer(), **options) == ["add calm"]
    with pytest.raises(TypeError, match="add_generation_promt"):
        history.apply_chat_template(tiny_tokenizer(), add_generation_promt=False)  # type: ignore[call-arg]


# Content of several parts

PICTURE = ContentBase("image", url="https://example.org/cat.png")
TEXT, MORE = "What is this?", " And why?"
QUESTION = ContentBase("text", text=TEXT)
WITH_PICTURES = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}"
    "{{ '<image ' + part.url + '>' if part.type == 'image' else part.text if part.type == 'text' }}"
    "{% endfor %};{% endfor %}"
)


class PictureProcessor:
    """A processor as far as text goes: it holds a tokenizer and has its templates read parts."""

    def __init__(self) -> None:
        self.tokenizer = tiny_tokenizer()
        self.tokenizer.chat_template = self.chat_template = WITH_PICTURES

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, **options)


def test_parts_of_text_render_with_a_tokenizer() -> None:
    parts = [QUESTION, ContentBase("text", text=MORE)]
    as_dicts = [{"type": "text", "text": TEXT}, {"type": "text", "text": MORE}]
    contents: list[Any] = [parts, as_dicts, TEXT + MORE]
    texts = History.from_chats([[{**USER, "content": each}] for each in contents]).apply_chat_template(tiny_tokenizer())
    assert texts == [texts[2]] * 3
    assert f"user\n{TEXT}{MORE}<|im_end|>" in texts[0]


@pytest.mark.parametrize("kind", ["image", "audio", "video", "file"])
def test_other_parts_are_refused_by_a_tokenizer_that_would_drop_them(kind: Any) -> None:
    history = History.from_chats([[{**USER, "content": [QUESTION, ContentBase(kind, url="x")]}]])
    with pytest.raises(DataError, match=f"message 1 .*{kind}.*AutoProcessor"):
        history.apply_chat_template(tiny_tokenizer())
    with pytest.raises(MaskError, match=f"message 1 .*{kind}"):
        history.apply_chat_template(tiny_tokenizer(), return_dict=True, return_assistant_tokens_mask=True)


def test_a_processor_is_given_the_parts() -> None:
    history = History.from_chats([[{**USER, "content": [QUESTION, PICTURE]}]])
    assert history.apply_chat_template(PictureProcessor()) == [f"user:{TEXT}<image {PICTURE.url}>;"]
