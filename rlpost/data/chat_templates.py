"""Chat formats known by name: how each is written (templates/NAME.jinja), how its text is read back, and which applies.

Shipped are chatml, qwen (2.5 and 3), llama3, llama4, gemma (2 and 3), mistral (v7) and deepseek (V3, R1). Each
writes the published format with two differences: the content of a message is written as it is (some published
templates strip it or remove thinking), and no system message is added. Mistral's and DeepSeek's texts are not read
back. rlpost has its own words for the description of the tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

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
    `filler` may fill a text on either side, as padding does. `model` is the role of the model's turns.
    """

    opening: str
    closing: str
    end: str
    behind: str = ""
    begin: str = ""
    text_end: str = ""
    filler: str = ""
    model: str = "assistant"

    def messages(self, text: str) -> list[Message]:
        """The messages of `text`; a tool call in it is part of the content. Raises as `read`."""
        return [turn.message() for turn in self.read(text)]

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
            raise UnparsedTextError(f"{text[place:]!r:.40} stands outside of any message")
        header_end = text.find(self.closing, place)
        role = text[place + len(self.opening) : header_end]
        if header_end < 0 or not role or role == PADDING_ROLE or self.opening in role or self.end in role:
            raise UnparsedTextError(f"{text[place:]!r:.40} is not a whole header of a message")
        role = "assistant" if role == self.model else role
        start = header_end + len(self.closing)
        end, following = text.find(self.end, start), text.find(self.opening, start)
        if end < 0 or 0 <= following < end:  # cut off, or the next turn comes before an end
            stop = following if following >= 0 else len(text)
            return Turn(role, text[start:stop], is_complete=False), stop
        behind = end + len(self.end)
        if behind < len(text) and not text.startswith(self.behind, behind):
            raise UnparsedTextError(f"{text[behind:]!r:.40} stands outside of any message")
        return Turn(role, text[start:end]), min(behind + len(self.behind), len(text))


# ChatML, and Qwen 2.5 and 3, which add tool calls and their results to it

CHATML_TURNS = HeadedTurns("<|im_start|>", "\n", "<|im_end|>", behind="\n", text_end="<|endoftext|>")
CALL, CALL_END = "<tool_call>\n", "\n</tool_call>"
RESULT, RESULT_END = "<tool_response>\n", "\n</tool_response>"


def parse_qwen(text: str) -> list[Message]:
    """The messages of a Qwen text: the calls that end an answer as its `tool_calls`, each result as a tool's.

    A call with malformed JSON, or with words behind it, stays in the content. So does a turn of results right behind
    another, which the template would write as one.
    """
    messages: list[Message] = []
    for turn in CHATML_TURNS.read(text):
        after_tool = bool(messages) and messages[-1]["role"] == "tool"
        is_results = turn.content.startswith(RESULT) and turn.content.endswith(RESULT_END)
        if turn.role == "user" and turn.is_complete and is_results and not after_tool:
            results = turn.content[len(RESULT) : -len(RESULT_END)].split(f"{RESULT_END}\n{RESULT}")
            messages.extend({"role": "tool", "content": result} for result in results)
        else:
            messages.append(_with_qwen_calls(turn) if turn.role == "assistant" else turn.message())
    return messages


def _with_qwen_calls(turn: Turn) -> Message:
    """The assistant's turn as a message, the calls at its end taken out of the content."""
    content, calls = turn.content, []
    while content.endswith(CALL_END):
        begin = content.rfind(CALL)
        call = _qwen_call(content[begin + len(CALL) : -len(CALL_END)]) if begin >= 0 else None
        # a line break stands between the text and a call, and none before a call at the beginning
        if call is None or (begin > 0 and content[begin - 1] != "\n") or begin == 1:
            break
        calls.insert(0, call)
        content = content[: max(0, begin - 1)]
    return turn.message(content=content, tool_calls=calls) if calls else turn.message()


def _qwen_call(text: str) -> dict[str, Any] | None:
    """The call that the JSON object `text` is; None for any other text.

    `text` is kept in the call if the template would write the same call differently.
    """
    try:
        function = json.loads(text)
        name, arguments = function["name"], function.get("arguments", {})
    except (ValueError, TypeError, LookupError, AttributeError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)  # as `tojson` of a template
    return call if text == written else {**call, "text": text}


# Gemma 2 and 3, Llama 3 (3.1 to 3.3) and Llama 4

# a system message has become part of the first user message
GEMMA_TURNS = HeadedTurns(
    "<start_of_turn>", "\n", "<end_of_turn>", "\n", begin="<bos>", text_end="<eos>", filler="<pad>", model="model"
)
# a call's result has the role ipython
LLAMA3_TURNS = HeadedTurns(
    "<|start_header_id|>",
    "<|end_header_id|>\n\n",
    "<|eot_id|>",
    begin="<|begin_of_text|>",
    text_end="<|end_of_text|>",
    filler="<|finetune_right_pad_id|>",
)
LLAMA4_TURNS = HeadedTurns(
    "<|header_start|>",
    "<|header_end|>\n\n",
    "<|eot|>",
    begin="<|begin_of_text|>",
    text_end="<|end_of_text|>",
    filler="<|finetune_right_pad|>",
)


# The known formats


InverseParser = Callable[[str], Any]  # returns messages, in a list or as a `History` of one chat


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
        ("deepseek", None, ("deepseek",), ("<｜Assistant｜>",)),
        ("llama4", LLAMA4_TURNS.messages, ("llama-4", "llama4", "llama_4"), ("<|header_start|>", "<|eot|>")),
        ("llama3", LLAMA3_TURNS.messages, ("llama-3", "llama3", "llama_3"), ("<|start_header_id|>", "<|eot_id|>")),
        ("gemma", GEMMA_TURNS.messages, ("gemma",), ("<start_of_turn>",)),
        ("mistral", None, ("mistral", "ministral"), ("[INST]", "[/INST]")),
        ("qwen", parse_qwen, ("qwen",), ("<|im_start|>", "<tool_call>")),
        ("chatml", CHATML_TURNS.messages, ("chatml", "smollm"), ("<|im_start|>",)),
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

    Raises ConfigError (a ValueError) for a template without `{% generation %}` and `{% endgeneration %}` around what
    the model says, the end of its turn included: they tell trainers built on transformers what to learn.
    """
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
        raise UnknownTemplateError(f"rlpost does not read {known.name} texts: add_chat_template(inverse_parser=...)")
    try:
        parsed = known.parse(text)
    except UnparsedTextError as error:
        raise UnparsedTextError(
            f"{text!r:.40} cannot be read as {known.name} messages: {error}. Mostly the special tokens are missing: "
            "decode with skip_special_tokens=False, and keep the stop string (include_stop_str_in_output=True)"
        ) from None
    return parsed.to_chats()[0] if hasattr(parsed, "to_chats") else [dict(message) for message in parsed]


def _by_name(tokenizer: Any) -> ChatTemplate | None:
    """The format with a keyword in the tokenizer's name; those added by users first, the last one before the others."""
    name = str(getattr(tokenizer, "name_or_path", "") or "").lower()
    added = [each for each in TEMPLATES.values() if each not in _SHIPPED]
    candidates = [*reversed(added), *_SHIPPED]
    return next((each for each in candidates if any(keyword in name for keyword in each.keywords)), None)
