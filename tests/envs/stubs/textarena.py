# type: ignore
"""Stands in for TextArena, as much of it as env=textarena uses.

A game draws from the process-wide `random`, forgives one invalid move, ends with the second, and gives its reward from
`close()` alone. Moves that have a meaning: `[roll]`, `[stop]`, `[hang]` and `[crash]`.
"""

import random
import threading
import types
from enum import Enum

GATE = threading.Event()  # a game that hangs waits for it
ObservationType = Enum("ObservationType", ["PROMPT", "PLAYER_ACTION", "GAME_MESSAGE", "GAME_ADMIN"])


class State:
    players = 1

    def __init__(self, num_players, seed, max_turns):
        self.max_turns = max_turns
        assert num_players == self.players, f"The number of players has to be {self.players}, received {num_players}"
        random.seed(seed)
        self.observations = {0: []}
        self.error_count, self.made_invalid_move, self.done, self.rewards = 0, False, False, None
        self.game_info = {0: {"invalid_move": False}}

    def add(self, message, kind):
        self.observations[0].append((0 if kind is ObservationType.PLAYER_ACTION else -1, message, kind))

    def set_outcome(self, reward):
        self.rewards, self.done = {0: reward}, True

    def set_invalid_move(self, reward):
        if self.error_count == 0:
            self.error_count, self.made_invalid_move = 1, True
            self.add("You attempted an invalid move.", ObservationType.GAME_ADMIN)
        else:
            self.game_info[0]["invalid_move"] = True
            self.set_outcome(reward)


class SinglePlayerState(State):
    pass


class TwoPlayerState(State):
    players = 2


class FFAMultiPlayerState(State):
    pass  # begins with too few players


class Dice:
    """Each roll draws a number; [stop] earns the share of the `goal` rolls that were made."""

    state_class = SinglePlayerState
    max_turns = 20

    def __init__(self, goal=4):
        self.goal = goal

    def reset(self, num_players, seed=None):
        self.state = self.state_class(num_players, seed, self.max_turns)
        self.rolls = 0
        self.state.add("You are Player 0. Write [roll] or [stop].", ObservationType.PROMPT)
        self.state.add(f"You begin with {random.randrange(10**6)}.", ObservationType.GAME_MESSAGE)

    def step(self, action):
        self.state.add(action, ObservationType.PLAYER_ACTION)
        self.state.made_invalid_move = False
        if "[hang]" in action:
            GATE.wait(60)
        if "[crash]" in action:
            raise RuntimeError("the dice fell off the table")
        if "[roll]" in action:
            self.rolls += 1
            self.state.add(f"You rolled {random.randrange(10**6)}.", ObservationType.GAME_MESSAGE)
            if self.rolls == self.goal:
                self.state.set_outcome(1)
        elif "[stop]" in action:
            self.state.set_outcome(self.rolls / self.goal)
        else:
            self.state.set_invalid_move(self.rolls / self.goal)
        if not self.state.made_invalid_move:
            self.state.error_count = 0
        return self.state.done, {"reward": 99.0}

    def get_observation(self):
        seen, self.state.observations[0] = self.state.observations[0], []
        return 0, seen

    def close(self):
        return self.state.rewards, self.state.game_info


class Mixed(Dice):
    def step(self, action):
        end = super().step(action)
        own = next(place for place, message in enumerate(self.state.observations[0]) if message[1] == action)
        self.state.observations[0][own] = (ObservationType.PLAYER_ACTION, 0, action)  # as Countdown-v0 does
        if self.state.game_info[0]["invalid_move"]:
            self.state.rewards = {0: "Bad action format."}
        return end


class Pair(Dice):
    state_class = TwoPlayerState


class Crowd(Dice):
    state_class = FFAMultiPlayerState


class Words(Dice):
    def __init__(self):
        import nltk

        nltk.download("words")
        super().__init__()


class Nothing(Dice):
    def close(self):
        return None, self.state.game_info


class Online(Dice):
    def __init__(self):
        raise ValueError("OpenRouter API key not found.")


class Newer(Dice):
    def __init__(self):
        compile("def (", "env.py", "exec")


class Alike(Dice):
    max_turns = None

    def reset(self, num_players, seed=None):
        super().reset(num_players, seed)
        self.state.observations[0].pop()


class Slow(Dice):
    def reset(self, num_players, seed=None):
        GATE.wait(60)


class Loose(Dice):
    def reset(self, num_players, seed=None):
        super().reset(num_players, None)


class Loud(Dice):
    def get_observation(self):
        print("Attempt 1")
        return super().get_observation()


class WholeText:
    """Shows all that has happened, as the wrappers for language models do."""

    def __init__(self, env):
        self.env, self.all = env, []

    def __getattr__(self, name):
        return getattr(self.env, name)

    def get_observation(self):
        player, seen = self.env.get_observation()
        self.all += seen
        return player, "".join(f"\n[{'GAME' if sender < 0 else 'Player'}] {text}" for sender, text, _ in self.all)


class LastText(WholeText):
    """Shows the rules and the last message alone, as the wrappers for boards do."""

    def get_observation(self):
        player, seen = self.env.get_observation()
        self.all += seen
        return player, "\n".join([self.all[0][1], *([self.all[-1][1]] if len(self.all) > 1 else [])])


GAMES = {f"{each.__name__}-v0": (each, WholeText) for each in (Dice, Mixed, Pair, Crowd, Words)}
GAMES |= {f"{each.__name__}-v0": (each, WholeText) for each in (Nothing, Online, Newer, Slow, Alike, Loose, Loud)}
GAMES |= {"Dice-v0-raw": (Dice, None), "Dice-v0-board": (Dice, LastText)}
envs = types.SimpleNamespace(registration=types.SimpleNamespace(ENV_REGISTRY=GAMES))


def make(env_id, **arguments):
    game, wrapper = GAMES[env_id]
    game = game(**arguments)
    return wrapper(game) if wrapper else game
