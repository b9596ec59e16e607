"""A class as TRL's GRPOTrainer takes it (`environment_factory`), one instance a conversation."""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from functools import partial
from hashlib import blake2b
from itertools import islice
from statistics import fmean
from time import monotonic
from typing import Any, Self

from rlpost.data.conversation import Conversation, Message
from rlpost.data.datasets import ShownRows
from rlpost.data.demonstrations import Demonstration
from rlpost.data.order import order_seed
from rlpost.envs.base import ToolCall, ToolResult, ToolTransform
from rlpost.envs.chat import record
from rlpost.envs.dataset import DatasetEnv
from rlpost.envs.draws import GENERATORS, Draws, Watch
from rlpost.envs.game_calls import Called, ended_if_stuck, make_calls
from rlpost.envs.tool_calls import schema_of, together
from rlpost.errors import ConfigError, DataError, named
from rlpost.remote.loop import LoopThread
from rlpost.rewards.calls import as_number, kind_of_value
from rlpost.rewards.score import RESERVED_PARTS, Score, log_failures, why_untrainable
from rlpost.settings import EnvSettings
from rlpost.settings.foreign import FactorySettings
from rlpost.user_file import import_file, where_in

NOT_TOOLS = ("reset", "get_reward")
PROVED_AT_MOST = 20  # rows that `rlpost env test` begins an episode with
log = logging.getLogger("rlpost")


class FactoryEnv(DatasetEnv):
    """Episodes of the class that `settings.factory` names, on each row of `settings.path`.

    The callable makes an object without arguments, one a conversation. `reset(**row)` begins its episode with all
    columns of the row; the text that it returns is appended to the last message of the prompt. The public methods
    of the class are tools, described by their types and docstrings. `get_reward()` scores the finished episode;
    rewards of `settings.reward` are added to it. Each of these may be `async def`.

    A call that is late, or an exception in `reset` or `get_reward`, makes the conversation invalid; the model reads an
    exception of a tool. A late call ends as soon as it runs Python code; one that keeps Python's lock in C code
    ends the process. Awaitables of all objects share one loop. A class that draws from the process-wide generators of
    `random` or NumPy has a state of them for each episode, seeded by its row, and its calls run one after the other.
    A saved conversation goes on by repeating its calls on a fresh object; if a text differs from the one that the
    model has read, the conversation is invalid. Other arguments are `DatasetChatEnv`'s.
    """

    tool_role_follows = True
    max_reward = None
    make: Callable[[], Any]  # once the class is known, as `_probe`, an object of it
    _probe: Any

    def __init__(self, settings: FactorySettings, **chat: Any) -> None:
        super().__init__(settings, **chat)
        self.file, _, self.name = settings.factory.rpartition(":")
        self.reset_seconds, self.step_seconds = settings.reset_seconds, settings.step_seconds
        self.methods: MethodTools | None = None  # once the class is known
        self.has_reward = False  # whether the class has get_reward
        self.generators: Sequence[str] = ()  # process-wide ones that calls have been seen to draw from
        self.loop = LoopThread(f"rlpost-{self.name}")
        self.episodes: dict[tuple[int, int], Episode] = {}  # in progress, by the keys of their conversations

    @classmethod
    def of(cls, settings: EnvSettings, *, seed: int, **common: Any) -> Self:
        """See `DatasetChatEnv.of`."""
        assert isinstance(settings, FactorySettings)
        return cls(settings, seed=order_seed(seed, settings.seed), **common)

    # Beginning

    def start(self) -> None:
        """See `DatasetEnv.start`; imports the class, and makes an object to see what its tools are.

        Raises ConfigError for a class that cannot be made, has no reset or no reward, or whose tools are not described.
        """
        if self._rows is not None:
            return
        self._look_at_class()
        super().start()
        self.max_reward = None  # also if the rewards beside the class have a known one
        first = self.rows[0]
        try:
            inspect.signature(self._probe.reset).bind(**first)
        except TypeError as error:
            raise ConfigError(
                f"{self.name}.reset cannot be called with the columns of a row ({', '.join(first)}): {error}; "
                "give it **columns"
            ) from error

    def _look_at_class(self) -> None:
        if self.methods is not None:
            return
        shown = f"env.factory={self.file}:{self.name}"
        if self.name in RESERVED_PARTS:
            raise ConfigError(f"{shown}: reward/{self.name} is a figure of every step: give the class another name")
        module = import_file(self.file)
        self.make = getattr(module, self.name)
        probe = Episode(self, {})
        self._probe = probe.call("making an object", self.make, self.reset_seconds)
        if probe.error is not None:
            why = probe.failure or TimeoutError(probe.error)
            where = where_in(module.__file__ or self.file, why, self.file)
            raise ConfigError(f"{where}: {self.name}() cannot be made: {named(why)}") from probe.failure
        functions = [name for name, _ in inspect.getmembers(type(self._probe), inspect.isfunction)]
        if "reset" not in functions:
            raise ConfigError(f"{shown} has no method reset, which begins an episode")
        self.has_reward = "get_reward" in functions
        if not (self.has_reward or self.settings.reward):
            raise ConfigError(f"{shown} has no method get_reward: write one, or give env.reward")
        tools = [name for name in functions if not name.startswith("_") and name not in NOT_TOOLS]
        self.methods = MethodTools(self, {name: getattr(self._probe, name) for name in tools})
        if tools:
            self.append_transform(self.methods)

    def _opened(self, conversations: list[Conversation]) -> list[Conversation]:
        """See `EnvBase._opened`: an episode begins for each."""
        self._look_at_class()
        self._isolated(self._begin, conversations)
        return super()._opened(conversations)

    def _begin(self, conversations: Sequence[Conversation]) -> None:
        fresh = [Episode(self, conversation.task) for conversation in conversations]
        self.episodes |= {c.key: episode for c, episode in zip(conversations, fresh, strict=True)}
        together(self._reset, fresh)
        for conversation, episode in zip(conversations, fresh, strict=True):
            conversation.messages = self._begun_messages(conversation.messages, episode)

    def _reset(self, episode: Episode) -> None:
        """Begin an episode; an error is kept in it."""
        episode.object = episode.call("making an object", self.make, self.reset_seconds)
        if episode.error is not None:
            return
        row = deepcopy(dict(episode.task))
        text = episode.call("reset", lambda: episode.object.reset(**row), self.reset_seconds, _text)
        episode.text = text or ""

    def _begun_messages(self, messages: Sequence[Message], episode: Episode) -> list[Message]:
        """The messages of a row with the text of reset behind the last one."""
        *before, last = messages
        return [*before, {**last, "content": last["content"] + episode.text}]

    # Going on

    def _isolated(self, act: Callable[[Sequence[Conversation]], Any], conversations: Sequence[Conversation]) -> Any:
        """`act(conversations)`; again with fresh episodes if calls are first seen to draw from process-wide generators.

        From then on each episode has a state of these, and calls run one after the other.
        """
        if self.generators:
            return act(conversations)
        watch, before = Watch(), [conversation.copy() for conversation in conversations]
        done = act(conversations)
        if not (watch.end() or self.generators):
            return done
        log.warning(
            "%s draws from the process-wide random or numpy.random: its calls run one after the other from now on; "
            "with random.Random(SEED) of a column of the row they would run at the same time",
            self.name,
        )
        self.generators = GENERATORS
        for conversation, saved in zip(conversations, before, strict=True):
            for each in fields(Conversation):
                setattr(conversation, each.name, getattr(saved, each.name))
        self._end(conversations)
        return act(conversations)

    def respond(self, conversations: Sequence[Conversation]) -> None:
        """See `EnvBase.respond`."""
        self.start()
        self._isolated(self._go_on, conversations)

    def _go_on(self, conversations: Sequence[Conversation]) -> None:
        together(self._take_up, conversations)
        for conversation in conversations:
            conversation.truncated |= self.episodes[conversation.key].error is not None
        super().respond([conversation for conversation in conversations if not conversation.done])
        for conversation in conversations:
            self.episodes[conversation.key].answered = _answered(conversation)

    def _take_up(self, conversation: Conversation) -> Episode:
        """The conversation's episode; a fresh one that repeats its calls if there is none, or it is at another turn."""
        episode, answered = self.episodes.get(conversation.key), _answered(conversation)
        if episode is not None and episode.task == conversation.task and episode.answered == answered:
            return episode
        episode = self.episodes[conversation.key] = Episode(self, conversation.task)
        episode.answered = answered
        self._reset(episode)
        if episode.error is None and (wrong := self._repeat(conversation, episode)):
            episode.error = f"{self.name}: {wrong}"
        return episode

    def _repeat(self, conversation: Conversation, episode: Episode) -> str | None:
        """Make the calls of a saved conversation again; why not, if another text comes of it."""
        opening = self._begun_messages(self.opening_messages(conversation.task), episode)
        shown = [message["content"] for message in conversation.messages[: conversation.opening]]
        if shown != [message["content"] for message in opening]:
            return "reset was called again, and its text is not the one that the model has read"
        for number, call, answer in self.tools.answered_calls(conversation) if self.tools is not None else ():
            if self.methods is None or not self.methods.takes(call.name):
                continue
            assert self.tools is not None
            text = self.tools.differs(answer, self.methods, number, call, self.methods.run(episode, call))
            if episode.error is not None:
                return None
            if text is not None:
                return f"its calls were made again, and {call.name} answers {text!r:.80}, not {answer!r:.80}"
        return None

    # Ending

    def score_finished(self, conversations: Sequence[Conversation]) -> None:
        """See `ChatEnv.score_finished`: by get_reward, and by the rewards of the settings. Raises RewardError."""
        playing = [conversation for conversation in conversations if conversation.valid]
        for conversation, score in zip(playing, self._isolated(partial(together, self._score), playing), strict=True):
            record(conversation, score)
        log_failures([c.error for c in conversations if not c.valid], len(conversations))
        super().score_finished([conversation for conversation in playing if conversation.valid])

    def _score(self, conversation: Conversation) -> Score:
        episode = self._take_up(conversation)
        reward = 0.0
        if episode.error is None and self.has_reward:
            reward = episode.call("get_reward", lambda: episode.object.get_reward(), self.reset_seconds, _number)
        if episode.error is not None:
            return Score(math.nan, valid=False, error=episode.error)
        return Score(reward, parts={self.name: reward} if self.has_reward else {})

    def conclude(self, conversations: Sequence[Conversation]) -> None:
        """See `EnvBase.conclude`: the episodes end."""
        super().conclude(conversations)
        self._end(conversations)

    def abandon(self, conversations: Sequence[Conversation] | None = None) -> None:
        """See `EnvBase.abandon`."""
        super().abandon(conversations)
        if conversations is None:
            self.episodes.clear()
        else:
            self._end(conversations)

    def close(self) -> None:
        """See `EnvBase.close`: ends the loop of awaitables too."""
        super().close()
        self.episodes.clear()
        self.loop.close()

    def _end(self, conversations: Sequence[Conversation]) -> None:
        for conversation in conversations:
            self.episodes.pop(conversation.key, None)

    # Nothing to learn from as it stands

    def demonstrations(self) -> Iterator[Demonstration]:
        """See `EnvBase.demonstrations`. Raises DataError: the rows are prompts."""
        raise DataError(f"{self.name} is an environment of several turns: its rows hold no good replies")

    def demonstrated(self) -> ShownRows:
        """See `DatasetChatEnv.demonstrated`. Raises as `demonstrations`."""
        raise DataError(f"{self.name} is an environment of several turns: its rows hold no good replies")

    @property
    def has_gold(self) -> bool:
        """See `DatasetChatEnv.has_gold`."""
        return False

    def rehearse(self) -> list[str]:
        """See `EnvBase.rehearse`: begins an episode with each row twice, and scores it untouched.

        Raises DataError for a row with which that fails, or whose episodes begin differently.
        """
        self.start()
        assert self.methods is not None
        earned: list[float] = []
        rows = list(islice(enumerate(self.rows), PROVED_AT_MOST))
        for number, row in rows:
            (_, first), (conversation, again) = [(c, self.episodes[c.key]) for c in map(self.begun, (row, row))]
            wrong = first.error or again.error
            if first.text != again.text:
                wrong = wrong or f"reset begins with another text each time: {first.text!r:.80} and {again.text!r:.80}"
            [score] = self._isolated(partial(together, self._score), [conversation])
            if wrong := wrong or score.error:
                raise DataError(f"{self.where(number)}: {wrong}")
            earned.append(score.reward)
            self._end([conversation])
        untouched = [f"without a call an episode earns {fmean(earned):g} on average"] if self.has_reward else []
        tools = ", ".join(self.methods.names())
        return [
            f"{len(rows)} episodes, each begun twice: both times alike",
            f"its tools, which were not called: {tools}" if tools else "its tools: none",
            *untouched,
        ]


class MethodTools(ToolTransform):
    """The public methods of an environment's objects as tools: of the object of the conversation that calls.

    Raises ConfigError for a method without types or a description.
    """

    def __init__(self, env: FactoryEnv, methods: Mapping[str, Callable[..., Any]]) -> None:
        self.env = env
        self._schemas = [schema_of(method, name) for name, method in methods.items()]
        self._signatures = {name: inspect.signature(method) for name, method in methods.items()}

    def schemas(self) -> list[dict[str, Any]]:
        """See `ToolTransform.schemas`."""
        return self._schemas

    def call(self, conversation: Conversation, call: ToolCall) -> ToolResult:
        """See `ToolTransform.call`. Raises RuntimeError if the episode cannot go on."""
        episode = self.env.episodes[conversation.key]
        result = self.run(episode, call)
        if episode.error is not None:
            raise RuntimeError(episode.error)
        return result

    def run(self, episode: Episode, call: ToolCall) -> ToolResult:
        """The answer of an episode's object to a call; it means nothing if the episode has an error behind it."""
        try:  # a copy: the conversation keeps the arguments as the model wrote them
            bound = self._signatures[call.name].bind(**deepcopy(dict(call.arguments)))
        except TypeError as error:
            return ToolResult(f"{call.name} cannot be called like that: {error}", ok=False)
        act = partial(getattr(episode.object, call.name), *bound.args, **bound.kwargs)
        text = episode.call(call.name, act, self.env.step_seconds, str)
        error = episode.failure
        if not isinstance(error, Exception):
            return ToolResult(text or "")
        episode.error = episode.failure = None
        return ToolResult(f"{type(error).__name__}: {error}", ok=False)


class Episode(Called):
    """An object of the user's class in one conversation, and why it cannot go on, if it cannot.

    Its calls run one at a time, as those of a game: see `make_calls`.
    """

    def __init__(self, env: FactoryEnv, task: Mapping[str, Any]) -> None:
        row = json.dumps(dict(task), sort_keys=True, default=str).encode()
        super().__init__(env.name, Draws(int.from_bytes(blake2b(row, digest_size=4).digest(), "big")))
        self.env, self.task = env, task
        self.object: Any = None
        self.text = ""  # of reset
        self.answered = 0  # turns of the model whose calls it has answered

    def call(
        self, what: str, act: Callable[[], Any], seconds: float, read: Callable[[Any], Any] = lambda value: value
    ) -> Any:
        """`read(act())`, awaited where it is awaitable; None, with the error kept, if it fails or is late."""
        values: list[Any] = []

        def work() -> None:
            deadline = monotonic() + seconds
            value = act()
            if inspect.isawaitable(value):
                future = self.env.loop.submit(_awaited(value))
                try:
                    value = future.result(deadline - monotonic())
                finally:
                    future.cancel()  # does nothing to one that is done
            values.append(read(value))

        self.calls = [(what, seconds, work)]
        with ended_if_stuck(seconds):
            make_calls([self], self.env.generators)
        return None if self.error is not None else values[0]


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"it must return text or None, and returned {kind_of_value(value)}")


def _number(value: Any) -> float:
    number = as_number(value)
    if number is None or why_untrainable(number):
        raise TypeError(f"it must return a finite number, and returned {kind_of_value(value)}")
    return number


def _answered(conversation: Conversation) -> int:
    """How many turns of the model have been answered: those with a message behind them."""
    own = conversation.messages[conversation.opening :]
    return sum(message["role"] == "assistant" for message in own[:-1])
