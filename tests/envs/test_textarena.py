"""Games of TextArena for one player, with a small package in place of it."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.cli.main import run
from rlpost.config.compose import compose
from rlpost.data.conversation import Conversation
from rlpost.envs.build import build_env
from rlpost.envs.textarena import TextArenaEnv
from rlpost.errors import ConfigError, DataError
from tests.envs.episodes import error_of, played, say
from tests.envs.textarena_stub import STUBS
from tests.says import Says
from tests.trainings import metrics

PACKAGES = ("textarena", "nltk")
ROLL, STOP, NONSENSE = "I [roll].", "[stop]", "hello"


@pytest.fixture(autouse=True)
def textarena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The small package, in place of the real one and of NLTK while a test runs."""
    monkeypatch.syspath_prepend(STUBS)
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

    def make(*words: str, id: str = "Dice-v0", num_prompts: int = 1, group_size: int = 1) -> TextArenaEnv:
        settings = compose(TRAIN_GRPO, ["env=textarena", f"env.id={id}", *words]).settings
        env = build_env(settings.env, num_prompts=num_prompts, group_size=group_size)
        assert isinstance(env, TextArenaEnv)
        return opened.enter_context(closing(env))

    with ExitStack() as opened:
        yield make


def texts(conversation: Conversation) -> list[str]:
    """Texts that the game has shown."""
    return [message["content"] for message in conversation.messages if message["role"] == "user"]


def shown(conversation: Conversation) -> list[int]:
    """The numbers at the end of these texts."""
    return [int(text.rstrip(".").split()[-1]) for text in texts(conversation)]


def numbers(conversation: Conversation, count: int) -> list[int]:
    """The numbers that the game of a conversation draws, if nothing else draws between."""
    own = random.Random(conversation.task["start"])
    return [own.randrange(10**6) for _ in range(count)]


# Playing


@pytest.mark.parametrize("id", ["Dice-v0", "Dice-v0-raw", "Dice-v0-board"])
def test_the_model_reads_what_is_new_and_close_rewards_it(id: str, made: Make, says: Says) -> None:
    conversation = played(made(id=id), ROLL, ROLL, STOP)
    assert shown(conversation) == numbers(conversation, 3)
    says("env", "\n".join(texts(conversation)))
    assert (conversation.reward, conversation.terminated, conversation.valid) == (0.5, True, True)
    assert conversation.reward_parts == {"earned": 0.5, "invalid_actions": 0.0}


def test_the_second_invalid_move_ends_with_partial_credit(made: Make) -> None:
    conversation = played(made(), NONSENSE, ROLL, NONSENSE, NONSENSE)
    assert [text.split("] ")[1][:9] for text in texts(conversation)[1:]] == ["You attem", "You rolle", "You attem"]
    assert (conversation.reward, conversation.valid, conversation.terminated) == (0.25, True, True)
    assert conversation.reward_parts["invalid_actions"] == 3.0


@pytest.mark.parametrize(
    ("word", "rolls", "reward", "terminated"),
    [("env.max_turns=2", 2, 0.0, False), ("env.arguments=[goal:15]", 15, 1.0, True)],
)
def test_an_episode_ends_with_the_limit_or_its_own_end(
    word: str, rolls: int, reward: float, terminated: bool, made: Make
) -> None:
    conversation = played(made(word), *[ROLL] * rolls)
    assert (conversation.reward, conversation.valid) == (reward, True)
    assert (conversation.terminated, conversation.truncated) == (terminated, not terminated)


def test_peculiarities_of_a_game_are_noted(made: Make, says: Says) -> None:
    short, enough, alike = made("env.max_turns=19"), made("env.max_turns=20"), made(id="Alike-v0")
    for env in (short, enough, alike):
        env.start()
    assert not enough.notes
    says("env", "\n".join([*short.notes, *alike.notes]))


def test_arguments_reach_the_game_and_success_is_measured(made: Make) -> None:
    env = made("env.arguments=[goal:1]", "env.success_return=1")
    assert (won := played(env, ROLL)).reward == 1.0
    assert won.accuracy_strict == 1.0
    assert played(env, STOP).accuracy_strict == 0.0


def test_a_game_that_mixes_up_its_arguments_shows_no_echo(made: Make, says: Says) -> None:
    env = made(id="Mixed-v0")
    conversation = played(env, ROLL, STOP)
    assert shown(conversation) == numbers(conversation, 2)
    assert texts(conversation)[1].count("[") == 1  # that of [GAME]
    assert conversation.reward == 0.25
    says("env", error_of(played(env, NONSENSE, NONSENSE)))


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
        assert shown(conversation) == numbers(conversation, 4)
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


# Failures while a game is played


def test_a_game_that_hangs_or_raises_leaves_the_others_alone(made: Make) -> None:
    env = made("env.step_seconds=0.2", num_prompts=4)
    random.seed(0)
    expected = random.random()
    random.seed(0)
    conversations = env.draw()
    say(env, conversations, ROLL, "[hang]", "[crash]", ROLL)
    first, late, crashed, last = conversations
    assert "within 0.2 s" in error_of(late)
    assert "RuntimeError" in error_of(crashed)
    say(env, [first, last], ROLL, ROLL)
    for conversation in (first, last):
        assert shown(conversation) == numbers(conversation, 3)
    assert random.random() == expected


def test_a_game_that_ends_without_a_reward_is_no_zero(made: Make) -> None:
    assert "ValueError" in error_of(played(made(id="Nothing-v0"), STOP))


# Refused at the start


@pytest.mark.parametrize(
    ("id", "words", "part"),
    [
        ("Dise-v0", [], "did you mean Dice-v0?"),
        ("xyz", [], "textarena.pprint_registry_detailed()"),
        ("Dice-v0", ["env.arguments=[gaol:3]"], "'gaol'"),
        ("Online-v0", [], "OpenRouter API key"),
        ("Newer-v0", [], "not valid Python 3."),
        ("Pair-v0", [], "has to be 2"),
        ("Crowd-v0", [], "not a game for one player"),
        ("Words-v0", [], "python -m nltk.downloader words"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused(id: str, words: list[str], part: str, made: Make) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"env.id={id} ") + f".*{re.escape(part)}"):
        made(*words, id=id).draw()


def test_data_that_the_machine_has_is_not_downloaded(made: Make, textarena: Any) -> None:
    import nltk

    download = nltk.download
    nltk.HERE.add("corpora/words")  # pyright: ignore[reportAttributeAccessIssue]
    assert played(made(id="Words-v0"), STOP).valid
    assert nltk.download is download


def test_a_game_that_does_not_begin_in_time_is_named(made: Make) -> None:
    with pytest.raises(DataError, match=r"Slow-v0: reset .* 0\.2 s"):
        made("env.start_seconds=0.2", id="Slow-v0").draw()


# Whole commands


def test_env_test_plays_the_examples_of_the_rules(capsys: pytest.CaptureFixture[str], says: Says) -> None:
    assert run(["env", "test", "textarena", "env.id=Dice-v0"]) == 0
    assert run(["env", "test", "textarena", "env.id=Dice-v0", "env.split=train", "env.max_turns=1"]) == 0
    says("env", capsys.readouterr().out)  # [stop] ends the third start, the limit the others


def test_env_test_keeps_prints_of_a_game_out_of_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "test", "textarena", "env.id=Loud-v0", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"train", "test"}


def test_env_test_finds_a_game_whose_seed_does_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "test", "textarena", "env.id=Loose-v0"]) == 3
    assert "reset(seed=" in capsys.readouterr().err


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
    assert "20 moves" in shown.out + shown.err
