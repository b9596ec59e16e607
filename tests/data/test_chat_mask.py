from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.data.chat import ChatMask, Continuation, MaskError, stop_ids
from rlpost.data.conversation import Conversation
from rlpost.data.demonstrations import Demonstration, Sample
from rlpost.data.encoding import Encoder
from rlpost.data.faults import Fault
from rlpost.errors import ConfigError, DataError
from tests.chat_templates import (
    CHATML,
    FAMILIES,
    PLAIN,
    SYSTEM_LAST,
    Family,
    bytes_tokenizer,
    ending,
    merging_tokenizer,
)

Chat = list[dict[str, Any]]

SINGLE: Chat = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "Four."}]
MULTI: Chat = [*SINGLE, {"role": "user", "content": "And 3 + 3?"}, {"role": "assistant", "content": " Six.\n"}]
SYSTEM: Chat = [{"role": "system", "content": "Be brief."}, *SINGLE]
EMPTY: Chat = [SINGLE[0], {"role": "assistant", "content": ""}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "sky", "arguments": {"city": "Rome"}}}
TOOLS: Chat = [
    {"role": "user", "content": "Is it sunny?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "Yes."},
]
# for templates that know of no tool calls: the call is what the assistant says
CALLS_AS_TEXT: Chat = [TOOLS[0], {"role": "assistant", "content": "sky(Rome)"}, *TOOLS[2:]]


@pytest.mark.parametrize(
    ("name", "opened", "end"),
    [
        ("phi", "", "<|end|>"),  # what it writes behind the end goes once a question follows
        ("command", "", "<|END_OF_TURN_TOKEN|>"),  # both tokens stay, and the model has to write both
        ("gpt-oss", "", "<|return|>"),  # which becomes <|end|> once a question follows
        ("base", "", "<|im_end|>"),  # the tokenizer's eos token ends texts
        ("base", "<think>\\n", "<|im_end|>"),  # no rendering begins with this generation prompt
    ],
)
def test_end_of_turn_is_what_the_template_keeps_behind_an_answer(name: str, opened: str, end: str) -> None:
    tokenizer = bytes_tokenizer(ending(name, opened))
    assert tokenizer.convert_ids_to_tokens(stop_ids(tokenizer)) == [end, "<|endoftext|>"]
    if not opened:
        ids, mask = ChatMask(tokenizer).encode(SINGLE)
        trained = tokenizer.decode([token for token, kept in zip(ids, mask, strict=True) if kept])
        assert trained == {"command": "Four.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"}.get(name, f"Four.{end}")


# family -> conversation -> what is trained, one text for each stretch of tokens
EXPECTED: dict[str, list[tuple[str, Chat, list[str]]]] = {
    "chatml": [
        ("single", SINGLE, ["Four.<|im_end|>"]),
        ("multi", MULTI, ["Four.<|im_end|>", " Six.\n<|im_end|>"]),
        ("tools", CALLS_AS_TEXT, ["sky(Rome)<|im_end|>", "Yes.<|im_end|>"]),
        ("system", SYSTEM, ["Four.<|im_end|>"]),
        ("empty", EMPTY, ["<|im_end|>"]),
    ],
    "qwen": [
        ("single", SINGLE, ["Four.<|im_end|>"]),
        ("multi", MULTI, ["Four.<|im_end|>", " Six.\n<|im_end|>"]),
        (
            "tools",
            TOOLS,
            [
                '<tool_call>\n{"name": "sky", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>',
                "Yes.<|im_end|>",
            ],
        ),
        ("system", SYSTEM, ["Four.<|im_end|>"]),
        ("empty", EMPTY, ["<|im_end|>"]),
    ],
    "llama3": [
        ("single", SINGLE, ["Four.<|eot_id|>"]),
        ("multi", MULTI, ["Four.<|eot_id|>", "Six.<|eot_id|>"]),
        ("tools", TOOLS, ['{"name": "sky", "parameters": {"city": "Rome"}}<|eot_id|>', "Yes.<|eot_id|>"]),
        ("system", SYSTEM, ["Four.<|eot_id|>"]),
        ("empty", EMPTY, ["<|eot_id|>"]),
    ],
    "gemma": [
        ("single", SINGLE, ["Four.<end_of_turn>"]),
        ("multi", MULTI, ["Four.<end_of_turn>", "Six.<end_of_turn>"]),
        ("empty", EMPTY, ["<end_of_turn>"]),
    ],
    "mistral": [
        ("single", SINGLE, [" Four.</s>"]),
        ("multi", MULTI, [" Four.</s>", " Six.</s>"]),
        (
            "tools",
            TOOLS,
            [
                '[TOOL_CALLS] [{"name": "sky", "arguments": {"city": "Rome"}, "id": "abcdefghi"}]</s>',
                " Yes.</s>",
            ],
        ),
        ("system", SYSTEM, [" Four.</s>"]),
        ("empty", EMPTY, [" </s>"]),
    ],
    "plain": [
        ("single", SINGLE, ["Four.</s>"]),
        ("multi", MULTI, ["Four.</s>", " Six.\n</s>"]),
        ("tools", CALLS_AS_TEXT, ["sky(Rome)</s>", "Yes.</s>"]),
        ("system", SYSTEM, ["Four.</s>"]),
        ("empty", EMPTY, ["</s>"]),
    ],
}
TABLE = [pytest.param(name, *case[1:], id=f"{name}-{case[0]}") for name, cases in EXPECTED.items() for case in cases]
TOKENIZERS = pytest.mark.parametrize("tokenizer_of", [bytes_tokenizer, merging_tokenizer], ids=["bytes", "merges"])


def encoded(tokenizer: Any, messages: Chat, max_tokens: int | None = None) -> Sample:
    return Encoder(tokenizer, max_tokens).encode(Demonstration("row 1", messages))


def trained_texts(tokenizer: Any, sample: Sample) -> list[str]:
    """Each stretch of trained tokens, decoded."""
    stretches = groupby(zip(sample.ids, sample.mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in stretch]) for trained, stretch in stretches if trained]


@TOKENIZERS
@pytest.mark.parametrize(("family", "messages", "expected"), TABLE)
def test_what_is_trained_is_the_assistants_text_and_the_end_of_its_turn(
    family: str, messages: Chat, expected: list[str], tokenizer_of: Any
) -> None:
    tokenizer = tokenizer_of(FAMILIES[family])
    sample = encoded(tokenizer, messages)
    assert (sample.fault, sample.reason) == (None, "")
    assert trained_texts(tokenizer, sample) == expected
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(sample.ids) == whole  # with no token before what the template writes


@TOKENIZERS
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_answer_is_trained_without_an_end_of_turn(family: str, tokenizer_of: Any) -> None:
    tokenizer = tokenizer_of(FAMILIES[family])
    whole = encoded(tokenizer, SINGLE)
    last = max(place for place, trained in enumerate(whole.mask) if trained)
    cut = encoded(tokenizer, SINGLE, max_tokens=last)
    assert cut.fault is Fault.cut
    assert cut.reason == f"{len(whole.ids)} tokens, more than max_tokens={last}: " + (
        f"{whole.num_trained - 1} of its {whole.num_trained} trained are left"
    )
    assert [text.strip() for text in trained_texts(tokenizer, cut)] == ["Four."]
    # one token more, and nothing that is trained is missing
    assert encoded(tokenizer, SINGLE, max_tokens=last + 1).fault is None
    assert trained_texts(tokenizer, encoded(tokenizer, SINGLE, max_tokens=last + 1)) == trained_texts(tokenizer, whole)


def test_a_prompt_that_fills_the_limit_leaves_nothing_to_train() -> None:
    cut = encoded(bytes_tokenizer(FAMILIES["chatml"]), SINGLE, max_tokens=10)
    assert (cut.fault, cut.num_trained, len(cut.ids)) == (Fault.cut, 0, 10)


@pytest.mark.parametrize("family", ["llama3", "gemma", "mistral"])
def test_a_conversation_begins_with_one_token_that_begins_a_text(family: str) -> None:
    tokenizer = bytes_tokenizer(FAMILIES[family])
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id  # it would add one of its own
    assert encoded(tokenizer, SINGLE).ids.count(tokenizer.bos_token_id) == 1


def test_a_template_that_leaves_out_tool_calls_is_named() -> None:
    sample = encoded(bytes_tokenizer(FAMILIES["chatml"]), TOOLS)
    assert sample.fault is Fault.template
    assert "leaves out the call of sky in message 2" in sample.reason


WORDS = st.text("ab \n:é🙂<|>", max_size=12)


@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), system=WORDS)
def test_nothing_but_the_assistants_words_is_ever_trained(turns: list[tuple[str, str]], system: str) -> None:
    chat: Chat = [{"role": "system", "content": system}]
    for asked, said in turns:
        chat += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    for name in ("chatml", "qwen"):
        tokenizer = bytes_tokenizer(FAMILIES[name])
        assert trained_texts(tokenizer, encoded(tokenizer, chat)) == [f"{said}<|im_end|>" for _, said in turns]


def test_a_row_that_is_rendered_already_is_bad() -> None:
    tokenizer = bytes_tokenizer(FAMILIES["chatml"])
    rendered = {"role": "user", "content": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"}
    sample = Encoder(tokenizer).encode(Demonstration("row 1", [rendered, SINGLE[1]]))
    assert sample.fault is Fault.template
    assert sample.reason.startswith("message 1 holds '<|im_start|>', which the chat template")
    with pytest.raises(DataError, match=r"message 1 holds '<\|im_start\|>'"):
        Continuation(tokenizer).begin(Conversation(task={}, messages=[rendered]))


def changed(template: str, old: str, new: str, family: str = "chatml") -> Any:
    """The byte tokenizer of a family, its template changed at one place."""
    assert old in template
    known = FAMILIES[family]
    return bytes_tokenizer(Family(template.replace(old, new), known.special, known.eos, known.bos))


def test_an_end_of_the_whole_text_behind_the_last_turn_is_not_trained() -> None:
    """Phi 3 writes `<|endoftext|>` where no answer is asked for: behind the last turn, whichever that is."""
    tokenizer = changed(CHATML, "{% endif -%}", "{% else %}<|endoftext|>{% endif -%}")
    assert tokenizer.apply_chat_template(SINGLE, tokenize=False).endswith("Four.<|im_end|>\n<|endoftext|>")
    assert trained_texts(tokenizer, encoded(tokenizer, MULTI)) == ["Four.<|im_end|>", " Six.\n<|im_end|>"]


THOUGHTS = "{{ '<think>\n\n</think>\n\n' if loop.last and m.role == 'assistant' else '' }}{{ m.content }}"


def test_one_rendering_of_a_chat_that_takes_several_is_refused_by_name() -> None:
    """Qwen 3 writes thoughts, empty ones too, before the last answer only."""
    tokenizer = changed(CHATML, "{{ m.content }}", THOUGHTS)
    tokenizer.name_or_path = "models/Thinker-1B"
    assert trained_texts(tokenizer, encoded(tokenizer, SINGLE)) == ["<think>\n\n</think>\n\nFour.<|im_end|>"]
    with pytest.raises(MaskError, match="of Thinker-1B renders message 2 differently once more follows") as raised:
        ChatMask(tokenizer).encode(MULTI)
    assert raised.value.fault is Fault.nesting
    both = trained_texts(tokenizer, encoded(tokenizer, MULTI))
    assert both == ["<think>\n\n</think>\n\nFour.<|im_end|>", "<think>\n\n</think>\n\n Six.\n<|im_end|>"]
    last_only = encoded(tokenizer, [SINGLE[0], SINGLE[1] | {"weight": 0}, *MULTI[2:]])
    assert trained_texts(tokenizer, last_only) == ["<think>\n\n</think>\n\n Six.\n<|im_end|>"]


def test_a_system_message_that_moves_with_the_last_question_stands_in_each_prompt() -> None:
    tokenizer = bytes_tokenizer(SYSTEM_LAST)
    assert trained_texts(tokenizer, encoded(tokenizer, MULTI)) == [" Four.</s>", " Six.</s>"]
    sample = encoded(tokenizer, [SYSTEM[0], *MULTI])
    [start] = sample.restarts
    assert tokenizer.decode(sample.ids[:start]) == "<s>[INST] Be brief.\n\nWhat is 2 + 2?[/INST] Four.</s>"
    second = "<s>[INST] What is 2 + 2?[/INST] Four.</s>[INST] Be brief.\n\nAnd 3 + 3?[/INST] Six.</s>"
    assert tokenizer.decode(sample.ids[start:]) == second
    assert trained_texts(tokenizer, sample) == [" Four.</s>", " Six.</s>"]


def test_a_template_that_never_ends_a_turn_is_refused() -> None:
    tokenizer = changed(PLAIN, "{{ eos_token }}", "", "plain")
    sample = encoded(tokenizer, SINGLE)
    assert sample.fault is Fault.endless
    assert "ends message 2 with no special token, so the model would never learn to stop" in sample.reason


def test_a_header_that_is_no_generation_prompt_is_refused() -> None:
    tokenizer = changed(PLAIN, "{%- if add_generation_prompt %}", "{%- if false %}", "plain")
    sample = encoded(tokenizer, SINGLE)
    assert sample.fault is Fault.template
    assert "writes '### Assistant:' before an answer but not as its generation prompt" in sample.reason


def test_a_conversation_that_the_assistant_begins_is_refused() -> None:
    sample = encoded(bytes_tokenizer(FAMILIES["chatml"]), SINGLE[1:])
    assert (sample.fault, sample.reason) == (Fault.template, "message 1 is the assistant's: begin with what it answers")


@pytest.mark.parametrize(
    ("header", "answer", "tokens"),
    [
        ("Assistant: ", "Four.", [" Four", ".", "</s>"]),  # the space is the template's, the word the answer's
        ("Assistant:\n", "\n\nFour.", ["\n", "Four", ".", "</s>"]),  # "\n\n" lies across: nothing to be seen in it
        ("Assistant:", " Four.", [" Four", ".", "</s>"]),  # begins exactly there
    ],
)
def test_a_token_across_the_beginning_is_trained_where_it_shows_the_answer_alone(
    header: str, answer: str, tokens: list[str]
) -> None:
    template = (
        "{%- for m in messages -%}{{ m.role | capitalize + HEADER + m.content }}"
        "{{- eos_token if m.role == 'assistant' else '\n' -}}{%- endfor -%}"
        "{{- 'Assistant' + HEADER if add_generation_prompt else '' -}}"
    ).replace("HEADER", repr(header.removeprefix("Assistant")))
    tokenizer = merging_tokenizer(Family(template, ("<s>", "</s>"), "</s>", "<s>"))
    sample = encoded(tokenizer, [SINGLE[0], {"role": "assistant", "content": answer}])
    trained = [tokenizer.decode([i]) for i, kept in zip(sample.ids, sample.mask, strict=True) if kept]
    assert trained == tokens


def test_a_token_across_the_beginning_that_shows_the_template_is_not_trained() -> None:
    template = (
        FAMILIES["plain"]
        .template.replace("### {{ m.role | capitalize }}:\n", "{{ m.role }} F")
        .replace("### Assistant:\n", "assistant F")
    )
    tokenizer = merging_tokenizer(Family(template, ("<s>", "</s>"), "</s>", "<s>"))
    sample = encoded(tokenizer, [SINGLE[0], {"role": "assistant", "content": "our."}])
    assert tokenizer.tokenize("assistant Four.")[-2:] == ["ĠFour", "."]
    assert trained_texts(tokenizer, sample) == [".</s>"]


def test_a_tokenizer_without_offsets_is_refused() -> None:
    class Slow:
        is_fast = False
        name_or_path = "models/Old-1B"

    with pytest.raises(ConfigError, match="the tokenizer Old-1B has no fast form"):
        ChatMask(Slow())


def test_a_mask_that_cannot_be_found_is_raised_with_its_fault() -> None:
    with pytest.raises(MaskError) as raised:
        ChatMask(bytes_tokenizer(FAMILIES["gemma"])).encode(SYSTEM)
    assert raised.value.fault is Fault.template
