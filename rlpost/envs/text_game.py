"""Games of several turns: any object with gymnasium's `reset` and `step`, one conversation an episode."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rlpost.data.conversation import CUT, Conversation
from rlpost.envs.chat import Task
from rlpost.envs.endless import EndlessEnv, EndlessProblems
from rlpost.errors import ConfigError, DataError, ToolError, named
from rlpost.imports import require
from rlpost.rewards.score import Score
from rlpost.settings import EnvSettings
from rlpost.settings.env import named_values
from rlpost.text import did_you_mean, nearest

CLOSE_SECONDS = 5.0  # that are waited for games to end
PROMPT_TEMPLATE = "You play {game}. {moves} Write your next move between <action> and </action>.\n\n{observation}"
_STYLED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)


# Text of games and of moves


def observation_text(game: Any, observation: Any, info: Any) -> str:
    """The game's drawing if it draws text (`render_mode="ansi"`), else its observation as Python prints it."""
    drawn = game.render() if getattr(game, "render_mode", None) == "ansi" else None
    return plain(drawn) if isinstance(drawn, str) else str(observation)


def text_of_action(reply: str) -> str:
    """The text in the last `<action>` tags of a reply, or the whole reply."""
    found = _ACTION.findall(reply)
    return (found[-1] if found else reply).strip()


def action_parser(moves: Sequence[str] = ()) -> Callable[[Any, str], Any]:
    """Reads an action: the place of a move in `moves`, else a number of a Discrete space, else the text itself."""
    places = {move.casefold(): place for place, move in enumerate(moves)}

    def parse(game: Any, text: str) -> Any:
        space: Any = getattr(game, "action_space", None)
        if places:
            if text.casefold() not in places:
                raise ValueError(f"{text[:80]!r} is not one of {', '.join(moves)}")
            return places[text.casefold()] + getattr(space, "start", 0)
        if hasattr(space, "n"):
            return _number(text, int(space.start), int(space.n))
        if not text:
            raise ValueError("it is empty")
        return text

    return parse


def moves_of(game: Any, moves: Sequence[str] = ()) -> str:
    """The moves of a game in words."""
    space: Any = getattr(game, "action_space", None)
    if not moves and hasattr(space, "n"):
        moves = [str(number) for number in range(int(space.start), int(space.start) + int(space.n))]
    return ", ".join(moves)


def plain(text: str) -> str:
    """Text without escape codes; highlighted characters are put in brackets."""
    return _ESCAPES.sub("", _STYLED.sub(r"[\1]", text)).strip("\n")


def _number(text: str, start: int, count: int) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", text) or not start <= int(text) < start + count:
        raise ValueError(f"{text[:80]!r} is not a number from {start} to {start + count - 1}")
    return int(text)


# The environment


class TextGameEnv(EndlessEnv):
    """An episode of a game a conversation: the first observation is the prompt, each reply a move.

    `game` makes a fresh object with `reset(seed=) -> (observation, info)` and `step(action) ->
    (observation, reward, terminated, truncated, info)` (or `(observation, reward, done, info)`); a str is a
    gymnasium id, made with `arguments` and drawn as text where the game can. `show`, `parse` and `earned`
    are those of `Rules`; `moves` names the actions 0, 1, ... of a game that numbers them.

    A task has `game`, `moves`, `observation`, and `start`, the seed of the game: those of one group begin
    alike, and no seed is in both splits (two seeds may look alike all the same). The reward is the sum of
    what all moves earn, with the parts `earned` (the same) and `invalid_actions`, how many replies were no
    action. With `success_return` an episode that earns so much counts as accurate. A game that raises or is
    late makes its conversation invalid. A saved conversation goes on by playing its replies again, unless
    `replays` is False; if the game then shows another text than the model has read, the conversation is invalid.
    A game that draws from the process-wide generators of `random` or NumPy has a state of them to itself, and such
    games move one after the other. Other arguments are `DatasetChatEnv`'s.
    """

    takes_tools = False
    max_reward = None
    has_accuracy = False

    def __init__(
        self,
        game: str | Callable[[], Any],
        *,
        arguments: Mapping[str, Any] | None = None,
        name: str | None = None,
        show: Callable[[Any, Any, Any], str] = observation_text,
        parse: Callable[[Any, str], Any] | None = None,
        earned: Callable[[Any, float], float] | None = None,
        moves: Sequence[str] = (),
        invalid_reward: float = 0.0,
        success_return: float | None = None,
        start_seconds: float = 60.0,
        step_seconds: float = 10.0,
        replays: bool = True,
        prompt_template: str = PROMPT_TEMPLATE,
        max_steps: int | None = 10,
        **chat: Any,
    ) -> None:
        super().__init__(prompt_template=prompt_template, max_steps=max_steps, **chat)
        self.arguments = dict(arguments or {})
        self.name = name or (game if isinstance(game, str) else getattr(game, "__name__", type(game).__name__))
        self.moves = tuple(moves)
        self.success_return = success_return
        self.replays = replays
        own: dict[str, Any] = {} if earned is None else {"earned": earned}
        self.rules = Rules(
            make=self._gymnasium_game if isinstance(game, str) else game,
            show=show,
            parse=parse or action_parser(moves),
            invalid_reward=invalid_reward,
            start_seconds=start_seconds,
            step_seconds=step_seconds,
            **own,
        )
        self._id = game if isinstance(game, str) else None
        self.games: dict[tuple[int, int], Game] = {}  # in progress, by the keys of their conversations

    @classmethod
    def arguments_of(cls, settings: EnvSettings) -> dict[str, Any]:
        """See `DatasetChatEnv.arguments_of`."""
        own = super().arguments_of(settings)
        own["game"] = own.pop("id")
        own["arguments"] = named_values("env.arguments", own["arguments"])
        return own

    def _gymnasium_game(self) -> Any:
        """A game of gymnasium's registry. Raises ConfigError for an unknown id or a wrong argument."""
        import gymnasium

        assert self._id is not None
        if ":" not in self._id and self._id not in gymnasium.registry:
            hint = did_you_mean(nearest(self._id, gymnasium.registry)) or ": see gymnasium.registry"
            raise ConfigError(f"env.id={self._id} is not a game of gymnasium{hint}")
        try:
            game = gymnasium.make(self._id, **self.arguments)
            if "ansi" in game.metadata.get("render_modes", ()) and "render_mode" not in self.arguments:
                game.close()
                game = gymnasium.make(self._id, render_mode="ansi", **self.arguments)
        except (gymnasium.error.Error, TypeError) as error:
            raise ConfigError(f"env.id={self._id} cannot be made: {error}") from error
        return game

    # Beginning

    def start(self) -> None:
        """See `DatasetChatEnv.start`; makes one game, to see that it can be made and begun.

        Raises MissingExtraError without gymnasium, ConfigError for an id it has not, DataError for a game
        that cannot be begun.
        """
        if self._id is not None:
            require("gymnasium", "gymnasium", "env=text_game")
            self._gymnasium_game().close()
        super().start()

    def open_rows(self, seed: int) -> Starts:
        """See `DatasetChatEnv.open_rows`."""
        return Starts(self, seed)

    def close(self) -> None:
        """See `EnvBase.close`: ends the games in progress."""
        super().close()
        self.abandon()

    def abandon(self, conversations: Sequence[Conversation] | None = None) -> None:
        """See `EnvBase.abandon`."""
        super().abandon(conversations)
        keys = list(self.games) if conversations is None else [conversation.key for conversation in conversations]
        self._end(keys)

    def _end(self, keys: Sequence[tuple[int, int]]) -> None:
        """End the games of the conversations with these keys, where there are some."""
        games = [self.games.pop(key, None) for key in keys]
        end_games([game for game in games if game is not None])

    # Going on

    def respond(self, conversations: Sequence[Conversation]) -> None:
        """See `EnvBase.respond`: all games move at the same time."""
        for game in [self._ask(conversation) for conversation in conversations]:
            try:
                if game.error is None:
                    game.answer()
            except ToolError as error:
                game.error = str(error)
        super().respond(conversations)

    def conclude(self, conversations: Sequence[Conversation]) -> None:
        """See `EnvBase.conclude`: the games end."""
        super().conclude(conversations)
        self._end([conversation.key for conversation in conversations])

    def _ask(self, conversation: Conversation) -> Game:
        """The conversation's game, playing the replies it has not played yet; begun again if it is at another turn."""
        spoken = [m["content"] for m in conversation.messages if m["role"] == self.policy_role][-conversation.turns :]
        before = conversation.turns - (conversation.finish_reason != "context")  # for which there was no reply
        moves = spoken[:before] if conversation.finish_reason in CUT else spoken  # a truncated reply is not a move
        game, task = self.games.get(conversation.key), conversation.task
        if game is None or game.seed != task["start"] or game.turns != before:
            if game is not None:
                end_games([game])
            observations = [
                m["content"] for m in conversation.messages[conversation.opening :] if m["role"] == self.user_role
            ]
            game = Game(self.rules, self.name, task["start"], [task["observation"], *observations])
            self.games[conversation.key] = game
            if before and not self.replays:
                game.error = f"{self.name}: a running game cannot be restarted: let conversations end before saving"
        if game.error is None:
            game.ask(moves[game.turns :])
        return game

    def _answer(self, conversation: Conversation) -> None:
        """End the conversation if its game is over, else show the game's text."""
        game = self.games[conversation.key]
        played = game.played
        if game.error is not None or played is None:
            conversation.truncated = True
        elif played.terminated or played.truncated:
            conversation.terminated, conversation.truncated = played.terminated, not played.terminated
        elif self._was_last(conversation):
            conversation.truncated = True
        else:
            conversation.messages.append({"role": self.user_role, "content": played.text})

    def score(self, conversation: Conversation) -> Score:
        """The sum of the moves' rewards; an error if the game failed."""
        game = self.games[conversation.key]
        if game.error is not None or game.played is None:
            return Score(math.nan, valid=False, error=game.error)
        total = game.played.total
        solved = None if self.success_return is None else float(total >= self.success_return)
        return Score(
            reward=total,
            parts={"earned": total, "invalid_actions": float(game.played.invalid)},
            weights={"invalid_actions": 0.0},
            accuracy_strict=solved,
            accuracy_lenient=solved,
        )

    def all_tasks(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """See `EnvBase.all_tasks`. Raises DataError: no one reply wins a game."""
        raise DataError(f"{self.name} is a game, and no single reply wins it: there is nothing to test with")


class Starts(EndlessProblems):
    """The starts of a game, identified by their seeds."""

    def make(self, number: int) -> Task:
        """See `EndlessProblems.make`."""
        digest = hashlib.blake2b(f"{self.seed}/{number}".encode(), digest_size=4).digest()
        return {"start": int.from_bytes(digest, "big") >> 1}

    def at(self, position: int) -> Task:
        """See `EndlessProblems.at`; raises DataError where the game cannot be begun."""
        env, start = self.env, super().at(position)["start"]
        apart = env.rules.draws_globally
        game = Game(env.rules, env.name, start)
        try:
            game.ask()
            observation = game.answer().text
            moves = moves_of(game.object, env.moves)
        except ToolError as error:
            raise DataError(f"a game cannot be begun: {error}") from error
        finally:
            end_games([game])
        if env.rules.draws_globally and not apart:  # found out just now: it begins otherwise from now on
            return self.at(position)
        moves_text = f"Your moves are {moves}." if moves else "A move is a text."
        return {"game": env.name, "moves": moves_text, "observation": observation, "start": start}

    def identity(self, task: Task) -> str:
        """See `EndlessProblems.identity`."""
        return str(task["start"])

    def describe(self) -> str:
        """See `EndlessProblems.describe`."""
        return json.dumps([self.env.name, self.env.arguments, self.env.moves], sort_keys=True, default=str)


# One game


@dataclass
class Rules:
    """How text becomes moves, and a game becomes text.

    `make` makes a fresh game. `show(game, observation, info)` is what the model reads; `parse(game, text)`
    the action that its text means, or a ValueError that says to the model why it is none;
    `earned(observation, reward)` what a step is worth. An action that is none earns `invalid_reward` and
    leaves the game as it is. `reset` may take `start_seconds`, `step` `step_seconds`.
    """

    make: Callable[[], Any]
    show: Callable[[Any, Any, Any], str]
    parse: Callable[[Any, str], Any]
    earned: Callable[[Any, float], float] = lambda observation, reward: float(reward)
    invalid_reward: float = 0.0
    start_seconds: float = 60.0
    step_seconds: float = 10.0
    draws_globally: bool = False  # once a game has been seen to


@dataclass
class Played:
    """The state of a game: its text, the sum of its rewards, and how it ended."""

    text: str
    turns: int = 0
    total: float = 0.0
    invalid: int = 0
    terminated: bool = False
    truncated: bool = False


class Game:
    """A game that begins with `reset(seed=seed)` and is moved by replies, in a thread of its own.

    `shown` are the texts that it has shown before, as far as they are known: the first observation, and one behind each
    move. A call that does not return in time is left behind.
    """

    def __init__(self, rules: Rules, name: str, seed: int, shown: Sequence[str] = ()) -> None:
        self.rules, self.name, self.seed, self.shown = rules, name, seed, list(shown)
        self._drawn: tuple[Any, Any] = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()
        self.played: Played | None = None
        self.error: str | None = None
        self.object: Any = None
        self._calls: list[tuple[str, float, Callable[[], None], Future[None]]] = []  # pending: name, seconds, result

    @property
    def turns(self) -> int:
        """Replies that have been played."""
        return self.played.turns if self.played else 0

    def ask(self, replies: Sequence[str] = ()) -> None:
        """Begin the game unless it has begun, and play `replies` one after the other; `answer` waits for it."""
        if self.played is None:
            self._calls.append(("reset", self.rules.start_seconds, self._begin, Future()))
        for reply in replies:
            self._calls.append(("step", self.rules.step_seconds, partial(self._move, reply), Future()))
        # daemonic: a game that hangs must not keep the interpreter from exiting
        threading.Thread(target=self._run, args=(self._calls,), name=f"rlpost-game-{self.name}", daemon=True).start()

    def answer(self) -> Played:
        """The game's state after the pending calls. Raises ToolError if one failed or is late."""
        calls, self._calls = self._calls, []
        for what, seconds, _, result in calls:
            try:
                result.result(seconds)
            except FutureTimeout:
                raise ToolError(f"{self.name}: {what} did not return within {seconds:g} s") from None
            except Exception as error:
                raise ToolError(f"{self.name}: {what} failed: {named(error)}") from error
        assert self.played is not None
        return self.played

    def close(self) -> Future[None]:
        """Tell the game to end; done when it has."""
        closed: Future[None] = Future()
        threading.Thread(target=self._run, args=([("close", 0.0, self._close, closed)],), daemon=True).start()
        return closed

    # In the game's thread

    def _run(self, calls: Sequence[tuple[str, float, Callable[[], None], Future[None]]]) -> None:
        for _, _, call, result in calls:
            try:
                with self._generators():
                    result.set_result(call())
            except BaseException as error:  # noqa: BLE001  raised again by `answer`
                result.set_exception(error)
                return

    def _begin(self) -> None:
        self.object = self.rules.make()
        observation, info = self.object.reset(seed=self.seed)
        self.played = Played(self.rules.show(self.object, observation, info))
        self._check_shown(f"reset(seed={self.seed}) does not always begin with the same observation")

    def _move(self, reply: str) -> None:
        played = self.played
        assert played is not None
        if played.terminated or played.truncated:
            return
        played.turns += 1
        try:
            action = self.rules.parse(self.object, text_of_action(reply))
        except ValueError as error:
            played.invalid += 1
            played.total += self.rules.invalid_reward
            played.text = f"That is not a valid action: {error}"
            self._check_shown("its moves were played again, and it shows another text than the model has read")
            return
        observation, reward, *ends, info = self.object.step(action)
        played.total += self.rules.earned(observation, reward)
        played.terminated, played.truncated = bool(ends[0]), any(map(bool, ends[1:]))  # some have `done` alone
        played.text = self.rules.show(self.object, observation, info)
        self._check_shown("its moves were played again, and it shows another text than the model has read")

    def _check_shown(self, wrong: str) -> None:
        """Raise ValueError if the game has shown another text at this turn before."""
        assert self.played is not None
        if self.shown[self.played.turns : self.played.turns + 1] not in ([], [self.played.text]):
            raise ValueError(wrong)

    @contextmanager
    def _generators(self) -> Iterator[None]:
        """The process-wide generators in the state in which this game left them, where it draws from them."""
        if not self.rules.draws_globally:
            uses, apart = _uses[0], not _DRAWING.locked()  # before the states: a use from here on is counted
            before = _states()
            yield
            # a change may be the work of another game that had its turn meanwhile, whose state must stay
            if apart and _DRAWING.acquire(blocking=False):
                try:
                    if _uses[0] == uses and _digest(_states()) != _digest(before):
                        self._drawn = _states()
                        _restore(before)
                        self.rules.draws_globally = True
                        _uses[0] += 1
                finally:
                    _DRAWING.release()
            return
        with _DRAWING:
            _uses[0] += 1
            others = _states()
            _restore(self._drawn)
            try:
                yield
            finally:
                self._drawn = _states()
                _restore(others)

    def _close(self) -> None:
        if hasattr(self.object, "close"):
            self.object.close()


_DRAWING = threading.Lock()  # held while a game draws from the process-wide generators
_uses = [0]  # how often a game has set the process-wide generators


def _states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _restore(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _digest(states: tuple[Any, Any]) -> tuple[Any, ...]:
    own, (_, keys, place, *normal) = states
    return own, keys.tobytes(), place, *normal


def end_games(games: Sequence[Game]) -> None:
    """Close games, all at the same time, and wait a few seconds for them: the next one may need the same resources."""
    wait([game.close() for game in games if game.error is None], CLOSE_SECONDS)
