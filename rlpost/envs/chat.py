"""Environments of conversations, about prompts from outside or rows of a dataset, and how their ends are scored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

from rlpost.data.conversation import CUT, Completion, Conversation, InputMode, Message, Ticket
from rlpost.data.order import HELD_OUT, OrderedRows, order_seed
from rlpost.data.ragged import one_each
from rlpost.data.rendering import filled
from rlpost.envs.base import EnvBase, ToolLimits, ToolTransform, Transform
from rlpost.envs.difficulty import WeighedRows
from rlpost.envs.transforms.training import DataLoadingPrimer
from rlpost.errors import ConfigError, DataError
from rlpost.rewards.score import Patience, Score, TooLong, interrupted_after, log_failures, why_untrainable
from rlpost.settings import EnvSettings
from rlpost.settings.env import Turns

if TYPE_CHECKING:
    from rlpost.data.datasets import Dataset, LocatedRows, Reader, ShownRows
    from rlpost.data.demonstrations import Demonstration
    from rlpost.data.rows import Row
    from rlpost.envs.tool_calls import Tools

CHOOSING = ("long_prompts", "pass_rates", "min_pass_rate", "max_pass_rate")  # settings used once the model is known
Scorer = Callable[[Conversation], Score | None]
Task = dict[str, Any]


# Environments of conversations


class ChatEnv(EnvBase):
    """A conversation about each prompt: the system's message if any, the user's, then turn by turn.

    The user's message is `prompt_template` formatted with the fields of the task, or the task's
    field `data_key`. Prompts come with `reset`, or from an appended `DataLoadingPrimer`.

    After the policy's turn the transforms act and its tool calls are answered, each with a message of
    `tool_role` and within `tool_limits`; then, unless one of them spoke, `next_message` may answer. A
    conversation ends with a reply cut at its token limit, or for which the context had no room, or
    with the `max_steps`-th turn if more would follow, whose calls are not run (`truncated`), or if the
    environment has no answer (`terminated`); with `max_steps=None` the latter leaves it open.
    `score` gives the reward when it ends.

    Where conversations are played one by one (`collector=async`), `next_message` and the transforms are called
    by several threads, though never by two at once; only the calls of tools run at the same time. `score` is
    called by one thread, which may be while another is in `next_message`.

    >>> from rlpost.envs import ChatEnv
    >>> from tensordict import TensorDict
    >>> env = ChatEnv(system_prompt="Be brief.")
    >>> asked = env.reset(TensorDict({"text": ["Who are you?"]}, batch_size=[1]))
    >>> asked["text_response"] = ["A model."]
    >>> [chat] = env.step(asked)["next", "history"].to_chats()
    >>> [f"{message['role']}: {message['content']}" for message in chat]
    ['system: Be brief.', 'user: Who are you?', 'assistant: A model.']
    """

    takes_tools = True

    source_name: str = ""  # its name in a mix of environments
    hint: str | None = None  # what the reference reads in its prompt, with {fields} of the task
    history: Turns | None = None  # what the model reads of its earlier turns; None: as its template decides
    as_template: bool = False  # the same, once the template is known
    tool_parser: str | None = None  # see `Tools`
    tool_role_follows: bool = False  # whether the chat template chooses the role of tools' answers
    score_seconds: float = 60.0  # timeout of `score`; then the conversation is invalid

    def __init__(
        self,
        batch_size: int | Sequence[int] = (1,),
        *,
        system_prompt: str | None = None,
        prompt_template: str | None = None,
        data_key: str = "query",
        max_steps: int | None = None,
        system_role: str = "system",
        user_role: str = "user",
        policy_role: str = "assistant",
        max_completion_tokens: int = 256,
        max_prompt_tokens: int | None = None,
        tokenizer: Any = None,
        tool_role: str = "user",
        tool_limits: ToolLimits | None = None,
        input_mode: InputMode | str = InputMode.history,
    ) -> None:
        super().__init__(
            batch_size,
            max_completion_tokens=max_completion_tokens,
            max_prompt_tokens=max_prompt_tokens,
            tokenizer=tokenizer,
            input_mode=input_mode,
        )
        self.system_prompt = system_prompt
        self.prompt_template = prompt_template
        self.data_key = data_key
        self.max_steps = max_steps
        self.system_role = system_role
        self.user_role = user_role
        self.policy_role = policy_role
        self.tool_role = tool_role
        self.tool_limits = tool_limits or ToolLimits()
        self.tools: Tools | None = None  # the appended tools, None without any
        self.primer: DataLoadingPrimer | None = None
        self._begun = 0  # number of conversations about rows from outside

    # For subclasses to override

    def next_message(self, conversation: Conversation) -> str | None:
        """The environment's answer to the policy's turn, or None."""
        return None

    def score(self, conversation: Conversation) -> Score | None:
        """The score of a conversation that is over, or None if this environment gives no reward."""
        return None

    @property
    def answers(self) -> bool:
        """Whether this environment itself may answer between two turns of the policy."""
        own = type(self)
        return any(getattr(own, name) is not getattr(ChatEnv, name) for name in ("next_message", "respond"))

    # Beginning

    def start(self) -> None:
        """See `EnvBase.start`: the transforms are started."""
        for transform in self.transforms:
            transform.start()
        if self.tools is not None:
            self.tools.check_names()

    def append_transform(self, transform: Transform) -> Self:
        """Add `transform`; a `DataLoadingPrimer` becomes the source of the prompts."""
        if isinstance(transform, DataLoadingPrimer):
            self.primer = transform
            return self
        if isinstance(transform, ToolTransform):
            from rlpost.envs.tool_calls import Tools

            self.tools = self.tools or Tools(
                self.tool_role, self.tool_limits, parser=self.tool_parser, follows_role=self.tool_role_follows
            )
            self.tools.add(transform)
        return super().append_transform(transform)

    def tickets(self, count: int | None = None) -> list[Ticket]:
        """See `EnvBase.tickets`; raises DataError without a primer."""
        self.start()
        if self.primer is None:
            raise DataError(
                f"{type(self).__name__} has no prompts of its own: reset it with a TensorDict that holds 'query', "
                "append a DataLoadingPrimer, or use DatasetChatEnv"
            )
        drawn = self.primer.take(self.numel() if count is None else count)
        return [replace(ticket, where=self._place(ticket)) for ticket in drawn]

    def _place(self, ticket: Ticket) -> str:
        """The place of a ticket's row; empty if it is not from a file."""
        return ""

    def _conversations_of(self, ticket: Ticket) -> list[Conversation]:
        conversations = [self._conversation(ticket.task, ticket.group, sample) for sample in ticket.samples]
        for conversation in conversations:
            conversation.where = ticket.where
        return conversations

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> list[Conversation]:
        """See `EnvBase.begin`; `query` is the user's message."""
        ChatEnv.start(self)  # the transforms alone: the rows are here
        first = self._begun
        self._begun += len(rows)
        return self._opened(
            [self._conversation({self.data_key: row["query"], **row}, first + i, 0) for i, row in enumerate(rows)]
        )

    def begun(self, task: Mapping[str, Any]) -> Conversation:
        """A fresh conversation about `task`, outside of any draw."""
        return self._opened([self._conversation(task, 0, 0)])[0]

    def _conversation(self, task: Mapping[str, Any], group: int, sample: int) -> Conversation:
        messages = self.opening_messages(task)
        return Conversation(
            task=task,
            messages=messages,
            group_id=group,
            sample=sample,
            source=self.source_name,
            max_completion_tokens=self.max_completion_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
            hint=self.hint_about(task),
            as_template=self.as_template,
        )

    def variables_of(self, task: Mapping[str, Any]) -> dict[str, Any] | None:
        """The variables that `task` passes to the chat template; None without any."""
        return None

    def hint_about(self, task: Mapping[str, Any]) -> str | None:
        """The hint with the fields of `task`, or None without a hint. Raises ConfigError for a missing field."""
        return None if self.hint is None else filled(self.hint, task, "hint")

    def opening_messages(self, task: Mapping[str, Any]) -> list[Message]:
        """How a conversation about `task` begins: an optional system message, and the user's."""
        user = {"role": self.user_role, "content": self.user_message(task)}
        return (
            [user] if self.system_prompt is None else [{"role": self.system_role, "content": self.system_prompt}, user]
        )

    def user_message(self, task: Mapping[str, Any]) -> str:
        """The user's message about `task`. Raises ConfigError, or DataError, for a missing field."""
        if self.prompt_template is not None:
            return filled(self.prompt_template, task)
        return str(task[self.data_key])

    # Going on

    def respond(self, conversations: Sequence[Conversation]) -> None:
        """See `EnvBase.respond`."""
        for conversation in conversations:
            conversation.truncated |= conversation.finish_reason in CUT
        for transform in self.transforms:
            self._in_turn(transform.on_reply, conversations)
        if self.tools is not None:
            self.tools.answer([c for c in conversations if not c.done and not self._was_last(c)])
        for conversation in conversations:
            if not conversation.done:
                self._answer(conversation)

    def conclude(self, conversations: Sequence[Conversation]) -> None:
        """See `EnvBase.conclude`."""
        self.score_finished(conversations)
        for transform in self.transforms if conversations else ():
            self._in_turn(transform.on_end, conversations)

    def score_finished(self, conversations: Sequence[Conversation]) -> None:
        """Score conversations that are over, in place: one by one, unless an environment scores them together."""
        record_scores(conversations, self.score, self.score_seconds)

    def _was_last(self, conversation: Conversation) -> bool:
        """Whether the policy has had its last turn."""
        return self.max_steps is not None and conversation.turns >= self.max_steps

    def _answer(self, conversation: Conversation) -> None:
        """End the conversation, or let the environment speak."""
        spoken = conversation.messages[-1]["role"] != self.policy_role  # by a transform or a tool
        last = self._was_last(conversation)
        calling = last and self.tools is not None and bool(self.tools.calls_in(conversation))
        with self._one_at_a_time:
            answer = None if spoken or calling else self.next_message(conversation)
        if not spoken and not calling and answer is None:
            conversation.terminated = self.max_steps is not None
        elif last:
            conversation.truncated = True
        elif answer is not None:
            conversation.messages.append({"role": self.user_role, "content": answer})

    # Resuming

    def state_dict(self) -> dict[str, Any]:
        """See `EnvBase.state_dict`."""
        return {"begun": self._begun, "primer": self.primer.state_dict() if self.primer else None}

    def initial_state(self) -> dict[str, Any]:
        """See `EnvBase.initial_state`."""
        state = self.state_dict()
        return {**state, "begun": 0, "primer": state["primer"] and {"position": 0}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `EnvBase.load_state_dict`."""
        self._begun = state["begun"]
        if self.primer is not None:
            self.primer.load_state_dict(state["primer"])


class DatasetChatEnv(ChatEnv):
    """A `ChatEnv` whose prompts are the rows of a dataset, one turn each unless `max_steps` says more.

    `dataset` is a sequence of mappings, or a path or hub id as `located_rows` takes. It keeps
    `num_envs` conversations in flight and gives each row to `repeats` of them in a row; with
    `group_repeats` there are `num_envs * repeats`, so that a draw holds `num_envs` whole groups.
    The order of the rows is a function of `seed` and the position alone. `batch_size_dl` rows are
    fetched from the dataset at a time. `held_out` is the share of the prompts that `located_rows` keeps
    for the split test of a path without one. Other arguments are `ChatEnv`'s.
    """

    notes: Sequence[str] = ()  # what a user should know of the environment, once it is started
    source_settings: EnvSettings | None = None  # of this source of a mix
    config: str | None = None  # of a dataset on the hub
    test_path: str | None = None  # of the split test, if it is not in `dataset`

    def __init__(
        self,
        dataset: Dataset,
        *,
        split: str = "train",
        limit: int | None = None,
        held_out: float = HELD_OUT,
        shuffle: bool = True,
        num_envs: int = 1,
        repeats: int = 1,
        batch_size_dl: int = 1,
        seed: int = 0,
        group_repeats: bool = False,
        data_key: str = "question",
        max_steps: int | None = 1,
        **chat: Any,
    ) -> None:
        size = num_envs * repeats if group_repeats else num_envs
        super().__init__(size, data_key=data_key, max_steps=max_steps, **chat)
        self.dataset = dataset
        self.split = split
        self.limit = limit
        self.held_out = held_out
        self.shuffle = shuffle
        self.repeats = repeats
        self.seed = seed
        self.read_ahead = batch_size_dl
        self._rows: Any = None
        self.weighed: WeighedRows | None = None  # where prompts are drawn by their difficulty

    @classmethod
    def of(cls, settings: EnvSettings, *, seed: int, **common: Any) -> Self:
        """The environment that `settings` describe; `seed` is the run's, `common` what every environment takes.

        A None in `common` stands for the constructor's default.
        """
        given = {name: value for name, value in common.items() if value is not None}
        own = cls.arguments_of(settings)
        return cls(seed=order_seed(seed, own.pop("seed", 0)), **own, **given)

    @classmethod
    def arguments_of(cls, settings: EnvSettings) -> dict[str, Any]:
        """The constructor's arguments from the fields that `settings` add to `EnvSettings`; `path` is `dataset`."""
        common = {*(field.name for field in fields(EnvSettings)), *CHOOSING}  # of the rows that are read
        own = {f.name: _plain(getattr(settings, f.name)) for f in fields(settings) if f.name not in common}
        return {"dataset" if name == "path" else name: value for name, value in own.items()}

    def start(self) -> None:
        """Read the rows, and write the first prompt to see that the template fits.

        Raises DataError for a dataset or row that cannot be used, ConfigError for the template.
        """
        super().start()
        if self._rows is None:
            self._rows = self.open_rows(self.seed)
            first = next(self._rows.iter_from(0))
            self.opening_messages(first)
            self.hint_about(first)
            self.primer = DataLoadingPrimer(self._rows, repeats=self.repeats)

    def weigh_by_difficulty(self, least: float) -> None:
        """Draw prompts by how their last groups did from now on: see `WeighedRows`."""
        self.start()
        self.weighed = WeighedRows(self._rows, self.seed, least)
        self.primer = DataLoadingPrimer(self.weighed, repeats=self.repeats)

    def learn_difficulty(self, group: Sequence[Conversation]) -> None:
        """Take in how a whole group did: by its accuracy, or else by its reward, between 0 and `max_reward`."""
        valid = [each for each in group if each.valid]
        if self.weighed is None or self.primer is None or not valid:
            return
        measured = one_each([each.accuracy_lenient for each in valid])
        if measured.isnan().any():
            measured = (one_each([each.reward for each in valid]) / (self.max_reward or 1.0)).clamp(0.0, 1.0)
        self.weighed.learn(group[0].group_id - self.primer.first_group, measured.mean().item())

    def open_rows(self, seed: int) -> Any:
        """The rows in the order of `seed`: something with `iter_from`, `count` and `fingerprint`."""
        rows = self.load(self.split) if self._rows is None else self._rows.rows
        if not len(rows):
            raise DataError("the dataset is empty: give at least one row")
        return OrderedRows(rows, shuffle=self.shuffle, seed=seed, read_ahead=self.read_ahead)

    def load(self, split: str) -> Sequence[Mapping[str, Any]]:
        """The tasks of one split, `limit` at most."""
        from rlpost.data.datasets import is_path

        if is_path(self.dataset):
            return self.located(split)
        rows: Any = self.dataset
        return rows if self.limit is None else [rows[i] for i in range(min(self.limit, len(rows)))]

    def located(
        self,
        split: str,
        reader: Reader | None = None,
        prepare: Callable[[Row], Row] = dict,
        *,
        max_bad_share: float | None = None,
    ) -> LocatedRows:
        """The rows of one split with their places, as `located_rows` reads and divides them.

        Without a `reader` a row's `data_key` is its prompt, and has to be text.
        """
        from rlpost.data.datasets import located_rows
        from rlpost.data.rows import text_in

        return located_rows(
            self.dataset,
            split,
            reader or (lambda row: text_in(row, self.data_key)),
            self.limit,
            config=self.config,
            prepare=prepare,
            held_out=self.held_out,
            test_path=self.test_path,
            max_bad_share=max_bad_share,
        )

    def drop_rows(self, numbers: Sequence[int], why: str) -> None:
        """Draw no more of these rows of the split, numbered from 0. Raises DataError, saying `why`, if none is left."""
        rows = self._rows.without(numbers)
        if not rows.rows:
            raise DataError(f"{why}: none is left")
        self._rows = rows
        self.primer = DataLoadingPrimer(rows, repeats=self.repeats)

    def _place(self, ticket: Ticket) -> str:
        own = self.primer is not None and self.primer.serves(self.weighed or self._rows)  # not one that was appended
        if not own or self.primer is None:
            return ""
        draw = ticket.group - self.primer.first_group
        return self.place_of(draw if self.weighed is None else self.weighed.number_of(draw))

    def place_of(self, position: int) -> str:
        """The place of the row at `position` of the order; empty if tasks are made on the spot."""
        return self.where(self._rows.row_at(position)) if isinstance(self._rows, OrderedRows) else ""

    @property
    def parts(self) -> list[DatasetChatEnv]:
        """The environments that answer and score conversations: this one, or the sources of a mix."""
        return [self]

    @property
    def not_used(self) -> str:
        """The columns and entries of the rows that nothing reads, in words; mostly empty."""
        return ""

    @property
    def order(self) -> Any:
        """The prompts in their order, once this environment is started: see `open_rows`."""
        return self._rows

    def content(self, shown: ShownRows | None = None) -> str:
        """The rows of this split, or those `shown`, in words with a hash of all: equal for equal rows."""
        if shown is not None:
            return OrderedRows(shown, shuffle=self.shuffle, seed=0).content()
        self.start()
        own = [part.order for part in self.parts]
        return "; ".join(o.content() if isinstance(o, OrderedRows) else o.fingerprint(0) for o in own)

    def where(self, number: int) -> str:
        """The place of a row of this split, from 0: file and row, where it comes from one."""
        return self._rows.where(number) or f"{self.split} row {number + 1}"

    @property
    def num_tasks(self) -> int:
        """How many different prompts this split has; reads the rows."""
        self.start()
        return self._rows.count()

    def prompts_shared_with(self, other: DatasetChatEnv) -> int:
        """How many prompts of this split are also prompts of `other`; reads the rows of both."""
        return len(self._openings() & other._openings())

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The tasks of this split; none if they are made on the spot."""
        self.start()
        return getattr(self._rows, "rows", ())

    def _openings(self) -> set[int]:
        """A hash of the opening messages of each row; none if tasks are made on the spot."""
        return {hash(repr(self.opening_messages(row))) for row in self.rows}

    def all_tasks(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """See `EnvBase.all_tasks`: the rows."""
        self.start()
        for number, row in enumerate(self._rows.rows):
            yield self.where(number), row

    def demonstrations(self) -> Iterator[Demonstration]:
        """See `EnvBase.demonstrations`: each task of `all_tasks`, answered by `gold_reply`."""
        from rlpost.data.demonstrations import Demonstration

        for where, task in self.all_tasks():
            yield Demonstration(where, messages=self.answered(task))

    def answered(self, task: Mapping[str, Any]) -> list[Message]:
        """The conversation about `task` in which the policy says `gold_reply` and the environment answers."""
        gold = self.gold_reply(task)
        if isinstance(gold, str):
            return [*self.opening_messages(task), {"role": self.policy_role, "content": gold}]
        conversation = self.begun(task)
        for text in gold[:-1]:
            conversation.add_completion(Completion([], [], text, "stop", 0))
            self.respond([conversation])
        return [*conversation.messages, {"role": self.policy_role, "content": gold[-1]}]

    @property
    def has_gold(self) -> bool:
        """Whether replies to the tasks are right or wrong, and a right one of each is known."""
        return True

    def demonstrated(self) -> ShownRows | None:
        """The demonstrations by number, each made when it is read; None if they can only be iterated."""
        return None

    def paired(self) -> ShownRows:
        """The pairs of replies in the rows, by number. Raises DataError where rows hold none."""
        raise DataError(
            f"{type(self).__name__} has no pairs of replies: give rows of pairs with env=dataset env.path=FILE"
        )

    def reset_dataloader(self) -> None:
        """Draw again from the first row on."""
        self.start()
        assert self.primer is not None
        self.primer.reset_dataloader()

    def set_seed(self, seed: int) -> None:
        """See `EnvBase.set_seed`."""
        self.seed = seed
        if self._rows is not None:
            self._rows = self.open_rows(seed)
            first = self.primer.next_group if self.primer is not None else 0
            if self.weighed is not None:
                self.weighed = WeighedRows(self._rows, seed, self.weighed.least)
            self.primer = DataLoadingPrimer(self.weighed or self._rows, repeats=self.repeats, first_group=first)

    def state_dict(self) -> dict[str, Any]:
        """See `EnvBase.state_dict`; the seed and the number of rows say which order the position is one of."""
        self.start()
        weighed = {} if self.weighed is None else {"weighed": self.weighed.state()}
        return {**super().state_dict(), "seed": self.seed, "rows": self._rows.fingerprint(self.rows_served), **weighed}

    def initial_state(self) -> dict[str, Any]:
        """See `EnvBase.initial_state`."""
        return {**super().initial_state(), "rows": self._rows.fingerprint(0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `EnvBase.load_state_dict`. Raises DataError where the rows drawn are not those `state` was taken with."""
        self.start()
        self.set_seed(state["seed"])
        super().load_state_dict(state)
        if ("weighed" in state) != (self.weighed is not None):
            began = "true" if "weighed" in state else "false"
            raise ConfigError(f"--resume: the run began with difficulty.enabled={began}; keep that")
        if self.weighed is not None:
            self.weighed.restore(state["weighed"])
        if state["rows"] != (these := self._rows.fingerprint(self.rows_served)):
            raise DataError(
                f"the saved position was taken with {state['rows']}, and this dataset gives {these}: resume with the "
                "dataset and env settings the run began with; only rows that were not drawn yet may go"
            )

    @property
    def rows_served(self) -> int:
        """How many rows have been drawn; the copies of one count as one."""
        if self.weighed is not None:
            return self.weighed.count()  # any may be the next
        return 0 if self.primer is None else -(-self.primer.position // self.repeats)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(element) for element in value]
    return value.name if isinstance(value, Enum) else value


# Scores


def record_scores(conversations: Sequence[Conversation], scorer: Scorer, seconds: float) -> None:
    """Call `record_score` for each; a `scorer` that takes longer than `seconds` makes its conversation invalid too.

    It runs in this process, so it is interrupted where Python can be: in the main thread, and not while
    it waits in C. After several late ones in a row the rest is invalid without being tried.
    """
    patience = Patience()
    for conversation in conversations:
        if patience.refusal:
            fail(conversation, patience.refusal)
            continue
        try:
            with interrupted_after(seconds):
                record_score(conversation, scorer)
            patience.note(None)
        except TooLong:
            fail(conversation, f"{getattr(scorer, '__qualname__', 'score')} did not return within {seconds:g} s")
            patience.note(conversation.error)
    log_failures([c.error for c in conversations if not c.valid], len(conversations))


def record_score(conversation: Conversation, scorer: Scorer) -> None:
    """Write the score of `scorer` into `conversation`, on top of a reward it may have already.

    A scorer that raises or gives no finite number makes the conversation invalid, with the error
    and without a reward, never a 0; ConfigError and DataError, which no other reply would
    avoid, are raised. None writes nothing.
    """
    try:
        score = scorer(conversation)
    except (ConfigError, DataError):
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever it raises is recorded, counted and excluded
        score = Score(math.nan, valid=False, error=f"{type(error).__name__}: {error}")
    if score is not None:
        record(conversation, score)


def record(conversation: Conversation, score: Score) -> None:
    """Write `score` into `conversation` as `record_score` does."""
    total = score.reward + (conversation.reward or 0.0)
    if score.valid and (wrong := why_untrainable(total)):
        score.valid, score.error = False, f"the reward is {total:g}, {wrong}"
    if not score.valid:
        fail(conversation, score.error or "the reward failed")
    elif conversation.valid:
        conversation.reward = total
        conversation.reward_parts |= score.parts
        conversation.part_weights |= {name: score.weights.get(name, 1.0) for name in score.parts}
        conversation.accuracy_strict = score.accuracy_strict
        conversation.accuracy_lenient = score.accuracy_lenient
        conversation.answer = score.answer
        conversation.instructions = score.instructions


def fail(conversation: Conversation, error: str) -> None:
    """Make the conversation invalid: it keeps its place in its group, and has no reward."""
    conversation.valid, conversation.error, conversation.reward = False, error, None
