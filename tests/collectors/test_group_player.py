"""GroupPlayer: conversations at their own pace, groups whole, cancelled, failed, and pushes between or into them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlpost.collectors.player import GroupPlayer
from rlpost.collectors.sync import Player
from rlpost.data.conversation import Completion, Conversation, PolicyVersionLabel, Ticket
from rlpost.envs import ArithmeticEnv, DatasetChatEnv
from rlpost.errors import DataError
from rlpost.model.load import load_model
from rlpost.policies import ScriptedPolicy, TransformersWrapper
from rlpost.policies.base import Request
from rlpost.rewards.score import Score
from rlpost.settings import ModelSettings, SamplingSettings
from tests.collectors.here import wait_until
from tests.collectors.talk import Talk, scripted, talk, tokenizer


class Host:
    """What a worker process gives its object: a main thread, and somebody who listens."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.main = ThreadPoolExecutor(1, "main")

    def tell(self, kind: str, content: Any) -> None:
        if kind == "groups":
            whole, totals = content
            self.told += [("group", (*each, totals)) for each in whole]
        elif kind != "progress":
            self.told.append((kind, content))

    def in_main_thread(self, work: Callable[[], Any]) -> Future[Any]:
        return self.main.submit(work)

    def wait(self, count: int) -> list[tuple[str, Any]]:
        wait_until(lambda: len(self.told) >= count)
        return self.told


class Folders(ScriptedPolicy):
    """Takes up folders, and says under which versions."""

    def __init__(self, hold: threading.Event | None = None) -> None:
        super().__init__(["a"], tokenizer(), sampling=SamplingSettings())
        self.hold = hold

    def load_folder(self, folder: Path, version: PolicyVersionLabel) -> None:
        self.become(version)

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        completions = super().generate(requests, sampling)
        if self.hold is not None:
            self.hold.wait(30)
        return completions


class Gated(Talk):
    """Waits in the first conversation's first answer until the second one is over."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.second_is_over = threading.Event()
        self.scored_in: set[str] = set()
        self.abandoned: list[tuple[int, int]] = []

    def respond(self, conversations: Sequence[Conversation]) -> None:
        [conversation] = conversations
        if conversation.sample == 0:
            assert self.second_is_over.wait(30)
        super().respond(conversations)
        if conversation.sample == 1 and conversation.done:
            self.second_is_over.set()

    def score(self, conversation: Conversation) -> Score:
        self.scored_in.add(threading.current_thread().name)
        return super().score(conversation)

    def abandon(self, conversations: Sequence[Conversation] | None = None) -> None:
        self.abandoned += [conversation.key for conversation in conversations or ()]
        super().abandon(conversations)


def gated() -> Gated:
    return Gated([{"question": "q", "turns": 3}], shuffle=False, repeats=2, max_steps=3)


@pytest.fixture
def playing() -> Iterator[Callable[..., GroupPlayer]]:
    players: list[GroupPlayer] = []

    def make(env: DatasetChatEnv, policy: Any = None) -> GroupPlayer:
        player = GroupPlayer(env, policy or scripted("a"))
        player.host = Host()
        players.append(player)
        return player

    yield make
    for player in players:
        player.close()


def told_to(player: GroupPlayer) -> Host:
    assert isinstance(player.host, Host)
    return player.host


def tickets(env: DatasetChatEnv, groups: int) -> list[Ticket]:
    return env.tickets(groups * env.repeats)


Playing = Callable[..., GroupPlayer]


def test_a_conversation_goes_on_while_another_waits_for_its_tool(playing: Playing) -> None:
    env = gated()
    player, began = playing(env), time.monotonic()
    player.play(tickets(env, 1))
    [(kind, (group, conversations, totals))] = told_to(player).wait(1)
    assert 0 < totals["reward"] <= time.monotonic() - began
    assert (kind, group) == ("group", 0)
    assert [(c.sample, c.turns, c.reward) for c in conversations] == [(0, 3, 3.0), (1, 3, 3.0)]
    assert env.scored_in == {"main_0"}
    assert totals["tokens"] == sum(sum(c.mask) for c in conversations)


def test_what_is_played_is_what_lock_step_plays(playing: Playing, tiny_folder: Path) -> None:
    model = load_model(tiny_folder, ModelSettings(path=""))
    policy = TransformersWrapper(model, tokenizer(), sampling=SamplingSettings())
    envs = [ArithmeticEnv(num_envs=3, repeats=2, group_repeats=True, seed=4, max_completion_tokens=5) for _ in range(2)]
    expected = envs[0].draw()
    Player(envs[0], policy).turn(expected)
    player = playing(envs[1], policy)
    player.play(tickets(envs[1], 3))
    groups = {content[0]: content[1] for _, content in told_to(player).wait(3)}
    played = [c for number in sorted(groups) for c in groups[number]]
    assert [(c.group_id, c.sample, c.response_ids, c.reward) for c in played] == [
        (c.group_id, c.sample, c.response_ids, c.reward) for c in expected
    ]


def test_a_group_that_is_cancelled_while_it_begins_is_abandoned(playing: Playing) -> None:
    begins, goes_on = threading.Event(), threading.Event()

    class Slow(Gated):
        def open(self, ticket: Ticket) -> list[Conversation]:
            begins.set()
            assert goes_on.wait(30)
            return super().open(ticket)

    env = Slow([{"question": "q", "turns": 3}], shuffle=False, repeats=2, max_steps=3)
    player = playing(env)
    [ticket] = tickets(env, 1)
    player.play([ticket])
    assert begins.wait(30)
    cancelled = player.cancel([ticket.group])
    threading.Timer(0.1, goes_on.set).start()
    cancelled.result(30)
    assert env.abandoned == [(0, 0), (0, 1)]


def test_a_cancelled_group_is_released_and_does_not_come_back(playing: Playing) -> None:
    env = gated()
    env.second_is_over.set()  # nothing waits for anything
    player = playing(env, Folders(hold := threading.Event()))
    [first, second] = tickets(env, 2)
    player.play([first])
    wait_until(lambda: player.policy.tokens_sampled)
    cancelled = player.cancel([first.group])
    hold.set()
    cancelled.result(30)
    assert env.abandoned == [(0, 0), (0, 1)]
    player.play([second])
    assert [content[0] for _, content in told_to(player).wait(1)] == [1]


def test_an_error_comes_back_with_its_group_alone(playing: Playing) -> None:
    class Picky(Talk):
        def respond(self, conversations: Sequence[Conversation]) -> None:
            if conversations[0].group_id == 1:
                raise DataError("train row 2 has no answer: remove it")
            super().respond(conversations)

    env = Picky([{"question": f"q{i}", "turns": 1} for i in range(3)], shuffle=False, repeats=2, max_steps=3)
    player = playing(env)
    player.play(tickets(env, 3))
    told = told_to(player).wait(3)
    assert sorted((kind, content[0]) for kind, content in told) == [("failed", 1), ("group", 0), ("group", 2)]
    [error] = [content[1] for kind, content in told if kind == "failed"]
    assert isinstance(error, DataError)
    assert "row 2" in str(error)


def test_a_push_waits_for_the_groups_under_way_or_goes_into_them(playing: Playing, tmp_path: Path) -> None:
    for wait, versions in ((True, [0, 0, 0]), (False, [0, 1, 1])):
        env = Talk([{"question": "q", "turns": 3}], shuffle=False, repeats=1, max_steps=3)
        player = playing(env, Folders(hold := threading.Event()))
        player.play(tickets(env, 1))
        wait_until(lambda player=player: player.policy.tokens_sampled)  # the first of three turns
        pushed = player.push(tmp_path, 1, wait=wait)
        if wait:
            assert not pushed.done()
        else:
            pushed.result(30)  # while the turn is still held
        hold.set()
        pushed.result(30)
        [(_, (_, [conversation], _))] = told_to(player).wait(1)
        assert conversation.policy_versions == versions
        assert player.policy.version == 1


def test_the_policy_rests_where_nothing_is_played_alone(playing: Playing) -> None:
    class Resting(Folders):
        rests = 0

        def rest(self) -> None:
            self.rests += 1

    env = Talk([{"question": "q", "turns": 1}], shuffle=False, repeats=2, max_steps=3)
    player = playing(env, policy := Resting(hold := threading.Event()))
    player.play(tickets(env, 1))
    wait_until(lambda: player.policy.tokens_sampled)
    player.rest().result(30)
    assert policy.rests == 0
    hold.set()
    told_to(player).wait(1)
    player.rest().result(30)
    assert policy.rests == 1


def test_completions_are_sampled_for_others_beside(playing: Playing) -> None:
    player = playing(talk())
    requests = [Request([1, 2], 8, seed) for seed in range(5)]
    completions = player.generate(requests, SamplingSettings(temperature=0.0)).result(30)
    assert [completion.text for completion in completions] == ["a"] * 5
    assert [content[0] for kind, content in told_to(player).told if kind == "ended"] == [1, 2, 3, 4, 5]
