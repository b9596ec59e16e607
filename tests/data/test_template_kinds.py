"""Templates that rewrite or leave out what came before: what is trained, what is refused, and how turns go on."""

from __future__ import annotations

from datetime import date
from itertools import pairwise
from typing import Any

import pytest

from rlpost.data.chat import ChatMask, Continuation, stop_ids
from rlpost.data.conversation import Completion, Conversation
from rlpost.data.demonstrations import Demonstration, Sample
from rlpost.data.encoding import Encoder, encode_all
from rlpost.data.faults import Fault
from rlpost.data.habits import CallForm, Habits, reply_text
from rlpost.data.rendering import render
from rlpost.data.template_choice import with_choice
from tests.chat_templates import KINDS, kind, stretches
from tests.says import Says

Chat = list[dict[str, Any]]

QUESTION = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "Four."}
AGAIN = {"role": "user", "content": "3 + 3?"}
SIX = {"role": "assistant", "content": "Six."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": "2"}}}],
}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
TWO: Chat = [QUESTION, ANSWER, AGAIN, SIX]
CALLED: Chat = [QUESTION, CALL, RESULT, ANSWER]


def thinking(message: dict[str, Any], thoughts: str = "Hm.") -> dict[str, Any]:
    return {**message, "reasoning_content": thoughts}


def inline(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": f"<think>\nHm.\n</think>\n\n{message['content']}"}


def encoded(name: str, messages: Chat, tools: list[dict[str, Any]] | None = None) -> Sample:
    return Encoder(kind(name)).encode(Demonstration("row 1", messages, tools=tools))


def pieces_of(tokenizer: Any, sample: Sample) -> list[list[str]]:
    """Each piece as its stretches of text, read and trained in turn."""
    ends = pairwise([0, *sample.restarts, len(sample.ids)])
    return [stretches(tokenizer, sample.ids[start:end], sample.mask[start:end]) for start, end in ends]


def asked(*contents: str) -> str:
    """The prompt of a user who has said the last of `contents`, the answers between them included."""
    roles = ["user", "assistant"] * len(contents)
    turns = [f"<|start|>{role}<|message|>{text}<|end|>" for role, text in zip(roles, contents, strict=False)]
    return "".join(turns) + "<|start|>assistant<|message|>"


EMPTY = "<think>\n\n</think>\n\n"
THOUGHT = "<think>\nHm.\n</think>\n\n"
REASONS = "Here are my reasoning steps:\n"
ONE, BOTH = asked("2 + 2?"), asked("2 + 2?", "Four.", "3 + 3?")
WRITTEN = '<call>add {"a": "2"}</call><|end|>'
OF_TOOL = "<|start|>tool<|message|>4<|end|><|start|>assistant<|message|>"
FOUR_END, SIX_END = "Four.<|end|>", "Six.<|end|>"
CHANNEL = ONE.removesuffix("<|message|>")
THOUGHTS = [[ONE, f"{THOUGHT}Four.<|end|>"], [BOTH, f"{THOUGHT}Six.<|end|>"]]
PIECES: list[tuple[str, Chat, list[list[str]]]] = [
    ("forgets", TWO, [[ONE, EMPTY + FOUR_END], [BOTH, EMPTY + SIX_END]]),
    ("forgets", [QUESTION, thinking(ANSWER), AGAIN, thinking(SIX)], THOUGHTS),
    ("forgets", [QUESTION, inline(ANSWER), AGAIN, inline(SIX)], THOUGHTS),
    (  # thoughts stay between a call and its result, so both answers stand in one piece
        "forgets",
        [QUESTION, thinking(CALL), RESULT, thinking(ANSWER)],
        [[ONE, THOUGHT + WRITTEN, OF_TOOL, THOUGHT + FOUR_END]],
    ),
    (
        "opens",
        [QUESTION, inline(ANSWER), AGAIN, SIX],
        [[ONE + "<think>\n", f"Hm.\n</think>\n\n{FOUR_END}"], [BOTH + "<think>\n", f"\n</think>\n\n{SIX_END}"]],
    ),
    (
        "opens",
        CALLED,
        [
            [ONE + "<think>\n", f"\n</think>\n\n{WRITTEN}"],
            [f"{ONE}{WRITTEN}{OF_TOOL}<think>\n", f"\n</think>\n\n{FOUR_END}"],
        ],
    ),
    (
        "reasons",
        [QUESTION, inline(ANSWER), AGAIN, SIX],
        [
            [ONE + REASONS, f"Hm.\n[BEGIN FINAL RESPONSE]\n{FOUR_END}"],
            [BOTH + REASONS, f"\n[BEGIN FINAL RESPONSE]\n\n{SIX_END}"],
        ],
    ),
    (
        "channels",
        [QUESTION, thinking(ANSWER), AGAIN, SIX],
        [
            [CHANNEL, ".thoughts<|message|>Hm.<|end|><|start|>assistant<|message|>Four.<|return|>"],
            [BOTH.removesuffix("<|message|>"), "<|message|>Six.<|return|>"],
        ],
    ),
    (  # a call keeps its end
        "channels",
        [QUESTION, thinking(CALL), RESULT, ANSWER],
        [
            [
                CHANNEL,
                '.thoughts<|message|>Hm.<|end|><|start|>assistant.add<|message|>{"a": "2"}<|call|>',
                OF_TOOL.removesuffix("<|message|>"),
                "<|message|>Four.<|return|>",
            ]
        ],
    ),
    ("empties", TWO, [[ONE + EMPTY, FOUR_END], [BOTH + EMPTY, SIX_END]]),
    (
        "chains",
        [QUESTION, CALL, RESULT, CALL, RESULT, ANSWER],
        [[ONE, WRITTEN, "<result>4</result>", f"\n{WRITTEN}", "<result>4</result>", FOUR_END]],
    ),
    ("parts", TWO, [[ONE, FOUR_END, asked("3 + 3?"), SIX_END]]),
]


@pytest.mark.parametrize(("name", "messages", "pieces"), PIECES)
def test_each_answer_is_trained_behind_the_prompt_that_asks_for_it(
    name: str, messages: Chat, pieces: list[list[str]]
) -> None:
    sample = encoded(name, messages)
    assert (sample.fault, sample.reason) == (None, "")
    assert pieces_of(kind(name), sample) == pieces


def test_pieces_and_empty_thoughts_are_noted(says: Says) -> None:
    rows = [Demonstration("row", messages) for messages in ([QUESTION, inline(ANSWER)], TWO, TWO)]
    [single, noted, _], bad = encode_all(rows, Encoder(kind("opens")))
    assert single.notes == ()
    assert bad.notes == dict.fromkeys(noted.notes, 2)
    says("data", "\n".join(noted.notes))


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("drops", [QUESTION, {**CALL, "content": "Let me see."}, ANSWER]),
        ("drops", CALLED),
        ("drops", [*TWO[:2], {"role": "system", "content": "In verse."}, *TWO[2:]]),
        ("chains", [QUESTION, thinking(ANSWER)]),
        ("parts", CALLED),
    ],
    ids=["text beside a call", "result", "system message", "thoughts", "call"],
)
def test_a_row_of_which_the_template_leaves_something_out_is_bad(name: str, messages: Chat, says: Says) -> None:
    sample = encoded(name, messages, [TOOL])
    assert sample.fault is Fault.template
    says("data", sample.reason)


def test_the_form_of_calls_is_the_one_that_the_template_writes() -> None:
    assert Habits(kind("forgets")).call_form == CallForm(arguments_as_text=False, empty="")
    assert Habits(kind("opens")).call_form == CallForm(arguments_as_text=True, empty=None)
    assert Habits(kind("parts")).call_form is None


def test_a_call_that_ends_with_a_token_of_its_own_ends_a_completion() -> None:
    tokenizer = kind("channels")
    assert tokenizer.convert_ids_to_tokens(stop_ids(tokenizer)) == ["<|return|>", "<|endoftext|>", "<|call|>"]
    assert ChatMask(kind("forgets")).end_of_call == ChatMask(kind("forgets")).end_of_turn


# Turn by turn


def played(name: str, replies: list[tuple[str, Chat]], *, as_template: bool) -> tuple[Conversation, Any]:
    """A conversation in which each reply, its end included, is sampled a byte at a time and messages follow it."""
    tokenizer = kind(name)
    continuation = Continuation(tokenizer)
    conversation = Conversation(task={}, messages=[QUESTION], as_template=as_template)
    continuation.begin(conversation)
    for text, messages in replies:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        bare = tokenizer.decode(ids, skip_special_tokens=True)
        conversation.add_completion(Completion(ids, [-0.5] * len(ids), bare, "stop", 0))
        conversation.messages[-1:] = [m for m in messages if m["role"] == "assistant"] or conversation.messages[-1:]
        if others := [m for m in messages if m["role"] != "assistant"]:
            conversation.messages += others
            new, is_whole = continuation.next_turn(conversation)
            conversation.begin_anew(new) if is_whole else conversation.add_observation(new)
    return conversation, tokenizer


SAID = f"{THOUGHT}Four.<|end|>"
NEXT = "<|start|>user<|message|>3 + 3?<|end|><|start|>assistant<|message|>"


def test_history_as_the_template_has_it_begins_anew_with_the_prompt_of_inference() -> None:
    conversation, tokenizer = played("forgets", [(SAID, [AGAIN]), ("Six.<|end|>", [])], as_template=True)
    assert conversation.restarts == [len(SAID) - len("<|end|>") + 1]
    prompt = tokenizer.apply_chat_template([QUESTION, ANSWER, AGAIN], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(conversation.context) == prompt + "Six.<|end|>"
    sampled = [token for token, own in zip(conversation.response_ids, conversation.mask, strict=True) if own]
    assert tokenizer.decode(sampled) == SAID + "Six.<|end|>"


def test_history_as_the_template_has_it_goes_on_where_nothing_is_changed() -> None:
    said = THOUGHT + WRITTEN
    conversation, tokenizer = played("forgets", [(said, [thinking(CALL), RESULT])], as_template=True)
    assert conversation.restarts == []
    assert tokenizer.decode(conversation.context).endswith(said + OF_TOOL)


@pytest.mark.parametrize(
    ("name", "said", "messages", "behind"),
    [
        ("forgets", SAID, [AGAIN], NEXT),  # which keeps the thought
        ("opens", "Hm.\n</think>\n\nFour.<|end|>", [AGAIN], NEXT + "<think>\n"),
        ("opens", "Four.<|endoftext|>", [AGAIN], f"<|end|>{NEXT}<think>\n"),  # another stop token lacks the end
        ("channels", "<|message|>Four.<|return|>", [AGAIN], NEXT.removesuffix("<|message|>")),
        ("channels", '.add<|message|>{"a": "2"}<|call|>', [CALL, RESULT], OF_TOOL.removesuffix("<|message|>")),
        ("chains", WRITTEN, [CALL, RESULT], "<result>4</result>"),
        ("empties", FOUR_END, [AGAIN], NEXT + EMPTY),
    ],
)
def test_what_follows_a_sampled_turn_is_what_the_template_writes_behind_it(
    name: str, said: str, messages: Chat, behind: str
) -> None:
    conversation, tokenizer = played(name, [(said, messages)], as_template=False)
    assert tokenizer.decode(conversation.response_ids) == said + behind
    assert conversation.context == conversation.prompt_ids + conversation.response_ids


def test_the_template_decides_whether_history_is_kept() -> None:
    rewriting = [name for name in KINDS if Continuation(kind(name)).rewrites("user", opening=[QUESTION])]
    assert rewriting == ["forgets", "opens", "reasons", "channels", "empties"]


def test_a_reply_to_a_prompt_that_opens_a_thought_is_judged_with_it() -> None:
    conversation, tokenizer = played("opens", [], as_template=False)
    conversation.opened = Continuation(tokenizer).opened(conversation)
    conversation.add_completion(Completion([1], [0.0], "Hm.\n</think>\n\nFour.", "stop", 0))
    assert conversation.reply == "<think>\nHm.\n</think>\n\nFour."


def test_a_sentence_begins_a_thought_only_where_the_mark_that_ends_it_follows() -> None:
    def read(text: str) -> str:
        return reply_text(kind("reasons"), kind("reasons")(text)["input_ids"])

    steps = "Here are my reasoning steps: 2 and 2."
    assert read(f"{steps}<|end|>") == steps
    assert read("Hm.\n[BEGIN FINAL RESPONSE]\nFour.<|end|>") == "Hm.\n</think>\nFour."


def test_a_template_writes_the_day_that_the_tokenizer_is_given() -> None:
    tokenizer = with_choice(kind("dated"), None, {}, "2024-02-03")
    assert render(tokenizer, [QUESTION]).startswith("<|start|>system<|message|>Today: 03 Feb 2024<|end|>")
    assert date.today().strftime("%d %b %Y") in render(kind("dated"), [QUESTION])
    assert Encoder(tokenizer).encode(Demonstration("row 1", TWO)).fault is None
