"""Environments that talk: prompts from outside (`ChatEnv`) or from a dataset (`DatasetChatEnv`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

from rlpost.data.conversation import CUT, Conversation, Message
from rlpost.data.datasets import HELD_OUT, Complaint, Row, located_rows
from rlpost.data.input_mode import InputMode
from rlpost.envs.base import EnvBase
from rlpost.envs.rows import OrderedRows, filled, order_seed
from rlpost.envs.scoring import record_scores
from rlpost.envs.tool import ROLES, ToolLimits, ToolTransform
from rlpost.envs.transforms.base import Transform
from rlpost.envs.transforms.dataloading import DataLoadingPrimer
from rlpost.errors import ConfigError, DataError
from rlpost.rewards.score import Score
from rlpost.settings import EnvSettings

if TYPE_CHECKING:
    from rlpost.data.demonstrations import Demonstration
    from rlpost.tools.calls import Tools


class ChatEnv(EnvBase):
    """A conversation about each prompt: the system's message if any, the user's, then turn by turn.

    The user's message is `prompt_template` formatted with the fields of the task, or the task's
    field `data_key`. Prompts come with `reset`, or from an appended `DataLoadingPrimer`.

    After the policy's turn the transforms act and its tool calls are answered, each with a message of
    `tool_role` and within `tool_limits`; then, unless one of them spoke, `next_message` may answer. A
    conversation ends with a reply cut at its token limit, or for which the context had no room, or
    with the `max_steps`-th turn when there was more to say, whose calls are not run (`truncated`), or
    when nothing is left to say (`terminated`); with `max_steps=None` the latter leaves it open.
    `score` gives the reward when it ends.

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

    score_seconds: float = 60.0  # longest wait for `score`, after which its conversation is invalid

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
        if max_steps is not None and max_steps < 1:
            raise ConfigError(f"max_steps={max_steps} leaves the policy no turn: it must be at least 1")
        if tool_role not in ROLES:
            raise ConfigError(f"tool_role={tool_role!r} is unknown: it must be {' or '.join(ROLES)}")
        self.system_prompt = system_prompt
        self.prompt_template = prompt_template
        self.data_key = data_key
        self.max_steps = max_steps
        self.system_role = system_role
        self.user_role = user_role
        self.policy_role = policy_role
        self.tool_role = tool_role
        self.tool_limits = tool_limits or ToolLimits()
        self.tools: Tools | None = None  # those appended, once there is one
        self.primer: DataLoadingPrimer | None = None
        self._begun = 0  # conversations begun about rows from outside

    # What a subclass says

    def next_message(self, conversation: Conversation) -> str | None:
        """The environment's answer to the policy's turn, or None when it has nothing to say."""
        return None

    def score(self, conversation: Conversation) -> Score | None:
        """What a conversation that is over is worth, or None where this environment gives no reward."""
        return None

    @property
    def answers(self) -> bool:
        """Whether this environment itself has something to say between two turns of the policy."""
        own = type(self)
        return own.next_message is not ChatEnv.next_message or own.advance is not ChatEnv.advance

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
            from rlpost.tools.calls import Tools

            self.tools = self.tools or Tools(self.tool_role, self.tool_limits)
            self.tools.add(transform)
        return super().append_transform(transform)

    def draw(self, count: int | None = None) -> list[Conversation]:
        """See `EnvBase.draw`; raises DataError without a primer, ConfigError for a template field no task has."""
        self.start()
        if self.primer is None:
            raise DataError(
                f"{type(self).__name__} has no prompts of its own: reset it with a TensorDict that holds 'query', "
                "append a DataLoadingPrimer, or use DatasetChatEnv"
            )
        drawn = self.primer.take(self.numel() if count is None else count)
        return self._opened([self._conversation(d.element, d.group, d.sample) for d in drawn])

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> list[Conversation]:
        """See `EnvBase.begin`; `query` is what the user says."""
        ChatEnv.start(self)  # the transforms alone: the rows are here
        first = self._begun
        self._begun += len(rows)
        return self._opened(
            [self._conversation({self.data_key: row["query"], **row}, first + i, 0) for i, row in enumerate(rows)]
        )

    def _opened(self, conversations: list[Conversation]) -> list[Conversation]:
        for transform in self.transforms:
            transform.on_begin(conversations)
        return conversations

    def _conversation(self, task: Mapping[str, Any], group: int, sample: int) -> Conversation:
        messages = self.opening_messages(task)
        return Conversation(
            task=task,
            messages=messages,
            group_id=group,
            sample=sample,
            max_completion_tokens=self.max_completion_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
        )

    def opening_messages(self, task: Mapping[str, Any]) -> list[Message]:
        """How a conversation about `task` begins: the system's message if there is one, and the user's."""
        user = {"role": self.user_role, "content": self.user_message(task)}
        return (
            [user] if self.system_prompt is None else [{"role": self.system_role, "content": self.system_prompt}, user]
        )

    def user_message(self, task: Mapping[str, Any]) -> str:
        """What the user says about `task`. Raises ConfigError, or DataError, for a field it has not."""
        if self.prompt_template is not None:
            return filled(self.prompt_template, task)
        if self.data_key not in task:
            raise DataError(f"a task has no field {self.data_key!r}: it has {', '.join(map(str, task))}")
        return str(task[self.data_key])

    # Going on

    def advance(self, conversations: Sequence[Conversation]) -> None:
        """See `EnvBase.advance`."""
        for conversation in conversations:
            conversation.truncated |= conversation.finish_reason in CUT
        for transform in self.transforms:
            transform.on_reply(conversations)
        if self.tools is not None:
            self.tools.answer([c for c in conversations if not c.done and not self._was_last(c)])
        for conversation in conversations:
            if not conversation.done:
                self._answer(conversation)
        ended = [conversation for conversation in conversations if conversation.done]
        self.score_finished(ended)
        for transform in self.transforms if ended else ():
            transform.on_end(ended)

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
        calling = last and self.tools is not None and bool(self.tools.calls_of(conversation.response_text))
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
    `num_envs` conversations under way and gives each row to `repeats` of them in a row; with
    `group_repeats` there are `num_envs * repeats`, so that a draw holds `num_envs` whole groups.
    The order of the rows is a function of `seed` and the position alone. `batch_size_dl` rows are
    fetched from the dataset at a time. `held_out` is the share of the prompts that `located_rows` keeps
    for the split test of a path without one. Other arguments are `ChatEnv`'s.
    """

    config: str | None = None  # of a dataset on the hub
    test_path: str | None = None  # where the split test is, if not in `dataset`

    def __init__(
        self,
        dataset: str | Sequence[Mapping[str, Any]],
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
        if min(num_envs, repeats, batch_size_dl) < 1:
            raise ConfigError(
                f"num_envs={num_envs}, repeats={repeats} and batch_size_dl={batch_size_dl} must be at least 1"
            )
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

    @classmethod
    def of(cls, settings: EnvSettings, *, seed: int, **common: Any) -> Self:
        """The environment that `settings` describe; `seed` is the run's, `common` what every environment takes.

        One that is None in `common` is left to the constructor, whose defaults are the environment's own.
        """
        given = {name: value for name, value in common.items() if value is not None}
        own = cls.arguments_of(settings)
        return cls(seed=order_seed(seed, own.pop("seed", 0)), **own, **given)

    @classmethod
    def arguments_of(cls, settings: EnvSettings) -> dict[str, Any]:
        """What `settings` add to `EnvSettings`, as the constructor takes it: by name, `path` as `dataset`."""
        common = {field.name for field in fields(EnvSettings)}
        own = {f.name: _plain(getattr(settings, f.name)) for f in fields(settings) if f.name not in common}
        return {"dataset" if name == "path" else name: value for name, value in own.items()}

    def start(self) -> None:
        """Read the rows, and write the first prompt to see that the template fits.

        Raises DataError for a dataset or row that cannot be used, ConfigError for the template.
        """
        super().start()
        if self._rows is None:
            self._rows = self.open_rows(self.seed)
            self.opening_messages(next(self._rows.iter_from(0)))
            self.primer = DataLoadingPrimer(self._rows, repeats=self.repeats)

    def open_rows(self, seed: int) -> Any:
        """The rows in the order of `seed`: something with `iter_from`, `count` and `fingerprint`."""
        rows = self.load(self.split) if self._rows is None else self._rows.rows
        if not len(rows):
            raise DataError("the dataset is empty: give at least one row")
        return OrderedRows(rows, shuffle=self.shuffle, seed=seed, read_ahead=self.read_ahead)

    def load(self, split: str) -> Sequence[Mapping[str, Any]]:
        """The tasks of one split, `limit` at most."""
        if isinstance(self.dataset, str):
            return [row for _, row in self.located(split)]
        if self.limit is None:
            return self.dataset
        return [self.dataset[i] for i in range(min(self.limit, len(self.dataset)))]

    def located(
        self,
        split: str,
        check: Callable[[Row], Complaint | None] | None = None,
        prompt: Callable[[Row], str] | None = None,
    ) -> list[tuple[str, Row]]:
        """The rows of one split with their places, as `located_rows` reads, checks and divides them.

        Without `prompt` a row's `data_key` is its prompt, and has to be text.
        """
        return located_rows(
            self.dataset,
            split,
            (self.data_key,) if prompt is None else (),
            self.limit,
            config=self.config,
            check=check,
            held_out=self.held_out,
            test_path=self.test_path,
            prompt=prompt,
        )

    @property
    def num_tasks(self) -> int:
        """How many different prompts this split has; reads the rows."""
        self.start()
        return self._rows.count()

    def prompts_shared_with(self, other: DatasetChatEnv) -> int:
        """How many prompts of this split are also prompts of `other`; reads the rows of both."""
        return len(self._openings() & other._openings())

    def _openings(self) -> set[str]:
        """How the conversation about each row begins; none where tasks are made rather than kept as rows."""
        self.start()
        return {repr(self.opening_messages(row)) for row in getattr(self._rows, "rows", ())}

    def all_tasks(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """See `EnvBase.all_tasks`: the rows."""
        for number, row in enumerate(self.load(self.split), start=1):
            yield f"{self.split} row {number}", row

    def demonstrations(self) -> Iterator[Demonstration]:
        """See `EnvBase.demonstrations`: each task of `all_tasks`, answered by `gold_reply`."""
        from rlpost.data.demonstrations import Demonstration

        for where, task in self.all_tasks():
            answer = {"role": self.policy_role, "content": self.gold_reply(task)}
            yield Demonstration(where, messages=[*self.opening_messages(task), answer])

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
            self.primer = DataLoadingPrimer(self._rows, repeats=self.repeats)

    def state_dict(self) -> dict[str, Any]:
        """See `EnvBase.state_dict`; the seed and the number of rows say which order the position is one of."""
        self.start()
        return {**super().state_dict(), "seed": self.seed, "rows": self._rows.fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `EnvBase.load_state_dict`. Raises DataError where the rows are not those `state` was taken with."""
        self.start()
        if state["rows"] != self._rows.fingerprint():
            raise DataError(
                f"the saved position was taken with {state['rows']}, and this dataset has {self._rows.fingerprint()}: "
                "resume with the dataset and env settings the run began with"
            )
        self.set_seed(state["seed"])
        super().load_state_dict(state)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(element) for element in value]
    return value.name if isinstance(value, Enum) else value
