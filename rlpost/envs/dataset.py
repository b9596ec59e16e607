"""A user's rows, one turn each, scored by the user's or built-in reward functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Self

from rlpost.data.conversation import Conversation, Message
from rlpost.data.datasets import DemonstratedRows, LocatedRows
from rlpost.data.demonstrations import Demonstration
from rlpost.data.habits import with_thoughts_inside, without_thoughts
from rlpost.data.pairs import PairRows, Preference
from rlpost.data.rows import Malformed, Row, order_seed
from rlpost.envs.chat import DatasetChatEnv, record
from rlpost.envs.row_checks import DemonstrationRows, PromptRows, answer_text, as_answer, asked
from rlpost.errors import DataError
from rlpost.rewards.builtin import BUILT_IN
from rlpost.rewards.functions import Finished, Rewards, load_rewards
from rlpost.rewards.numbers import last_number
from rlpost.settings import DatasetSettings, EnvSettings
from rlpost.settings.env import Thoughts

COLUMNS_OF = 10_000  # rows searched for columns that a reward may take


class DatasetEnv(DatasetChatEnv):
    """One turn on each row of `settings.path`; a task is the row, its columns under their own names.

    A prompt is a text, said by the user (through `prompt_template` if it is set), or a list
    of messages, without a trailing assistant's; `system_prompt` comes first, in place
    of a system message of the row's own. Conversations that end together are scored together, by
    `settings.reward`. Other arguments are `DatasetChatEnv`'s.
    """

    has_accuracy = False

    def __init__(self, settings: DatasetSettings, **chat: Any) -> None:
        super().__init__(settings.path, shuffle=settings.shuffle, held_out=settings.held_out, **chat)
        # keyword arguments take precedence over the settings
        self.settings = replace(settings, system_prompt=self.system_prompt, prompt_template=self.prompt_template)
        self._prompts = PromptRows(self.settings)
        self.config, self.test_path, self.gold = settings.config, settings.test_path, settings.gold
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
        assert rewards is not None
        super().start()
        columns = list(dict.fromkeys(name for task in islice(self.tasks, COLUMNS_OF) for name in task))
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

    @property
    def reads(self) -> str:
        """See `DatasetChatEnv.reads`."""
        return repr(replace(self.settings, split="train", limit=None))

    def load(self, split: str) -> LocatedRows:
        """See `DatasetChatEnv.load`; raises DataError naming file, row and field."""
        prompts = self._prompts
        rows = self.located(split, prompts.complaint, prompts.identity, prompts.prepared)
        self.data_key = prompts.key
        return rows

    def opening_messages(self, task: Mapping[str, Any]) -> list[Message]:
        """See `ChatEnv.opening_messages`."""
        if self._prompts.of_messages:
            return self._shown(asked(task[self.data_key]))
        return self._with_thoughts(super().opening_messages(task))

    def _under_system(self, messages: list[Message]) -> list[Message]:
        """The messages under `system_prompt`, if it is set, instead of a system message of their own."""
        if self.system_prompt is None:
            return messages
        rest = messages[1:] if messages[0]["role"] == "system" else messages
        return [{"role": self.system_role, "content": self.system_prompt}, *rest]

    def _shown(self, messages: list[Message]) -> list[Message]:
        """The messages of a row, under `system_prompt` and with thoughts where `settings.thoughts` says."""
        return self._under_system(self._with_thoughts(messages))

    def _with_thoughts(self, messages: list[Message]) -> list[Message]:
        match self.settings.thoughts:
            case Thoughts.inline:
                return list(map(with_thoughts_inside, messages))
            case Thoughts.drop:
                return list(map(without_thoughts, messages))
            case None:
                return messages

    def score_finished(self, conversations: Sequence[Conversation]) -> None:
        """See `ChatEnv.score_finished`: all of them in one call of each reward. Raises RewardError."""
        assert self.rewards is not None
        finished = [self._finished(conversation) for conversation in conversations]
        scores = self.rewards.score(finished) if finished else []
        for conversation, score in zip(conversations, scores, strict=True):
            record(conversation, score)

    def prompt_of(self, task: Mapping[str, Any]) -> str | list[Message]:
        """The prompt of a row as rewards receive it: a text, or messages."""
        return self.opening_messages(task) if self._prompts.of_messages else self.user_message(task)

    def _finished(self, conversation: Conversation) -> Finished:
        task = conversation.task
        return Finished(
            prompt=self.prompt_of(task),
            reply=conversation.reply,
            reply_ids=list(conversation.response_ids),
            columns=task,
            answer=as_answer(task.get(self._prompts.answer_column)),
        )

    # What supervised fine-tuning learns from

    def demonstrations(self) -> Iterator[Demonstration]:
        """See `EnvBase.demonstrations`: the rows as `rlpost.data.demonstrations` reads them; no reward is needed.

        Malformed rows come first, with what is wrong with them. Raises ConfigError for a setting that the rows
        have no place for.
        """
        return self.demonstrated().in_turn()

    def demonstrated(self) -> DemonstratedRows[Demonstration]:
        """See `DatasetChatEnv.demonstrated`. Raises as `demonstrations` does."""
        shown = DemonstrationRows(self.settings, self.user_role)

        def of(where: str, row: Row) -> Demonstration:
            demonstration = shown.demonstration(where, row)
            if demonstration.messages is None:
                return demonstration
            return replace(demonstration, messages=self._shown(demonstration.messages))

        bad: list[Demonstration] = []
        rows = self._read(shown, lambda where, wrong: bad.append(Demonstration(where, wrong=wrong)))
        return DemonstratedRows(rows, of, bad)

    def paired(self) -> DemonstratedRows[Preference]:
        """See `DatasetChatEnv.paired`; malformed rows come first. Raises as `demonstrations` does."""
        shown = PairRows(self.settings, self.user_role)

        def of(where: str, row: Row) -> Preference:
            pair = shown.demonstration(where, row)
            if not pair.prompt:
                return pair
            chosen, rejected = map(self._with_thoughts, (pair.chosen, pair.rejected))
            return replace(pair, prompt=self._shown(pair.prompt), chosen=chosen, rejected=rejected)

        bad: list[Preference] = []
        rows = self._read(shown, lambda where, wrong: bad.append(Preference(where, wrong=wrong)))
        return DemonstratedRows(rows, of, bad)

    def _read(self, shown: DemonstrationRows | PairRows, malformed: Malformed) -> LocatedRows:
        """The rows of this split that are shown to be learned from; `malformed` is given the others."""
        return self.located(self.split, shown.complaint, shown.identity, malformed=malformed)

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
        for number, task in enumerate(self.tasks):
            where = self.where(number)
            if not answer_text(task.get(column)).strip():
                raise DataError(
                    f"{where} has no {column}, and a test needs a good reply for each row: name the column that holds "
                    "it with env.answer_column"
                )
            yield where, task

    def gold_reply(self, task: Mapping[str, Any]) -> str | Sequence[str]:
        """See `EnvBase.gold_reply`: the row's answer, or its number if rewards only look for that."""
        answer = answer_text(task[self._prompts.answer_column])
        wanted = {function.reference for function in self.rewards.functions} if self.rewards else set()
        return last_number(answer) or answer if wanted == {"number"} else answer

    def corrupted_replies(self, task: Mapping[str, Any]) -> list[str]:
        """See `EnvBase.corrupted_replies`: nothing, and the answer with its last digit changed or written backwards."""
        answer = answer_text(task[self._prompts.answer_column])
        number = last_number(answer)
        if number is not None:
            return ["", f"{number[:-1]}{(int(number[-1]) + 1) % 10}"]
        backwards = answer[::-1]
        return [""] if sorted({backwards, answer}) == [answer] else ["", backwards]
