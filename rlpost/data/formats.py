"""The one reader of other people's rows: as prompts to answer, as demonstrations, or as pairs of replies.

The first row decides which columns hold what. A conversation stands in `messages` or `conversations`, whole; or as a
prompt (`prompt`, `question`, or Alpaca's `instruction` and `input`, with `history` before it) and a reply to it
(`completion`, `answer`, `output`), or two (`chosen` and `rejected`, which may be whole conversations); or it is plain
`text`. Prompts and replies are texts or messages, also as JSON text. `system` is the system message of a row that has
none, `tools` are the functions that it may call, `chat_template_kwargs` the variables of its chat template.

A row's prompt is the same for every training: the same messages, tools and variables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, takewhile
from string import Formatter
from typing import Any

from rlpost.data.demonstrations import Demonstration
from rlpost.data.habits import PREFILL, with_thoughts_inside, without_thoughts
from rlpost.data.messages import (
    MEDIA,
    ChatMessage,
    FormatError,
    from_json,
    messages_in,
    read_messages,
    transcript,
)
from rlpost.data.rows import Complaint, filled, kind_of, missing, no_object
from rlpost.errors import ConfigError
from rlpost.settings import DatasetSettings
from rlpost.settings.env import Thoughts
from rlpost.text import counted

CHAT_COLUMNS = ("messages", "conversations")
ALPACA_COLUMNS = INSTRUCTION, INPUT, OUTPUT = ("instruction", "input", "output")  # the second may be missing or empty
PROMPT_COLUMNS = ("prompt", *CHAT_COLUMNS, "question", INSTRUCTION)
COMPLETION, ANSWER, TEXT = "completion", "answer", "text"
ANSWER_COLUMNS = (ANSWER, COMPLETION, OUTPUT)  # what a reward compares with; the first that a row has
PAIR_COLUMNS = CHOSEN, REJECTED = ("chosen", "rejected")
SYSTEM, HISTORY, TOOLS, VARIABLES = "system", "history", "tools", "chat_template_kwargs"
BESIDE = (SYSTEM, TOOLS, VARIABLES)  # columns that are read beside any prompt
RENDERED = "rendered_prompt"  # column of `rlpost data pairs`: the prompt as text, behind the chat template
# chosen_ids: the ids behind the prompt; chosen_mask: which of them were sampled; chosen_restarts: where among them a
# whole new prompt begins, which takes the place of all ids before it
OF_IDS = IDS, MASK, RESTARTS = ("_ids", "_mask", "_restarts")
Replies = tuple[list[ChatMessage], ...]  # none, one, or a chosen and a rejected one
PAIRS = "these are preferences (chosen, rejected): learn from them with rlpost train dpo"


class Wanted(Enum):
    """The use of rows; the value says what one of them needs."""

    prompt = "a prompt"
    demonstration = "a demonstration has messages, prompt and completion, question and answer, instruction and output, "
    pair = "a pair has prompt, chosen and rejected"


@dataclass(frozen=True, slots=True)
class Shown:
    """A row as it is read: a `prompt` and replies to it (none, one, or a chosen and a rejected one); or `text` alone.

    A reply whose beginning the prompt holds already has the entry `prefill` with that beginning.
    """

    prompt: list[ChatMessage] = field(default_factory=list)
    replies: Replies = ()
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] | None = None
    prefill: str = ""


class RowReader:
    """Reads the rows of one dataset, whose columns the first row or the settings name.

    `unused` counts, over all rows that `complaint` saw, the columns and entries that say something and are not read.
    """

    def __init__(
        self, settings: DatasetSettings, wanted: Wanted, *, user_role: str = "user", system_role: str = "system"
    ) -> None:
        self.settings, self.wanted = settings, wanted
        self.user_role, self.system_role = user_role, system_role
        self.unused: Counter[str] = Counter()
        self.prompt: str | None = None  # column of prompts; None: `chat`, or prompt_template writes them
        self.chat: str | None = None  # column of whole conversations
        self.reply: str | None = None  # column of replies
        self.text: str | None = None
        self._looked = False

    # Which columns

    def look(self, first_row: Mapping[str, Any]) -> None:
        """Find the columns, once. Raises FormatError for a row in an unknown form, ConfigError for unfit settings."""
        if self._looked:
            return
        settings, row = self.settings, first_row
        named, templated = settings.prompt_column, settings.prompt_template is not None
        first = next((name for name in PROMPT_COLUMNS if name in row), None)
        self.prompt = named or first
        match self.wanted:
            case Wanted.prompt:
                self._look_for_prompt(row, templated=templated)
            case Wanted.demonstration:
                self._look_for_demonstration(row, templated=templated)
            case Wanted.pair:
                if self.prompt in CHAT_COLUMNS and named is None:
                    self.prompt, self.chat = None, self.prompt
        self._check_settings(row, templated=templated)
        fields = [name for _, name, _, _ in Formatter().parse(settings.prompt_template or "") if name]
        beside = [HISTORY, INPUT] if self.is_alpaca else []
        own = [self.prompt, self.chat, self.reply, self.text, *fields, *beside, *([] if self.text else BESIDE)]
        if self.wanted is Wanted.pair:
            own += [*PAIR_COLUMNS, RENDERED, *(f"{name}{what}" for name in PAIR_COLUMNS for what in OF_IDS)]
        self.read_columns = {name.partition(".")[0].partition("[")[0] for name in own if name} | set(own)
        self._looked = True

    def _look_for_prompt(self, row: Mapping[str, Any], *, templated: bool) -> None:
        named = self.settings.prompt_column
        if self.prompt is None:
            if templated:
                return
            if is_preference(row):
                raise FormatError(PROMPT_COLUMNS[0], f"missing; {PAIRS}, {chosen_only(row)}")
            self.prompt = PROMPT_COLUMNS[0]
        if self.prompt not in row and not (templated and named is None):
            advice = "" if named else "; name one of them with env.prompt_column"
            raise FormatError(self.prompt, missing(self.prompt, row) + advice)
        value = row.get(self.prompt)
        is_text = isinstance(value, str) and messages_in(value) is None
        if not is_text and (self.prompt in CHAT_COLUMNS or (named and named not in PROMPT_COLUMNS)):
            self.prompt, self.chat = None, self.prompt

    def _look_for_demonstration(self, row: Mapping[str, Any], *, templated: bool) -> None:
        settings = self.settings
        prompt, named = settings.prompt_column, settings.prompt_column
        prompt = prompt or next((name for name in ("prompt", "question") if name in row), None)
        reply = next((name for name in (COMPLETION, ANSWER) if name in row), None)
        if reply == ANSWER and messages_in(row.get(named or "")):
            reply = None  # a conversation, whose answer is for a reward
        chat = next((name for name in CHAT_COLUMNS if name in row), None)
        self.prompt = None
        if settings.completion_column is not None or (named is not None and reply is not None):
            self.reply, self.prompt = settings.completion_column or reply, prompt or (None if templated else "prompt")
        elif named is not None or chat is not None:
            self.chat = named or chat
        elif COMPLETION in row and (prompt is not None or templated):
            self.prompt, self.reply = prompt, COMPLETION
        elif is_alpaca(row):
            self.prompt, self.reply = INSTRUCTION, OUTPUT
        elif ANSWER in row and (prompt is not None or templated):
            self.prompt, self.reply = prompt, ANSWER
        elif TEXT in row:
            self.text = TEXT
        elif is_preference(row):
            raise FormatError(CHOSEN, f"{PAIRS}, {chosen_only(row)}")
        else:
            column = CHAT_COLUMNS[0] if prompt is None else COMPLETION
            advice = "or text: name its columns with env.prompt_column and env.completion_column"
            raise FormatError(column, f"{missing(column, row)}; {self.wanted.value}{advice}")

    def _check_settings(self, row: Mapping[str, Any], *, templated: bool) -> None:
        of_messages = self.chat or (self.prompt if self.prompt and messages_in(row.get(self.prompt)) else None)
        if templated and (of_messages or self.text):
            raise ConfigError(
                f"env.prompt_template is for prompts of text, and {of_messages or self.text} holds "
                f"{'messages' if of_messages else 'whole texts'}: leave it out"
            )
        if self.settings.system_prompt is not None and self.text is not None:
            raise ConfigError("env.system_prompt is for conversations, and the rows show plain text: leave it out")
        if self.settings.system_prompt is not None and self.wanted is Wanted.pair and RENDERED in row:
            raise ConfigError("env.system_prompt: these rows hold sampled ids, prompts included: leave it out")

    @property
    def is_alpaca(self) -> bool:
        """Whether prompts are Alpaca's instructions."""
        return self.prompt == INSTRUCTION and self.settings.prompt_column is None

    @property
    def form(self) -> str:
        """The columns that are read, in words, once a row has been seen."""
        if not self._looked:
            return "of no row"
        if self.is_alpaca:
            return f"Alpaca ({', '.join(ALPACA_COLUMNS)})"
        return f"messages in {self.chat}" if self.chat else self.text or f"{self.prompt} and {self.reply}"

    def of_messages(self, row: Mapping[str, Any]) -> bool:
        """Whether the prompt of a row is written as messages, not as text."""
        return self.chat is not None or messages_in(row.get(self.prompt or "")) is not None

    # Reading

    def complaint(self, row: Mapping[str, Any]) -> Complaint | None:
        """The fault of a row that cannot be read; what it says besides is counted in `unused`.

        Raises ConfigError for a setting that does not fit the rows.
        """
        if not isinstance(row, Mapping):
            columns = {Wanted.prompt: PROMPT_COLUMNS[0], Wanted.demonstration: CHAT_COLUMNS[0], Wanted.pair: CHOSEN}
            return no_object(row, columns[self.wanted])
        unused: set[str] = set()
        try:
            self.read(row, unused)
        except FormatError as error:
            return error.complaint
        unused |= {name for name in row if name not in self.read_columns and row[name] not in (None, "", [], {})}
        self.unused.update(unused)
        return None

    def read(self, row: Mapping[str, Any], unused: set[str] | None = None) -> Shown:
        """The row as it is read; entries that are not read are added to `unused`. Raises FormatError."""
        self.look(row)
        unused = set() if unused is None else unused
        if media := next((name for name in MEDIA if row.get(name)), None):
            raise FormatError(media, "rlpost trains on text only: remove the column, or the row")
        if self.text is not None:
            return Shown(text=_text(row, self.text))
        prompt, replies = self._parts(row, unused)
        prefill = ""
        if prompt and prompt[-1]["role"] == "assistant":
            prefill, prompt = prompt[-1]["content"], prompt[:-1]
            replies = tuple(_begun(reply, prefill) for reply in replies)
        if self.wanted is Wanted.prompt and (not prompt or prompt[-1]["role"] not in ("user", "tool")):
            column = self.chat or str(self.prompt)
            raise FormatError(column, "has to end with a user's message, which an assistant's may follow")
        if self.wanted is Wanted.prompt:  # nothing of it is trained, and rewards read it
            prompt = [{name: value for name, value in message.items() if name != "weight"} for message in prompt]
        variables = row.get(VARIABLES)
        return Shown(
            self._under_system(list(map(self._with_thoughts, prompt)), row, unused),
            tuple(list(map(self._with_thoughts, reply)) for reply in replies),
            tools=read_tools(row),
            variables=from_json(variables, VARIABLES) if isinstance(variables, str) else variables or None,
            prefill=prefill,
        )

    def identity(self, row: Mapping[str, Any]) -> str:
        """The prompt as text, the same for every training; settings that change it do not count."""
        self.look(row)
        column = self.settings.prompt_column or next((name for name in PROMPT_COLUMNS if name in row), None)
        if self.text is not None:
            return _text(row, self.text)
        if column is not None and isinstance(row.get(column), str) and not messages_in(row[column]):
            return with_input(row) if column == INSTRUCTION else row[column]
        if RENDERED in row and column is None:
            return row[RENDERED]
        return "\n".join(f"{m['role']}: {m['content']}" for m in self._parts(row, set())[0])

    def _parts(self, row: Mapping[str, Any], unused: set[str]) -> tuple[list[ChatMessage], Replies]:
        """The prompt, which may end with the beginning of the reply, and the replies."""
        if self.wanted is Wanted.pair:
            return self._pair(row, unused)
        if self.chat is None:
            prompt = self._asked(row, unused)
            return prompt, (self._reply(row, str(self.reply), unused),) if self.reply else ()
        messages = read_messages(_present(row, self.chat), self.chat, unused)
        before, last = (messages[:-1], messages[-1:]) if messages[-1]["role"] == "assistant" else (messages, [])
        return before, (last,) if self.wanted is Wanted.demonstration and last else ()

    def _asked(self, row: Mapping[str, Any], unused: set[str]) -> list[ChatMessage]:
        """The prompt of a row that has a column for it, or one that the template writes."""
        if self.settings.prompt_template is not None:
            return [{"role": self.user_role, "content": _filled(self.settings.prompt_template, row)}]
        assert self.prompt is not None
        value = _present(row, self.prompt)
        if isinstance(value, list) or messages_in(value):
            return _untrained(read_messages(value, self.prompt, unused))
        if not isinstance(value, str):
            raise FormatError(self.prompt, f"must be text or a list of messages, and is {kind_of(value)}")
        if not value.strip():
            raise FormatError(self.prompt, "is empty")
        said = self.user_role, "assistant"
        before = [(role, text) for turn in row.get(HISTORY) or [] for role, text in zip(said, turn, strict=True)]
        asked = (self.user_role, with_input(row) if self.is_alpaca else value)
        return [{"role": role, "content": text} for role, text in [*(before if self.is_alpaca else []), asked]]

    def _reply(self, row: Mapping[str, Any], column: str, unused: set[str]) -> list[ChatMessage]:
        """A reply as messages, or a whole conversation."""
        value = _present(row, column)
        if found := messages_in(value):
            return read_messages(found, column, unused)
        if not isinstance(value, str):
            raise FormatError(column, f"must be text or a list of messages, and is {kind_of(value)}")
        return [{"role": "assistant", "content": value}]

    def _pair(self, row: Mapping[str, Any], unused: set[str]) -> tuple[list[ChatMessage], Replies]:
        for column in PAIR_COLUMNS:
            if column not in row:
                raise FormatError(column, f"{missing(column, row)}; {Wanted.pair.value}")
        if row[CHOSEN] == row[REJECTED]:
            raise FormatError(CHOSEN, "is the same as rejected")
        column = self.chat or self.prompt or PROMPT_COLUMNS[0]
        if RENDERED in row and column not in row:
            return [], ()
        spoken = [transcript(row[name]) if isinstance(row[name], str) else None for name in PAIR_COLUMNS]
        alone = column not in row
        replies = [
            (alone and said) or self._reply(row, name, unused) for name, said in zip(PAIR_COLUMNS, spoken, strict=True)
        ]
        chosen, rejected = replies
        if "assistant" not in (chosen[0]["role"], rejected[0]["role"]):
            return _parted(chosen, rejected)
        if alone:
            raise FormatError(column, f"{missing(column, row)}, and chosen and rejected do not begin with it")
        if self.chat is not None:
            return _untrained(read_messages(row[self.chat], self.chat, unused)), (chosen, rejected)
        return self._asked(row, unused), (chosen, rejected)

    def _under_system(self, messages: list[ChatMessage], row: Mapping[str, Any], unused: set[str]) -> list[ChatMessage]:
        """The messages under `env.system_prompt`, or else their own system message, or else the column `system`."""
        if not messages:  # of rows of sampled ids, whose prompt is rendered
            return messages
        own = messages[0]["content"] if messages[0]["role"] in ("system", "developer") else None
        said, setting = row.get(SYSTEM), self.settings.system_prompt
        if said is not None and not isinstance(said, str):
            raise FormatError(SYSTEM, f"must be text, and is {kind_of(said)}")
        text = next((text for text in (setting, own, said) if text), None)
        if own and own != text:
            unused.add("system messages, for env.system_prompt takes their place")
        if said and said != text:
            unused.add(SYSTEM)
        if text is None or (own == text and setting is None):
            return messages
        return [{"role": self.system_role, "content": text}, *messages[own is not None :]]

    def _with_thoughts(self, message: ChatMessage) -> ChatMessage:
        match self.settings.thoughts:
            case Thoughts.inline:
                return with_thoughts_inside(message)
            case Thoughts.drop:
                return without_thoughts(message)
            case None:
                return message


def demonstration(where: str, row: Mapping[str, Any], reader: RowReader) -> Demonstration:
    """The demonstration in a row. Raises FormatError for a malformed one."""
    shown = reader.read(row)
    if shown.text is not None:
        return Demonstration(where, text=shown.text)
    messages = [*shown.prompt, *chain(*shown.replies)]
    return Demonstration(where, messages, tools=shown.tools, variables=shown.variables)


def not_used(unused: Mapping[str, int]) -> str:
    """Entries that nothing reads, as `not used: images (4 rows)`, the most frequent first; empty without any."""
    most = sorted(unused.items(), key=lambda each: (-each[1], each[0]))
    return "not used: " + ", ".join(f"{name} ({counted(n, 'row')})" for name, n in most) if most else ""


def is_alpaca(row: Mapping[str, Any]) -> bool:
    """Whether a row has an instruction and its output."""
    return INSTRUCTION in row and OUTPUT in row


def with_input(row: Mapping[str, Any]) -> str:
    """The prompt of an Alpaca row: its instruction, and its input below if there is any."""
    given = row.get(INPUT)
    instruction = str(row.get(INSTRUCTION))
    return f"{instruction}\n\n{given}" if isinstance(given, str) and given.strip() else instruction


def is_preference(row: Mapping[str, Any]) -> bool:
    """Whether a row has a chosen and a rejected reply."""
    return all(name in row for name in PAIR_COLUMNS)


def chosen_column(row: Mapping[str, Any]) -> str:
    """The setting that makes demonstrations of chosen replies: `prompt_column` if they are whole chats."""
    whole = any(message.get("role") == "user" for message in messages_in(row[CHOSEN]) or [])
    return "prompt_column" if whole else "completion_column"


def chosen_only(row: Mapping[str, Any]) -> str:
    """The advice about preferences."""
    setting = f"env.{chosen_column(row)}={CHOSEN}"
    prompts = f" {setting}" if chosen_column(row) == "prompt_column" else ""
    fine_tune = f"fine-tune on the chosen ones with rlpost train sft {setting}"
    return f"{fine_tune}, or use the prompts{prompts} with rlpost train grpo"


def read_tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The functions in a row's `tools`; None without any. Raises FormatError."""
    value = row.get(TOOLS)
    if isinstance(value, str):
        value = from_json(value, TOOLS) if value.strip() else None
    return value or None


def _parted(chosen: list[ChatMessage], rejected: list[ChatMessage]) -> tuple[list[ChatMessage], Replies]:
    """The messages with which two conversations begin, and the rest of each, which has to be the assistant's."""
    alike = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
    for column, messages in zip(PAIR_COLUMNS, (chosen, rejected), strict=True):
        if not alike or len(messages) == alike or messages[alike]["role"] != "assistant":
            wrong = (
                "begins with another message than" if not alike else f"has no reply behind the {alike} it shares with"
            )
            other = REJECTED if column == CHOSEN else CHOSEN
            raise FormatError(column, f"{wrong} {other}: a pair is two replies to one prompt")
    return _untrained(chosen[:alike]), (chosen[alike:], rejected[alike:])


def _begun(reply: list[ChatMessage], prefill: str) -> list[ChatMessage]:
    """The reply behind its beginning, which the prompt holds."""
    first, *rest = reply
    return [{**first, "content": prefill + first["content"], PREFILL: prefill}, *rest]


def _untrained(prompt: list[ChatMessage]) -> list[ChatMessage]:
    return [message | {"weight": 0} if message["role"] == "assistant" else message for message in prompt]


def _filled(template: str, row: Mapping[str, Any]) -> str:
    try:
        return filled(template, row)
    except ConfigError as error:
        if isinstance(error.__cause__, KeyError):
            name = str(error.__cause__.args[0])
            raise FormatError(name, missing(name, row)) from error
        raise


def _text(row: Mapping[str, Any], column: str) -> str:
    value = _present(row, column)
    if not isinstance(value, str):
        raise FormatError(column, f"must be text, and is {kind_of(value)}")
    return value


def _present(row: Mapping[str, Any], column: str) -> Any:
    if column not in row:
        raise FormatError(column, missing(column, row))
    return row[column]
