"""The halves of a draw and of a turn: tickets that are opened anywhere, and answers that many threads get at once."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlpost.data.conversation import Completion, Conversation, Ticket
from rlpost.envs import ArithmeticEnv, ChatEnv, DatasetChatEnv, TextGameEnv
from rlpost.envs.base import ToolCall, ToolResult, ToolTransform
from rlpost.envs.build import build_env
from rlpost.envs.mix import MixEnv
from rlpost.envs.transforms import DataLoadingPrimer, Transform
from rlpost.errors import ConfigError
from rlpost.rewards.score import Score
from rlpost.settings import MixSettings
from rlpost.torchrl.envs import LLMEnv
from tests.envs.own_rows import write_rows
from tests.says import Says

ROWS = [{"question": f"q{i}", "answer": str(i)} for i in range(7)]
THREADS = 64


class Echo(ToolTransform):
    """Says what it is told, after `run`; remembers which conversations began and ended."""

    def __init__(self, run: Callable[[], object] = lambda: None) -> None:
        self.run = run
        self.began: list[tuple[int, int]] = []
        self.ended: list[tuple[int, int]] = []

    def schemas(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "echo", "description": "Echo.", "parameters": {}}}]

    def call(self, conversation: Conversation, call: ToolCall) -> ToolResult:
        self.run()
        return ToolResult(f"{conversation.key} {call.arguments['text']}")

    def on_begin(self, conversations: Sequence[Conversation]) -> None:
        super().on_begin(conversations)
        self.began += [conversation.key for conversation in conversations]

    def on_end(self, conversations: Sequence[Conversation]) -> None:
        self.ended += [conversation.key for conversation in conversations]


class Up:
    """Begins at the seed's last digit; the move "up" adds one, and at 9 the game is won."""

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        self.number = seed % 5
        return str(self.number), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(0.001)
        self.number += 1
        return str(self.number), 1.0, self.number == 6, False, {}


class Patient(DatasetChatEnv):
    """Answers twice; fails where two conversations are answered at once."""

    inside = 0

    def next_message(self, conversation: Conversation) -> str | None:
        self.inside += 1
        time.sleep(0.0005)
        assert self.inside == 1
        self.inside -= 1
        return f"and? {conversation.response_text}" if conversation.turns < 3 else None

    def score(self, conversation: Conversation) -> Score:
        return Score(float(conversation.turns))


def of_rows() -> DatasetChatEnv:
    return DatasetChatEnv(ROWS, num_envs=2, repeats=3, seed=1, system_prompt="Be brief.")


def of_a_mix() -> MixEnv:
    sources = ["countdown weight=2", "arithmetic digits=1"]
    settings = MixSettings(sources=sources, max_prompt_tokens=400, max_completion_tokens=100)
    env = build_env(settings, num_prompts=2, group_size=3, seed=3)
    assert isinstance(env, MixEnv)
    return env


def of_a_game() -> TextGameEnv:
    return TextGameEnv(Up, num_envs=2, repeats=3)


def with_a_tool() -> ChatEnv:
    return ArithmeticEnv(num_envs=2, repeats=3, max_steps=2).append_transform(Echo())


def of_plain_text() -> LLMEnv:
    rows = [{"text": f"Once {number}"} for number in range(4)]
    return LLMEnv(2).append_transform(DataLoadingPrimer(rows, repeats=3))


def reply(conversations: Sequence[Conversation], text: str) -> None:
    """Without letting the environment go on."""
    for conversation in conversations:
        conversation.add_completion(Completion([1], [0.0], text, "stop", 0))


def opened(env: ChatEnv, tickets: Sequence[Ticket]) -> list[Conversation]:
    return [conversation for ticket in tickets for conversation in env.open(ticket)]


MAKERS = [of_rows, of_a_mix, of_a_game, with_a_tool, of_plain_text]


@pytest.mark.parametrize("make", MAKERS)
def test_tickets_opened_elsewhere_are_what_draw_gives(make: Callable[[], ChatEnv]) -> None:
    whole, driver, player = make(), make(), make()
    for count in (2, 5, 2, 1):  # begin and end in the middle of groups of 3
        drawn = whole.draw(count)
        tickets: list[Ticket] = pickle.loads(pickle.dumps(driver.tickets(count)))
        assert opened(player, tickets) == drawn
        assert [(t.group, s) for t in tickets for s in t.samples] == [c.key for c in drawn]
        assert len({t.group for t in tickets}) == len(tickets)
        assert driver.state_dict() == whole.state_dict()
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(driver.state_dict())))  # one sample of a group has been drawn
    assert [t.samples for t in resumed.tickets(4)] == [[1, 2], [0, 1]]
    resumed.load_state_dict(whole.state_dict())
    assert opened(resumed, resumed.tickets()) == whole.draw()


@pytest.mark.parametrize("make", [of_rows, of_a_mix, of_a_game, with_a_tool])
def test_a_ticket_can_be_written_as_json(make: Callable[[], ChatEnv]) -> None:
    (ticket,) = make().tickets(2)
    assert Ticket(**json.loads(json.dumps(asdict(ticket)))) == ticket


def test_a_ticket_knows_the_place_of_its_row_and_begins_nothing(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS, "train.jsonl")
    echo = Echo()
    env = DatasetChatEnv(str(tmp_path), shuffle=False, held_out=0, repeats=2, tool_role="tool").append_transform(echo)
    tickets = env.tickets(3)
    assert [(t.group, t.samples) for t in tickets] == [(0, [0, 1]), (1, [0])]
    assert [t.where.partition(", ")[2] for t in tickets] == ["row 1", "row 2"]
    assert echo.began == []
    assert [c.where for c in env.open(tickets[0])] == [tickets[0].where] * 2
    assert echo.began == [(0, 0), (0, 1)]


def begun_since(before: set[threading.Thread]) -> int:
    """Threads that were not there before; one that another test has left may end meanwhile."""
    return len(set(threading.enumerate()) - before)


def played(env: ChatEnv, text: str, workers: int) -> list[Conversation]:
    """64 conversations, opened and answered by 64 threads."""
    tickets = env.tickets(THREADS)
    go = threading.Barrier(workers, timeout=30)

    def play(ticket: Ticket) -> list[Conversation]:
        go.wait()
        conversations = env.open(ticket)
        while going := [conversation for conversation in conversations if not conversation.done]:
            reply(going, text.format(going[0].group_id, going[0].turns))
            env.respond(going)
        return conversations

    with ThreadPoolExecutor(workers) as pool:
        conversations = [c for each in pool.map(play, tickets) for c in each]
    env.conclude(conversations)
    env.close()
    return conversations


CALL = '<tool_call>{{"name": "echo", "arguments": {{"text": "{} {}"}}}}</tool_call>'


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ArithmeticEnv(num_envs=THREADS, max_steps=3).append_transform(Echo(lambda: time.sleep(0.002))), CALL),
        (lambda: TextGameEnv(Up, num_envs=THREADS), "<action>up</action>"),
        (lambda: Patient(ROWS, num_envs=THREADS, max_steps=3), "{} {}"),
    ],
)
def test_64_threads_get_the_answers_that_one_gets(make: Callable[[], ChatEnv], text: str) -> None:
    threads = set(threading.enumerate())
    together = played(make(), text, THREADS)
    assert together == played(make(), text, 1)
    assert len(together) == THREADS
    assert all(c.valid and c.turns > 1 and c.reward is not None for c in together)
    deadline = time.monotonic() + 30
    while begun_since(threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert begun_since(threads) == 0  # no game is left


@pytest.mark.parametrize("at_once", [3, None])
def test_a_tool_runs_as_many_calls_at_once_as_it_says(at_once: int | None) -> None:
    """None: a conversation waits for no tool of another."""
    counting, inside, most = threading.Lock(), 0, 0
    meeting = threading.Barrier(at_once or 12, timeout=30)

    def count() -> None:
        nonlocal inside, most
        with counting:
            inside += 1
            most = max(most, inside)
        meeting.wait()  # until as many are inside as may be
        time.sleep(0.005)
        with counting:
            inside -= 1

    echo = Echo(count)
    echo.at_once = at_once
    env = ArithmeticEnv(num_envs=12, max_steps=2).append_transform(echo)
    conversations = env.draw()
    reply(conversations, CALL.format(0, 0))
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda c: env.respond([c]), conversations))
    results = [c.messages[-1]["content"].partition("\n")[2] for c in conversations]
    assert results == [f"({number}, 0) 0 0" for number in range(12)]
    assert most == (at_once or 12)


def test_transforms_are_not_called_by_two_threads_at_once() -> None:
    class Alone(Transform):
        inside = 0

        def on_begin(self, conversations: Sequence[Conversation]) -> None:
            self.inside += 1
            time.sleep(0.001)
            assert self.inside == 1
            self.inside -= 1

        on_reply = on_end = on_begin

    env = Patient(ROWS, num_envs=8, max_steps=3).append_transform(Alone())
    tickets = env.tickets(8)

    def play(ticket: Ticket) -> None:
        conversations = env.open(ticket)
        reply(conversations, "x")
        env.respond(conversations)
        env.abandon(conversations)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(play, tickets)) == [None] * 8


def test_conversations_that_are_given_up_are_ended_one_by_one() -> None:
    echo = Echo()
    env = TextGameEnv(Up, num_envs=2)
    env.transforms.append(echo)
    gone, stays = conversations = env.draw()
    reply(conversations, "<action>up</action>")
    env.respond(conversations)
    env.abandon([gone])
    assert echo.ended == [gone.key]
    env.abandon([stays])
    assert echo.ended == [gone.key, stays.key]


def test_an_environment_that_overrides_a_whole_turn_is_refused(says: Says) -> None:
    class Whole(DatasetChatEnv):
        def advance(self, conversations: Sequence[Conversation]) -> None:
            super().advance(conversations)

    for make in MAKERS:
        make().check_halves()
    with says.refused("env", ConfigError, "Whole"):
        Whole(ROWS).check_halves()
