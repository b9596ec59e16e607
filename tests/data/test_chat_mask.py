"""Which tokens of a conversation are trained, family by family, and which conversations are refused."""

from __future__ import annotations

import re
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
    stretches,
)
from tests.says import Says

Chat = list[dict[str, Any]]

SINGLE: Chat = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "Four."}]
MULTI: Chat = [*SINGLE, {"role": "user", "content": "And 3 + 3?"}, {"role": "assistant", "content": " Six.\n"}]
SYSTEM: Chat = [{"role": "system", "content": "Be brief."}, *SINGLE]
EMPTY: Chat = [SINGLE[0], {"role": "assistant", "content": ""}]
CALL = {"id": "abc", "type": "function", "function": {"name": "sky", "arguments": {"city": "Rome"}}}
TOOLS: Chat = [
    {"role": "user", "content": "Is it sunny?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "tool_call_id": "abc"},
    {"role": "assistant", "content": "Yes."},
]
# for templates that know of no tool calls: the call is what the assistant says
CALLS_AS_TEXT: Chat = [TOOLS[0], {"role": "assistant", "content": "sky(Rome)"}, *TOOLS[2:]]


def encoded(tokenizer: Any, messages: Chat, max_tokens: int | None = None) -> Sample:
    return Encoder(tokenizer, max_tokens).encode(Demonstration("row 1", messages))


def trained_texts(tokenizer: Any, sample: Sample) -> list[str]:
    """Each stretch of trained tokens, decoded."""
    return stretches(tokenizer, sample.ids, sample.mask)[1::2]


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
        written = "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>" if name == "command" else end
        assert trained_texts(tokenizer, encoded(tokenizer, MULTI)) == [f"Four.{written}", f" Six.\n{written}"]


# family -> what stands before an answer, the second answer of MULTI, the end of a turn, and the call of TOOLS
TRAINED = {
    "chatml": ("", " Six.\n", "<|im_end|>", "sky(Rome)"),
    "qwen": ("", " Six.\n", "<|im_end|>", '<tool_call>\n{"name": "sky", "arguments": {"city": "Rome"}}\n</tool_call>'),
    "llama3": ("", "Six.", "<|eot_id|>", '{"name": "sky", "parameters": {"city": "Rome"}}'),
    "gemma": ("", "Six.", "<end_of_turn>", None),
    "mistral": (" ", "Six.", "</s>", '[TOOL_CALLS] [{"name": "sky", "arguments": {"city": "Rome"}, "id": "abc"}]'),
    "plain": ("", " Six.\n", "</s>", "sky(Rome)"),
}
TOKENIZERS = pytest.mark.parametrize("tokenizer_of", [bytes_tokenizer, merging_tokenizer], ids=["bytes", "merges"])


@TOKENIZERS
@pytest.mark.parametrize("family", TRAINED)
def test_the_assistants_text_and_end_of_turn_are_trained(family: str, tokenizer_of: Any) -> None:
    tokenizer = tokenizer_of(FAMILIES[family])
    space, six, end, call = TRAINED[family]
    four = f"{space}Four.{end}"
    cases = [(SINGLE, [four]), (MULTI, [four, f"{space}{six}{end}"]), (EMPTY, [space + end])]
    if call is not None:  # Gemma has no tools, and no system message
        called = CALLS_AS_TEXT if call == "sky(Rome)" else TOOLS
        cases += [(SYSTEM, [four]), (called, [call + end, f"{space}Yes.{end}"])]
    for messages, expected in cases:
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
    counts = [len(whole.ids), last, whole.num_trained - 1, whole.num_trained]
    assert re.findall(r"\d+", cut.reason) == list(map(str, counts))
    assert [text.strip() for text in trained_texts(tokenizer, cut)] == ["Four."]
    # one token more, and nothing that is trained is missing
    more = encoded(tokenizer, SINGLE, max_tokens=last + 1)
    assert (more.fault, trained_texts(tokenizer, more)) == (None, trained_texts(tokenizer, whole))


def test_a_prompt_that_fills_the_limit_leaves_nothing_to_train() -> None:
    cut = encoded(bytes_tokenizer(FAMILIES["chatml"]), SINGLE, max_tokens=10)
    assert (cut.fault, cut.num_trained, len(cut.ids)) == (Fault.cut, 0, 10)


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


def changed(template: str, old: str, new: str, family: str = "chatml") -> Any:
    """The byte tokenizer of a family, its template changed at one place."""
    assert old in template
    known = FAMILIES[family]
    return bytes_tokenizer(Family(template.replace(old, new), known.special, known.eos, known.bos))


RENDERED = {"role": "user", "content": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"}
NO_PROMPT = changed(PLAIN, "{%- if add_generation_prompt %}", "{%- if false %}", "plain")
REFUSED: dict[str, tuple[Any, Chat, Fault]] = {
    "rendered already": (bytes_tokenizer(FAMILIES["chatml"]), [RENDERED, SINGLE[1]], Fault.template),
    "begun by the assistant": (bytes_tokenizer(FAMILIES["chatml"]), SINGLE[1:], Fault.template),
    "system message": (bytes_tokenizer(FAMILIES["gemma"]), SYSTEM, Fault.template),
    "no generation prompt": (NO_PROMPT, SINGLE, Fault.template),
    "turns without an end": (changed(PLAIN, "{{ eos_token }}", "", "plain"), SINGLE, Fault.endless),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_conversation_whose_mask_cannot_be_found_is_refused(case: str, says: Says) -> None:
    tokenizer, messages, fault = REFUSED[case]
    sample = encoded(tokenizer, messages)
    assert (sample.fault, sample.num_trained) == (fault, 0)
    says("data", sample.reason)


def test_a_prompt_that_is_rendered_already_is_refused() -> None:
    with pytest.raises(DataError, match=r"message 1 .*<\|im_start\|>"):
        Continuation(bytes_tokenizer(FAMILIES["chatml"])).begin(Conversation(task={}, messages=[RENDERED]))


THOUGHTS = "{{ '<think>\n\n</think>\n\n' if loop.last and m.role == 'assistant' else '' }}{{ m.content }}"


def test_one_rendering_of_a_chat_that_takes_several_is_refused(says: Says) -> None:
    """Qwen 3 writes thoughts, empty ones too, before the last answer only."""
    tokenizer = changed(CHATML, "{{ m.content }}", THOUGHTS)
    tokenizer.name_or_path = "models/Thinker-1B"
    assert trained_texts(tokenizer, encoded(tokenizer, SINGLE)) == ["<think>\n\n</think>\n\nFour.<|im_end|>"]
    with pytest.raises(MaskError, match="Thinker-1B") as raised:
        ChatMask(tokenizer).encode(MULTI)
    assert raised.value.fault is Fault.nesting
    says("data", raised.value)
    both = trained_texts(tokenizer, encoded(tokenizer, MULTI))
    assert both == ["<think>\n\n</think>\n\nFour.<|im_end|>", "<think>\n\n</think>\n\n Six.\n<|im_end|>"]
    last_only = encoded(tokenizer, [SINGLE[0], SINGLE[1] | {"weight": 0}, *MULTI[2:]])
    assert trained_texts(tokenizer, last_only) == ["<think>\n\n</think>\n\n Six.\n<|im_end|>"]


def test_a_system_message_that_moves_with_the_last_question_stands_in_each_prompt() -> None:
    tokenizer = bytes_tokenizer(SYSTEM_LAST)
    assert trained_texts(tokenizer, encoded(tokenizer, MULTI)) == [" Four.</s>", " Six.</s>"]
    sample = encoded(tokenizer, [SYSTEM[0], *MULTI])
    [start] = sample.restarts
    brief, two, three = (message["content"] for message in (SYSTEM[0], MULTI[0], MULTI[2]))
    assert tokenizer.decode(sample.ids[:start]) == f"<s>[INST] {brief}\n\n{two}[/INST] Four.</s>"
    second = f"<s>[INST] {two}[/INST] Four.</s>[INST] {brief}\n\n{three}[/INST] Six.</s>"
    assert tokenizer.decode(sample.ids[start:]) == second
    assert trained_texts(tokenizer, sample) == [" Four.</s>", " Six.</s>"]


@pytest.mark.parametrize(
    ("header", "answer", "tokens"),
    [
        ("Assistant: ", "Four.", [" Four", ".", "</s>"]),  # the space is the template's, the word the answer's
        ("Assistant:\n", "\n\nFour.", ["\n", "Four", ".", "</s>"]),  # "\n\n" lies across: nothing to be seen in it
        ("Assistant:", " Four.", [" Four", ".", "</s>"]),  # begins exactly there
        ("Assistant: F", "our.", [".", "</s>"]),  # " Four" shows an F of the template
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


def test_a_tokenizer_without_offsets_is_refused() -> None:
    class Slow:
        is_fast = False
        name_or_path = "models/Old-1B"

    with pytest.raises(ConfigError, match="Old-1B"):
        ChatMask(Slow())
