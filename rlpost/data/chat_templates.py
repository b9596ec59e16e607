"""Chat formats known by name: how each is written (templates/NAME.jinja), how its text is read back, and which applies.

Shipped are chatml, qwen (2.5 and 3), llama3, llama4, gemma (2 and 3), mistral (v7) and deepseek (V3, R1). Each
writes the published format, with two differences that let a text be read back exactly: a message's content is
written as it is, where some published templates strip it or take thinking out of it, and no system message is
added. The description of the tools is worded by rlpost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol, runtime_checkable

from rlpost.data.conversation import PADDING_ROLE, Message
from rlpost.errors import ConfigError, DataError
from rlpost.text import did_you_mean, nearest

# What the readers of all formats share


class UnparsedTextError(DataError, RuntimeError):
    """A text that is not a conversation in the format it was read as."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a text; `is_complete` is False if its end is missing."""

    role: str
    content: str
    is_complete: bool = True

    def message(self, **entries: Any) -> Message:
        """The turn as a message; `entries` replace or add to its entries."""
        message: Message = {"role": self.role, "content": self.content, **entries}
        return message if self.is_complete else {**message, "is_complete": False}


@dataclass(frozen=True, slots=True)
class HeadedTurns:
    """A text of turns, each `opening role closing content end`, with `behind` after the end.

    `begin` may stand before the first turn. `text_end` may end a text in place of `end`, and it and
    `filler` may fill a text on either side, as padding does.
    """

    opening: str
    closing: str
    end: str
    behind: str = ""
    begin: str = ""
    text_end: str = ""
    filler: str = ""

    def read(self, text: str) -> list[Turn]:
        """The turns of `text`. Raises UnparsedTextError where it holds none, or something between them."""
        body, ended = self._without_filling(text)
        turns: list[Turn] = []
        place = 0
        while place < len(body):
            turn, place = self._turn_at(place, body)
            turns.append(turn)
        if not turns:
            raise UnparsedTextError(f"no {self.opening} is in it")
        if ended and not turns[-1].is_complete:
            turns[-1] = Turn(turns[-1].role, turns[-1].content)
        return turns

    def _without_filling(self, text: str) -> tuple[str, bool]:
        """`text` without what begins and fills it, and whether `text_end` ended it."""
        fillers = [token for token in (self.text_end, self.filler) if token]
        ended = False
        while found := next((token for token in fillers if text.endswith(token)), None):
            text, ended = text.removesuffix(found), ended or found == self.text_end
        while found := next((token for token in fillers if text.startswith(token)), None):
            text = text.removeprefix(found)
        return text.removeprefix(self.begin), ended

    def _turn_at(self, place: int, text: str) -> tuple[Turn, int]:
        """The turn whose header begins at `place`, and where the next one begins."""
        if not text.startswith(self.opening, place):
            raise UnparsedTextError(f"{shown(text[place:])} stands outside of any message")
        header_end = text.find(self.closing, place)
        role = text[place + len(self.opening) : header_end]
        if header_end < 0 or not role or role == PADDING_ROLE or self.opening in role or self.end in role:
            raise UnparsedTextError(f"{shown(text[place:])} is no whole header of a message")
        start = header_end + len(self.closing)
        end, following = text.find(self.end, start), text.find(self.opening, start)
        if end < 0 or 0 <= following < end:  # cut off, or the next turn comes before an end
            stop = following if following >= 0 else len(text)
            return Turn(role, text[start:stop], is_complete=False), stop
        behind = end + len(self.end)
        if behind < len(text) and not text.startswith(self.behind, behind):
            raise UnparsedTextError(f"{shown(text[behind:])} stands outside of any message")
        return Turn(role, text[start:end]), min(behind + len(self.behind), len(text))


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls as JSON objects `{"name": ..., arguments_key: {...}}`, with an "id" last where `with_id`."""

    arguments_key: str
    with_id: bool = False

    def read(self, text: str) -> dict[str, Any] | None:
        """The call that `text` is; None if it is not one.

        A call is `{"type": "function", "function": {"name": ..., "arguments": {...}}}`, with its `id`
        where it has one. `text` is kept in it where a template would write the same call differently.
        """
        try:
            read = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(read, dict) or not isinstance(read.get("name"), str):
            return None
        arguments = read.get(self.arguments_key, {})
        if not isinstance(arguments, dict):
            return None
        call: dict[str, Any] = {"type": "function", "function": {"name": read["name"], "arguments": arguments}}
        if self.with_id and isinstance(read.get("id"), str) and read["id"]:
            call["id"] = read["id"]
        return call if text == self._written(call) else {**call, "text": text}

    def read_all(self, text: str, separator: str) -> list[dict[str, Any]] | None:
        """The calls that `text` is, with `separator` between them; None for any other text."""
        calls: list[dict[str, Any]] = []
        place = 0
        while True:
            try:
                _, end = json.JSONDecoder().raw_decode(text, place)
            except (ValueError, RecursionError):
                return None
            call = self.read(text[place:end])
            if call is None:
                return None
            calls.append(call)
            if end == len(text):
                return calls
            if not text.startswith(separator, end):
                return None
            place = end + len(separator)

    def _written(self, call: dict[str, Any]) -> str:
        """The JSON object of a call as templates write it."""
        function = call["function"]
        fields = {"name": function["name"], self.arguments_key: function["arguments"]}
        return as_json({**fields, "id": call["id"]} if "id" in call else fields)


def read_blocks(text: str, opening: str, separator: str, closing: str) -> list[str] | None:
    """The contents of the blocks that `text` consists of; None for any other text."""
    if len(text) < len(opening) + len(closing) or not (text.startswith(opening) and text.endswith(closing)):
        return None
    return text[len(opening) : len(text) - len(closing)].split(closing + separator + opening)


def as_json(value: Any) -> str:
    """`value` as JSON, like the `tojson` of chat templates."""
    return json.dumps(value, ensure_ascii=False)


def shown(text: str) -> str:
    """The beginning of `text`, as an error quotes it."""
    return repr(text[:40] + "..." if len(text) > 40 else text)


# ChatML, and Qwen 2.5 and 3, which add tool calls and their results to it

CHATML_TURNS = HeadedTurns("<|im_start|>", "\n", "<|im_end|>", behind="\n", text_end="<|endoftext|>")
QWEN_CALLS = JsonCalls("arguments")


def parse_chatml(text: str) -> list[Message]:
    """The messages of a ChatML text; a tool call in it is part of the content."""
    return [turn.message() for turn in CHATML_TURNS.read(text)]


def parse_qwen(text: str) -> list[Message]:
    """The messages of a Qwen text: the calls that end an answer as its `tool_calls`, each result as a tool's.

    A call whose JSON is bad, and one with words behind it, stays in the content, as does a turn of
    results right behind another, which the template would write as one.
    """
    messages: list[Message] = []
    for turn in CHATML_TURNS.read(text):
        if turn.role == "tool":
            raise UnparsedTextError("it has a turn of role tool, whose results this format gives to the user's")
        results = None
        if turn.role == "user" and turn.is_complete and not (messages and messages[-1]["role"] == "tool"):
            results = read_blocks(turn.content, "<tool_response>\n", "\n", "\n</tool_response>")
        if results is not None:
            messages.extend({"role": "tool", "content": result} for result in results)
        else:
            messages.append(_with_qwen_calls(turn) if turn.role == "assistant" else turn.message())
    return messages


def _with_qwen_calls(turn: Turn) -> Message:
    """The assistant's turn as a message, the calls at its end taken out of the content."""
    opening, closing = "<tool_call>\n", "\n</tool_call>"
    content, calls = turn.content, []
    while content.endswith(closing):
        begin = content.rfind(opening)
        call = QWEN_CALLS.read(content[begin + len(opening) : -len(closing)]) if begin >= 0 else None
        # a line break stands between what is said and a call, and none before a call at the beginning
        if call is None or (begin > 0 and content[begin - 1] != "\n") or begin == 1:
            break
        calls.insert(0, call)
        content = content[: max(0, begin - 1)]
    return turn.message(content=content, tool_calls=calls) if calls else turn.message()


# DeepSeek V3 and R1, and the models distilled from R1

DEEPSEEK_BEGIN, DEEPSEEK_END, FILLER = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_NAME, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
RESULTS_BEGIN, RESULTS_END = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
RESULT_BEGIN, RESULT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
_DEEPSEEK_TURNS = re.compile("|".join((USER, ASSISTANT, RESULTS_BEGIN, RESULTS_END, DEEPSEEK_END, DEEPSEEK_BEGIN)))


def parse_deepseek(text: str) -> list[Message]:
    """The messages of a DeepSeek text.

    Arguments that the template would write differently stay the text they are. A message of the
    user has no end of its own, so the last one counts as complete.
    """
    body = text
    while body.startswith(FILLER) or body.endswith(FILLER):
        body = body.removeprefix(FILLER).removesuffix(FILLER)
    body = body.removeprefix(DEEPSEEK_BEGIN)
    first = _DEEPSEEK_TURNS.search(body)
    if first is None:
        raise UnparsedTextError(f"no {USER} or {ASSISTANT} is in it")
    place = first.start()
    messages: list[Message] = [{"role": "system", "content": body[:place]}] if place else []
    while place < len(body):
        place = _read_turn(place, body, messages)
    return messages


def _read_turn(place: int, body: str, messages: list[Message]) -> int:
    """Add the turn at `place` to `messages`; returns the place of the next one."""
    token = _DEEPSEEK_TURNS.match(body, place)
    after_tool = bool(messages) and messages[-1]["role"] == "tool" and messages[-1].get("is_complete", True)
    if token and token.group() == RESULTS_BEGIN and not after_tool:
        return _read_results(token.end(), body, messages)
    if token and token.group() == USER:
        begin, role = token.end(), "user"
    elif token and token.group() == ASSISTANT and not after_tool:
        begin, role = token.end(), "assistant"
    elif after_tool and (token is None or token.group() == DEEPSEEK_END):
        begin, role = place, "assistant"
    else:
        raise UnparsedTextError(f"{shown(body[place:])} stands outside of any message")
    stop = _DEEPSEEK_TURNS.search(body, begin)
    content = body[begin : stop.start() if stop else len(body)]
    if role == "user":
        messages.append({"role": role, "content": content})
        return stop.start() if stop else len(body)
    is_complete = stop is not None and stop.group() == DEEPSEEK_END
    message: Message = {"role": role, **_with_deepseek_calls(content)}
    messages.append(message if is_complete else {**message, "is_complete": False})
    return len(body) if stop is None else stop.end() if is_complete else stop.start()


def _read_results(begin: int, body: str, messages: list[Message]) -> int:
    """Add a message for each of the tool results at `begin`; returns the place behind them."""
    end = body.find(RESULTS_END, begin)
    results = read_blocks(body[begin:end], RESULT_BEGIN, "\n", RESULT_END) if end >= 0 else None
    if results is None:
        raise UnparsedTextError(f"{shown(body[begin:])} are no whole results of tools")
    messages.extend({"role": "tool", "content": result} for result in results)
    return end + len(RESULTS_END)


def _with_deepseek_calls(content: str) -> dict[str, Any]:
    """The entries of the assistant's message: its calls out of the content where all are well formed."""
    said, found, written = content.partition(CALLS_BEGIN)
    blocks = None
    if found and written.endswith(CALLS_END):
        opening, closing = f"{CALL_BEGIN}function{CALL_NAME}", f"\n```{CALL_END}"
        blocks = read_blocks(written.removesuffix(CALLS_END), opening, "\n", closing)
    calls = [_call(block) for block in blocks or []]
    if not calls or None in calls:
        return {"content": content}
    return {"content": said, "tool_calls": calls}


def _call(block: str) -> dict[str, Any] | None:
    """The call of a name with its arguments below it, fenced as json; None if they are not a JSON object."""
    name, found, written = block.partition("\n```json\n")
    try:
        arguments = json.loads(written)
    except (ValueError, RecursionError):
        return None
    if not found or not isinstance(arguments, dict):
        return None
    same = as_json(arguments) == written
    return {"type": "function", "function": {"name": name, "arguments": arguments if same else written}}


# Gemma 2 and 3

GEMMA_TURNS = HeadedTurns(
    "<start_of_turn>", "\n", "<end_of_turn>", behind="\n", begin="<bos>", text_end="<eos>", filler="<pad>"
)


def parse_gemma(text: str) -> list[Message]:
    """The messages of a Gemma text; a system message has become part of the first of the user."""
    return [_gemma_message(turn) for turn in GEMMA_TURNS.read(text)]


def _gemma_message(turn: Turn) -> Message:
    if turn.role not in ("user", "model"):
        raise UnparsedTextError(f"it has a turn of role {turn.role}, and this format knows user and model alone")
    return turn.message(role="assistant") if turn.role == "model" else turn.message()


# Llama 3 (3.1 to 3.3) and Llama 4

TURNS_3 = HeadedTurns(
    "<|start_header_id|>",
    "<|end_header_id|>\n\n",
    "<|eot_id|>",
    begin="<|begin_of_text|>",
    text_end="<|end_of_text|>",
    filler="<|finetune_right_pad_id|>",
)
TURNS_4 = HeadedTurns(
    "<|header_start|>",
    "<|header_end|>\n\n",
    "<|eot|>",
    begin="<|begin_of_text|>",
    text_end="<|end_of_text|>",
    filler="<|finetune_right_pad|>",
)
LLAMA_CALLS = JsonCalls("parameters")


def parse_llama3(text: str) -> list[Message]:
    """The messages of a Llama 3 text; an answer that is one call alone becomes its `tool_calls`."""
    return [_llama_message(turn, _alone) for turn in TURNS_3.read(text)]


def parse_llama4(text: str) -> list[Message]:
    """The messages of a Llama 4 text; the calls behind `<|python_end|>` become `tool_calls`."""
    return [_llama_message(turn, _behind_python) for turn in TURNS_4.read(text)]


def _llama_message(turn: Turn, with_calls: Callable[[Turn], Message]) -> Message:
    if turn.role == "assistant":
        return with_calls(turn)
    if turn.role == "tool":
        raise UnparsedTextError("it has a turn of role tool, which this format calls ipython")
    return _result(turn) if turn.role == "ipython" else turn.message()


def _alone(turn: Turn) -> Message:
    call = LLAMA_CALLS.read(turn.content)
    return turn.message() if call is None else turn.message(content="", tool_calls=[call])


def _behind_python(turn: Turn) -> Message:
    opening, closing = "<|python_start|>", "<|python_end|>"
    if turn.content.startswith(opening) and closing in turn.content:
        content, _, written = turn.content.removeprefix(opening).partition(closing)
        calls = LLAMA_CALLS.read_all(written, separator="")
        if calls is not None:
            return turn.message(content=content, tool_calls=calls)
    return turn.message()


def _result(turn: Turn) -> Message:
    """A tool's message where the turn holds its words as a JSON string, as the template writes them."""
    try:
        said = json.loads(turn.content)
    except (ValueError, RecursionError):
        said = None
    if turn.is_complete and isinstance(said, str) and as_json(said) == turn.content:
        return {"role": "tool", "content": said}
    return turn.message()


# Mistral's instruct models, version 7 of their tokenizers (Small 3, Large 2411)

MISTRAL_CALLS = JsonCalls("arguments", with_id=True)
MISTRAL_BEGIN, MISTRAL_END = "<s>", "</s>"

# how each role's message stands in the text; what stands in none of these is the assistant's
_BRACKETS = {
    "[SYSTEM_PROMPT]": ("system", "[/SYSTEM_PROMPT]"),
    "[AVAILABLE_TOOLS]": ("available_tools", "[/AVAILABLE_TOOLS]"),
    "[INST]": ("user", "[/INST]"),
    "[TOOL_RESULTS]": ("tool", "[/TOOL_RESULTS]"),
}
_TOKENS = re.compile(
    "|".join(re.escape(t) for o, (_, c) in _BRACKETS.items() for t in (o, c)) + f"|{MISTRAL_END}|{MISTRAL_BEGIN}"
)


def parse_mistral(text: str) -> list[Message]:
    """The messages of a Mistral text; older versions' spaces behind `[INST]` and `[/INST]` are part of the content.

    A description of tools comes back as a message of role "available_tools", a result with its
    `tool_call_id`. The format has no header before an answer: one of no words and no end is none.
    """
    text = text.removeprefix(MISTRAL_BEGIN)
    messages: list[Message] = []
    place = 0
    while place < len(text):
        token = _TOKENS.match(text, place)
        bracket = _BRACKETS.get(token.group()) if token else None
        if token and bracket:
            role, closing = bracket
            place = token.end()
        elif token and token.group() != MISTRAL_END:
            raise UnparsedTextError(f"{shown(text[place:])} stands outside of any message")
        else:
            role, closing = "assistant", MISTRAL_END
        stop = _TOKENS.search(text, place)
        content = text[place : stop.start() if stop else len(text)]
        is_complete = stop is not None and stop.group() == closing
        messages.append(_mistral_message(role, content, is_complete))
        place = len(text) if stop is None else stop.end() if is_complete else stop.start()
    if not messages:
        raise UnparsedTextError("nothing is in it")
    return messages


def _mistral_message(role: str, content: str, is_complete: bool) -> Message:
    message: Message = {"role": role, "content": content}
    if role == "assistant":
        said, found, written = content.partition("[TOOL_CALLS][")
        calls = (
            MISTRAL_CALLS.read_all(written.removesuffix("]"), separator=", ")
            if found and written.endswith("]")
            else None
        )
        message |= {"content": said, "tool_calls": calls} if calls is not None else {}
    elif role == "tool":
        number, found, said = content.partition("[TOOL_CONTENT]")
        if not found:
            raise UnparsedTextError(f"{shown(content)} is a tool's result without [TOOL_CONTENT]")
        message |= {"content": said, "tool_call_id": number} if number else {"content": said}
    return message if is_complete else {**message, "is_complete": False}


# The known formats


@runtime_checkable
class OneChat(Protocol):
    """A `History` of one chat."""

    def to_chats(self) -> list[list[Message]]:
        """Its messages, in a list of one."""
        ...


InverseParser = Callable[[str], Sequence[Mapping[str, Any]] | OneChat]


class UnknownTemplateError(ConfigError, NotImplementedError):
    """A name without a chat template, or a template without a parser."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat format: its jinja `template`, and `parse`, which reads a text of it back.

    `keywords` occur in the names of its tokenizers, in lower case; `marks` all occur in a tokenizer's own
    template that writes this format.
    """

    name: str
    template: str
    parse: InverseParser | None = None
    keywords: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()


def jinja(name: str) -> str:
    """The shipped template of that name."""
    return (resources.files("rlpost.data") / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


# in the order in which keywords and marks are looked for: DeepSeek's distilled models are named after Qwen
# and Llama too, and every format built on ChatML has ChatML's marks
_SHIPPED = tuple(
    ChatTemplate(name, jinja(name), parse, keywords, marks)
    for name, parse, keywords, marks in (
        ("deepseek", parse_deepseek, ("deepseek",), ("<｜Assistant｜>",)),
        ("llama4", parse_llama4, ("llama-4", "llama4", "llama_4"), ("<|header_start|>", "<|eot|>")),
        ("llama3", parse_llama3, ("llama-3", "llama3", "llama_3"), ("<|start_header_id|>", "<|eot_id|>")),
        ("gemma", parse_gemma, ("gemma",), ("<start_of_turn>",)),
        ("mistral", parse_mistral, ("mistral", "ministral"), ("[INST]", "[/INST]")),
        ("qwen", parse_qwen, ("qwen",), ("<|im_start|>", "<tool_call>")),
        ("chatml", parse_chatml, ("chatml", "smollm"), ("<|im_start|>",)),
    )
)
TEMPLATES: dict[str, ChatTemplate] = {each.name: each for each in _SHIPPED}


_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def add_chat_template(
    template_name: str,
    template: str,
    inverse_parser: InverseParser | None = None,
    model_family_keywords: Sequence[str] | None = None,
) -> None:
    """Make a chat format known by `template_name`, to `History` and to all that renders with it.

    `inverse_parser` takes a text and returns its messages, as a list of dicts or a `History` of one
    chat: `History.from_text` reads with it. A tokenizer without a template of its own uses this one if its
    name contains one of `model_family_keywords`.

    Raises ConfigError (a ValueError) for a name that is taken, and for a template without
    `{% generation %}` and `{% endgeneration %}` around what the model says, the end of its turn
    included: they tell trainers built on transformers what to learn.
    """
    if template_name in TEMPLATES:
        raise ConfigError(f"there is a chat template {template_name!r} already: choose another name")
    if not _GENERATION.search(template):
        raise ConfigError(
            f"the chat template {template_name!r} has no {{% generation %}}: put it, and {{% endgeneration %}}, "
            "around what the model says and the end of its turn"
        )
    keywords = tuple(keyword.lower() for keyword in model_family_keywords or ())
    TEMPLATES[template_name] = ChatTemplate(template_name, template, inverse_parser, keywords)


def chat_template(name: str) -> ChatTemplate:
    """The format of that name. Raises UnknownTemplateError, with the nearest name, if there is none."""
    if name not in TEMPLATES:
        known, suggestion = ", ".join(sorted(TEMPLATES)), did_you_mean(nearest(name, TEMPLATES))
        raise UnknownTemplateError(f"no chat template is named {name!r}: known are {known}{suggestion}")
    return TEMPLATES[name]


def template_to_write(tokenizer: Any, template: str | None = None, name: str | None = None) -> str | None:
    """The jinja template to render with; None for the tokenizer's own.

    In this order: `template`, the one named `name`, the tokenizer's own, one with a keyword in the tokenizer's
    name (the one added last first), ChatML.
    """
    if template is not None:
        return template
    if name is not None:
        return chat_template(name).template
    if getattr(tokenizer, "chat_template", None):
        return None
    return (_by_name(tokenizer) or TEMPLATES["chatml"]).template


def template_to_read(tokenizer: Any = None, name: str | None = None) -> ChatTemplate:
    """The format to read a text as.

    In this order: the one named `name`, one whose marks are in the tokenizer's own template, one with a keyword
    in the tokenizer's name, ChatML.
    """
    if name is not None:
        return chat_template(name)
    own = str(getattr(tokenizer, "chat_template", None) or "")
    marked = next((t for t in TEMPLATES.values() if t.marks and all(mark in own for mark in t.marks)), None)
    return marked or _by_name(tokenizer) or TEMPLATES["chatml"]


def parse_chat(text: str, known: ChatTemplate) -> list[Message]:
    """The messages of a text in the format `known`.

    Raises UnknownTemplateError for a format without a parser, UnparsedTextError for a text that is
    not a conversation in it.
    """
    if known.parse is None:
        raise UnknownTemplateError(f"the chat template {known.name!r} was added without an inverse_parser: give it one")
    try:
        parsed = known.parse(text)
    except UnparsedTextError as error:
        raise _unparsed(text, known, str(error)) from None
    chat = parsed.to_chats()[0] if isinstance(parsed, OneChat) else [dict(message) for message in parsed]
    if not chat:
        raise _unparsed(text, known, "its parser found no message")
    return chat


def _unparsed(text: str, known: ChatTemplate, reason: str) -> UnparsedTextError:
    quoted = repr(text[:60] + "..." if len(text) > 60 else text)
    return UnparsedTextError(
        f"{quoted} cannot be read as {known.name} messages: {reason}. Mostly the special tokens are missing: decode "
        "with skip_special_tokens=False, and keep the stop string in the output (include_stop_str_in_output=True)"
    )


def _by_name(tokenizer: Any) -> ChatTemplate | None:
    """The format with a keyword in the tokenizer's name; those added by users first, the last one before the others."""
    name = str(getattr(tokenizer, "name_or_path", "") or "").lower()
    added = [each for each in TEMPLATES.values() if each not in _SHIPPED]
    candidates = [*reversed(added), *_SHIPPED]
    return next((each for each in candidates if any(keyword in name for keyword in each.keywords)), None)
