"""One game under way: an object with gymnasium's `reset` and `step`, played by text, in a thread with deadlines."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from rlpost.errors import ToolError

LOOK_SECONDS = 0.1  # between two looks at what is waited for by now
CLOSE_SECONDS = 5.0  # that are waited for games to end

_STYLED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)


@dataclass(frozen=True)
class Rules:
    """How text and a game meet.

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


@dataclass
class Played:
    """How far a game is: what it shows, what all turns earned together, and how it ended."""

    text: str
    turns: int = 0
    total: float = 0.0
    invalid: int = 0
    terminated: bool = False
    truncated: bool = False


@dataclass
class Game:
    """A game that begins with `reset(seed=seed)` and is moved by replies.

    `ask` and `answer` are two steps so that many games move at the same time. Whatever the game does is done
    in a thread of its own; one that does not come back in time is left behind.
    """

    rules: Rules
    name: str
    seed: int
    first: str | None = None  # what it has to show first, where that is known
    played: Played | None = None
    error: str | None = None
    _object: Any = None
    _calls: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    _answers: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    _expected: tuple[str, float, float] = ("", 0.0, 0.0)  # what is waited for, how long, and until when
    _late: bool = False  # it is not waited for any more

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._serve, name=f"rlpost-game-{self.name}", daemon=True)
        self._thread.start()

    @property
    def turns(self) -> int:
        """Replies that have been played."""
        return self.played.turns if self.played else 0

    def ask(self, replies: Sequence[str] = ()) -> None:
        """Begin the game unless it has begun, and play `replies` one after the other."""
        self._expect("reset", self.rules.start_seconds)  # the thread goes on from there
        self._calls.put(lambda: self._play(replies))

    def answer(self) -> Played:
        """How far the game is after what was asked. Raises ToolError where it failed or is late."""
        while True:
            what, seconds, deadline = self._expected
            left = deadline - time.monotonic()
            try:
                failed, value = self._answers.get(timeout=max(0.0, min(left, LOOK_SECONDS)))
            except Empty:
                if left <= 0:
                    self._late = True
                    raise ToolError(f"{self.name}: {what} did not return within {seconds:g} s") from None
                continue
            if failed:
                raise ToolError(f"{self.name}: {self._expected[0]} failed: {value}")
            return value

    def close(self) -> None:
        """Tell the game to end, and its thread; `wait_closed` waits until it has."""
        self._calls.put(self._close)
        self._calls.put(None)

    def wait_closed(self, seconds: float) -> None:
        """Wait until a closed game has ended, unless it hangs: what it played on is free for the next one then."""
        if not self._late:
            self._thread.join(seconds)

    def _expect(self, what: str, seconds: float) -> None:
        self._expected = (what, seconds, time.monotonic() + seconds)

    # In the game's thread

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._answers.put((False, call()))
            except BaseException as error:  # noqa: BLE001  SystemExit too: whatever a game raises is told
                self._answers.put((True, f"{type(error).__name__}: {error}"))

    def _play(self, replies: Sequence[str]) -> Played:
        played = self.played or self._begun()
        for reply in replies:
            if played.terminated or played.truncated:
                break
            self._expect("step", self.rules.step_seconds)
            self._move(played, reply)
        self.played = played
        return played

    def _begun(self) -> Played:
        self._object = self.rules.make()
        observation, info = self._object.reset(seed=self.seed)
        played = Played(self.rules.show(self._object, observation, info))
        if self.first not in (None, played.text):
            raise ValueError(f"reset(seed={self.seed}) does not always begin with the same observation")
        return played

    def _move(self, played: Played, reply: str) -> None:
        played.turns += 1
        try:
            action = self.rules.parse(self._object, text_of_action(reply))
        except ValueError as error:
            played.invalid += 1
            played.total += self.rules.invalid_reward
            played.text = f"That is no valid action: {error}"
            return
        observation, reward, *ends, info = self._object.step(action)
        played.total += self.rules.earned(observation, reward)
        played.terminated, played.truncated = bool(ends[0]), any(map(bool, ends[1:]))  # some have `done` alone
        played.text = self.rules.show(self._object, observation, info)

    def _close(self) -> None:
        if hasattr(self._object, "close"):
            self._object.close()


def end_games(games: Sequence[Game]) -> None:
    """Close games, all at the same time, and wait until they have ended."""
    for game in games:
        game.close()
    deadline = time.monotonic() + CLOSE_SECONDS
    for game in games:
        game.wait_closed(max(0.0, deadline - time.monotonic()))


def text_of_action(reply: str) -> str:
    """What stands in the last `<action>` tags of a reply, or all of it."""
    found = _ACTION.findall(reply)
    return (found[-1] if found else reply).strip()


def observation_text(game: Any, observation: Any, info: Any) -> str:
    """What a game draws where it draws text (`render_mode="ansi"`), else the observation as Python writes it."""
    drawn = game.render() if getattr(game, "render_mode", None) == "ansi" else None
    return plain(drawn) if isinstance(drawn, str) else str(observation)


def plain(text: str) -> str:
    """Text without escape codes; what stood out by its colour stands in brackets."""
    return _ESCAPES.sub("", _STYLED.sub(r"[\1]", text)).strip("\n")


def action_parser(moves: Sequence[str] = ()) -> Callable[[Any, str], Any]:
    """Reads an action: the place of a move in `moves`, else a number of a Discrete space, else the text itself."""
    places = {move.casefold(): place for place, move in enumerate(moves)}

    def parse(game: Any, text: str) -> Any:
        space: Any = getattr(game, "action_space", None)
        if places:
            if text.casefold() not in places:
                raise ValueError(f"{text[:80]!r} is none of {', '.join(moves)}")
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


def _number(text: str, start: int, count: int) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", text) or not start <= int(text) < start + count:
        raise ValueError(f"{text[:80]!r} is no number from {start} to {start + count - 1}")
    return int(text)
