"""The base of every environment, and the transforms and tools that can be appended to one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import RLock
from typing import TYPE_CHECKING, Any, Self

import torch
from tensordict import TensorDictBase

from rlpost.data.batch import batch_from_conversations
from rlpost.data.conversation import Conversation, InputMode, Ticket
from rlpost.errors import ConfigError, DataError
from rlpost.settings.base import Settings, doc

if TYPE_CHECKING:
    from rlpost.data.demonstrations import Demonstration
    from rlpost.envs import EnvFace

ROLES = ("user", "tool")  # of the messages that answer a call


# Environments


class EnvBase(ABC):
    """Prompts, and the scores of replies to them.

    `draw` begins conversations, the policy appends its turn to each, `advance` scores them or appends the
    environment's answer, until all are `done`. Where draws are played elsewhere, or conversations one by one, the
    halves of the two are used: `tickets` and `open` for `draw`, `respond` and `conclude` for `advance`. `open` and
    `respond` may be called from many threads at once, each with conversations of its own. A subclass overrides the
    halves, not `draw` or `advance`.

    It is also played as TensorDicts of `batch_size`: `reset`, `step`, `step_and_maybe_reset` and `rollout` keep no
    state of their own. The conversations travel in the TensorDict, under `conversation`, and a step leaves those it
    was given as they are. `input_mode` is the form in which they ask and are answered, and changes nothing else:
    "history" (messages), "text" (the messages as the chat template writes them) or "tokens" (the ids of that text;
    sampled ids are carried forward and never tokenised again). Text and tokens need `tokenizer`; with one, the mode
    history shows both as well.

    Building an environment reads nothing; `start` does, and whatever needs the rows calls it.
    """

    max_reward: float | None = 1.0  # the reward of a perfect reply; None: unknown
    has_accuracy: bool = True  # whether the task has a 0/1 measure that a perfect reply meets
    takes_tools: bool = False  # whether replies are searched for tool calls

    def __init__(
        self,
        batch_size: int | Sequence[int],
        *,
        max_completion_tokens: int = 256,
        max_prompt_tokens: int | None = None,
        tokenizer: Any = None,
        input_mode: InputMode | str = InputMode.history,
    ) -> None:
        self.batch_size = one_dimension(batch_size)
        self.max_completion_tokens = max_completion_tokens
        self.max_prompt_tokens = max_prompt_tokens
        self.tokenizer = tokenizer
        self.input_mode = InputMode.of(input_mode)
        self.check_tokenizer()
        self.transforms: list[Transform] = []
        self._one_at_a_time = RLock()  # held while transforms begin, answer and end, and while `start` runs for `open`
        self._ready = False  # whether `open` has started everything

    def check_tokenizer(self) -> None:
        """Raise ConfigError if the input mode needs a tokenizer and there is none."""
        if self.input_mode is not InputMode.history and self.tokenizer is None:
            raise ConfigError(f"input_mode={self.input_mode.value!r} needs a tokenizer to write prompts with: give one")

    def start(self) -> None:  # noqa: B027  these three mean nothing to some environments
        """Read everything needed to draw; a second call does nothing."""

    def close(self) -> None:
        """Release what transforms hold, such as processes; a second call does nothing."""
        self._ready = False
        for transform in self.transforms:
            transform.close()

    def abandon(self, conversations: Sequence[Conversation] | None = None) -> None:
        """Release the resources of `conversations` in progress (None: of all), which will not go on."""
        for transform in self.transforms:
            if conversations is None:
                transform.on_reset()
            else:
                self._in_turn(transform.on_end, conversations)

    def numel(self) -> int:
        """How many conversations are in progress at once."""
        return self.batch_size.numel()

    def draw(self, count: int | None = None) -> list[Conversation]:
        """`count` (None: `numel()`) fresh conversations; those of one prompt follow each other.

        `group_id` numbers the draws of prompts over the environment's life, `sample` the
        conversations of one. Raises DataError where there is no prompt to draw.
        """
        return self._opened([fresh for ticket in self.tickets(count) for fresh in self._conversations_of(ticket)])

    @abstractmethod
    def tickets(self, count: int | None = None) -> list[Ticket]:
        """The next `count` (None: `numel()`) conversations as tickets, one for those of one prompt.

        Moves on as `draw` does, and begins nothing: no transform hears of it. A group that an earlier call left
        in the middle goes on with a ticket of its remaining samples. Raises DataError as `draw` does.
        """

    def open(self, ticket: Ticket) -> list[Conversation]:
        """The conversations of `ticket` as `draw` begins them, one for each of its samples.

        The ticket may be of another environment of the same settings, as one in another process is. Starts this one
        where it is not, and leaves its own drawing where it is. Several threads may call it at once.
        """
        with self._one_at_a_time:
            if not self._ready:
                self.start()
                self._ready = True
        return self._opened(self._conversations_of(ticket))

    @abstractmethod
    def _conversations_of(self, ticket: Ticket) -> list[Conversation]:
        """The conversations of `ticket` before any transform has acted on them."""

    def _opened(self, conversations: list[Conversation]) -> list[Conversation]:
        """Let the transforms act on fresh `conversations`."""
        for transform in self.transforms:
            self._in_turn(transform.on_begin, conversations)
        return conversations

    def advance(self, conversations: Sequence[Conversation]) -> None:
        """Answer the policy's turn in each conversation, in place: score and end it, or append a message."""
        self.respond(conversations)
        self.conclude([conversation for conversation in conversations if conversation.done])

    @abstractmethod
    def respond(self, conversations: Sequence[Conversation]) -> None:
        """Answer the policy's turn in each conversation, in place: append a message, or end it without a score.

        May wait for tools. Several threads may call it at once, each with conversations of its own.
        """

    @abstractmethod
    def conclude(self, conversations: Sequence[Conversation]) -> None:
        """Score conversations that `respond` has ended, in place, and release their resources.

        Called by one thread at a time: where that is the main thread, time limits of scores can interrupt them.
        """

    def check_halves(self) -> None:
        """Raise ConfigError if a subclass overrides `draw` or `advance` instead of their halves."""
        for whole, halves in {"draw": "tickets and open", "advance": "respond and conclude"}.items():
            if getattr(type(self), whole) is not getattr(EnvBase, whole):
                raise ConfigError(
                    f"{type(self).__name__} overrides {whole}, which is not called where conversations are played one "
                    f"by one: override {halves} instead, or collect with collector=sync cluster=none"
                )

    def _in_turn(self, act: Callable[[Sequence[Conversation]], None], conversations: Sequence[Conversation]) -> None:
        """Have a transform act while no other does: only tools are called by several threads at once."""
        with self._one_at_a_time:
            act(conversations)

    @abstractmethod
    def begin(self, rows: Sequence[Mapping[str, Any]]) -> list[Conversation]:
        """Conversations about `rows` from outside, one each, numbered like draws."""

    def set_seed(self, seed: int) -> None:  # noqa: B027
        """Restart the prompts in the order of `seed`; later draws get new numbers. Changes nothing else."""

    def state_dict(self) -> dict[str, Any]:
        """The position in the prompts, JSON-compatible."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Go on drawing exactly where `state` was taken."""

    def initial_state(self) -> dict[str, Any]:
        """The state from which the first prompt is drawn next."""
        return {}

    def learn_difficulty(self, group: Sequence[Conversation]) -> None:  # noqa: B027
        """Take in how a whole group did, where that decides what is drawn next."""

    @property
    def num_tasks(self) -> int:
        """How many different prompts there are to draw. Raises DataError where they come from outside."""
        raise DataError(f"{type(self).__name__} has no prompts of its own to count: use an environment with a dataset")

    def build_batch(self, conversations: Sequence[Conversation]) -> TensorDictBase:
        """The batch that a collector delivers of `conversations`, (B,): see `rlpost.data.batch` for its keys."""
        return self.transformed(batch_from_conversations(conversations))

    def append_transform(self, transform: Transform) -> Self:
        """Add `transform` after those there are, and return this environment.

        Raises ConfigError for a tool where nothing looks for calls.
        """
        if isinstance(transform, ToolTransform) and not self.takes_tools:
            raise ConfigError(f"{type(transform).__name__} is a tool, and only a ChatEnv runs tools: append it to one")
        self.transforms.append(transform)
        self._ready = False
        return self

    # What `rlpost env test` needs; environments with gold answers give all three

    def all_tasks(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(where it stands, task) of everything with a gold answer, in this environment's split."""
        raise DataError(f"{type(self).__name__} has no gold answers to test with: give it all_tasks and gold_reply")

    def rehearse(self) -> list[str] | None:
        """Try an environment that no gold answer can prove, such as a game: findings in words; None where one can.

        Raises DataError or ToolError for an environment that cannot be played.
        """
        return None

    def gold_reply(self, task: Mapping[str, Any]) -> str | Sequence[str]:
        """A reply to `task` that earns `max_reward` and both accuracies, or a reply for each turn of one.

        Raises DataError where none is known.
        """
        raise DataError(f"{type(self).__name__} has no gold answers: give it gold_reply")

    def corrupted_replies(self, task: Mapping[str, Any]) -> Sequence[str | Sequence[str]]:
        """Replies like the gold one but wrong: less than `max_reward`, and neither accuracy."""
        return [""]

    # What supervised fine-tuning learns from

    def demonstrations(self) -> Iterator[Demonstration]:
        """Every prompt of this environment's split, once, with a good answer.

        Raises DataError where there are none, and for a row that is not a demonstration.
        """
        raise DataError(f"{type(self).__name__} has no answers to learn from: give it all_tasks and gold_reply")

    # As TensorDicts

    @cached_property
    def _face(self) -> EnvFace:
        """Plays this environment as TensorDicts; only those who do so load rlpost/torchrl."""
        from rlpost.envs import EnvFace

        return EnvFace(self)

    def reset(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Fresh conversations: about the `text` or `query` of each row of `tensordict`, else drawn.

        Returns a TensorDict of `batch_size` with `query`, `group_id`, `sample`, `conversation` and
        `done`, `terminated`, `truncated` (B, 1), and what the policy reads: in the mode text `("text", "prompt")`,
        in the mode tokens `("tokens", "prompt")`, ragged (B, *), in the mode history `history` and, with a
        tokenizer, both of these. Raises DataError for a TensorDict with neither entry or of another batch size.
        """
        return self._face.reset(tensordict)

    def rows_of(self, tensordict: TensorDictBase) -> list[dict[str, Any]]:
        """The entries of a reset TensorDict as one mapping a row, `text` among them becoming `query`.

        Raises DataError with neither.
        """
        return self._face.rows_of(tensordict)

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Take the policy's turn out of `tensordict`, which a reset or step returned, and advance.

        The turn is `text_response` (a str a row; an end-of-turn marker at its end is dropped), or
        the policy's `("text", "response")` with, where it wrote them, `("tokens", "response")`,
        `("log_probs", "response")`, `finish_reason` and `policy_version`; in the mode text also
        `("text", "full")`, prompt and response. In the mode tokens it is `("tokens", "response")`,
        `tokens_response` or `("tokens", "full")`, and the text is decoded. Writes `next`: what reset
        returns, of the conversations one turn later, and `reward` (B, 1), 0 until a conversation is
        scored and NaN where scoring failed, `reward_parts`, `accuracy_strict`, `accuracy_lenient`.
        Raises DataError without a turn to take, or for a conversation that is over.
        """
        return self._face.step(tensordict)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """`step`, and what to act on next: the following turn, or a fresh draw where a row is done."""
        return self._face.step_and_maybe_reset(tensordict)

    def rollout(
        self,
        max_steps: int,
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        tensordict: TensorDictBase | None = None,
        break_when_any_done: bool = True,
    ) -> TensorDictBase:
        """At most `max_steps` turns of `policy` after a reset, as one TensorDict (B, T), stacked lazily.

        Ends with the first turn that ends a conversation, or goes on with a fresh one in its row.
        """
        return self._face.rollout(max_steps, policy, tensordict, break_when_any_done=break_when_any_done)

    def observe(self, conversations: Sequence[Conversation]) -> TensorDictBase:
        """The TensorDict of `conversations` as `reset` returns it, transforms applied."""
        return self._face.observe(conversations)

    def transformed(self, tensordict: TensorDictBase) -> TensorDictBase:
        """`tensordict`, which holds turns that were played, transforms applied."""
        for transform in self.transforms:
            tensordict = transform.on_played(tensordict)
        return tensordict


def one_dimension(batch_size: int | Sequence[int]) -> torch.Size:
    """The batch size of an environment."""
    return torch.Size([batch_size] if isinstance(batch_size, int) else batch_size)


# Transforms and tools


class Transform:
    """Acts on conversations when they begin, after each reply and when they end, and on the TensorDicts made of them.

    `on_begin`, `on_reply` and `on_end` are called whichever face of the environment is used, `__call__`
    only by `reset` and `step`. A transform overrides what it needs; each method does nothing by itself.
    Where conversations are played one by one (`collector=async`) the three are called by several threads, each
    with some conversations, though never by two at once in one environment.
    """

    reward_per_token = False  # whether it makes a reward for each token, which no algorithm of rlpost accepts

    def start(self) -> None:
        """Load or start what is needed, or raise why that cannot be done; a second call does nothing."""

    def on_begin(self, conversations: Sequence[Conversation]) -> None:
        """Change conversations that have just been drawn, in place."""

    def on_reply(self, conversations: Sequence[Conversation]) -> None:
        """React to the policy's turn, in place: append a message, add to the reward, end the conversation."""

    def on_end(self, conversations: Sequence[Conversation]) -> None:
        """Release the resources of conversations that are over; called once for each, after it was scored.

        Also called for abandoned conversations, for which nothing may be held yet.
        """

    def on_reset(self) -> None:
        """Release the resources of conversations in progress, which a reset of the environment abandons."""

    def close(self) -> None:
        """Release everything; called when the environment closes. A second call does nothing."""

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Change the policy's observations: the result of `reset`, and `next` in that of `step`."""
        return tensordict

    def on_played(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Change played turns, with their `next`: the result of `step`, and the batch of a collector."""
        return tensordict


class ToolTransform(Transform):
    """Functions that the model may call; a `ChatEnv` runs them and shows the model what they answered.

    `call` may be entered by several threads at once, never twice at once for one conversation; further
    calls than `at_once` wait for their turn. What is kept from turn to turn belongs to `conversation.key`,
    until `on_end`.
    """

    at_once: int | None = None  # calls that run at the same time; None: of as many conversations as call
    described: bool = True  # False: the model is not shown the schemas; its prompt says what it may call

    role: str = "user"  # of the messages that answer its calls: the environment's, once it is appended to one

    @abstractmethod
    def schemas(self) -> list[dict[str, Any]]:
        """The functions as JSON schemas for the model: `{"type": "function", "function": {"name": ..., ...}}` each."""

    @abstractmethod
    def call(self, conversation: Conversation, call: ToolCall) -> ToolResult:
        """Run one call, within a time limit.

        A mistake of the model gives a `ToolResult` that explains it. An exception is a fault of the tool:
        the conversation ends with it, without a reward; an `RlpostError` ends the run.
        """

    def calls_in(self, reply: str) -> list[ToolCall]:
        """The calls in forms that are this tool's own."""
        return []

    def message(self, number: int, call: ToolCall, result: ToolResult) -> str:
        """The answer to the `number`-th call of a turn, as the model reads it."""
        if result.ok:
            return f"Tool {call.name} executed successfully:\n{result.text}"
        return f"Tool {call.name} failed:\n{result.text}"

    def names(self) -> list[str]:
        """The names of the functions."""
        return [schema["function"]["name"] for schema in self.schemas()]

    def takes(self, name: str) -> bool:
        """Whether a call of `name` is for this tool, which may go by shorter names than those it shows."""
        return name in self.names()

    def on_begin(self, conversations: Sequence[Conversation]) -> None:
        """Show the functions to the model, where they are to be described."""
        for conversation in conversations if self.described else ():
            conversation.tools = [*conversation.tools, *self.schemas()]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call in a reply: characters `place` to `end` of it; `fault` says why it cannot be run as it stands."""

    name: str
    arguments: Mapping[str, Any]
    place: int
    fault: str | None = None
    end: int = 0


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's answer; `ok` is False if the call failed, and `text` then explains why to the model."""

    text: str
    ok: bool = True


@dataclass(frozen=True)
class ToolLimits(Settings):
    """How much of its tools a model may use.

    `max_calls` in a conversation and `max_calls_per_turn` in a reply are run, further ones answered
    with the limit; None: no limit. An answer is truncated to `max_output_chars` characters.
    """

    max_calls: int | None = doc(None, at_least=1)
    max_calls_per_turn: int | None = doc(8, at_least=1)
    max_output_chars: int = doc(4000, at_least=1)
