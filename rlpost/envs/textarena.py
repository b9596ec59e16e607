"""Games of TextArena for one player: https://github.com/LeonGuertler/TextArena."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from rlpost.envs.text_game import TextGameEnv
from rlpost.errors import ConfigError
from rlpost.imports import require
from rlpost.text import did_you_mean, nearest

PROMPT_TEMPLATE = "{observation}"  # the games say themselves how a move is written
_MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")  # as the rules of a game write an example
_NLTK_FOLDERS = ("corpora", "taggers")  # of the data that the games ask for


class TextArenaEnv(TextGameEnv):
    """A `TextGameEnv` of a one-player game of TextArena, by its id; `arguments` go to the game.

    The reply is the move: the game itself looks for `[brackets]` in it, forgives the first invalid move and ends
    with the second in a row. It gives its reward at its end, also for a part of the way; an episode that `max_steps`
    ends earns 0, and without it the game's own limit holds. The model reads the text that is new since its last
    move, without an echo of the move.
    """

    def __init__(
        self,
        game: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        prompt_template: str = PROMPT_TEMPLATE,
        max_steps: int | None = None,
        **game_settings: Any,
    ) -> None:
        super().__init__(
            partial(OnePlayer, game, dict(arguments or {})),
            name=game,
            arguments=arguments,
            show=lambda game, observation, info: observation,
            parse=lambda game, reply: reply,
            refused=lambda info: info.get("refused", False),
            draws_from=("random",),
            prompt_template=prompt_template,
            max_steps=max_steps,
            **game_settings,
        )

    def start(self) -> None:
        """See `TextGameEnv.start`.

        Raises MissingExtraError without TextArena, and ConfigError for an unknown id, for wrong arguments and for a
        game that is for more players or downloads data.
        """
        begins = self._rows is None
        if begins:  # a draw starts again, and looking for the version takes as long as a game
            require("textarena", "textarena", "env=textarena")
        super().start()
        if begins:
            self.notes = list(self._notes())

    def _notes(self) -> Iterator[str]:
        """Peculiarities of the game that a training should know."""
        first, second = self._rows.at(0), self._rows.at(1)
        own = self.waiting[first["start"]].object.game.state.max_turns
        if own is None:
            ends = "the model's context" if self.max_steps is None else f"env.max_turns={self.max_steps}"
            yield f"{self.name} has no limit of moves of its own: an episode that {ends} cuts off earns 0"
        elif self.max_steps is not None and self.max_steps < own:
            yield (
                f"env.max_turns={self.max_steps} is below the {own} moves of {self.name}: an episode that it cuts off "
                "earns 0; without it the game plays to its own end"
            )
        if first["start"] != second["start"] and first["observation"] == second["observation"]:
            yield (
                f"{self.name} begins with the same text at the first two starts: a few games have one start alone, and "
                "others hide what differs"
            )

    def tried_replies(self, task: Mapping[str, Any]) -> Sequence[str]:
        """See `TextGameEnv.tried_replies`: the examples in the rules of the game."""
        examples = dict.fromkeys(_MOVE.findall(task["observation"]))
        return [example for example in examples if example != "[GAME]"] or ["[1]"]


class OnePlayer:
    """A game of TextArena with gymnasium's `reset` and `step`."""

    def __init__(self, game: str, arguments: Mapping[str, Any]) -> None:
        """Make the game. Raises ConfigError if it is unknown, cannot be made, or has to download data."""
        textarena: Any = import_module("textarena")
        known = textarena.envs.registration.ENV_REGISTRY
        self.name = game
        self._one_player: type = textarena.SinglePlayerState
        self._seen = self._rules = ""
        if game not in known:
            hint = did_you_mean(nearest(game, known)) or ": see textarena.pprint_registry_detailed()"
            raise ConfigError(f"env.id={game} is not a game of TextArena{hint}")
        try:
            with _without_downloads(game):
                self.game: Any = textarena.make(game, **arguments)
        except SyntaxError as error:
            python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
            raise ConfigError(f"env.id={game} cannot be made: its file is not valid {python}: {error}") from error
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"env.id={game} cannot be made: {type(error).__name__}: {error}") from error

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        """The rules and the first observation. Raises ConfigError for a game that is not for one player."""
        try:
            with _without_downloads(self.name):
                self.game.reset(num_players=1, seed=seed)
        except ConfigError:
            raise
        except Exception as error:
            if "player" not in str(error).lower():
                raise
            raise ConfigError(f"env.id={self.name} is not a game for one player: {error}") from error
        if not isinstance(self.game.state, self._one_player):  # some begin with too few players
            raise ConfigError(f"env.id={self.name} is not a game for one player: choose one that is")
        kinds = [(message, kind.name) for _, message, kind in self.game.state.observations[0]]
        self._rules = next((message for message, kind in kinds if kind == "PROMPT"), "")
        return self._news(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play a move; `info["refused"]` is whether the game took it as invalid. The reward comes at the end."""
        state = self.game.state
        errors = state.error_count
        done, _ = self.game.step(action=action)
        if not done:
            return self._news(), 0.0, False, False, {"refused": state.error_count > errors}
        rewards, about = self.game.close()
        if not rewards:
            raise ValueError("it ended without a reward")
        if isinstance(rewards[0], str):  # Countdown and two others give the reason instead of the reward
            raise ValueError(f"it ended with the reward {rewards[0]!r}, which is not a number: a fault of this game")
        return "", float(rewards[0]), True, False, {"refused": about[0]["invalid_move"]}

    def _news(self) -> str:
        """The text that is new since the last observation: without the player's moves, and without the rules again."""
        new = self.game.state.observations[0]
        # some games, such as Countdown, have mixed up the arguments: the move stands instead of the kind
        new[:] = [message for message in new if getattr(message[2], "name", "PLAYER_ACTION") != "PLAYER_ACTION"]
        _, shown = self.game.get_observation()
        if not isinstance(shown, str):  # of a game without wrappers, whose id ends in -raw
            return "\n".join(message for _, message, _ in shown).strip()
        known = next((text for text in (self._seen, self._seen and self._rules) if shown.startswith(text)), "")
        self._seen = shown
        return shown[len(known) :].strip() or "(The game shows nothing new.)"


@contextmanager
def _without_downloads(game: str) -> Iterator[None]:
    """Games find the NLTK data of this machine; ConfigError for one that would download some."""
    import nltk

    def find(names: str | Sequence[str], *_: Any, **__: Any) -> bool:
        for name in [names] if isinstance(names, str) else names:
            if not any(_is_there(f"{folder}/{name}") for folder in _NLTK_FOLDERS):
                raise ConfigError(
                    f"env.id={game} downloads NLTK's {name}, and rlpost downloads nothing while a game is made: "
                    f"python -m nltk.downloader {name}"
                )
        return True

    download, nltk.download = nltk.download, find  # the games of the process take turns
    try:
        yield
    finally:
        nltk.download = download


def _is_there(resource: str) -> bool:
    import nltk

    try:
        nltk.data.find(resource)
    except LookupError:
        return False
    return True
