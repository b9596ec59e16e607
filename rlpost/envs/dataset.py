"""A user's rows, one turn each, scored by the user's or built-in reward functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Self

from rlpost.data.conversation import Conversation, Message
from rlpost.data.datasets import LocatedRows, ShownRows
from rlpost.data.demonstrations import Demonstration
from rlpost.data.formats import RowReader, Wanted, not_used
from rlpost.data.order import order_seed
from rlpost.envs.chat import DatasetChatEnv, record
from rlpost.envs.row_checks import PromptRows, answer_text, value_at
from rlpost.errors import DataError
from rlpost.rewards.builtin import BUILT_IN
from rlpost.rewards.functions import Finished, Rewards, load_rewards
from rlpost.rewards.numbers import last_number
from rlpost.settings import DatasetSettings, EnvSettings, OwnRowsSettings

COLUMNS_OF = 10_000  # rows searched for columns that a reward may take


class DatasetEnv(DatasetChatEnv):
    """One turn on each row of `settings.path`; a task is the row, its columns under their own names.

    `rlpost.data.formats` says which prompts a row may have; `system_prompt` takes the place of a row's own
    system message. Conversations that end together are scored together, by `settings.reward`; without one they end
    without a reward. Other arguments are `DatasetChatEnv`'s.
    """

    has_accuracy = False

    def __init__(self, settings: OwnRowsSettings, **chat: Any) -> None:
        super().__init__(settings.path, shuffle=settings.shuffle, held_out=settings.held_out, **chat)
        # keyword arguments take precedence over the settings
        self.settings = replace(settings, system_prompt=self.system_prompt, prompt_template=self.prompt_template)
        self._prompts = PromptRows(self.settings, user_role=self.user_role, system_role=self.system_role)
        self.config, self.test_path = settings.config, settings.test_path
        self.gold = settings.gold if isinstance(settings, DatasetSettings) else None
        self.rewards: Rewards | None = None

    @classmethod
    def of(cls, settings: EnvSettings, *, seed: int, **common: Any) -> Self:
        """See `DatasetChatEnv.of`."""
        assert isinstance(settings, DatasetSettings)
        return cls(settings, seed=order_seed(seed, settings.seed), **common)

    def start(self) -> None:
        """See `DatasetChatEnv.start`; imports the rewards too.

        Raises ConfigError for a reward that cannot be loaded, DataError for one that needs a missing column.
        """
        if self._rows is not None:
            return
        self.rewards = rewards = load_rewards(self.settings)
        super().start()
        if rewards is None:
            return
        columns = list(dict.fromkeys(name for task in islice(self.rows, COLUMNS_OF) for name in task))
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
    def not_used(self) -> str:
        """See `DatasetChatEnv.not_used`: what neither prompts nor rewards read."""
        self.start()
        unused, rewards = self._prompts.unused, self.rewards
        return not_used({name: count for name, count in unused.items() if rewards is None or not rewards.reads(name)})

    def load(self, split: str) -> LocatedRows:
        """See `DatasetChatEnv.load`; raises DataError naming file, row and field."""
        rows = self.located(split, self._prompts)
        self.data_key = self._prompts.chat or self._prompts.prompt or self.data_key
        return rows

    def opening_messages(self, task: Mapping[str, Any]) -> list[Message]:
        """See `ChatEnv.opening_messages`."""
        return self._prompts.read("", task).messages or []

    def variables_of(self, task: Mapping[str, Any]) -> dict[str, Any] | None:
        """See `ChatEnv.variables_of`."""
        return self._prompts.read("", task).variables

    def _conversation(self, task: Mapping[str, Any], group: int, sample: int) -> Conversation:
        shown = self._prompts.read("", task)
        conversation = super()._conversation(task, group, sample)
        conversation.tools = list(shown.tools or [])
        conversation.variables, conversation.prefill = shown.variables, shown.prefill
        return conversation

    def score_finished(self, conversations: Sequence[Conversation]) -> None:
        """See `ChatEnv.score_finished`: all of them in one call of each reward. Raises RewardError."""
        if self.rewards is None:
            return
        finished = [self._finished(conversation) for conversation in conversations]
        scores = self.rewards.score(finished) if finished else []
        for conversation, score in zip(conversations, scores, strict=True):
            record(conversation, score)

    def prompt_of(self, task: Mapping[str, Any]) -> str | list[Message]:
        """The prompt of a row as rewards receive it: a text, or messages."""
        messages = self.opening_messages(task)
        return messages if self._prompts.of_messages(task) else messages[-1]["content"]

    def answers_of(self, task: Mapping[str, Any]) -> list[str]:
        """The right answers of a row: each of them is right."""
        return self._prompts.answers(task)

    def _finished(self, conversation: Conversation) -> Finished:
        task = conversation.task
        return Finished(
            prompt=self.prompt_of(task),
            reply=conversation.reply,
            reply_ids=list(conversation.response_ids),
            columns=task,
            answers=self.answers_of(task),
            step=version if isinstance(version := conversation.newest_version, int) and version > 0 else 0,
        )

    # What supervised fine-tuning learns from

    def demonstrations(self) -> Iterator[Demonstration]:
        """See `EnvBase.demonstrations`: the rows as `rlpost.data.formats` reads them; no reward is needed.

        Malformed rows come first, with what is wrong with them. Raises ConfigError for a setting that the rows
        have no place for.
        """
        return self.demonstrated().in_turn()

    def demonstrated(self) -> ShownRows:
        """See `DatasetChatEnv.demonstrated`. Raises as `demonstrations` does."""
        return self._shown(Wanted.demonstration)

    def paired(self) -> ShownRows:
        """See `DatasetChatEnv.paired`; malformed rows come first. Raises as `demonstrations` does."""
        return self._shown(Wanted.pair)

    def _shown(self, wanted: Wanted) -> ShownRows:
        """The rows of this split that are learned from as they are."""
        reader = RowReader(self.settings, wanted, user_role=self.user_role, system_role=self.system_role)
        rows = self.located(self.split, reader, max_bad_share=1.0)
        return ShownRows(rows, reader.read, not_used(reader.unused))

    # What `rlpost env test` needs

    @property
    def has_gold(self) -> bool:
        """See `DatasetChatEnv.has_gold`: `settings.gold`, else whether the rows have an answer."""
        self.start()
        return self._prompts.answered if self.gold is None else self.gold

    def all_tasks(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """See `EnvBase.all_tasks`; raises DataError for rows without an answer."""
        self.start()
        if self.gold is False:
            raise DataError("env.gold=false: no reply is right or wrong, so there is nothing to prove")
        column = self._prompts.answer_column
        for number, task in enumerate(self.rows):
            where = self.where(number)
            if not answer_text(value_at(task, column)).strip():
                raise DataError(
                    f"{where} has no {column}, and a test needs a good reply for each row: name the column that holds "
                    "it with env.answer_column"
                )
            yield where, task

    def gold_reply(self, task: Mapping[str, Any]) -> str | Sequence[str]:
        """See `EnvBase.gold_reply`: the row's answer as it stands, the first of several."""
        return answer_text(value_at(task, self._prompts.answer_column))

    def corrupted_replies(self, task: Mapping[str, Any]) -> list[str]:
        """See `EnvBase.corrupted_replies`: nothing, and the answer with its last digit changed or written backwards."""
        answer = answer_text(value_at(task, self._prompts.answer_column))
        number = last_number(answer)
        if number is not None:
            return ["", f"{number[:-1]}{(int(number[-1]) + 1) % 10}"]
        backwards = answer[::-1]
        return [""] if sorted({backwards, answer}) == [answer] else ["", backwards]
