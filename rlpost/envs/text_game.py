"""Games of several turns: any object with gymnasium's `reset` and `step`, one conversation an episode."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlpost.data.conversation import CUT, Conversation
from rlpost.envs.endless import EndlessEnv, EndlessProblems, Task
from rlpost.envs.games import Game, Rules, action_parser, end_games, moves_of, observation_text
from rlpost.errors import ConfigError, DataError, ToolError
from rlpost.extras import require
from rlpost.nearest import did_you_mean, nearest
from rlpost.rewards.score import Score
from rlpost.settings import EnvSettings
from rlpost.settings.more_envs import named_values

PROMPT_TEMPLATE = "You play {game}. {moves} Write your next move between <action> and </action>.\n\n{observation}"


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
    `replays` is False. Other arguments are `DatasetChatEnv`'s.
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
        own = {} if earned is None else {"earned": earned}
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
        self._games: dict[tuple[int, int], Game] = {}

    @classmethod
    def arguments_of(cls, settings: EnvSettings) -> dict[str, Any]:
        """See `DatasetChatEnv.arguments_of`."""
        own = super().arguments_of(settings)
        own["game"] = own.pop("id")
        own["arguments"] = named_values("env.arguments", own["arguments"])
        return own

    def _gymnasium_game(self) -> Any:
        """A game of gymnasium's registry. Raises ConfigError for one it has not, or an argument of no use to it."""
        import gymnasium

        assert self._id is not None
        if ":" not in self._id and self._id not in gymnasium.registry:
            hint = did_you_mean(nearest(self._id, gymnasium.registry)) or ": see gymnasium.registry"
            raise ConfigError(f"env.id={self._id} is no game of gymnasium's{hint}")
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
        settings = [self.name, self.arguments, self.moves]
        return Starts(
            self.rules, self.name, self.moves, settings, self.split, seed, limit=self.limit, held_out=self.held_out
        )

    def close(self) -> None:
        """See `EnvBase.close`: ends the games under way."""
        super().close()
        self.abandon()

    def abandon(self, conversations: Sequence[Conversation] | None = None) -> None:
        """See `EnvBase.abandon`."""
        super().abandon(conversations)
        keys = list(self._games) if conversations is None else [conversation.key for conversation in conversations]
        self._end(keys)

    def _end(self, keys: Sequence[tuple[int, int]]) -> None:
        """End the games of the conversations with these keys, where there are some."""
        games = [self._games.pop(key, None) for key in keys]
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
        """The conversation's game, told to play what it has not yet; begun again where it is not at that turn."""
        spoken = [m["content"] for m in conversation.messages if m["role"] == self.policy_role][-conversation.turns :]
        before = conversation.turns - (conversation.finish_reason != "context")  # for which there was no reply
        moves = spoken[:before] if conversation.finish_reason in CUT else spoken  # what was cut is no move
        game, task = self._games.get(conversation.key), conversation.task
        if game is None or game.seed != task["start"] or game.turns != before:
            if game is not None:
                end_games([game])
            game = self._games[conversation.key] = Game(self.rules, self.name, task["start"], task["observation"])
            if before and not self.replays:
                game.error = f"{self.name}: a game under way cannot be begun again: let conversations end before saving"
        if game.error is None:
            game.ask(moves[game.turns :])
        return game

    def _answer(self, conversation: Conversation) -> None:
        """End the conversation with its game, or show what the game shows."""
        game = self._games[conversation.key]
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
        """What the moves earned; an error where the game failed."""
        game = self._games[conversation.key]
        if game.error is not None or game.played is None:
            return Score(math.nan, valid=False, error=game.error)
        total = game.played.total
        solved = None if self.success_return is None else float(total >= self.success_return)
        return Score(
            reward=total,
            parts={"earned": total, "invalid_actions": float(game.played.invalid)},
            accuracy_strict=solved,
            accuracy_lenient=solved,
        )

    def all_tasks(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """See `EnvBase.all_tasks`. Raises DataError: no one reply wins a game."""
        raise DataError(f"{self.name} is a game, and no single reply wins it: there is nothing to test with")

    @property
    def answers(self) -> bool:
        """See `ChatEnv.answers`."""
        return True


class Starts(EndlessProblems):
    """The starts of a game, told apart by their seeds."""

    def __init__(
        self, rules: Rules, name: str, moves: Sequence[str], settings: Sequence[Any], split: str, seed: int, **more: Any
    ) -> None:
        super().__init__(split, seed, **more)
        self.rules = rules
        self.name = name
        self.moves = moves
        self.settings = settings

    def make(self, number: int) -> Task:
        """See `EndlessProblems.make`."""
        digest = hashlib.blake2b(f"{self.seed}/{number}".encode(), digest_size=4).digest()
        return {"start": int.from_bytes(digest, "big") >> 1}

    def at(self, position: int) -> Task:
        """See `EndlessProblems.at`; raises DataError where the game cannot be begun."""
        start = super().at(position)["start"]
        game = Game(self.rules, self.name, start)
        try:
            game.ask()
            observation = game.answer().text
            moves = moves_of(game._object, self.moves)
        except ToolError as error:
            raise DataError(f"a game cannot be begun: {error}") from error
        finally:
            end_games([game])
        told = f"Your moves are {moves}." if moves else "A move is a text."
        return {"game": self.name, "moves": told, "observation": observation, "start": start}

    def identity(self, task: Task) -> str:
        """See `EndlessProblems.identity`."""
        return str(task["start"])

    def describe(self) -> str:
        """See `EndlessProblems.describe`."""
        return json.dumps(self.settings, sort_keys=True, default=str)
