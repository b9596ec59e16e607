"""ChatEnv: a conversation about prompts that come from outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from rlpost.data.conversation import CUT, Conversation, Message, Ticket
from rlpost.data.input_mode import InputMode
from rlpost.envs.base import EnvBase
from rlpost.envs.rows import filled
from rlpost.envs.scoring import record_scores
from rlpost.envs.tool import ROLES, ToolLimits, ToolTransform
from rlpost.envs.transforms.base import Transform
from rlpost.envs.transforms.dataloading import DataLoadingPrimer, Draw
from rlpost.errors import ConfigError, DataError
from rlpost.rewards.score import Score

if TYPE_CHECKING:
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

    source_name: str = ""  # by which a mix of environments knows this one
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
        return any(getattr(own, name) is not getattr(ChatEnv, name) for name in ("next_message", "respond", "advance"))

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

    def tickets(self, count: int | None = None) -> list[Ticket]:
        """See `EnvBase.tickets`; raises DataError without a primer."""
        self.start()
        if self.primer is None:
            raise DataError(
                f"{type(self).__name__} has no prompts of its own: reset it with a TensorDict that holds 'query', "
                "append a DataLoadingPrimer, or use DatasetChatEnv"
            )
        tickets: list[Ticket] = []
        for drawn in self.primer.take(self.numel() if count is None else count):
            if not tickets or tickets[-1].group != drawn.group:
                tickets.append(Ticket(drawn.group, [], drawn.element, self._place(drawn)))
            tickets[-1].samples.append(drawn.sample)
        return tickets

    def _place(self, drawn: Draw) -> str:
        """The place of the row of a draw; empty where it is of no file."""
        return ""

    def _conversations_of(self, ticket: Ticket) -> list[Conversation]:
        conversations = [self._conversation(ticket.task, ticket.group, sample) for sample in ticket.samples]
        for conversation in conversations:
            conversation.where = ticket.where
        return conversations

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> list[Conversation]:
        """See `EnvBase.begin`; `query` is what the user says."""
        ChatEnv.start(self)  # the transforms alone: the rows are here
        first = self._begun
        self._begun += len(rows)
        return self._opened(
            [self._conversation({self.data_key: row["query"], **row}, first + i, 0) for i, row in enumerate(rows)]
        )

    def begun(self, task: Mapping[str, Any]) -> Conversation:
        """A conversation about `task` as it begins, of no draw."""
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
        calling = last and self.tools is not None and bool(self.tools.calls_of(conversation.response_text))
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
