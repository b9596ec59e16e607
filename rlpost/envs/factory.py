"""A class as TRL's GRPOTrainer takes it (`environment_factory`), one instance a conversation."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from copy import deepcopy
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any, Self

from rlpost.data.conversation import Conversation, Message
from rlpost.data.datasets import ShownRows
from rlpost.data.demonstrations import Demonstration
from rlpost.data.order import order_seed
from rlpost.envs.base import ToolCall, ToolResult, ToolTransform
from rlpost.envs.chat import record
from rlpost.envs.dataset import DatasetEnv
from rlpost.envs.tool_calls import schema_of, together
from rlpost.errors import ConfigError, DataError, ToolError, named
from rlpost.rewards.calls import as_number, kind_of_value
from rlpost.rewards.score import Score, why_untrainable
from rlpost.settings import EnvSettings
from rlpost.settings.foreign import FactorySettings
from rlpost.user_file import import_file, where_in

NOT_TOOLS = ("reset", "get_reward")
PROVED_AT_MOST = 20  # rows that `rlpost env test` begins an episode with


class FactoryEnv(DatasetEnv):
    """Episodes of the class that `settings.factory` names, on each row of `settings.path`.

    The callable makes an object without arguments, one a conversation. `reset(**row)` begins its episode with all
    columns of the row; the text that it returns is appended to the last message of the prompt. The public methods
    of the class are tools, described by their types and docstrings. `get_reward()` scores the finished episode;
    rewards of `settings.reward` are added to it. Each of these may be `async def`.

    A call that is late, or an exception in `reset` or `get_reward`, makes the conversation invalid; the model reads an
    exception of a tool. A late call cannot be killed and is left behind. A saved conversation goes on by repeating
    its calls on a fresh object; if a text differs from the one that the model has read, the conversation is invalid.
    Other arguments are `DatasetChatEnv`'s.
    """

    tool_role_follows = True

    def __init__(self, settings: FactorySettings, **chat: Any) -> None:
        super().__init__(settings, **chat)
        self.file, _, self.name = settings.factory.rpartition(":")
        self.reset_seconds, self.step_seconds = settings.reset_seconds, settings.step_seconds
        self.max_reward = None
        self.methods: MethodTools | None = None  # once the class is known
        self.has_reward = False  # whether the class has get_reward
        self.make: Callable[[], Any] = _not_started
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
        self.max_reward = None
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
        module = import_file(self.file)
        self.make = getattr(module, self.name)
        try:
            self._probe = Episode(self.name, {}).call("()", self.make, self.reset_seconds)
        except Exception as error:
            where = where_in(module.__file__ or self.file, error, self.file)
            raise ConfigError(f"{where}: {self.name}() cannot be made: {named(error)}") from error
        functions = [name for name, _ in inspect.getmembers(type(self._probe), inspect.isfunction)]
        if "reset" not in functions:
            raise ConfigError(f"env.factory={self.file}:{self.name} has no method reset, which begins an episode")
        self.has_reward = "get_reward" in functions
        if not (self.has_reward or self.settings.reward):
            raise ConfigError(
                f"env.factory={self.file}:{self.name} has no method get_reward: write one, or give env.reward"
            )
        tools = [name for name in functions if not name.startswith("_") and name not in NOT_TOOLS]
        self.methods = MethodTools(self, {name: getattr(self._probe, name) for name in tools})
        if tools:
            self.append_transform(self.methods)

    def _opened(self, conversations: list[Conversation]) -> list[Conversation]:
        """See `EnvBase._opened`: an episode begins for each."""
        fresh = [Episode(self.name, conversation.task) for conversation in conversations]
        self.episodes |= {c.key: episode for c, episode in zip(conversations, fresh, strict=True)}
        together(self._reset, fresh)
        for conversation, episode in zip(conversations, fresh, strict=True):
            conversation.messages = self._begun_messages(conversation.messages, episode)
        return super()._opened(conversations)

    def _reset(self, episode: Episode) -> None:
        """Begin an episode; an error is kept in it."""
        try:
            episode.object = episode.call("()", self.make, self.reset_seconds)
            row = deepcopy(dict(episode.task))
            text = episode.call("reset", lambda: episode.object.reset(**row), self.reset_seconds)
            if not (text is None or isinstance(text, str)):
                raise TypeError(f"it must return text or None, and returned {kind_of_value(text)}")
            episode.text = text or ""
        except Exception as error:  # noqa: BLE001  recorded, counted and excluded, like a failed reward
            episode.fail("reset", error)

    def _begun_messages(self, messages: Sequence[Message], episode: Episode) -> list[Message]:
        """The messages of a row with the text of reset behind the last one."""
        *before, last = messages
        return [*before, {**last, "content": last["content"] + episode.text}]

    # Going on

    def respond(self, conversations: Sequence[Conversation]) -> None:
        """See `EnvBase.respond`."""
        self.start()
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
        episode = self.episodes[conversation.key] = Episode(self.name, conversation.task)
        episode.answered = answered
        self._reset(episode)
        try:
            if episode.error is None:
                self._repeat(conversation, episode)
        except Exception as error:  # noqa: BLE001  as in _reset
            episode.fail("a repeated call", error)
        return episode

    def _repeat(self, conversation: Conversation, episode: Episode) -> None:
        """Make the calls of a saved conversation again. Raises ToolError if another text comes of it."""
        opening = self._begun_messages(self.opening_messages(conversation.task), episode)
        shown = [message["content"] for message in conversation.messages[: conversation.opening]]
        if shown != [message["content"] for message in opening]:
            raise ToolError("reset was called again, and its text is not the one that the model has read")
        for number, call, answer in self.tools.answered_calls(conversation) if self.tools is not None else ():
            if self.methods is None or not self.methods.takes(call.name):
                continue
            assert self.tools is not None
            text = self.tools.shown(self.methods, number, call, self.methods.run(episode, call))
            if answer != text and not answer.startswith(f"{text}\nonly "):  # which a limit of calls has added
                raise ToolError(f"its calls were made again, and {call.name} answers {text!r:.80}, not {answer!r:.80}")

    # Ending

    def score_finished(self, conversations: Sequence[Conversation]) -> None:
        """See `ChatEnv.score_finished`: by get_reward, and by the rewards of the settings. Raises RewardError."""
        playing = [conversation for conversation in conversations if conversation.valid]
        scores = together(self._score, playing)
        for conversation, score in zip(playing, scores, strict=True):
            record(conversation, score)
        super().score_finished([conversation for conversation in playing if conversation.valid])

    def _score(self, conversation: Conversation) -> Score:
        episode = self._take_up(conversation)
        reward: Any = 0.0
        if episode.error is None and self.has_reward:
            try:
                reward = self._reward_of(episode)
            except Exception as error:  # noqa: BLE001  as in _reset
                episode.fail("get_reward", error)
        if episode.error is not None:
            return Score(math.nan, valid=False, error=episode.error)
        return Score(reward, parts={self.name: reward} if self.has_reward else {})

    def _reward_of(self, episode: Episode) -> float:
        value = episode.call("get_reward", episode.object.get_reward, self.reset_seconds)
        number = as_number(value)
        if number is None or why_untrainable(number):
            raise TypeError(f"it must return a finite number, and returned {kind_of_value(value)}")
        return number

    def conclude(self, conversations: Sequence[Conversation]) -> None:
        """See `EnvBase.conclude`: the episodes end."""
        super().conclude(conversations)
        self._end([conversation.key for conversation in conversations])

    def abandon(self, conversations: Sequence[Conversation] | None = None) -> None:
        """See `EnvBase.abandon`."""
        super().abandon(conversations)
        self._end(list(self.episodes) if conversations is None else [c.key for c in conversations])

    def close(self) -> None:
        """See `EnvBase.close`."""
        super().close()
        self._end(list(self.episodes))

    def _end(self, keys: Sequence[tuple[int, int]]) -> None:
        for key in keys:
            if (episode := self.episodes.pop(key, None)) is not None:
                episode.close()

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
            first, again = Episode(self.name, row), Episode(self.name, row)
            for episode in (first, again):
                self._reset(episode)
            if first.error is None and again.error is None and first.text != again.text:
                first.error = f"reset begins with another text each time: {first.text!r:.80} and {again.text!r:.80}"
            if first.error is None and again.error is None and self.has_reward:
                try:
                    earned.append(self._reward_of(first))
                except Exception as error:  # noqa: BLE001  of the user's class: named with its row
                    first.fail("get_reward", error)
            if wrong := first.error or again.error:
                raise DataError(f"{self.where(number)}: {wrong}")
        untouched = [f"without a call an episode earns {fmean(earned):g} on average"] if earned else []
        tools = ", ".join(self.methods.names()) or "none"
        return [f"{len(rows)} episodes, each begun twice: both times alike", f"its tools: {tools}", *untouched]


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
        """See `ToolTransform.call`. Raises Late."""
        return self.run(self.env.episodes[conversation.key], call)

    def run(self, episode: Episode, call: ToolCall) -> ToolResult:
        """The answer of an episode's object to a call. Raises Late if none comes in time."""
        try:
            bound = self._signatures[call.name].bind(**call.arguments)
        except TypeError as error:
            return ToolResult(f"{call.name} cannot be called like that: {error}", ok=False)
        method = partial(getattr(episode.object, call.name), *bound.args, **bound.kwargs)
        try:
            return ToolResult(str(episode.call(call.name, method, self.env.step_seconds)))
        except Late:
            raise
        except Exception as error:  # noqa: BLE001  shown to the model and counted in tools/errors
            return ToolResult(f"{type(error).__name__}: {error}", ok=False)


class Late(Exception):
    """A call that did not return within its deadline."""


class Episode:
    """An object of the user's class in one conversation, and why it cannot go on, if it cannot.

    Its calls run one at a time, each in a thread that is left behind if it is late.
    """

    def __init__(self, name: str, task: Mapping[str, Any]) -> None:
        self.name, self.task = name, task
        self.object: Any = None
        self.text = ""  # of reset
        self.answered = 0  # turns of the model whose calls it has answered
        self.error: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, what: str, act: Callable[[], Any], seconds: float) -> Any:
        """The value of `act()`, awaited where it is awaitable. Raises what it raises, and Late."""
        done: Future[Any] = Future()
        # daemonic: a call that hangs must not keep the interpreter from exiting
        threading.Thread(target=self._run, args=(act, done), name=f"rlpost-{self.name}", daemon=True).start()
        try:
            return done.result(seconds)
        except FutureTimeout:
            if done.done():  # it raised this itself
                raise
            self._loop = None  # which the late call goes on using
            shown = what if what.startswith("(") else f".{what}"
            raise Late(f"{self.name}{shown} did not return within {seconds:g} s") from None

    def fail(self, what: str, error: Exception) -> None:
        """Keep why the episode cannot go on."""
        texts = {Late: str(error), ToolError: f"{self.name}: {error}"}
        self.error = texts.get(type(error), f"{self.name}.{what} failed: {named(error)}")

    def close(self) -> None:
        """Close the loop of async calls."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    def _run(self, act: Callable[[], Any], done: Future[Any]) -> None:
        try:
            value = act()
            if inspect.isawaitable(value):
                self._loop = self._loop or asyncio.new_event_loop()
                value = self._loop.run_until_complete(_awaited(value))
            done.set_result(value)
        except BaseException as error:  # noqa: BLE001  raised again by `call`
            done.set_exception(error if isinstance(error, Exception) else RuntimeError(named(error)))


async def _awaited(value: Any) -> Any:
    return await value


def _answered(conversation: Conversation) -> int:
    """How many turns of the model have been answered: those with a message behind them."""
    own = conversation.messages[conversation.opening :]
    return sum(message["role"] == "assistant" for message in own[:-1])


def _not_started() -> Any:
    raise AssertionError("the class is imported by start")
