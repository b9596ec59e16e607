import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import SecurityError

from rlpost.data import History, add_chat_template
from rlpost.data.chat_templates import (
    TEMPLATES,
    UnknownTemplateError,
    UnparsedTextError,
    parse_qwen,
    template_to_read,
    template_to_write,
)
from rlpost.data.conversation import Message
from rlpost.data.rendering import render
from rlpost.errors import DataError
from rlpost.model.conversion import tiny_tokenizer
from tests.chat_templates import BY_NAME, CHATML, FAMILIES, bytes_tokenizer
from tests.says import Says

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Two and two?"}
ANSWER = {"role": "assistant", "content": "Four."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "zwei"}}}
RESULT = {"role": "tool", "content": 'it is "4"'}

# what begins a text, a turn with its role, and what ends one, of formats whose texts are read back too
HEADED = {
    "chatml": ("", "<|im_start|>{}\n", "<|im_end|>\n"),
    "qwen": ("", "<|im_start|>{}\n", "<|im_end|>\n"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
    "llama4": ("<|begin_of_text|>", "<|header_start|>{}<|header_end|>\n\n", "<|eot|>"),
    "gemma": ("<bos>", "<start_of_turn>{}\n", "<end_of_turn>\n"),
}


def turns(name: str, *said: tuple[str, str]) -> str:
    """The text of a format in which each role says its text."""
    begin, opening, end = HEADED[name]
    return begin + "".join(opening.format(role) + text + end for role, text in said)


# what each format writes of SYSTEM, USER, ANSWER
WRITTEN = {
    **{
        name: turns(name, ("system", "Be brief."), ("user", "Two and two?"), ("assistant", "Four."))
        for name in ("chatml", "qwen", "llama3", "llama4")
    },
    "gemma": turns("gemma", ("user", "Be brief.\n\nTwo and two?"), ("model", "Four.")),  # it has no system message
    "mistral": "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Two and two?[/INST]Four.</s>",
    "deepseek": "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Two and two?<｜Assistant｜>Four.<｜end▁of▁sentence｜>",
}
PROMPT = {name: opening.format("model" if name == "gemma" else "assistant") for name, (_, opening, _) in HEADED.items()}
PROMPT |= {"mistral": "", "deepseek": "<｜Assistant｜>"}
# what each format writes of USER, an answer with a call, its RESULT, ANSWER
ADD = '{"name": "add", "parameters": {"a": 2, "b": "zwei"}}'
OF_TURNS = {  # the call, the role of its result, and the result
    "qwen": (
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "zwei"}}\n</tool_call>',
        "user",
        '<tool_response>\nit is "4"\n</tool_response>',
    ),
    "llama3": (ADD, "ipython", '"it is \\"4\\""'),
    "llama4": (f"<|python_start|><|python_end|>{ADD}", "ipython", '"it is \\"4\\""'),
}
WITH_CALL = {
    name: turns(name, ("user", "Two and two?"), ("assistant", call), (role, result), ("assistant", "Four."))
    for name, (call, role, result) in OF_TURNS.items()
} | {
    "mistral": (
        '<s>[INST]Two and two?[/INST][TOOL_CALLS][{"name": "add", "arguments": {"a": 2, "b": "zwei"}}]</s>'
        '[TOOL_RESULTS][TOOL_CONTENT]it is "4"[/TOOL_RESULTS]Four.</s>'
    ),
    "deepseek": (
        "<｜begin▁of▁sentence｜><｜User｜>Two and two?<｜Assistant｜><｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 2, "b": "zwei"}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>it is "4"<｜tool▁output▁end｜><｜tool▁outputs▁end｜>'
        "Four.<｜end▁of▁sentence｜>"
    ),
}
WITH_TOOLS = sorted(WITH_CALL)
NO_TOOLS = ("chatml", "gemma", "deepseek")
TOKENIZER = tiny_tokenizer()  # templates are given by name: it only lends its jinja


def calling(content: str = "", *calls: Any) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": list(calls or [CALL])}


def write(chats: Sequence[Sequence[Message]], name: str, *, prompt: bool = False, **options: Any) -> list[str]:
    history = History.from_chats(chats)
    return history.apply_chat_template(TOKENIZER, add_generation_prompt=prompt, chat_template_name=name, **options)


def read(texts: Sequence[str], name: str) -> list[list[Message]]:
    return History.from_text(texts, chat_template_name=name).to_chats()


@pytest.fixture
def nothing_stays_added() -> Iterator[None]:
    before = dict(TEMPLATES)
    yield
    TEMPLATES.clear()
    TEMPLATES.update(before)


# What is written


@pytest.mark.parametrize("name", WRITTEN)
def test_a_chat_is_written_in_the_published_format(name: str) -> None:
    assert write([[SYSTEM, USER, ANSWER]], name) == [WRITTEN[name]]
    assert write([[SYSTEM, USER, ANSWER]], name, prompt=True) == [WRITTEN[name] + PROMPT[name]]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_and_results_are_written_in_the_published_format(name: str) -> None:
    chat = [USER, calling(), RESULT, ANSWER]
    assert write([chat], name) == [WITH_CALL[name]]
    if name in HEADED:
        assert write(read([WITH_CALL[name]], name), name) == [WITH_CALL[name]]


@pytest.mark.parametrize("name", ["chatml", "qwen", "llama3", "gemma"])
def test_what_is_written_is_what_a_tokenizer_of_the_family_writes(name: str) -> None:
    family = FAMILIES[name]
    chats = {
        "qwen": [SYSTEM, USER, calling("Let me see.", CALL, CALL), RESULT, RESULT, ANSWER, USER],
        "llama3": [SYSTEM, USER, calling(), RESULT, ANSWER, USER],
    }
    chat = chats.get(name, [USER, ANSWER, USER])
    own = bytes_tokenizer(family).apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    # Llama 3 dates its knowledge at the head of the system message
    own = own.replace("Cutting Knowledge Date: December 2023\n\n", "")
    assert write([chat], name, prompt=True) == [own]


@pytest.mark.parametrize(
    ("name", "message", "tools", "wrong"),
    [
        *((name, ANSWER, [{"type": "function", "function": {"name": "add"}}], "tools") for name in NO_TOOLS),
        *((name, calling(), None, "tool calls") for name in ("chatml", "gemma")),
        ("llama3", calling("Let me see."), None, "one call"),
        ("llama3", calling("", CALL, CALL), None, "one call"),
    ],
)
def test_what_a_format_has_no_form_for_is_refused(name: str, message: Message, tools: Any, wrong: str) -> None:
    with pytest.raises(DataError, match=wrong):
        write([[USER, message]], name, tools=tools)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_generation_tags_of_a_template_hold_what_the_assistant_mask_does(name: str) -> None:
    chat: list[Message] = [USER, ANSWER, USER, {"role": "assistant", "content": " Four,\n\nas ever \n"}]
    if name in WITH_TOOLS:
        chat = [USER, calling(), RESULT, *chat]
    tokenizer = bytes_tokenizer(BY_NAME[name])
    by_tags = tokenizer.apply_chat_template(
        chat, chat_template=TEMPLATES[name].template, return_dict=True, return_assistant_tokens_mask=True
    )
    ours = History.from_chats([chat]).apply_chat_template(
        tokenizer, False, chat_template_name=name, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ours["input_ids"][0].tolist() == by_tags["input_ids"]
    assert ours["assistant_masks"][0].int().tolist() == by_tags["assistant_masks"]


# What is read


@pytest.mark.parametrize("name", HEADED)
def test_a_generation_prompt_is_read_as_an_empty_unfinished_answer(name: str) -> None:
    (text,) = write([[USER]], name, prompt=True)
    assert read([text], name) == [[USER, {"role": "assistant", "content": "", "is_complete": False}]]
    assert write(read([text], name), name, prompt=True) == [text]  # it is gone on with, not begun anew


@pytest.mark.parametrize("cut", [10, 25])
@pytest.mark.parametrize("name", HEADED)
def test_of_a_text_cut_short_the_last_message_alone_is_unfinished(name: str, cut: int) -> None:
    long = {"role": "assistant", "content": "It is four, as everybody knows."}
    (text,) = write([[SYSTEM, USER, ANSWER, USER, long]], name)
    history = History.from_text(text[:-cut], chat_template_name=name)
    assert history.is_complete.tolist() == [True] * (history.numel() - 1) + [False]
    assert long["content"].startswith(history.content[-1].split("<")[0])
    assert history.apply_chat_template(TOKENIZER, chat_template_name=name) == text[:-cut]


def test_padding_and_the_token_that_ends_a_text_are_no_message() -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n"
    for padded in ("<|endoftext|><|endoftext|>" + text, text + "<|endoftext|>", text.removesuffix("\n")):
        assert read([padded], "chatml") == [[{"role": "user", "content": "Hi"}]]
    ended = "<|im_start|>assistant\nHello<|endoftext|>"  # as a base model ends its answer
    assert read([ended], "qwen") == [[{"role": "assistant", "content": "Hello"}]]


@pytest.mark.parametrize(
    "bad",
    [
        '<tool_call>\n{"name": "add", "arguments": }\n</tool_call>',  # no JSON
        "<tool_call>\n[1]\n</tool_call>",  # no object
        '<tool_call>\n{"arguments": {}}\n</tool_call>',  # no name
        '<tool_call>\n{"name": "add", "arguments": "2"}\n</tool_call>',  # arguments that are none
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>',  # in one line
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call> Done.',  # words behind it
        '\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',  # which the template would put higher
    ],
)
def test_what_is_no_call_as_the_template_writes_it_stays_in_the_content(bad: str) -> None:
    text = f"<|im_start|>assistant\n{bad}<|im_end|>\n"
    assert read([text], "qwen") == [[{"role": "assistant", "content": bad}]]
    assert write(read([text], "qwen"), "qwen") == [text]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chatml", "Hello"),
        ("chatml", ""),
        ("chatml", "<|im_start|>user\nHi<|im_end|> and so on"),
        ("chatml", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assis"),
        ("chatml", "<|im_start|><none>\nHi<|im_end|>\n"),
        ("llama3", "<|header_start|>user<|header_end|>\n\nHi<|eot|>"),
        ("llama4", "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"),
    ],
    ids=["bare", "empty", "between", "cut header", "padding", "of Llama 4", "of Llama 3"],
)
def test_a_text_of_no_messages_is_refused_with_the_usual_cause(name: str, text: str, says: Says) -> None:
    with says.refused("tensordict", UnparsedTextError, "include_stop_str_in_output"):
        read([text], name)


# Text and messages, both ways, whatever they say

CONTROL = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>",
    "<|header_start|>", "<|header_end|>", "<|eot|>", "<|python_start|>", "<|python_end|>",
    "<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
ODD = st.sampled_from(
    [
        *(" ", "\n", "\n\n", "\t", "{", "}", "{{ x }}", "{% y %}", '"', "\\n", "é", "語", "🙂", "\u2028", "<", "|>"),
        *("<|im_", "im_end|>", "<none>", "assistant\n", "[/INST", "[{", "<tool_call", '{"name": 1}', "Four", "#### 4"),
    ]
)
WORDS = st.lists(st.one_of(ODD, st.text(st.characters(exclude_categories=["Cs"]), max_size=4)), max_size=6).map("".join)
CONTENT = WORDS.filter(lambda text: not any(token in text for token in CONTROL))
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | CONTENT
VALUES = LEAVES | st.lists(LEAVES, max_size=2) | st.dictionaries(CONTENT, LEAVES, max_size=2)
NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": draw(NAMES), "arguments": draw(st.dictionaries(NAMES, VALUES, max_size=3))},
    }


@st.composite
def chats(draw: st.DrawFn, name: str) -> list[Message]:
    """A chat of the user and the assistant in turn, with all that the format can tell apart."""
    system = {"role": "system", "content": draw(CONTENT.filter(bool))}
    chat: list[Message] = [system] if name != "gemma" and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        chat.append({"role": "user", "content": draw(CONTENT)})
        if name == "qwen" and draw(st.booleans()):
            called = draw(st.lists(calls(), min_size=1, max_size=3))
            chat.append({"role": "assistant", "content": draw(CONTENT), "tool_calls": called})
            chat.extend({"role": "tool", "content": draw(CONTENT)} for _ in called)
        chat.append({"role": "assistant", "content": draw(CONTENT)})
    if draw(st.booleans()):
        # without a header before an answer, one that has not begun cannot be told from none
        chat[-1] = {**chat[-1], "content": chat[-1]["content"] or "I", "is_complete": False}
    return chat


@pytest.mark.parametrize("name", HEADED)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_messages_come_back_from_their_text_and_the_text_from_its_messages(name: str, data: st.DataObject) -> None:
    batch = data.draw(st.lists(chats(name), min_size=1, max_size=3))
    texts = write(batch, name)
    assert read(texts, name) == batch  # uneven chats too, which "<none>" fills up
    assert write(read(texts, name), name) == texts


GOOD, COMPACT = '{"name": "f", "arguments": {"a": 1}}', '{"name":"f"}'
RESULT_END = "\n</tool_response>"
OPENINGS = ["<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_start|>user\n<tool_response>\n"]
INNER = [
    *("Hi", "\n", "\n", "</tool_call>", "<tool_call>\n", "<tool_call>\n{\n</tool_call>"),
    *(f"<tool_call>\n{GOOD}\n</tool_call>", f"<tool_call>\n{COMPACT}\n</tool_call>"),
    *("<tool_response>\n", RESULT_END, f"{RESULT_END}\n<tool_response>\n"),
]
ENDS = ["<|im_end|>\n", "<|im_end|>\n", f"{RESULT_END}<|im_end|>\n", f"{RESULT_END}<|im_end|>\n", ""]


def test_a_text_that_can_be_read_is_written_the_same() -> None:
    """Pieces of Qwen's template in random orders; a template would write few of them."""
    chance = random.Random("qwen")
    readable = 0
    for _ in range(1200):
        text = ""
        for _ in range(chance.randint(1, 4)):
            inner = "".join(chance.choices(INNER, k=chance.randint(0, 4)))
            text += chance.choice(OPENINGS) + inner + chance.choice(ENDS)
        try:
            chat = parse_qwen(text)
        except UnparsedTextError:
            continue
        readable += 1
        written = render(TOKENIZER, chat, template=TEMPLATES["qwen"].template)
        assert written.removesuffix("\n") == text.removesuffix("\n"), chat
    assert readable > 150


# Which format


class Named:
    """A tokenizer as far as the choice of a format sees it."""

    def __init__(self, name_or_path: str = "", chat_template: str | None = None) -> None:
        self.name_or_path, self.chat_template = name_or_path, chat_template


@pytest.mark.parametrize(
    ("name", "format_name"),
    [
        ("Qwen/Qwen2.5-0.5B", "qwen"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "deepseek"),
        ("meta-llama/Llama-3.2-1B", "llama3"),
        ("meta-llama/Llama-4-Scout-17B-16E", "llama4"),
        ("meta-llama/Llama-2-7b-hf", "chatml"),  # whose format is none of those
        ("google/gemma-2-2b", "gemma"),
        ("mistralai/Mistral-Small-24B", "mistral"),
        ("HuggingFaceTB/SmolLM2-135M", "chatml"),
        ("/models/unheard-of", "chatml"),
    ],
)
def test_a_tokenizer_without_a_template_has_the_one_of_its_name(name: str, format_name: str) -> None:
    assert template_to_write(Named(name)) == TEMPLATES[format_name].template
    assert template_to_read(Named(name)).name == format_name


def test_what_is_asked_for_goes_before_the_tokenizers_own_and_that_before_its_name() -> None:
    qwen = Named("Qwen/Qwen2.5-0.5B", "own")
    assert template_to_write(qwen, "{{ 1 }}", "gemma") == "{{ 1 }}"
    assert template_to_write(qwen, None, "gemma") == TEMPLATES["gemma"].template
    assert template_to_write(qwen) is None  # its own


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_text_is_read_as_what_the_tokenizers_own_template_writes(name: str) -> None:
    assert template_to_read(Named("runs/my-run", TEMPLATES[name].template)).name == name
    assert template_to_read(Named("Qwen/Qwen2.5-0.5B", TEMPLATES[name].template), "gemma").name == "gemma"


def test_an_unknown_format_is_refused_with_the_nearest(says: Says) -> None:
    with says.refused("tensordict", UnknownTemplateError, "lama3"):
        History.from_text("Hi", chat_template_name="lama3")
    with pytest.raises(NotImplementedError):
        write([[USER]], "falcon")


SHOUTING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content + '!' }}{% endgeneration %}"
    "{% else %}{{ m.role + ':' + m.content + '!' }}{% endif %}{% endfor %}"
)


def parse_shouting(text: str) -> list[Message]:
    pairs = [said.split(":", 1) for said in text.split("!") if said]
    return [{"role": "assistant" if role == "A" else role, "content": content} for role, content in pairs]


def test_an_added_format_is_written_read_and_found_by_keyword(nothing_stays_added: None) -> None:
    add_chat_template("shouting", SHOUTING, parse_shouting, ["Shout"])
    text = "user:Two and two?!A:Four.!"
    assert write([[USER, ANSWER]], "shouting") == [text]
    assert read([text], "shouting") == [[USER, ANSWER]]
    assert template_to_write(Named("acme/shout-qwen-7b")) == SHOUTING  # before the shipped ones
    add_chat_template("histories", SHOUTING, lambda text: History.from_chats([parse_shouting(text)]))
    assert read([text], "histories") == [[USER, ANSWER]]


def test_an_added_format_needs_generation_tags_and_a_parser_to_be_read(nothing_stays_added: None) -> None:
    with pytest.raises(ValueError, match=r"no \{% generation %\}"):
        add_chat_template("plain", CHATML)
    add_chat_template("unread", SHOUTING)
    with pytest.raises(UnknownTemplateError, match="inverse_parser"):
        read(["user:Hi!"], "unread")


def test_the_template_of_a_model_reaches_no_code() -> None:
    tokenizer = tiny_tokenizer()
    for reaching in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os }}"):
        with pytest.raises(SecurityError):
            tokenizer.apply_chat_template([USER], chat_template=reaching, tokenize=False)
