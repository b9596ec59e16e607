"""Rows in the form in which ten well-known sources publish them: what is read, what is trained, what is not used."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from rlpost.data.encoding import Encoder, PairEncoder
from rlpost.data.formats import RowReader, Wanted
from rlpost.settings import DatasetSettings
from tests.chat_templates import FAMILIES, bytes_tokenizer, stretches

Row = dict[str, Any]
TOKENIZER = bytes_tokenizer(FAMILIES["qwen"])
CALL = {"name": "add", "arguments": {"a": 2, "b": 3}}
AS_TEXT = {"id": "call_1", "type": "function", "function": CALL | {"arguments": '{"a": 2, "b": 3}'}}
WRITTEN = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
DEFAULT = "<|im_start|>system\nYou are Qwen.<|im_end|>\n"
OPENING = "<|im_start|>assistant\n"


def said(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


ASKED = DEFAULT + said("user", "2 and 3?") + OPENING
GREETED = DEFAULT + said("user", "Hello?") + OPENING
RESULT = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n" + OPENING
THOUGHT = "<think>\nAdd.\n</think>\n\nFive."
CALLED = [WRITTEN, RESULT, "Five.<|im_end|>"]
GPT = {"from": "gpt", "value": "Hello."}
SUM, GREETING = {"role": "user", "content": "2 and 3?"}, {"role": "user", "content": "Hello?"}
FIVE, HELLO, NO = ({"role": "assistant", "content": text} for text in ("Five.", "Hello.", "No."))


@dataclass
class Source:
    """A row, what a training on it reads and trains by turns, and what of it is not used."""

    row: Row
    wanted: Wanted
    turns: list[str]
    unused: dict[str, int] = field(default_factory=dict)


SOURCES = {
    "Alpaca of LlamaFactory": Source(
        {
            "instruction": "And the next?",
            "input": "of 7",
            "output": "8",
            "system": "Be brief.",
            "history": [["What follows 5?", "6"]],
            "id": "a-1",
        },
        Wanted.demonstration,
        [
            said("system", "Be brief.") + said("user", "What follows 5?") + OPENING,
            "6<|im_end|>",
            "\n" + said("user", "And the next?\n\nof 7") + OPENING,
            "8<|im_end|>",
        ],
        {"id": 1},
    ),
    "ShareGPT with tools": Source(
        {
            "conversations": [
                {"from": "human", "value": "2 and 3?"},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "5"},
                {"from": "gpt", "value": "Five."},
            ],
            "tools": json.dumps([]),
            "system": "Use tools.",
        },
        Wanted.demonstration,
        [said("system", "Use tools.") + said("user", "2 and 3?") + OPENING, *CALLED],
    ),
    "ShareGPT pairs of LlamaFactory": Source(
        {"conversations": [{"from": "human", "value": "Hello?"}], "chosen": GPT, "rejected": {**GPT, "value": "No."}},
        Wanted.pair,
        [GREETED, "Hello.<|im_end|>"],
    ),
    "OpenAI with calls and weights": Source(
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "2 and 3?"}]},
                {"role": "assistant", "content": "Six.", "weight": 0, "refusal": None},
                {"role": "user", "content": "Again.", "name": "ada"},
                {**FIVE, "content": None, "tool_calls": [AS_TEXT]},
                {"role": "tool", "tool_call_id": "call_1", "content": "5"},
                FIVE,
            ],
            "parallel_tool_calls": False,
        },
        Wanted.demonstration,
        [ASKED + "Six.<|im_end|>\n" + said("user", "Again.") + OPENING, *CALLED],
        {"name of messages": 1, "parallel_tool_calls": 1},
    ),
    "UltraFeedback": Source(
        {
            "prompt": "Hello?",
            "prompt_id": "u",
            "messages": [GREETING, HELLO],
            "chosen": [GREETING, HELLO],
            "rejected": [GREETING, NO],
            "score_chosen": 8.0,
            "score_rejected": 2.0,
        },
        Wanted.pair,
        [GREETED, "Hello.<|im_end|>"],
        {"prompt_id": 1, "messages": 1, "score_chosen": 1, "score_rejected": 1},
    ),
    "pairs of HH": Source(
        {
            "chosen": "\n\nHuman: Hello?\n\nAssistant: Hello.\n\nHuman: And?\n\nAssistant: Bye.",
            "rejected": "\n\nHuman: Hello?\n\nAssistant: Hello.\n\nHuman: And?\n\nAssistant: What?",
        },
        Wanted.pair,
        [GREETED + "Hello.<|im_end|>\n" + said("user", "And?") + OPENING, "Bye.<|im_end|>"],
    ),
    "verl": Source(
        {
            "data_source": "sums",
            "prompt": [SUM],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "5"},
            "extra_info": {"index": 4, "split": "train"},
        },
        Wanted.prompt,
        [DEFAULT + said("user", "2 and 3?")],
        {"data_source": 1, "ability": 1, "reward_model": 1, "extra_info": 1},
    ),
    "prompt and completion of TRL": Source(
        {
            "prompt": [SUM, {"role": "assistant", "content": "It is "}],
            "completion": [{"role": "assistant", "content": "five."}],
            "chat_template_kwargs": {"enable_thinking": False},
        },
        Wanted.demonstration,
        [ASKED + "It is ", "five.<|im_end|>"],
    ),
    "ms-swift": Source(
        {
            "messages": [
                SUM,
                {"role": "tool_call", "content": json.dumps(CALL)},
                {"role": "tool_response", "content": "5"},
                {"role": "assistant", "content": "Five.", "loss": True},
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": "Perhaps.", "loss": False},
            ],
            "channel": "sums",
        },
        Wanted.demonstration,
        [ASKED, *CALLED, "\n" + said("user", "Sure?") + said("assistant", "Perhaps.")],
        {"channel": 1},
    ),
    "reasoning in the manner of R1": Source(
        {"problem": "2 and 3?", "messages": [SUM, {**FIVE, "content": THOUGHT}], "source": "sums"},
        Wanted.demonstration,
        [ASKED, f"{THOUGHT}<|im_end|>"],
        {"problem": 1, "source": 1},
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_published_row_is_read_whole(name: str) -> None:
    source = SOURCES[name]
    reader = RowReader(DatasetSettings(path="rows", reward=[]), source.wanted)
    reader(source.row)
    assert reader.unused == source.unused
    if source.wanted is Wanted.pair:
        pair = PairEncoder(TOKENIZER, 1000).encode(reader.read("row 1", source.row))
        assert (pair.fault, pair.reason) == (None, "")
        sample = pair.chosen
    else:
        sample = Encoder(TOKENIZER).encode(reader.read("row 1", source.row))
        assert sample.fault is None or source.wanted is Wanted.prompt, sample.reason
    assert [text for text in stretches(TOKENIZER, sample.ids, sample.mask) if text.strip()] == source.turns
