"""Games of TextArena for one player, with a small package in place of it."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.cli.main import run
from rlpost.config.compose import compose
from rlpost.data.conversation import Completion, Conversation
from rlpost.envs.build import build_env
from rlpost.envs.textarena import TextArenaEnv
from rlpost.errors import ConfigError, DataError, MissingExtraError
from tests.envs.textarena_stub import write_stubs
from tests.trainings import metrics

PACKAGES = ("textarena", "nltk")
ROLL, STOP, NONSENSE = "I [roll].", "[stop]", "hello"


@pytest.fixture(autouse=True)
def textarena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The small package, in place of the real one and of NLTK while a test runs."""
    (tmp_path / "stubs").mkdir()
    write_stubs(tmp_path / "stubs")
    monkeypatch.syspath_prepend(tmp_path / "stubs")
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in PACKAGES}
    state = random.getstate()
    import textarena  # pyright: ignore[reportMissingImports]

    yield textarena
    textarena.GATE.set()  # no game waits on
    for name in PACKAGES:
        sys.modules.pop(name, None)
    sys.modules.update(real)
    random.setstate(state)


Make = Callable[..., TextArenaEnv]


@pytest.fixture
def made() -> Iterator[Make]:
    """Makes environments from words of the command line, and closes them."""
    environments: list[TextArenaEnv] = []

    def make(*words: str, id: str = "Dice-v0", num_prompts: int = 1, group_size: int = 1) -> TextArenaEnv:
        settings = compose(TRAIN_GRPO, ["env=textarena", f"env.id={id}", *words]).settings
        env = build_env(settings.env, num_prompts=num_prompts, group_size=group_size)
        assert isinstance(env, TextArenaEnv)
        environments.append(env)
        return env

    yield make
    for env in environments:
        env.close()


def say(env: TextArenaEnv, conversations: Sequence[Conversation], *replies: str) -> None:
    """Let the model reply, the i-th conversation with the i-th reply."""
    for conversation, reply in zip(conversations, replies, strict=True):
        conversation.add_completion(Completion([1], [0.0], reply, "stop", 0))
    env.advance(conversations)


def played(env: TextArenaEnv, *replies: str) -> Conversation:
    """A conversation with these replies."""
    [conversation] = env.draw()
    for reply in replies:
        assert not conversation.done
        say(env, [conversation], reply)
    return conversation


def texts(conversation: Conversation) -> list[str]:
    """Texts that the game has shown."""
    return [message["content"] for message in conversation.messages if message["role"] == "user"]


def numbers(seed: int, count: int) -> list[int]:
    """The numbers that a game with this seed draws, if nothing else draws between."""
    own = random.Random(seed)
    return [own.randrange(10**6) for _ in range(count)]


# Playing


def test_a_game_is_played_to_its_end_and_rewarded_by_close_alone(made: Make) -> None:
    conversation = played(made(), ROLL, ROLL, STOP)
    begun, first, second = numbers(conversation.task["start"], 3)
    assert texts(conversation) == [
        f"[GAME] You are Player 0. Write [roll] or [stop].\n[GAME] You begin with {begun}.",
        f"[GAME] You rolled {first}.",
        f"[GAME] You rolled {second}.",
    ]
    assert (conversation.reward, conversation.terminated, conversation.valid) == (0.5, True, True)
    assert conversation.reward_parts == {"earned": 0.5, "invalid_actions": 0.0}


def test_an_invalid_move_is_forgiven_once_and_the_second_ends_with_partial_credit(made: Make) -> None:
    conversation = played(made(), NONSENSE, ROLL, NONSENSE, NONSENSE)
    assert [text.split("] ")[1][:9] for text in texts(conversation)[1:]] == ["You attem", "You rolle", "You attem"]
    assert (conversation.reward, conversation.valid, conversation.terminated) == (0.25, True, True)
    assert conversation.reward_parts["invalid_actions"] == 3.0


def test_an_episode_that_the_limit_of_turns_ends_earns_nothing(made: Make) -> None:
    conversation = played(made("env.max_turns=2"), ROLL, ROLL)
    assert (conversation.reward, conversation.truncated, conversation.valid) == (0.0, True, True)


def test_without_a_limit_of_turns_the_game_plays_to_its_own_end(made: Make) -> None:
    env = made("env.arguments=[goal:15]")
    conversation = played(env, *[ROLL] * 15)
    assert (conversation.reward, conversation.terminated) == (1.0, True)


def test_an_episode_that_will_be_cut_off_is_noted(made: Make) -> None:
    short, long = made("env.max_turns=19"), made("env.max_turns=20")
    short.start()
    long.start()
    [note] = short.notes
    assert "env.max_turns=19 is below the 20 moves of Dice-v0" in note
    assert not long.notes


def test_a_game_without_a_limit_and_with_one_start_is_noted(made: Make) -> None:
    env = made(id="Alike-v0")
    env.start()
    endless, alike = env.notes
    assert "Alike-v0 has no limit of moves of its own" in endless
    assert "Alike-v0 begins with the same text at the first two starts" in alike


def test_arguments_reach_the_game_and_success_is_measured(made: Make) -> None:
    env = made("env.arguments=[goal:1]", "env.success_return=1")
    assert (won := played(env, ROLL)).reward == 1.0
    assert won.accuracy_strict == 1.0
    assert played(env, STOP).accuracy_strict == 0.0


def test_a_game_that_mixes_up_its_arguments_is_played_without_echo_and_loses_by_name(made: Make) -> None:
    env = made(id="Mixed-v0")
    conversation = played(env, ROLL, STOP)
    assert texts(conversation)[1:] == [f"[GAME] You rolled {numbers(conversation.task['start'], 2)[1]}."]
    assert conversation.reward == 0.25
    lost = played(env, NONSENSE, NONSENSE)
    assert "it ended with the reward 'Bad action format.', which is not a number: a fault of this" in str(lost.error)
    assert (lost.valid, lost.reward) == (False, None)


def test_games_without_a_wrapper_and_with_a_board_show_what_is_new(made: Make) -> None:
    for id in ("Dice-v0-raw", "Dice-v0-board"):
        conversation = played(made(id=id), ROLL, ROLL)
        begun, *rolled = numbers(conversation.task["start"], 3)
        assert texts(conversation) == [
            f"You are Player 0. Write [roll] or [stop].\nYou begin with {begun}.",
            *(f"You rolled {number}." for number in rolled),
        ]


# Draws


def test_seeds_hold_in_groups_and_after_other_draws(made: Make) -> None:
    env = made(num_prompts=3, group_size=4)
    conversations = env.draw()
    random.seed(0)
    expected = [random.random() for _ in range(3)]
    random.seed(0)
    drawn: list[float] = []
    for _ in range(3):
        say(env, conversations, *[ROLL] * 12)
        drawn.append(random.random())  # which is no game's
    assert drawn == expected  # and no game drew from the program's
    for conversation in conversations:
        shown = [int(text.rstrip(".").split()[-1]) for text in texts(conversation)]
        assert shown == numbers(conversation.task["start"], 4)
    assert len({conversation.task["start"] for conversation in conversations}) == 3


def test_a_saved_conversation_goes_on(made: Make) -> None:
    env, resumed = made(), made()
    [conversation] = env.draw()
    for reply in (ROLL, NONSENSE, ROLL):
        say(env, [conversation], reply)
    saved = conversation.copy()
    for reply in (ROLL, STOP):
        say(env, [conversation], reply)
        random.random()
        say(resumed, [saved], reply)
    assert (saved.messages, saved.reward, saved.error) == (conversation.messages, 0.75, None)


def test_no_start_is_in_both_splits(made: Make) -> None:
    starts = {}
    for split in ("train", "test"):
        env = made(f"env.split={split}", "eval.enabled=false", num_prompts=20)
        starts[split] = {conversation.task["start"] for conversation in env.draw()}
    assert all(len(each) == 20 for each in starts.values())
    assert not starts["train"] & starts["test"]


# Failures while a game is played


def test_a_game_that_hangs_is_left_behind_and_the_others_go_on(made: Make) -> None:
    env = made("env.step_seconds=0.2", num_prompts=3)
    random.seed(0)
    expected = random.random()
    random.seed(0)
    conversations = env.draw()
    say(env, conversations, ROLL, "[hang]", ROLL)
    late, others = conversations[1], conversations[::2]
    assert late.error == "Dice-v0: step did not return within 0.2 s"
    assert (late.done, late.valid, late.reward) == (True, False, None)
    say(env, others, ROLL, ROLL)
    for conversation in others:
        shown = [int(text.rstrip(".").split()[-1]) for text in texts(conversation)]
        assert shown == numbers(conversation.task["start"], 3)
    assert random.random() == expected


def test_a_game_that_raises_is_an_error_of_its_conversation_alone(made: Make) -> None:
    env = made(num_prompts=2)
    conversations = env.draw()
    say(env, conversations, "[crash]", ROLL)
    crashed, other = conversations
    assert crashed.error == "Dice-v0: step failed: RuntimeError: the dice fell off the table"
    assert (crashed.valid, crashed.reward) == (False, None)
    assert not other.done


def test_a_game_that_ends_without_a_reward_is_an_error_and_never_a_zero(made: Make) -> None:
    conversation = played(made(id="Nothing-v0"), STOP)
    assert "it ended without a reward" in (conversation.error or "")
    assert (conversation.valid, conversation.reward) == (False, None)


# Refused at the start


@pytest.mark.parametrize(
    ("id", "words", "said"),
    [
        ("Dise-v0", [], r"env.id=Dise-v0 is not a game of TextArena; did you mean Dice-v0\?"),
        ("xyz", [], r"env.id=xyz is not a game of TextArena: see textarena.pprint_registry_detailed\(\)"),
        ("Dice-v0", ["env.arguments=[gaol:3]"], r"env.id=Dice-v0 cannot be made: TypeError.*gaol"),
        ("Online-v0", [], r"env.id=Online-v0 cannot be made: ValueError: OpenRouter API key not found"),
        ("Newer-v0", [], r"env.id=Newer-v0 cannot be made: its file is not valid Python 3\.\d+: "),
        ("Pair-v0", [], r"env.id=Pair-v0 is not a game for one player: .*has to be 2"),
        ("Crowd-v0", [], r"env.id=Crowd-v0 is not a game for one player: choose one that is"),
        ("Words-v0", [], r"env.id=Words-v0 downloads NLTK's words.*python -m nltk.downloader words"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused_by_name(id: str, words: list[str], said: str, made: Make) -> None:
    with pytest.raises(ConfigError, match=said):
        made(*words, id=id).draw()


def test_data_that_the_machine_has_is_not_downloaded(made: Make, textarena: Any) -> None:
    import nltk

    download = nltk.download
    nltk.HERE.add("corpora/words")  # pyright: ignore[reportAttributeAccessIssue]
    assert played(made(id="Words-v0"), STOP).valid
    assert nltk.download is download


def test_a_game_that_does_not_begin_in_time_is_named(made: Make) -> None:
    with pytest.raises(DataError, match=r"Slow-v0: reset did not return within 0.2 s"):
        made("env.start_seconds=0.2", id="Slow-v0").draw()


def test_the_package_is_looked_for_once(monkeypatch: pytest.MonkeyPatch, made: Make) -> None:
    looked: list[str] = []
    monkeypatch.setattr("rlpost.envs.textarena.require", lambda package, *_: looked.append(package))
    env = made()
    for _ in range(3):
        env.draw()
    assert looked == ["textarena"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, made: Make) -> None:
    monkeypatch.setattr("rlpost.imports.is_installed", lambda package: False)
    with pytest.raises(MissingExtraError, match=r"env=textarena needs textarena.*pip install 'rlpost\[textarena\]'"):
        made().draw()


# Whole commands


def test_env_test_plays_the_examples_of_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "test", "textarena", "env.id=Dice-v0"]) == 0
    told = capsys.readouterr().out
    assert told.count("3 starts, each played twice with the same replies: both times alike") == 2
    assert "You are Player 0. Write [roll] or [stop]." in told
    assert run(["env", "test", "textarena", "env.id=Pair-v0"]) != 0
    assert "not a game for one player" in capsys.readouterr().err


def test_env_test_counts_the_episodes_that_were_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["env", "test", "textarena", "env.id=Dice-v0", "env.split=train"]
    assert run([*words, "env.max_turns=1"]) == 0
    shown = capsys.readouterr().out
    assert "1 to 1 turns; 2 cut off by env.max_turns=1" in shown  # [stop] ends the third
    assert "env.max_turns=1 is below the 20 moves of Dice-v0" in shown


def test_env_test_keeps_prints_of_a_game_out_of_its_json(
    textarena: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(textarena.Dice, "get_observation", _printing(textarena.Dice.get_observation))
    assert run(["env", "test", "textarena", "env.id=Dice-v0", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"train", "test"}


def _printing(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def printed(self: Any) -> Any:
        print("Attempt 1")
        return method(self)

    return printed


def test_env_test_finds_a_game_whose_seed_does_not_hold(
    textarena: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = random.Random(1)
    monkeypatch.setattr(textarena, "random", own)
    monkeypatch.setattr(own, "seed", lambda seed: None)
    assert run(["env", "test", "textarena", "env.id=Dice-v0"]) == 3
    assert "does not always begin with the same observation" in capsys.readouterr().err


def test_it_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    words = [
        *("env=textarena", "env.id=Dice-v0", "env.max_turns=2", "env.max_prompt_tokens=2048", "model=tiny"),
        *("policy=scripted", f"policy.replies={json.dumps([ROLL, STOP])}", "prompts_per_step=2", "group_size=2"),
        *("steps=2", "eval.enabled=false"),
    ]
    assert run(["train", "grpo", *words, "--out", str(folder)]) == 0
    # of four conversations two stop at once, one rolls twice, and one rolls and stops, for 0.25
    assert [(line["step"], line["reward/mean"]) for line in metrics(folder)] == [(1, 0.25 / 4), (2, 0.25 / 4)]
    shown = capsys.readouterr()
    assert "env.max_turns=2 is below the 20 moves of Dice-v0" in shown.out + shown.err
