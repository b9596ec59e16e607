"""The one reader of other people's rows: as prompts to answer, as demonstrations, or as pairs of replies.

The first row decides which columns hold what. A conversation stands in `messages` or `conversations`, whole; or as a
prompt (`prompt`, `question`, or Alpaca's `instruction` and `input`, with `history` before it) and a reply to it
(`completion`, `answer`, `output`), or two (`chosen` and `rejected`, which may be whole conversations); or it is plain
`text`. Prompts and replies are texts or messages, also as JSON text. `system` is the system message of a row that has
none, `tools` are the functions that it may call, `chat_template_kwargs` the variables of its chat template.

A row's prompt is the same for every training: the same messages, tools and variables.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from itertools import chain, takewhile
from string import Formatter
from typing import Any

from rlpost.data.conversation import Message
from rlpost.data.demonstrations import Demonstration, Replies
from rlpost.data.faults import FormatError
from rlpost.data.habits import PREFILL, with_thoughts_inside, without_thoughts
from rlpost.data.messages import MEDIA, from_json, messages_in, read_messages, transcript
from rlpost.data.rendering import filled
from rlpost.data.rows import Row, kind_of, missing, present, text_in
from rlpost.errors import ConfigError
from rlpost.settings import DatasetSettings, OwnRowsSettings
from rlpost.settings.env import Thoughts
from rlpost.text import counted

CHAT_COLUMNS = ("messages", "conversations")
ALPACA_COLUMNS = INSTRUCTION, INPUT, OUTPUT = ("instruction", "input", "output")  # the second may be missing or empty
PROMPT_COLUMNS = ("prompt", *CHAT_COLUMNS, "question", INSTRUCTION)
COMPLETION, ANSWER, TEXT = "completion", "answer", "text"
ANSWER_COLUMNS = (ANSWER, COMPLETION, OUTPUT)  # what a reward compares with; the first that a row has
PAIR_COLUMNS = CHOSEN, REJECTED = ("chosen", "rejected")
SYSTEM, HISTORY, TOOLS, VARIABLES = "system", "history", "tools", "chat_template_kwargs"
RENDERED = "rendered_prompt"  # column of `rlpost data pairs`: the prompt as text, behind the chat template
# chosen_ids: the ids behind the prompt; chosen_mask: which of them were sampled; chosen_restarts: where among them a
# whole new prompt begins, which takes the place of all ids before it
OF_IDS = IDS, MASK, RESTARTS = ("_ids", "_mask", "_restarts")


class Wanted(Enum):
    """The use of rows; the value says what one of them needs."""

    prompt = "a prompt"
    demonstration = "a demonstration has messages, prompt and completion, question and answer, instruction and output, "
    pair = "a pair has prompt, chosen and rejected"


class RowReader:
    """Reads the rows of one dataset, whose columns the first row or the settings name.

    Called with a row, it returns the prompt as text, the same for every training and whatever the settings add to it;
    raises FormatError for a bad row, ConfigError for a setting that does not fit. `unused` counts, over all rows that
    it was called with, the columns and entries that say something and are not read.
    """

    def __init__(
        self, settings: OwnRowsSettings, wanted: Wanted, *, user_role: str = "user", system_role: str = "system"
    ) -> None:
        self.settings, self.wanted = settings, wanted
        self.user_role, self.system_role = user_role, system_role
        self.unused: Counter[str] = Counter()
        self.prompt: str | None = None  # column of prompts; None: `chat`, or prompt_template writes them
        self.chat: str | None = None  # column of whole conversations
        self.reply: str | None = None  # column of replies
        self.text: str | None = None
        self.read_columns: set[str] | None = None  # None until the first row was seen

    # Which columns

    def look(self, row: Row) -> None:
        """Find the columns in the first row. Raises FormatError for one in an unknown form."""
        templated = self.settings.prompt_template is not None
        if self.wanted is Wanted.demonstration:
            self._look_for_demonstration(row, templated=templated)
        else:
            self._look_for_prompt(row, templated=templated)
        self._check_settings(row, templated=templated)
        own = [self.prompt, self.chat, self.reply, self.text]
        own += [name for _, name, _, _ in Formatter().parse(self.settings.prompt_template or "")]
        own += [] if self.text else [SYSTEM, TOOLS, VARIABLES]
        own += [HISTORY, INPUT] if self.is_alpaca else []
        if self.wanted is Wanted.pair:
            own += [*PAIR_COLUMNS, RENDERED, *(f"{name}{what}" for name in PAIR_COLUMNS for what in OF_IDS)]
        self.read_columns = {name.partition(".")[0].partition("[")[0] for name in own if name} | set(filter(None, own))

    def _look_for_prompt(self, row: Row, *, templated: bool) -> None:
        named, paired = self.settings.prompt_column, self.wanted is Wanted.pair
        column = named or next((name for name in PROMPT_COLUMNS if name in row), None)
        if templated and named is None and column is None:
            return
        if not paired and column not in row:
            if named is None and is_preference(row):
                raise FormatError(PROMPT_COLUMNS[0], f"missing; {for_preferences(row)}")
            column, advice = column or PROMPT_COLUMNS[0], "" if named else "; name one of them with env.prompt_column"
            raise FormatError(column, missing(column, row) + advice)
        value = row.get(column or "")
        of_text = isinstance(value, str) and messages_in(value) is None
        whole = column in CHAT_COLUMNS or (named is not None and named not in PROMPT_COLUMNS and not paired)
        self.prompt, self.chat = (None, column) if whole and not of_text else (column, None)

    def _look_for_demonstration(self, row: Row, *, templated: bool) -> None:
        settings, named = self.settings, self.settings.prompt_column
        prompt = named or next((name for name in ("prompt", "question", INSTRUCTION) if name in row), None)
        own = settings.completion_column if isinstance(settings, DatasetSettings) else None
        reply = own
        if reply is None:
            of_prompt = (COMPLETION, OUTPUT, ANSWER) if prompt == INSTRUCTION else (COMPLETION, ANSWER, OUTPUT)
            reply = next((name for name in of_prompt if name in row), None)
            if reply == ANSWER and messages_in(row.get(named or "")):
                reply = None  # a conversation, whose answer is for a reward
        chat = next((name for name in CHAT_COLUMNS if name in row), None)
        if own is None and (reply is None or not named) and (named or chat):
            self.chat = named or chat
        elif reply is not None and (prompt or templated or own):
            self.prompt, self.reply = prompt or (None if templated else "prompt"), reply
        elif TEXT in row:
            self.text = TEXT
        elif is_preference(row):
            raise FormatError(CHOSEN, for_preferences(row))
        else:
            column = CHAT_COLUMNS[0] if prompt is None else COMPLETION
            advice = "or text: name its columns with env.prompt_column and env.completion_column"
            raise FormatError(column, f"{missing(column, row)}; {self.wanted.value}{advice}")

    def _check_settings(self, row: Row, *, templated: bool) -> None:
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
        """Whether prompts are Alpaca's instructions, with their inputs."""
        return self.prompt == INSTRUCTION and self.settings.prompt_column is None

    @property
    def form(self) -> str:
        """The columns that are read, in words, once a row has been seen."""
        if self.read_columns is None:
            return "none: no row can be used"
        if self.is_alpaca:
            return f"Alpaca ({', '.join(ALPACA_COLUMNS)})"
        return f"messages in {self.chat}" if self.chat else self.text or f"{self.prompt} and {self.reply}"

    def of_messages(self, row: Row) -> bool:
        """Whether the prompt of a row is written as messages, not as text."""
        return self.chat is not None or messages_in(row.get(self.prompt or "")) is not None

    # Reading

    def __call__(self, row: Row) -> str:
        """See the class."""
        unused: set[str] = set()
        shown, prompt = self._read("", row, unused)
        assert self.read_columns is not None
        unused |= {name for name in row if name not in self.read_columns and row[name] not in (None, "", [], {})}
        self.unused.update(unused)
        column = self.settings.prompt_column or next((name for name in PROMPT_COLUMNS if name in row), None)
        if shown.text is not None:
            return shown.text
        if column is not None and isinstance(row.get(column), str) and not messages_in(row[column]):
            return with_input(row) if self.is_alpaca else row[column]
        if column is None and RENDERED in row:
            return row[RENDERED]
        if self.settings.prompt_template is not None and self.prompt is None:  # the row decides, not the template
            return json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
        return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)

    def read(self, where: str, row: Row) -> Demonstration:
        """The row as it is read. Raises FormatError."""
        return self._read(where, row, set())[0]

    def _read(self, where: str, row: Row, unused: set[str]) -> tuple[Demonstration, list[Message]]:
        """The row as it is read, and its own prompt; entries that are not read are added to `unused`."""
        if not isinstance(row, Mapping):
            present(row, {Wanted.demonstration: CHAT_COLUMNS[0], Wanted.pair: CHOSEN}.get(self.wanted, "prompt"))
        if self.read_columns is None:
            self.look(row)
        if media := next((name for name in MEDIA if row.get(name)), None):
            raise FormatError(media, "rlpost trains on text only: remove the column, or the row")
        if self.text is not None:
            return Demonstration(where, text=text_in(row, self.text)), []
        own, replies = self._parts(row, unused)
        prompt, prefill = own, ""
        if prompt and prompt[-1]["role"] == "assistant":
            prefill, prompt = prompt[-1]["content"], prompt[:-1]
            replies = tuple(_begun(reply, prefill) for reply in replies)
        if self.wanted is Wanted.prompt:
            if not prompt or prompt[-1]["role"] not in ("user", "tool"):
                wrong = "has to end with a user's message, which an assistant's may follow"
                raise FormatError(self.chat or str(self.prompt), wrong)
            for message in prompt:  # nothing of it is trained, and rewards read it
                message.pop("weight", None)
        messages = self._under_system(list(map(self._with_thoughts, prompt)), row, unused)
        replies = tuple(list(map(self._with_thoughts, reply)) for reply in replies)
        paired = self.wanted is Wanted.pair
        return Demonstration(
            where,
            messages if paired else [*messages, *chain(*replies)],
            tools=_json_in(row, TOOLS),
            variables=_json_in(row, VARIABLES),
            replies=replies if paired else (),
            sampled=row if paired and RENDERED in row and all(name + IDS in row for name in PAIR_COLUMNS) else None,
            prefill=prefill,
        ), own

    def _parts(self, row: Row, unused: set[str]) -> tuple[list[Message], Replies]:
        """The prompt, which may end with the beginning of the reply, and the replies."""
        if self.wanted is Wanted.pair:
            return self._pair(row, unused)
        if self.chat is None:
            return self._prompt_messages(row, unused), (self._reply(row, self.reply, unused),) if self.reply else ()
        messages = read_messages(present(row, self.chat), self.chat, unused)
        before, last = (messages[:-1], messages[-1:]) if messages[-1]["role"] == "assistant" else (messages, [])
        return before, (last,) if self.wanted is Wanted.demonstration and last else ()

    def _prompt_messages(self, row: Row, unused: set[str]) -> list[Message]:
        """The prompt of a row that has a column for it, or one that the template writes."""
        if self.settings.prompt_template is not None:
            return [{"role": self.user_role, "content": _filled(self.settings.prompt_template, row)}]
        assert self.prompt is not None
        value = present(row, self.prompt)
        if isinstance(value, list) or messages_in(value):
            return _untrained(read_messages(value, self.prompt, unused))
        question = {"role": self.user_role, "content": text_in(row, self.prompt)}
        if not self.is_alpaca:
            return [question]
        before = [turn for turn in row.get(HISTORY) or [] if isinstance(turn, list) and len(turn) == 2]
        if len(before) < len(row.get(HISTORY) or []):
            raise FormatError(HISTORY, "must be a list of [instruction, output] pairs")
        earlier = [
            (role, text) for turn in before for role, text in zip((self.user_role, "assistant"), turn, strict=True)
        ]
        return [*({"role": role, "content": text} for role, text in earlier), question | {"content": with_input(row)}]

    def _reply(self, row: Row, column: str, unused: set[str]) -> list[Message]:
        """A reply as messages, or a whole conversation."""
        value = present(row, column)
        if found := messages_in(value):
            return read_messages(found, column, unused)
        if not isinstance(value, str):
            raise FormatError(column, f"must be text or a list of messages, and is {kind_of(value)}")
        return [{"role": "assistant", "content": value}]

    def _pair(self, row: Row, unused: set[str]) -> tuple[list[Message], Replies]:
        for column in PAIR_COLUMNS:
            if column not in row:
                raise FormatError(column, f"{missing(column, row)}; {Wanted.pair.value}")
        if row[CHOSEN] == row[REJECTED]:
            raise FormatError(CHOSEN, "is the same as rejected")
        column = self.chat or self.prompt or PROMPT_COLUMNS[0]
        if RENDERED in row and column not in row:
            return [], ()
        alone = column not in row
        chosen, rejected = (
            (transcript(row[name]) if alone and isinstance(row[name], str) else None) or self._reply(row, name, unused)
            for name in PAIR_COLUMNS
        )
        if "assistant" not in (chosen[0]["role"], rejected[0]["role"]):
            return _parted(chosen, rejected)
        if alone:
            raise FormatError(column, f"{missing(column, row)}, and chosen and rejected do not begin with it")
        if self.chat is not None:
            return _untrained(read_messages(row[column], column, unused)), (chosen, rejected)
        return self._prompt_messages(row, unused), (chosen, rejected)

    def _under_system(self, messages: list[Message], row: Row, unused: set[str]) -> list[Message]:
        """The messages under `env.system_prompt`, or else their own system message, or else the column `system`."""
        if not messages:  # of rows of sampled ids, whose prompt is rendered
            return messages
        own = messages[0]["content"] if messages[0]["role"] in ("system", "developer") else None
        from_row, setting = row.get(SYSTEM), self.settings.system_prompt
        if from_row is not None and not isinstance(from_row, str):
            raise FormatError(SYSTEM, f"must be text, and is {kind_of(from_row)}")
        text = next((text for text in (setting, own, from_row) if text), None)
        if own and own != text:
            unused.add("system messages, for env.system_prompt takes their place")
        if from_row and from_row != text:
            unused.add(SYSTEM)
        if text is None or (own == text and setting is None):
            return messages
        return [{"role": self.system_role, "content": text}, *messages[own is not None :]]

    def _with_thoughts(self, message: Message) -> Message:
        match self.settings.thoughts:
            case Thoughts.inline:
                return with_thoughts_inside(message)
            case Thoughts.drop:
                return without_thoughts(message)
            case None:
                return message


def not_used(unused: Mapping[str, int]) -> str:
    """Entries that nothing reads, as `not used: images (4 rows)`, the most frequent first; empty without any."""
    most = sorted(unused.items(), key=lambda each: (-each[1], each[0]))
    return "not used: " + ", ".join(f"{name} ({counted(n, 'row')})" for name, n in most) if most else ""


def with_input(row: Row) -> str:
    """The prompt of an Alpaca row: its instruction, and its input below if there is any."""
    given = row.get(INPUT)
    instruction = str(row.get(INSTRUCTION))
    return f"{instruction}\n\n{given}" if isinstance(given, str) and given.strip() else instruction


def is_preference(row: Row) -> bool:
    """Whether a row has a chosen and a rejected reply."""
    return all(name in row for name in PAIR_COLUMNS)


def chosen_column(row: Row) -> str:
    """The setting that makes demonstrations of chosen replies: `prompt_column` if they are whole chats."""
    whole = any(message.get("role") == "user" for message in messages_in(row[CHOSEN]) or [])
    return "prompt_column" if whole else "completion_column"


def for_preferences(row: Row) -> str:
    """The advice about preferences."""
    return (
        "these are preferences (chosen, rejected): learn from them with rlpost train dpo, or from the chosen ones with "
        f"env.{chosen_column(row)}={CHOSEN}"
    )


def _json_in(row: Row, column: str) -> Any:
    """The value of a column, also as JSON text; None without any. Raises FormatError."""
    value = row.get(column)
    return (from_json(value, column) if isinstance(value, str) and value.strip() else value) or None


def _parted(chosen: list[Message], rejected: list[Message]) -> tuple[list[Message], Replies]:
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


def _begun(reply: list[Message], prefill: str) -> list[Message]:
    """The reply behind its beginning, which the prompt holds."""
    first, *rest = reply
    return [{**first, "content": prefill + first["content"], PREFILL: prefill}, *rest]


def _untrained(prompt: list[Message]) -> list[Message]:
    return [message | {"weight": 0} if message["role"] == "assistant" else message for message in prompt]


def _filled(template: str, row: Row) -> str:
    try:
        return filled(template, row)
    except ConfigError as error:
        if isinstance(error.__cause__, KeyError):
            name = str(error.__cause__.args[0])
            raise FormatError(name, missing(name, row)) from error
        raise
