"""Games of several turns: any object with gymnasium's `reset` and `step`, one conversation an episode."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from rlpost.data.conversation import CUT, Completion, Conversation, Ticket
from rlpost.envs.chat import Task
from rlpost.envs.draws import GENERATORS, Draws, Watch
from rlpost.envs.endless import EndlessEnv, EndlessProblems
from rlpost.envs.game_calls import Called, make_calls
from rlpost.errors import ConfigError, DataError
from rlpost.imports import require
from rlpost.rewards.score import Score
from rlpost.settings import EnvSettings
from rlpost.settings.env import named_values
from rlpost.text import did_you_mean, nearest

CLOSE_SECONDS = 5.0  # that a game may take to end
BEGUN_AT_MOST = 256  # games that wait for their conversations
TRIED = 3  # starts that `rlpost env test` plays
TRIED_MOVES = 200  # most moves of each
PROMPT_TEMPLATE = "You play {game}. {moves} Write your next move between <action> and </action>.\n\n{observation}"
MOVES = "Your moves are {}."
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


def score_of_episode(earned: float, success_return: float | None, **counts: int) -> Score:
    """The score of an episode that earned so much; `counts` are parts without weight."""
    solved = None if success_return is None else float(earned >= success_return)
    return Score(
        reward=earned,
        parts={"earned": earned, **{name: float(count) for name, count in counts.items()}},
        weights=dict.fromkeys(counts, 0.0),
        accuracy_strict=solved,
        accuracy_lenient=solved,
    )


# The environment


class TextGameEnv(EndlessEnv):
    """An episode of a game a conversation: the first observation is the prompt, each reply a move.

    `game` makes a fresh object with `reset(seed=) -> (observation, info)` and `step(action) ->
    (observation, reward, terminated, truncated, info)` (or `(observation, reward, done, info)`); a str is a
    gymnasium id, made with `arguments` and drawn as text where the game can. `show(game, observation, info)` is
    what the model reads; `parse(game, text)` the action that its text means, or a ValueError that says to the model
    why it is none; `earned(observation, reward)` what a step is worth. An action that is none earns `invalid_reward`
    and leaves the game as it is; `refused(info)` is whether the game itself has refused the action of a step. `reset`
    may take `start_seconds`, `step` `step_seconds`. `moves` names the actions 0, 1, ... of a game that numbers them.

    A task has `game`, `moves`, `observation`, and `start`, the seed of the game: those of one group begin
    alike, and no seed is in both splits (two seeds may look alike all the same). The reward is the sum of
    what all moves earn, with the parts `earned` (the same) and `invalid_actions`, how many replies were no
    action. With `success_return` an episode that earns so much counts as accurate. A game that raises or is
    late makes its conversation invalid. A saved conversation goes on by playing its replies again, unless
    `replays` is False; if the game then shows another text than the model has read, the conversation is invalid.
    A game that draws from the process-wide generators of `random` or NumPy has a state of them to itself, and such
    games move one after the other; `draws_from` names these generators, if it is known from which ones the game draws.
    Other arguments are `DatasetChatEnv`'s.
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
        earned: Callable[[Any, float], float] = lambda observation, reward: float(reward),
        refused: Callable[[Any], bool] = lambda info: False,
        moves: Sequence[str] = (),
        invalid_reward: float = 0.0,
        success_return: float | None = None,
        start_seconds: float = 60.0,
        step_seconds: float = 10.0,
        replays: bool = True,
        draws_from: Sequence[str] | None = None,
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
        self.make = self._gymnasium_game if isinstance(game, str) else game
        self.show = show
        self.parse = parse or action_parser(moves)
        self.earned = earned
        self.refused = refused
        self.invalid_reward = invalid_reward
        self.start_seconds = start_seconds
        self.step_seconds = step_seconds
        self.draws_from = draws_from
        self._id = game if isinstance(game, str) else None
        self.waiting: dict[int, Game] = {}  # by their starts: games that no conversation has yet
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
        if self._id is not None and self._rows is None:
            require("gymnasium", "gymnasium", "env=text_game")
            self._gymnasium_game().close()
        super().start()

    def open_rows(self, seed: int) -> Starts:
        """See `DatasetChatEnv.open_rows`."""
        return Starts(self, seed)

    def tickets(self, count: int | None = None) -> list[Ticket]:
        """See `EnvBase.tickets`: the games are begun all at once, to be played by the first of their conversations."""
        self.start()
        primer = self.primer
        if primer is not None and primer.serves(self._rows):
            last = primer.position + (self.numel() if count is None else count)
            self._rows.begin(range(-(-primer.position // primer.repeats), -(-last // primer.repeats)))
        return super().tickets(count)

    def close(self) -> None:
        """See `EnvBase.close`: ends the games in progress."""
        super().close()
        self.abandon()

    def abandon(self, conversations: Sequence[Conversation] | None = None) -> None:
        """See `EnvBase.abandon`."""
        super().abandon(conversations)
        if conversations is None:
            self._end(list(self.games))
            self.end_waiting(0)
        else:
            self._end([conversation.key for conversation in conversations])

    def end_waiting(self, most: int) -> None:
        """End the oldest games that no conversation has yet, until there are `most`."""
        games: list[Game] = []
        with suppress(KeyError, RuntimeError, StopIteration):  # another thread may take games meanwhile
            while len(self.waiting) > most:
                games.append(self.waiting.pop(next(iter(self.waiting))))
        end_games(games)

    def _end(self, keys: Sequence[tuple[int, int]]) -> None:
        """End the games of the conversations with these keys, where there are some."""
        games = [self.games.pop(key, None) for key in keys]
        end_games([game for game in games if game is not None])

    # Going on

    def respond(self, conversations: Sequence[Conversation]) -> None:
        """See `EnvBase.respond`: all games move at the same time, or in turn if they draw from the same generators."""
        if play([self._ask(conversation) for conversation in conversations]) and self.replays:
            self._end([conversation.key for conversation in conversations])  # they begin again, each with its own draws
            play([self._ask(conversation) for conversation in conversations])
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
        if game is None and not before and (kept := self.waiting.pop(task["start"], None)) is not None:
            game = self.games[conversation.key] = kept
        if game is None or game.seed != task["start"] or game.turns != before:
            if game is not None:
                end_games([game])
            observations = [
                m["content"] for m in conversation.messages[conversation.opening :] if m["role"] == self.user_role
            ]
            game = Game(self, task["start"], [task["observation"], *observations])
            self.games[conversation.key] = game
            if before and not self.replays:
                game.error = f"{self.name}: a running game cannot be restarted: let conversations end before saving"
        if game.error is None:
            game.ask(moves[game.turns :])
        return game

    def _answer(self, conversation: Conversation) -> None:
        """End the conversation if its game is over, else show the game's text."""
        game = self.games[conversation.key]
        if game.error is not None:
            conversation.truncated = True
        elif game.terminated or game.truncated:
            conversation.terminated, conversation.truncated = game.terminated, not game.terminated
        elif self._was_last(conversation):
            conversation.truncated = True
        else:
            conversation.messages.append({"role": self.user_role, "content": game.text})

    def score(self, conversation: Conversation) -> Score:
        """The sum of the moves' rewards; an error if the game failed."""
        game = self.games[conversation.key]
        if game.error is not None:
            return Score(math.nan, valid=False, error=game.error)
        return score_of_episode(game.total, self.success_return, invalid_actions=game.invalid)

    # Trying out

    def all_tasks(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """See `EnvBase.all_tasks`. Raises DataError: no one reply wins a game."""
        raise DataError(f"{self.name} is a game, and no single reply wins it: there is nothing to test with")

    def rehearse(self) -> list[str]:
        """See `EnvBase.rehearse`: plays a few starts twice with the same replies, and compares the conversations.

        The second time the game begins again in the middle and hears its replies again, as when a run is resumed.
        Raises DataError for a game that fails, or goes another way the second time.
        """
        self.start()
        played: list[Conversation] = []
        cut = 0
        for number in range(min(TRIED, self._rows.count())):
            task = self._rows.at(number)
            replies = self.tried_replies(task)
            replies = [*replies[number % len(replies) :], *replies[: number % len(replies)]]
            whole, again = (self.begun(task) for _ in range(2))
            self._play_on(whole, replies)
            if self.replays:
                self._play_on(again, replies, whole.turns // 2)
                self.abandon([again])
            self._play_on(again, replies)
            cut += not whole.done or (whole.truncated and self._was_last(whole))
            self.abandon([whole, again])
            if wrong := whole.error or again.error:
                raise DataError(f"{self.split} start {number + 1}, {', '.join(map(repr, replies[:3]))}: {wrong}")
            if (again.messages, again.reward) != (whole.messages, whole.reward):
                raise DataError(f"{self.name}: the same seed and replies lead to another conversation the second time")
            played.append(whole)
        turns = sorted(conversation.turns for conversation in played)
        return [
            f"{len(played)} starts, each played twice with the same replies: both times alike",
            f"  rewards {', '.join('none' if c.reward is None else f'{c.reward:g}' for c in played)}; "
            f"{turns[0]} to {turns[-1]} turns; {cut} cut off by env.max_turns, or after {TRIED_MOVES} moves",
            "  the first prompt:",
            *(f"    {line}" for line in played[0].query.splitlines()),
        ]

    def tried_replies(self, task: Mapping[str, Any]) -> Sequence[str]:
        """Replies to play in `rehearse`, over and over: the moves of the game, where it names them."""
        before, _, after = MOVES.partition("{}")
        listed = task["moves"].startswith(before)
        return task["moves"].removeprefix(before).removesuffix(after).split(", ") if listed else ["1"]

    def _play_on(self, conversation: Conversation, replies: Sequence[str], turns: int = TRIED_MOVES) -> None:
        """Play `replies` over and over until the conversation is done or has `turns` turns."""
        while not conversation.done and conversation.turns != turns:
            reply = replies[conversation.turns % len(replies)]
            conversation.add_completion(Completion([], [], reply, "stop", 0))
            self.advance([conversation])


class Starts(EndlessProblems):
    """The starts of a game, identified by their seeds."""

    def make(self, number: int) -> Task:
        """See `EndlessProblems.make`."""
        digest = hashlib.blake2b(f"{self.seed}/{number}".encode(), digest_size=4).digest()
        return {"start": int.from_bytes(digest, "big") >> 1}

    def at(self, position: int) -> Task:
        """See `EndlessProblems.at`; raises DataError where the game cannot be begun."""
        start = super().at(position)["start"]
        game = self.env.waiting.get(start) or self.begin([position])[0]
        if game.error is not None:
            if isinstance(game.failure, ConfigError):
                raise game.failure
            raise DataError(f"a game cannot be begun: {game.error}") from game.failure
        moves = moves_of(game.object, self.env.moves)
        moves_text = MOVES.format(moves) if moves else "A move is a text."
        return {"game": self.env.name, "moves": moves_text, "observation": game.text, "start": start}

    def begin(self, positions: Sequence[int]) -> list[Game]:
        """Begin the games at `positions`, all at once; a game that has begun waits for its conversation."""
        env = self.env
        starts = dict.fromkeys(super(Starts, self).at(position)["start"] for position in positions)
        fresh = [Game(env, start) for start in starts if start not in env.waiting]
        for game in fresh:
            game.ask()
        if play(fresh):  # it is known only now how to begin them
            end_games(fresh)
            return self.begin(positions)
        env.waiting.update({game.seed: game for game in fresh if game.error is None})
        env.end_waiting(BEGUN_AT_MOST)
        return fresh

    def identity(self, task: Task) -> str:
        """See `EndlessProblems.identity`."""
        return str(task["start"])

    def describe(self) -> str:
        """See `EndlessProblems.describe`."""
        return json.dumps([self.env.name, self.env.arguments, self.env.moves], sort_keys=True, default=str)


# One game


class Game(Called):
    """A game that begins with `reset(seed=seed)` and is moved by replies.

    `shown` are the texts that it has shown before, as far as they are known: the first observation, and one behind each
    move. A call that does not return in time is left behind.
    """

    def __init__(self, env: TextGameEnv, seed: int, shown: Sequence[str] = ()) -> None:
        super().__init__(env.name, Draws(seed))
        self.env, self.seed, self.shown = env, seed, list(shown)
        self.object: Any = None
        self.text = ""  # of the last observation
        self.turns = 0  # replies that have been played
        self.total = 0.0  # of the rewards
        self.invalid = 0  # replies that were no action
        self.terminated = self.truncated = False

    def ask(self, replies: Sequence[str] = ()) -> None:
        """Begin the game unless it has begun, and play `replies`, when `play` makes these calls."""
        if self.object is None:
            self.calls.append(("reset", self.env.start_seconds, self._begin))
        for reply in replies:
            self.calls.append(("step", self.env.step_seconds, partial(self._move, reply)))

    # In the thread that makes the calls

    def _begin(self) -> None:
        self.object = self.env.make()
        observation, info = self.object.reset(seed=self.seed)
        self.text = self.env.show(self.object, observation, info)
        self._check_shown(f"reset(seed={self.seed}) does not always begin with the same observation")

    def _move(self, reply: str) -> None:
        if self.terminated or self.truncated:
            return
        self.turns += 1
        try:
            action = self.env.parse(self.object, text_of_action(reply))
        except ValueError as error:
            self.invalid += 1
            self.total += self.env.invalid_reward
            self.text = f"That is not a valid action: {error}"
        else:
            observation, reward, *ends, info = self.object.step(action)
            self.total += self.env.earned(observation, reward)
            self.invalid += self.env.refused(info)
            self.terminated, self.truncated = bool(ends[0]), any(map(bool, ends[1:]))  # some have `done` alone
            self.text = self.env.show(self.object, observation, info)
        self._check_shown("its moves were played again, and it shows another text than the model has read")

    def _check_shown(self, wrong: str) -> None:
        """Raise ValueError if the game has shown another text at this turn before."""
        if self.shown[self.turns : self.turns + 1] not in ([], [self.text]):
            raise ValueError(wrong)


def play(games: Sequence[Game]) -> bool:
    """Make the pending calls of games of one environment.

    True if they have been seen to draw from process-wide generators, which was not known: then they have disturbed
    each other, and have to be begun again.
    """
    if not games:
        return False
    env = games[0].env
    known = env.draws_from
    watch = Watch() if known is None else None
    make_calls([game for game in games if game.error is None], known or ())
    if watch is not None and watch.end():
        env.draws_from = GENERATORS
    return env.draws_from is not known


def end_games(games: Sequence[Game]) -> None:
    """Close games, all at the same time, and wait a few seconds for them: the next one may need the same resources."""
    ending = [game for game in games if game.error is None and hasattr(game.object, "close")]
    for game in ending:
        game.calls = [("close", CLOSE_SECONDS, game.object.close)]
    make_calls(ending, ending[0].env.draws_from or () if ending else ())
