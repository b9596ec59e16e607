import random
import threading
import time
from typing import Any, ClassVar

import numpy as np
import pytest

from rlpost.collectors import LLMCollector
from rlpost.envs import TextGameEnv
from rlpost.envs.build import build_env
from rlpost.envs.proof import prove
from rlpost.envs.text_game import action_parser, plain, text_of_action
from rlpost.errors import ConfigError, DataError
from rlpost.policies import ScriptedPolicy
from rlpost.settings import SamplingSettings, TextGameSettings
from tests.envs.episodes import digit_of, error_of, say, say_right, say_wrong, wrong_for
from tests.says import Says

LAKE_MOVES = ("left", "down", "right", "up")
LAKE_PATH = ("right", "right", "down", "down", "down", "right")  # of the 4x4 map, around its holes


class Guess:
    """Find a number from 0 to 9, drawn by the seed; five guesses. Kept: every game that was made."""

    made: ClassVar[list["Guess"]] = []

    def __init__(self) -> None:
        self.closed = False
        self.guesses: list[str] = []
        Guess.made.append(self)

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        assert seed is not None
        self.number = seed % 10
        return f"Guess a number from 0 to 9. Hint: it is {'even' if self.number % 2 == 0 else 'odd'}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.guesses.append(action)
        if action == "crash":
            raise RuntimeError("the board fell over")
        if action == "sleep":
            time.sleep(60)
        guess = int(action)
        right = guess == self.number
        return ("yes" if right else "no"), (1.0 if right else -0.25), right, len(self.guesses) == 5, {}

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def none_made() -> None:
    Guess.made.clear()


def digits(game: Any, text: str) -> str:
    if text in ("crash", "sleep") or (text.isdigit() and len(text) == 1):
        return text
    raise ValueError("write one digit")


def guessing(**settings: Any) -> TextGameEnv:
    return TextGameEnv(Guess, parse=digits, **{"step_seconds": 30.0, **settings})


def test_an_episode_earns_the_sum_of_its_moves(says: Says) -> None:
    env = guessing(success_return=0.5)
    [conversation] = env.draw()
    says("env", conversation.query)
    say(env, [conversation], f"<action>{wrong_for(conversation)}</action>")
    assert not conversation.done
    assert conversation.messages[-1] == {"role": "user", "content": "no"}
    say(env, [conversation], f"Then it is <action>{digit_of(conversation)}</action>")
    assert (conversation.terminated, conversation.truncated) == (True, False)
    assert conversation.reward == pytest.approx(0.75)
    assert conversation.reward_parts == {"earned": 0.75, "invalid_actions": 0.0}
    assert (conversation.accuracy_strict, conversation.accuracy_lenient) == (1.0, 1.0)


@pytest.mark.parametrize(("limit", "turns"), [(10, 5), (2, 2)])
def test_the_game_or_the_turns_may_cut_an_episode_short(limit: int, turns: int) -> None:
    env = guessing(max_steps=limit)
    [conversation] = env.draw()
    for _ in range(turns):  # the game ends itself with the fifth
        say_wrong(env, [conversation])
    assert (conversation.terminated, conversation.truncated) == (False, True)
    assert conversation.reward == -0.25 * turns


def test_a_truncated_reply_is_not_a_move() -> None:
    env = guessing(invalid_reward=-1.0)
    [conversation] = env.draw()
    say(env, [conversation], "eleven")
    say(env, [conversation], str(digit_of(conversation)), reason="length")
    assert (conversation.truncated, conversation.reward) == (True, -1.0)


def test_a_game_that_raises_or_hangs_is_an_error_of_its_conversation_alone() -> None:
    env = guessing(num_envs=3, step_seconds=1.0)
    crashing, hanging, right = conversations = env.draw()
    began = time.monotonic()
    say(env, conversations, "crash", "sleep", str(digit_of(right)))
    assert time.monotonic() - began < 30
    assert (right.valid, right.reward) == (True, 1.0)
    assert "RuntimeError" in error_of(crashing)
    assert "within 1 s" in error_of(hanging)


def test_games_are_closed_with_their_conversations() -> None:
    env = guessing(num_envs=2)
    conversations = env.draw()
    say(env, conversations, str(digit_of(conversations[0])), wrong_for(conversations[1]))
    assert len(env.games) == 1
    env.close()
    assert len(Guess.made) == 2  # begun for the first observations, and played
    assert all(game.closed for game in Guess.made)
    assert env.games == {}


def test_a_saved_conversation_goes_on_by_playing_it_again() -> None:
    env = guessing(seed=3)
    [conversation] = env.draw()
    say(env, [conversation], "eleven")
    say_wrong(env, [conversation])
    saved, again, state = conversation.copy(), conversation.copy(), env.state_dict()
    resumed = guessing(seed=3)
    resumed.load_state_dict(state)
    say_right(resumed, [saved])
    assert (saved.reward, saved.reward_parts["invalid_actions"]) == (0.75, 1.0)
    say_wrong(env, [conversation])
    say_right(env, [again])  # from a turn that its game has left
    assert again.reward == 0.75
    assert [c.task for c in resumed.draw()] == [c.task for c in env.draw()]


def test_a_game_that_cannot_be_replayed_is_an_error(says: Says) -> None:
    env = guessing(replays=False)
    [conversation] = env.draw()
    say_wrong(env, [conversation])
    env.abandon()
    say_right(env, [conversation])
    says("env", error_of(conversation))


class BegunAnew(Guess):
    """Begins otherwise each time."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return f"game {len(Guess.made)}", {}


class PlayedAnew(Guess):
    """Answers otherwise each time."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"game {len(Guess.made)}", 0.0, False, False, {}


@pytest.mark.parametrize(("game", "turns"), [(BegunAnew, 0), (PlayedAnew, 1)])
def test_a_game_that_goes_another_way_again_is_an_error(game: type[Guess], turns: int, says: Says) -> None:
    env = TextGameEnv(game, name="Guess", parse=digits)
    [conversation] = env.draw()
    for _ in range(turns):
        say(env, [conversation], "1")
    saved = conversation.copy()
    say(TextGameEnv(game, name="Guess", parse=digits), [saved], "1")
    says("env", error_of(saved))


def test_starts_are_divided_by_seed() -> None:
    train, test = (guessing(split=split) for split in ("train", "test"))
    sides = [{env.open_rows(0).at(position)["start"] for position in range(60)} for env in (train, test)]
    assert len(sides[0]) == len(sides[1]) == 60
    assert not sides[0] & sides[1]


def test_frozen_lake_is_drawn_as_text_and_won(says: Says) -> None:
    pytest.importorskip("gymnasium")
    env = TextGameEnv(
        "FrozenLake-v1", arguments={"is_slippery": False}, moves=LAKE_MOVES, success_return=1.0, num_envs=2
    )
    won, lost = env.draw()
    says("env", won.query)
    say(env, [won, lost], "<action>Right</action>", "down")
    assert won.messages[-1]["content"] == "  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG"
    say(env, [won, lost], "right", "right")  # into a hole
    assert (lost.terminated, lost.reward, lost.accuracy_strict) == (True, 0.0, 0.0)
    for move in LAKE_PATH[2:]:
        say(env, [won], move)
    assert (won.terminated, won.reward, won.accuracy_strict) == (True, 1.0, 1.0)
    env.close()


def test_a_collector_plays_whole_episodes_of_frozen_lake(tiny_tokenizer: Any) -> None:
    pytest.importorskip("gymnasium")
    settings = TextGameSettings(
        id="FrozenLake-v1", arguments=["is_slippery:false"], moves=list(LAKE_MOVES), success_return=1.0, max_turns=3
    )
    env = build_env(settings, num_prompts=1, group_size=2, seed=0)
    policy = ScriptedPolicy(["<action>down</action>", "fly"], tiny_tokenizer, sampling=SamplingSettings())
    collector = LLMCollector(env, policy=policy, yield_only_last_steps=True)
    batch = next(iter(collector))
    assert batch is not None
    assert batch["next", "reward"].tolist() == [[0.0], [0.0]]
    assert batch["next", "reward_parts", "invalid_actions"].tolist() == [[0.0], [3.0]]  # down, down, down: a hole
    told = [tiny_tokenizer.decode(ids) for ids in batch["tokens", "response"].unbind()]
    assert told[0].count("<action>down</action>") == 3
    assert "(Down)\nSFFF\n[F]HFH" in told[0]
    assert told[1].count("'fly' is") == 2
    collector.env.close()


def test_a_number_is_the_action_of_a_game_without_names() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    game = gymnasium.make("FrozenLake-v1")
    parse = action_parser()
    assert parse(game, "3") == 3
    for text in ("4", "-1", "two", "", "9" * 30):
        with pytest.raises(ValueError, match="from 0 to 3"):
            parse(game, text)


def test_a_game_or_argument_that_is_not_there_is_named() -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match=r"env\.id=FrozenLake-v7 .*FrozenLake-v1\?"):
        TextGameEnv("FrozenLake-v7").start()
    with pytest.raises(ConfigError, match=r"env\.id=FrozenLake-v1 .*'slip'"):
        TextGameEnv("FrozenLake-v1", arguments={"slip": False}).start()


def test_no_single_reply_wins_a_game() -> None:
    with pytest.raises(DataError, match="Guess is"):
        prove(guessing())


def test_text_stands_out_by_brackets_where_it_did_by_colour() -> None:
    assert plain("\n\x1b[41mS\x1b[0mFFF\n") == "[S]FFF"
    assert plain("\x1b[35;1mR\x1b[m: \x1b[2Kx") == "[R]: x"


def test_the_last_action_tags_count() -> None:
    assert text_of_action("<action>a</action> no <action> b\n</action>") == "b"
    assert text_of_action(" c ") == "c"


class Cards:
    """Draws a card a turn from the process-wide generators, as games of TextArena do; ends with the fifth."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        random.seed(seed)
        np.random.seed(seed)
        self.turns = 0
        return self._card(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        return self._card(), 1.0, self.turns == 5, False, {}

    def _card(self) -> str:
        time.sleep(0.001)  # others draw meanwhile
        return f"{random.randrange(10**6)} {np.random.randint(10**6)}"


def test_games_that_draw_globally_are_each_a_game_of_its_own() -> None:
    env = TextGameEnv(Cards, num_envs=4, repeats=4, max_steps=5)
    conversations = env.draw()
    for _ in range(3):
        say(env, conversations, *["on"] * len(conversations))
        random.random()  # nor does what others draw change them
    groups: dict[int, list[Any]] = {}
    for conversation in conversations:
        groups.setdefault(conversation.group_id, []).append(conversation.messages)
    for alike in groups.values():
        assert all(messages == alike[0] for messages in alike)
        cards = [message["content"] for message in alike[0] if message["role"] == "user"]
        assert len(set(cards)) == 4
    saved, state = conversations[0].copy(), env.state_dict()
    say(env, conversations[:1], "on")
    resumed = TextGameEnv(Cards, num_envs=4, repeats=4, max_steps=5)
    resumed.start()
    resumed.load_state_dict(state)
    say(resumed, [saved], "on")
    assert (saved.error, saved.messages) == (None, conversations[0].messages)


def test_a_game_that_draws_nothing_leaves_the_generators_alone() -> None:
    began, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    class Slow:
        def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            return "go", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            began.set()
            assert may_end.wait(60)
            return "gone", 0.0, False, False, {}

    class Held(Cards):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            may_end.set()  # the other game ends its move in the middle of this one
            assert has_ended.wait(60)
            return super().step(action)

    def play_slow() -> None:
        env = TextGameEnv(Slow, max_steps=5)
        say(env, env.draw(), "on")
        has_ended.set()

    held, alone = (TextGameEnv(game, name="Cards", max_steps=5) for game in (Held, Cards))
    [conversation], [expected] = held.draw(), alone.draw()
    threading.Thread(target=play_slow, daemon=True).start()
    assert began.wait(60)
    say(held, [conversation], "on")
    say(alone, [expected], "on")
    assert (conversation.error, conversation.messages) == (None, expected.messages)
