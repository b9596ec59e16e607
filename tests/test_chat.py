"""A conversation with a model: pieces of text, the cache, limits, and Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rlpost.chat import Chat, TextStream
from rlpost.errors import DataError
from rlpost.model.load import load_model
from rlpost.model.tokenizer import load_tokenizer
from rlpost.policies import Request, TransformersWrapper
from rlpost.policies.base import request_seed
from rlpost.settings import ModelSettings, SamplingSettings


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> PreTrainedModel:
    return load_model(tiny_folder, ModelSettings(path=str(tiny_folder)))


@pytest.fixture
def start(model: PreTrainedModel, tiny_folder: Path) -> Callable[..., Chat]:
    """Begins a conversation with the tiny random model: `start(max_tokens=5)`."""

    def make(**kwargs: Any) -> Chat:
        policy = TransformersWrapper(model, load_tokenizer(tiny_folder), sampling=SamplingSettings())
        return Chat(policy, **{"sampling": SamplingSettings(), "max_tokens": 12, **kwargs})

    return make


def ignore(piece: str) -> None:
    pass


class Bytes:
    """A tokenizer whose ids are bytes, decoded as byte-level tokenizers do it."""

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        ("a€b".encode(), ["a", "", "", "€", "b", ""]),
        ("🙂".encode(), ["", "", "", "🙂", ""]),
        ("\u202e".encode(), ["", "", "\u202e", ""]),
        (b"\xffa", ["", "\ufffda", ""]),
        (b"\xe2\x82", ["", "", "\ufffd"]),  # the reply ended within a character
        (b"\xff\xff\xff\xff\xff", ["", "", "", "\ufffd", "\ufffd", "\ufffd" * 3]),
    ],
)
def test_a_character_waits_until_it_is_whole(data: bytes, pieces: list[str]) -> None:
    stream = TextStream(Bytes())
    assert [*(stream.add(byte) for byte in data), stream.rest()] == pieces
    assert stream.text == data.decode(errors="replace")


def test_what_is_shown_is_the_reply_and_what_the_policy_would_sample(start: Callable[..., Chat]) -> None:
    chat = start(max_tokens=40, seed=5)
    pieces: list[str] = []
    reply = chat.reply("hello", pieces.append)
    assert "".join(pieces) == reply.text
    assert len([piece for piece in pieces if piece]) > 5
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = chat.policy.tokenizer(prompt)["input_ids"]
    [completion] = chat.policy.generate([Request(ids, 40, request_seed(5, 0, 0, 0))], SamplingSettings())
    assert (reply.text, reply.tokens) == (completion.text, len(completion.token_ids))
    assert reply.finish_reason == completion.finish_reason


def test_later_turns_reuse_what_was_read_and_say_the_same_as_without(
    start: Callable[..., Chat], monkeypatch: pytest.MonkeyPatch
) -> None:
    def converse(chat: Chat) -> list[str]:
        return [chat.reply(text, ignore).text for text in ("one", "two", "three")]

    fed: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        fed.append(kwargs["input_ids"].shape[1])

    cached = start(sampling=SamplingSettings(temperature=0.0))
    hook = cached.policy.model.register_forward_pre_hook(count, with_kwargs=True)
    replies = converse(cached)
    with_cache = sum(fed)
    fed.clear()
    monkeypatch.setattr(TransformersWrapper, "takes_cache", False)
    fresh = start(sampling=SamplingSettings(temperature=0.0))
    assert converse(fresh) == replies
    hook.remove()
    assert with_cache < 0.7 * sum(fed)


def test_the_same_words_get_the_same_replies_and_a_reset_others(start: Callable[..., Chat]) -> None:
    first, second = start(seed=1), start(seed=1)
    said = first.reply("hello", ignore).text
    assert second.reply("hello", ignore).text == said
    second.reset()
    assert second.messages == []
    assert second.reply("hello", ignore).text != said
    assert start(seed=2).reply("hello", ignore).text != said


def test_a_reply_is_cut_at_its_limit_or_where_the_context_ends(start: Callable[..., Chat]) -> None:
    chat = start(max_tokens=3, sampling=SamplingSettings(temperature=0.0))
    assert chat.reply("a", ignore).finish_reason == "length"
    chat.reset()
    prompt = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    chat.policy.max_model_len = len(chat.policy.tokenizer(prompt)["input_ids"]) + 2
    reply = chat.reply("a", ignore)
    assert (reply.tokens, reply.finish_reason) == (2, "context")


def test_a_full_context_says_what_to_do_and_leaves_the_conversation(start: Callable[..., Chat]) -> None:
    chat = start()
    chat.policy.max_model_len = 60
    with pytest.raises(DataError, match="60"):
        chat.reply("a" * 60, ignore)
    chat.reply("a", ignore)
    messages = list(chat.messages)
    with pytest.raises(DataError, match="/reset"):
        chat.reply("b", ignore)
    assert chat.messages == messages


def test_a_stop_text_ends_a_reply_and_stays_in_it(start: Callable[..., Chat]) -> None:
    whole = start(max_tokens=30, seed=1).reply("hello", ignore)
    stop = whole.text[5:7]
    reply = start(max_tokens=30, seed=1, sampling=SamplingSettings(stop=[stop])).reply("hello", ignore)
    assert reply.finish_reason == "stop"
    assert reply.text == whole.text[: whole.text.index(stop) + len(stop)]


def test_ctrl_c_keeps_what_was_said_and_the_conversation_goes_on(start: Callable[..., Chat]) -> None:
    chat = start(max_tokens=30, sampling=SamplingSettings(temperature=0.0))
    whole = start(max_tokens=30, sampling=SamplingSettings(temperature=0.0)).reply("hello", ignore)
    seen: list[str] = []

    def interrupt(piece: str) -> None:
        seen.append(piece)
        if len(seen) == 4:
            raise KeyboardInterrupt

    reply = chat.reply("hello", interrupt)
    assert (reply.tokens, reply.finish_reason) == (4, "interrupted")
    assert whole.text.startswith(reply.text.rstrip("\ufffd"))
    assert chat.messages[-1] == {"role": "assistant", "content": reply.text}
    assert torch.is_grad_enabled()
    assert chat.reply("go on", ignore).tokens > 0


def test_a_template_that_refuses_is_an_error_and_no_traceback(start: Callable[..., Chat]) -> None:
    chat = start(system="x")
    chat.policy.tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(DataError, match="not supported"):
        chat.reply("hello", ignore)


def test_what_is_no_character_is_replaced(start: Callable[..., Chat]) -> None:
    assert start().reply("a\udcff", ignore).tokens > 0
