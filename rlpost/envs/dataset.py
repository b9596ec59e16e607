"""Rows of one's own, one turn each, scored by reward functions of one's own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Self

from rlpost.data.conversation import Conversation, Message
from rlpost.data.datasets import Complaint, Row, located_rows, missing
from rlpost.data.demonstrations import Demonstration
from rlpost.data.formats import FormatError, RowFormat, kind_of
from rlpost.envs.chat import DatasetChatEnv
from rlpost.envs.rows import order_seed
from rlpost.envs.scoring import record_score
from rlpost.errors import ConfigError, DataError
from rlpost.rewards.builtin import BUILT_IN
from rlpost.rewards.functions import Finished, Rewards, load_rewards
from rlpost.rewards.numbers import last_number
from rlpost.settings import DatasetSettings, EnvSettings

PROMPT_COLUMNS = ("prompt", "messages", "question")
ANSWER_COLUMN = "answer"
ROLES = ("system", "user", "assistant", "tool")


class DatasetEnv(DatasetChatEnv):
    """One turn on each row of `settings.path`; a task is the row, its columns under their own names.

    A prompt is a text, which the user says (through `prompt_template` where there is one), or a list
    of messages, of which a trailing assistant's is left out; `system_prompt` comes first, in place
    of a system message of the row's own. Conversations that end together are scored together, by
    `settings.reward`. Other arguments are `DatasetChatEnv`'s.
    """

    has_accuracy = False

    def __init__(self, settings: DatasetSettings, **chat: Any) -> None:
        super().__init__(settings.path, shuffle=settings.shuffle, held_out=settings.held_out, **chat)
        self.settings = settings
        self.rewards: Rewards | None = None
        self._format: RowFormat | None = None  # of demonstrations, once their first row is read
        self._of_messages: bool | None = None  # what the first prompt is; the others have to be the same

    @classmethod
    def of(cls, settings: EnvSettings, *, seed: int, **common: Any) -> Self:
        """See `DatasetChatEnv.of`."""
        assert isinstance(settings, DatasetSettings)
        return cls(settings, seed=order_seed(seed, settings.seed), **common)

    def start(self) -> None:
        """See `DatasetChatEnv.start`; imports the rewards too.

        Raises ConfigError for a reward that cannot be loaded, DataError for one that wants a column
        there is not.
        """
        if self._rows is not None:
            return
        self.rewards = rewards = load_rewards(self.settings)
        assert rewards is not None
        super().start()
        columns = list(dict.fromkeys(str(name) for task in self.tasks for name in task))
        rewards.offer_columns(columns, self.settings.path)
        known = all(function.reference in BUILT_IN for function in rewards.functions)
        self.max_reward = sum(rewards.weights) if known else None
        self.has_accuracy = known and rewards.accuracy is not None

    def close(self) -> None:
        """See `EnvBase.close`; the processes of the rewards end, unless another environment uses them."""
        super().close()
        if self.rewards is not None:
            self.rewards.close()

    @property
    def tasks(self) -> Sequence[Row]:
        """The rows of this environment's split, once it is started."""
        return self._rows.rows

    def load(self, split: str) -> list[Row]:
        """See `DatasetChatEnv.load`; raises DataError naming file, row and field."""
        return [row for _, row in self._located(split, self._complaint, self._identity)]

    def _located(
        self, split: str, check: Callable[[Row], Complaint | None], prompt: Callable[[Row], str]
    ) -> list[tuple[str, Row]]:
        settings = self.settings
        return located_rows(
            settings.path,
            split,
            (),
            self.limit,
            config=settings.config,
            check=check,
            held_out=self.held_out,
            test_path=settings.test_path,
            prompt=prompt,
        )

    def opening_messages(self, task: Mapping[str, Any]) -> list[Message]:
        """See `ChatEnv.opening_messages`."""
        if not self._of_messages:
            return super().opening_messages(task)
        return self._under_system(_asked(task[self.data_key]))

    def _under_system(self, messages: list[Message]) -> list[Message]:
        """The messages under `system_prompt`, where there is one, in place of a system message of their own."""
        if self.system_prompt is None:
            return messages
        rest = messages[1:] if messages[0]["role"] == "system" else messages
        return [{"role": self.system_role, "content": self.system_prompt}, *rest]

    def score_finished(self, conversations: Sequence[Conversation]) -> None:
        """See `ChatEnv.score_finished`: all of them in one call of each reward. Raises RewardError."""
        assert self.rewards is not None
        finished = [self._finished(conversation) for conversation in conversations]
        scores = self.rewards.score(finished) if finished else []
        for conversation, score in zip(conversations, scores, strict=True):
            record_score(conversation, lambda _, score=score: score)

    def prompt_of(self, task: Mapping[str, Any]) -> str | list[Message]:
        """What the rewards are given as the prompt of a row: a text where it has a text, else messages."""
        return self.opening_messages(task) if self._of_messages else self.user_message(task)

    def _finished(self, conversation: Conversation) -> Finished:
        task = conversation.task
        return Finished(
            prompt=self.prompt_of(task),
            reply=conversation.response_text,
            reply_ids=list(conversation.response_ids),
            columns=task,
            answer=as_answer(task.get(self._answer_column)),
        )

    # What supervised fine-tuning learns from

    def demonstrations(self) -> Iterator[Demonstration]:
        """See `EnvBase.demonstrations`: the rows as `rlpost.data.formats` reads them; no reward is needed.

        Raises DataError naming file, row and field, ConfigError for a setting that the rows have no place for.
        """
        self._format = None
        for where, row in self._located(self.split, self._demonstration_complaint, self._demonstrated_prompt):
            yield self._demonstration(where, row)

    def _demonstration_complaint(self, row: Row) -> Complaint | None:
        if not isinstance(row, Mapping):
            return "messages", f"the row is no object of named fields but {kind_of(row)}"
        try:
            if self._format is None:
                self._format = self._told_format(row)
            if self.prompt_template is not None and (complaint := self._template_complaint(row)):
                return complaint
            self._demonstration("", row)
        except FormatError as error:
            return error.complaint
        return None

    def _told_format(self, first_row: Row) -> RowFormat:
        """The format of the rows. Raises ConfigError for a setting that they have no place for."""
        settings = self.settings
        told = RowFormat(
            first_row, settings.prompt_column, settings.completion_column, templated=self.prompt_template is not None
        )
        messages = told.chat or (told.prompt if isinstance(first_row.get(told.prompt or ""), list) else None)
        if self.prompt_template is not None and (messages or told.text):
            raise ConfigError(
                f"env.prompt_template is for prompts of text, and {messages or told.text} holds "
                f"{'messages' if messages else 'whole texts'}: leave it out"
            )
        if self.system_prompt is not None and told.text is not None:
            raise ConfigError("env.system_prompt is for conversations, and the rows show plain text: leave it out")
        return told

    def _demonstration(self, where: str, row: Row) -> Demonstration:
        """What a row shows. Raises FormatError where it is malformed."""
        assert self._format is not None
        if self._format.text is not None:
            return Demonstration(where, text=self._format.plain_text(row))
        tools = self._format.tools(row)
        if self._format.chat is not None:
            return Demonstration(where, self._under_system(self._format.messages(row)), tools=tools)
        asked = self.user_message(row) if self.prompt_template is not None else self._format.asked(row)
        if isinstance(asked, str):
            asked = [{"role": self.user_role, "content": asked}]
        return Demonstration(where, [*self._under_system(asked), *self._format.answer(row)], tools=tools)

    def _demonstrated_prompt(self, row: Row) -> str:
        """What `_identity` says of the row too, so that training on rewards holds the same rows out."""
        assert self._format is not None
        column = self.settings.prompt_column or next((name for name in PROMPT_COLUMNS if name in row), None)
        if column is not None and column != self._format.chat and isinstance(row[column], str):
            return row[column]
        if self._format.text is not None:
            return self._format.plain_text(row)
        if self._format.chat is not None:
            return json.dumps(_asked(self._format.messages(row)))
        asked = self.user_message(row) if self._format.prompt is None else self._format.asked(row)
        return asked if isinstance(asked, str) else json.dumps(_asked(asked))

    # What `rlpost env test` needs

    def all_tasks(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """See `EnvBase.all_tasks`; raises DataError for rows without an answer."""
        self.start()
        for number, task in enumerate(self.tasks, start=1):
            if as_answer(task.get(self._answer_column)) is None:
                raise DataError(
                    f"{self.settings.path}: {self.split} row {number} has no {self._answer_column}, and a test needs a "
                    "good reply for each row: name the column that holds it with env.answer_column"
                )
            yield f"{self.split} row {number}", task

    def gold_reply(self, task: Mapping[str, Any]) -> str:
        """See `EnvBase.gold_reply`: the row's answer, or its number where that is all the rewards look for."""
        answer = as_answer(task[self._answer_column]) or ""
        wanted = {function.reference for function in self.rewards.functions} if self.rewards else set()
        return last_number(answer) or answer if wanted == {"number"} else answer

    def corrupted_replies(self, task: Mapping[str, Any]) -> list[str]:
        """See `EnvBase.corrupted_replies`: nothing, and the answer with its last digit changed or written backwards."""
        answer = as_answer(task[self._answer_column]) or ""
        number = last_number(answer)
        if number is not None:
            return ["", f"{number[:-1]}{(int(number[-1]) + 1) % 10}"]
        backwards = answer[::-1]
        return [""] if sorted({backwards, answer}) == [answer] else ["", backwards]

    # Rows

    @property
    def _answer_column(self) -> str:
        return self.settings.answer_column or ANSWER_COLUMN

    def _complaint(self, row: Row) -> Complaint | None:
        """What is wrong with a row: no prompt, a malformed one, or no answer where that is needed."""
        if not isinstance(row, Mapping):
            return "prompt", f"the row is no object of named fields but {type(row).__name__}"
        return self._prompt_complaint(row) or self._answer_complaint(row)

    def _prompt_complaint(self, row: Row) -> Complaint | None:
        asked = self.settings.prompt_column
        if self._of_messages is None:
            self.data_key = asked or next((name for name in PROMPT_COLUMNS if name in row), PROMPT_COLUMNS[0])
        column = self.data_key
        if column not in row:
            if self.prompt_template is not None and asked is None:  # it writes the prompt from other fields
                self._of_messages = False
                return self._template_complaint(row)
            hint = "" if asked else "; name one of them with env.prompt_column"
            return column, missing(column, row) + hint
        prompt = row[column]
        if self._of_messages is None:
            self._of_messages = isinstance(prompt, list)
            if self._of_messages and self.prompt_template is not None:
                raise ConfigError(
                    f"env.prompt_template is for prompts of text, and {column} holds messages: leave it out"
                )
        if isinstance(prompt, list) != self._of_messages:
            return column, f"is {kind_of(prompt)} where the first row has {'messages' if self._of_messages else 'text'}"
        if isinstance(prompt, list):
            wrong = _messages_complaint(prompt)
            return (column, wrong) if wrong else None
        if not isinstance(prompt, str):
            return column, f"must be text or a list of messages, and is {kind_of(prompt)}"
        return self._template_complaint(row) if prompt.strip() else (column, "is empty")

    def _template_complaint(self, row: Row) -> Complaint | None:
        """A field of the template that the row does not have; raises ConfigError for a template that cannot be read."""
        try:
            self.user_message(row)
        except ConfigError as error:
            if isinstance(error.__cause__, KeyError):
                field = str(error.__cause__.args[0])
                return field, missing(field, row)
            raise
        return None

    def _answer_complaint(self, row: Row) -> Complaint | None:
        """Built-in rewards need an answer in each row; a column that was named has to be there."""
        built_in = self.rewards.built_in if self.rewards else []
        column = self._answer_column
        if not built_in and self.settings.answer_column is None:
            return None
        if column not in row:
            hint = "" if self.settings.answer_column else "; name one of them with env.answer_column"
            return column, missing(column, row) + hint
        if not built_in:
            return None
        answer = as_answer(row[column])
        if answer is None:
            return column, f"must be text or a number, and is {kind_of(row[column])}"
        if not answer.strip():
            return column, "is empty"
        return next(((column, wrong) for name in built_in if (wrong := BUILT_IN[name].complaint(answer))), None)

    def _identity(self, row: Row) -> str:
        """What makes a row's prompt the same as another's."""
        prompt = row.get(self.data_key)
        if prompt is None:
            return self.user_message(row)
        return prompt if isinstance(prompt, str) else json.dumps(_asked(prompt))


def as_answer(value: Any) -> str | None:
    """An answer as text: numbers in full, without an exponent; None for what is neither text nor a number."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return str(value) if isinstance(value, int) else format(Decimal(repr(value)), "f")


def _asked(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages to answer: role and content of each, a trailing assistant's left out."""
    asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    return [{"role": message["role"], "content": message["content"]} for message in asked]


def _messages_complaint(messages: Sequence[Any]) -> str | None:
    """What is wrong with a prompt of messages, or None."""
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            return f"message {number} is no object with role and content but {kind_of(message)}"
        if message.get("role") not in ROLES:
            return f"message {number} has the role {message.get('role')!r:.40}: it must be one of {', '.join(ROLES)}"
        if not isinstance(message.get("content"), str):
            return f"message {number} must have text as its content, and has {kind_of(message.get('content'))}"
        more = [str(name) for name, value in message.items() if name not in ("role", "content") and value is not None]
        if more:
            return (
                f"message {number} has {', '.join(more)} besides role and content, which rlpost does not use: remove it"
            )
    asked = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    if not asked or asked[-1]["role"] != "user":
        return "has to end with a user's message, which an assistant's may follow"
    return None
