"""Checks of the rows that environments read: without torch, so that a bad row is reported before anything heavy loads.

A check returns the field of a row and its fault, or None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from rlpost.data.conversation import Message
from rlpost.data.datasets import examined, local_sources
from rlpost.data.demonstrations import Demonstration
from rlpost.data.formats import (
    ALPACA_COLUMNS,
    ANSWER_COLUMN,
    CHAT_COLUMNS,
    COMPLETION_COLUMN,
    PAIRS,
    FormatError,
    RowFormat,
    chosen_only,
    is_alpaca,
    is_preference,
    with_input,
    written_out,
)
from rlpost.data.rows import Complaint, Complaints, PackedRows, Row, filled, kind_of, missing, no_object, text_complaint
from rlpost.errors import ConfigError, DataError
from rlpost.files import paths_in
from rlpost.rewards.builtin import BUILT_IN
from rlpost.rewards.gsm8k import split_solution
from rlpost.settings import DatasetSettings, EnvSettings, GSM8KSettings, IFEvalSettings, MathSettings

PROMPT_COLUMNS = ("prompt", *CHAT_COLUMNS, "question", ALPACA_COLUMNS[0])
ANSWER_COLUMNS = (ANSWER_COLUMN, COMPLETION_COLUMN, ALPACA_COLUMNS[2])
ROLES = ("system", "user", "assistant", "tool")
QUESTIONS = ("problem", "question")  # columns of MATH; the first that a row has is used
MOST_ROWS = 50_000  # examined in a split
MOST_BYTES = 8 << 20  # of a file that is read whole; only the first row of a larger one is examined
Check = Callable[[Row], Complaint | None]


def look_at_rows(
    settings: EnvSettings,
    splits: Sequence[str],
    *,
    demonstrated: bool,
    paired: bool = False,
    max_bad_share: float | None = None,
) -> list[str] | None:
    """The columns of the rows that `settings` name; None if not all rows were examined.

    `demonstrated` is whether the rows are learned from as they are: as demonstrations, or as pairs if `paired`.
    Rows on the hub are not downloaded. Raises DataError with file, row and field of the bad rows if there are more
    than `max_bad_share` (None: any), as reading them for `splits` would.
    """
    path = getattr(settings, "path", None)
    if not isinstance(path, str):
        return None

    columns: dict[str, None] = {}
    whole = True
    for split in splits:
        check = check_of(settings, demonstrated=demonstrated, paired=paired)
        found = check and _look(settings, path, split, check, max_bad_share)
        whole = whole and found is not None
        columns |= dict.fromkeys(found or ())
    return list(columns) if whole else None


def check_of(settings: EnvSettings, *, demonstrated: bool, paired: bool) -> Check | None:
    """The check of the rows that `settings` name, for one split; None for an environment without rows.

    For `demonstrated` and `paired` see `look_at_rows`.
    """
    match settings:
        case GSM8KSettings():
            return lambda row: text_complaint(row, ("question",)) or gsm8k_complaint(row)
        case MathSettings():
            return math_complaint
        case IFEvalSettings():  # the environment checks each instruction, with its extra installed
            return lambda row: text_complaint(row, ("prompt",)) or _absent(row, "instruction_id_list")
        case DatasetSettings() if paired:
            from rlpost.data.pairs import PairRows  # which no other training needs

            return PairRows(settings).complaint
        case DatasetSettings():
            return DemonstrationRows(settings).complaint if demonstrated else PromptRows(settings).complaint
    return None


def gsm8k_complaint(row: Row) -> Complaint | None:
    """No answer, or one that does not end in "#### " and a number."""
    if complaint := text_complaint(row, ("answer",)):
        return complaint
    try:
        split_solution(row["answer"])
    except ValueError as error:
        return "answer", str(error)
    return None


def math_complaint(row: Row) -> Complaint | None:
    """No problem, or no right answer that can be compared."""
    from rlpost.rewards.math_answers import MAX_CHARACTERS

    name = next((name for name in QUESTIONS if isinstance(row, Mapping) and name in row), QUESTIONS[0])
    if complaint := text_complaint(row, (name,)):
        return complaint
    answer = math_answer(row)
    if answer is None:
        field = "answer" if "answer" in row else "solution"
        no_answer = "has no right answer: no text in answer, and no \\boxed{} at the end of solution"
        return _absent(row, field) or (field, no_answer)
    if len(answer) > MAX_CHARACTERS:
        return "answer", f"has {len(answer)} characters: at most {MAX_CHARACTERS} are compared"
    return None


def math_question(row: Mapping[str, Any]) -> str:
    """The problem of a row of MATH or its like."""
    return next(str(row[name]) for name in QUESTIONS if name in row)


def math_answer(row: Mapping[str, Any]) -> str | None:
    r"""The right answer of a row: `answer` (what follows its "####") or a last `\boxed{}`; None without one."""
    from rlpost.rewards.math_answers import last_box

    told = str(row.get("answer", "")).rpartition("####")[2].strip()
    if not told or "\\boxed" in told:
        told = last_box(told or str(row.get("solution", ""))) or ""
    return told or None


class PromptRows:
    """A user's rows as prompts: the first one decides the `column` of prompts, and if they are messages."""

    def __init__(self, settings: DatasetSettings) -> None:
        self.settings = settings
        self.column = settings.prompt_column or PROMPT_COLUMNS[0]
        self.of_messages: bool | None = None  # None: no row has been seen
        self.answer_column = settings.answer_column or ANSWER_COLUMNS[0]
        self.key = self.column  # the column of the prompt in a prepared row
        self.answered = False  # whether the first row has an answer
        self.built_in = [name for name in BUILT_IN if name in (*settings.reward, settings.accuracy)]

    def complaint(self, row: Row) -> Complaint | None:
        """No prompt, a malformed one, or no answer where a reward needs one. Raises ConfigError for the template."""
        if not isinstance(row, Mapping):
            return no_object(row, "prompt")
        if self.of_messages is None:
            self._look(row)
        return self._prompt_complaint(row) or self._answer_complaint(row)

    def prepared(self, row: Row) -> Row:
        """A row without a complaint, its messages with role and content, an instruction with its input as `prompt`."""
        if self.of_messages:
            return {**row, self.column: written_out(row[self.column], self.column)}
        return {**row, self.key: with_input(row)} if self.key != self.column else dict(row)

    def identity(self, row: Row) -> str:
        """A prepared row's prompt as text; equal prompts have equal texts."""
        prompt = row.get(self.key)
        if prompt is None:
            return filled(self.settings.prompt_template or "", row)
        return prompt if isinstance(prompt, str) else json.dumps(asked(prompt))

    def _prompt_complaint(self, row: Row) -> Complaint | None:
        named, template = self.settings.prompt_column, self.settings.prompt_template
        column = self.column
        if column not in row:
            if template is not None and named is None:  # it writes the prompt from other fields
                return template_complaint(template, row)
            if is_preference(row) and not named:
                return column, f"missing; {PAIRS}, {chosen_only(row)}"
            return _absent(row, column, "" if named else "; name one of them with env.prompt_column")
        prompt = row[column]
        if _holds_messages(column, prompt) != self.of_messages:
            return column, f"is {kind_of(prompt)} where the first row has {'messages' if self.of_messages else 'text'}"
        if self.of_messages:
            try:
                wrong = _messages_complaint(written_out(prompt, column))
            except FormatError as error:
                return error.complaint
            return (column, wrong) if wrong else None
        if not isinstance(prompt, str):
            return column, f"must be text or a list of messages, and is {kind_of(prompt)}"
        return template_complaint(template, row) if prompt.strip() else (column, "is empty")

    def _look(self, first_row: Row) -> None:
        """Find the columns of prompts and answers. Raises ConfigError for a template with prompts of messages."""
        settings = self.settings
        self.column = settings.prompt_column or next((n for n in PROMPT_COLUMNS if n in first_row), PROMPT_COLUMNS[0])
        self.of_messages = _holds_messages(self.column, first_row.get(self.column))
        if self.of_messages and settings.prompt_template is not None:
            raise ConfigError(
                f"env.prompt_template is for prompts of text, and {self.column} holds messages: leave it out"
            )
        alpaca = settings.prompt_column is None and self.column == ALPACA_COLUMNS[0] and is_alpaca(first_row)
        self.key = PROMPT_COLUMNS[0] if alpaca else self.column
        if settings.answer_column is None:
            self.answer_column = next((n for n in ANSWER_COLUMNS if n in first_row), ANSWER_COLUMNS[0])
        self.answered = self.answer_column in first_row

    def _answer_complaint(self, row: Row) -> Complaint | None:
        """Built-in rewards need an answer in each row; a named column has to exist."""
        column, named = self.answer_column, self.settings.answer_column
        if not self.built_in and named is None:
            return None
        if absent := _absent(row, column, "" if named else "; name one of them with env.answer_column"):
            return absent
        if not self.built_in:
            return None
        answer = as_answer(row[column])
        if answer is None:
            value = row[column]
            what = f"the number {value}" if isinstance(value, float) else kind_of(value)  # NaN, or infinite
            return column, f"must be text or a finite number, and is {what}"
        if not answer.strip():
            return column, "is empty"
        return next(((column, wrong) for name in self.built_in if (wrong := BUILT_IN[name].complaint(answer))), None)


class DemonstrationRows:
    """Demonstrations from a user's own rows, in the format that the first row has."""

    def __init__(self, settings: DatasetSettings, user_role: str = "user") -> None:
        self.settings = settings
        self.user_role = user_role
        self._format: RowFormat | None = None

    def complaint(self, row: Row) -> Complaint | None:
        """No demonstration in the row. Raises ConfigError for a setting that does not fit the rows."""
        if not isinstance(row, Mapping):
            return no_object(row, CHAT_COLUMNS[0])
        try:
            if self._format is None:
                self._format = self._told_format(row)
            if complaint := template_complaint(self.settings.prompt_template, row):
                return complaint
            self.demonstration("", row)
        except FormatError as error:
            return error.complaint
        return None

    def _told_format(self, first_row: Row) -> RowFormat:
        settings, templated = self.settings, self.settings.prompt_template is not None
        told = RowFormat(first_row, settings.prompt_column, settings.completion_column, templated=templated)
        messages = told.chat or (told.prompt if isinstance(first_row.get(told.prompt or ""), list) else None)
        if templated and (messages or told.text):
            raise ConfigError(
                f"env.prompt_template is for prompts of text, and {messages or told.text} holds "
                f"{'messages' if messages else 'whole texts'}: leave it out"
            )
        if settings.system_prompt is not None and told.text is not None:
            raise ConfigError("env.system_prompt is for conversations, and the rows show plain text: leave it out")
        return told

    @property
    def answers(self) -> bool:
        """Whether the demonstrations are answers, which a reward can compare with too."""
        return self._format is not None and self._format.completion == ANSWER_COLUMN

    @property
    def form(self) -> str:
        """The columns of the demonstrations, in words, once a row has been examined."""
        told = self._format
        if told is None:
            return "of no row"
        if (told.prompt, told.completion) == ALPACA_COLUMNS[::2]:
            return f"Alpaca ({', '.join(ALPACA_COLUMNS)})"
        return f"messages in {told.chat}" if told.chat else told.text or f"{told.prompt} and {told.completion}"

    def demonstration(self, where: str, row: Row) -> Demonstration:
        """The demonstration in a row, without `system_prompt`. Raises FormatError for a malformed one."""
        told = self._format
        assert told is not None
        if told.text is not None:
            return Demonstration(where, text=told.plain_text(row))
        tools = told.tools(row)
        if told.chat is not None:
            return Demonstration(where, told.messages(row), tools=tools)
        prompt = self._prompt(row, told)
        messages = [{"role": self.user_role, "content": prompt}] if isinstance(prompt, str) else prompt
        return Demonstration(where, [*messages, *told.answer(row)], tools=tools)

    def identity(self, row: Row) -> str:
        """As `PromptRows.identity`, so that training on rewards holds out the same rows."""
        told = self._format
        assert told is not None
        column = self.settings.prompt_column or next((name for name in PROMPT_COLUMNS if name in row), None)
        if column == ALPACA_COLUMNS[0] and is_alpaca(row):
            return with_input(row)
        if column is not None and column != told.chat and isinstance(row[column], str):
            return row[column]
        if told.text is not None:
            return told.plain_text(row)
        if told.chat is not None:
            return json.dumps(asked(told.messages(row)))
        prompt = self._prompt(row, told) if told.prompt is None else told.asked(row)
        return prompt if isinstance(prompt, str) else json.dumps(asked(prompt))

    def _prompt(self, row: Row, told: RowFormat) -> str | list[Message]:
        template = self.settings.prompt_template
        return told.asked(row) if template is None else filled(template, row)


def template_complaint(template: str | None, row: Row) -> Complaint | None:
    """A field of the template that the row does not have. Raises ConfigError for a template that cannot be read."""
    try:
        filled(template or "", row)
    except ConfigError as error:
        if isinstance(error.__cause__, KeyError):
            return _absent(row, str(error.__cause__.args[0]))
        raise
    return None


def as_answer(value: Any) -> str | None:
    """An answer as text: numbers in full, without an exponent; None unless it is text or a finite number."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return str(value) if isinstance(value, int) else format(Decimal(repr(value)), "f")


def answer_text(value: Any) -> str:
    """An answer as the model would write it: an object as JSON, messages as the last one's text; "" for none."""
    if isinstance(value, list) and value and all(isinstance(m, Mapping) and "content" in m for m in value):
        value = value[-1]["content"]
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else as_answer(value) or ""


def asked(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages to answer: role and content of each, a trailing assistant's left out."""
    kept = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    return [{"role": message["role"], "content": message["content"]} for message in kept]


def _holds_messages(column: str, prompt: Any) -> bool:
    """Whether a prompt is a list of messages, or one written out as JSON in a column that is for messages."""
    return isinstance(prompt, list) or (
        column in CHAT_COLUMNS and isinstance(prompt, str) and prompt.lstrip().startswith("[")
    )


def _messages_complaint(messages: Sequence[Any]) -> str | None:
    """The fault of a prompt of messages, or None."""
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            return f"message {number} is not an object with role and content but {kind_of(message)}"
        if message.get("role") not in ROLES:
            return f"message {number} has the role {message.get('role')!r:.40}: it must be one of {', '.join(ROLES)}"
        if not isinstance(message.get("content"), str):
            return f"message {number} must have text as its content, and has {kind_of(message.get('content'))}"
        more = [str(name) for name, value in message.items() if name not in ("role", "content") and value is not None]
        if more:
            return (
                f"message {number} has {', '.join(more)} besides role and content, which rlpost does not use: remove it"
            )
    if not messages or not (rest := asked(messages)) or rest[-1]["role"] != "user":
        return "has to end with a user's message, which an assistant's may follow"
    return None


def _absent(row: Any, field: str, advice: str = "") -> Complaint | None:
    """The complaint about a row without `field`."""
    return None if field in row else (field, missing(field, row) + advice)


def _look(settings: EnvSettings, path: str, split: str, check: Check, max_bad_share: float | None) -> list[str] | None:
    """The columns of one split."""
    test_path = getattr(settings, "test_path", None) if split == "test" else None
    key = "env.test_path" if test_path else "env.path"
    sources = [s for each in paths_in(test_path or path) for s in local_sources(each, split, key, MOST_BYTES)]
    columns: dict[str, None] = {}
    partial = any(source.partial for source in sources)
    for source in sources:
        divided = source.shared and getattr(settings, "test_path", None) is None
        limit = settings.limit if split == settings.split and not divided else None
        complaints, kept = Complaints(source.name), PackedRows()
        for _, row in examined(source, complaints, kept, min(limit or MOST_ROWS, MOST_ROWS), check=check):
            columns |= dict.fromkeys(map(str, row))
        if complaints.count > (max_bad_share or 0.0) * complaints.rows:
            raise complaints.error(max_bad_share)
        partial = partial or complaints.rows == MOST_ROWS
        if not complaints.rows and not source.partial:
            raise DataError(f"{source.name} holds no rows: give a file with one JSON object a line")
    return list(columns) if sources and not partial else None
