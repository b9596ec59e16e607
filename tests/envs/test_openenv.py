"""env=openenv against a small server of our own, and against recorded frames of OpenEnv 0.10.0."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import pytest
from websockets.sync.server import ServerConnection

from rlpost.catalog import EVAL, TRAIN_GRPO
from rlpost.cli.main import run as run_cli
from rlpost.config.compose import compose
from rlpost.data.conversation import Completion, Conversation
from rlpost.envs.base import ToolCall, ToolLimits, ToolResult, ToolTransform, Transform
from rlpost.envs.build import build_env
from rlpost.envs.checks import check_template
from rlpost.envs.openenv import OpenEnv
from rlpost.envs.openenv_actions import ActionForm, observation_text
from rlpost.errors import ConfigError, DataError, MissingExtraError, ToolError
from rlpost.settings import OpenEnvSettings
from tests.collectors.talk import tokenizer
from tests.openenv_server import SCHEMA, TOOLS_SCHEMA, Failure, Guess, OpenEnvServer, Shop, open_env_server, seen
from tests.trainings import metrics, train_in

RECORDED = json.loads((Path(__file__).parent / "openenv_frames.json").read_text())
ADD = '<tool_call>{"name": "add", "arguments": {"number": 3}}</tool_call>'
STOP = '<tool_call>{"name": "stop", "arguments": {"number": 1}}</tool_call>'


@pytest.fixture
def server() -> Iterator[OpenEnvServer]:
    with open_env_server() as server:
        yield server


@pytest.fixture
def opened() -> Iterator[list[OpenEnv]]:
    """Environments that are closed after the test, before its server looks for what is left."""
    envs: list[OpenEnv] = []
    yield envs
    for env in envs:
        env.close()


@pytest.fixture
def env_of(server: OpenEnvServer, opened: list[OpenEnv]) -> Any:
    def make(**settings: Any) -> OpenEnv:
        opened.append(OpenEnv(server.url, **{"start_seconds": 20.0, "step_seconds": 20.0, **settings}))
        return opened[-1]

    return make


@contextmanager
def playing(
    game: Any = Guess, *, settings: dict[str, Any] | None = None, **server: Any
) -> Iterator[tuple[OpenEnvServer, OpenEnv]]:
    """A server of a game, and an environment that plays it."""
    own = {"start_seconds": 20.0, "step_seconds": 20.0, **(settings or {})}
    with open_env_server(game, **server) as running, closing(OpenEnv(running.url, **own)) as env:
        yield running, env


def say(env: OpenEnv, conversations: Sequence[Conversation], *replies: str, reason: str = "stop") -> None:
    for conversation, reply in zip(conversations, replies, strict=True):
        conversation.add_completion(Completion([], [], reply, reason, 0))
    env.advance(conversations)


def digit_of(conversation: Conversation) -> int:
    return conversation.task["start"] % 10


def wrong_for(conversation: Conversation) -> str:
    return str((digit_of(conversation) + 1) % 10)


# Episodes


def test_a_conversation_is_an_episode_and_earns_the_sum_of_its_steps(server: OpenEnvServer, env_of: Any) -> None:
    env = env_of(success_return=0.5, repeats=2, num_envs=2, reset={"level": "hard"})
    conversation, other = env.draw()
    parity = "even" if digit_of(conversation) % 2 == 0 else "odd"
    assert conversation.messages == other.messages
    assert conversation.query == (
        "An action is a whole number from 0 (guess: a digit). Write your next action between <action> and </action>."
        f"\n\nGuess a digit. It is {parity}; hard."
    )
    say(env, [conversation, other], f"<action>{wrong_for(conversation)}</action>", str(digit_of(other)))
    assert conversation.messages[-1] == {"role": "user", "content": "no, 1"}
    assert (other.terminated, other.reward, other.accuracy_strict) == (True, 1.0, 1.0)
    say(env, [conversation], f'Then <action>{{"guess": {digit_of(conversation)}}}</action>')
    assert (conversation.terminated, conversation.truncated, conversation.reward) == (True, False, 0.75)
    assert conversation.reward_parts == {"earned": 0.75, "invalid_actions": 0.0, "unset_rewards": 0.0}
    guesses = sorted(action["guess"] for action in server.steps())
    assert guesses == sorted([int(wrong_for(conversation)), *[digit_of(conversation)] * 2])


def test_sessions_serve_one_episode_after_the_other_and_are_closed_with_the_environment(
    server: OpenEnvServer, env_of: Any
) -> None:
    env = env_of(num_envs=3)
    env.start()
    assert server.wait_until_idle()  # a start leaves no session open
    before = server.opened
    for _ in range(4):
        conversations = env.draw()
        say(env, conversations, *(str(digit_of(each)) for each in conversations))
        assert [each.reward for each in conversations] == [1.0] * 3
    assert server.opened == before + 3
    env.close()
    assert server.wait_until_idle()
    assert env.draw()[0].query  # and it can begin again


def test_two_environments_of_one_server_share_its_sessions(server: OpenEnvServer, env_of: Any) -> None:
    training, testing = env_of(num_envs=2), env_of(split="test", num_envs=2)
    for env in (training, testing):
        conversations = env.draw()
        say(env, conversations, *(str(digit_of(each)) for each in conversations))
    assert server.most_open == 2
    training.close()
    assert testing.draw()[0].query


def test_the_model_reads_why_a_reply_is_invalid_and_the_reply_is_not_sent(server: OpenEnvServer, env_of: Any) -> None:
    env = env_of(invalid_reward=-1.0, max_steps=2)
    [conversation] = env.draw()
    say(env, [conversation], "<action>seven</action>")
    assert conversation.messages[-1]["content"] == "That is not a valid action: 'seven' is not a whole number from 0"
    assert server.steps() == []
    say(env, [conversation], str(digit_of(conversation)))
    assert (conversation.reward, conversation.reward_parts["invalid_actions"]) == (0.0, 1.0)


def test_a_truncated_reply_is_not_an_action(server: OpenEnvServer, env_of: Any) -> None:
    env = env_of()
    [conversation] = env.draw()
    say(env, [conversation], "7", reason="length")
    assert (conversation.truncated, conversation.valid, conversation.reward, server.steps()) == (True, True, 0.0, [])


def test_turns_may_cut_an_episode_short(env_of: Any) -> None:
    env = env_of(max_steps=1)
    [conversation] = env.draw()
    say(env, [conversation], wrong_for(conversation))
    assert (conversation.terminated, conversation.truncated, conversation.reward) == (False, True, -0.25)


def test_the_server_may_be_named_by_http_and_with_a_path() -> None:
    assert OpenEnv("http://host:1/").url == OpenEnv("ws://host:1/ws").url == "ws://host:1/ws"
    assert OpenEnv("https://host/a").url == "wss://host/a/ws"
    assert OpenEnvSettings(url="ws://[::1]:80/a").url == "ws://[::1]:80/a"
    for wrong in ("host:8000", "ws://HOST:PORT"):
        with pytest.raises(ConfigError, match=rf"env\.url={wrong} is not an address: write ws://HOST:PORT"):
            compose(EVAL, ["env=openenv", f"env.url={wrong}"])


# Rewards that are not set


class Unset(Guess):
    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        return {**super().step(action), "reward": None if action["guess"] > 1 else 0.5}


def test_an_unset_reward_is_skipped_and_counted_and_never_0() -> None:
    with playing(Unset, settings={"num_envs": 2, "max_steps": 2}) as (_, env):
        some, none = conversations = env.draw()
        say(env, conversations, "12", "13")
        say(env, conversations, "1", "14")
        assert (some.reward, some.reward_parts["unset_rewards"]) == (0.5, 1.0)
        assert (none.valid, none.reward) == (False, None)
        assert none.error is not None
        assert none.error.endswith("none of the episode's 2 steps has a reward (reward is null)")


# Failures of the server


def played_with(twist: Any, reply: str = "7", **settings: Any) -> tuple[Conversation, Conversation, int]:
    """Two conversations of which `twist` spoils the one that says `reply`; and how many sessions there were after."""
    with playing(twist=twist, settings={"num_envs": 2, "start_seconds": 20.0, "step_seconds": 20.0, **settings}) as (
        server,
        env,
    ):
        spoilt, right = conversations = env.draw()
        before = server.opened
        say(env, conversations, reply, str(digit_of(right)))
        server.released.set()
        assert (right.valid, right.reward) == (True, 1.0)
        assert (spoilt.valid, spoilt.reward, spoilt.done) == (False, None, True)
        for _ in range(2):
            again = env.draw()
            say(env, again, *(str(digit_of(each)) for each in again))
            assert [each.reward for each in again] == [1.0, 1.0]  # no answer of before comes up again
        return spoilt, right, server.opened - before


SPOILT = {"guess": 77}


def test_a_late_step_is_an_error_and_its_session_is_never_used_again() -> None:
    released: list[Any] = []

    def hang(connection: ServerConnection, frame: dict[str, Any]) -> bool:
        if frame.get("data") != SPOILT:
            return False
        released.append(frame)
        return True  # no answer

    spoilt, _, opened = played_with(hang, "77", step_seconds=1.0)
    assert spoilt.error is not None
    assert spoilt.error.endswith("/ws: step did not return within 1 s")
    assert (opened, len(released)) == (1, 1)


def test_a_server_whose_schema_lies_is_an_error_by_name() -> None:
    fault = {"type": "extra_forbidden", "loc": ["guess"], "msg": "Extra inputs are not permitted"}

    def lie(connection: ServerConnection, frame: dict[str, Any]) -> bool:
        if frame.get("data") == SPOILT:
            error = Failure("VALIDATION_ERROR", "Invalid message", errors=[fault])
            connection.send(json.dumps({"type": "error", "data": error.data}))
            return True
        return False

    spoilt, _, _ = played_with(lie, "77")
    assert spoilt.error is not None
    assert "step failed: guess: Extra inputs are not permitted (VALIDATION_ERROR)" in spoilt.error


def test_the_model_reads_a_finer_rule_of_the_server() -> None:
    fault = {"type": "less_than", "loc": ["guess"], "msg": "Input should be less than 10"}

    class Strict(Guess):
        def step(self, action: dict[str, Any]) -> dict[str, Any]:
            if action["guess"] > 9:
                raise Failure("VALIDATION_ERROR", "Invalid message", errors=[fault])
            return super().step(action)

    with playing(Strict) as (_, env):
        [conversation] = env.draw()
        say(env, [conversation], "12")
        assert conversation.messages[-1]["content"] == "That is not a valid action: guess: Input should be less than 10"
        say(env, [conversation], str(digit_of(conversation)))
        assert (conversation.reward, conversation.reward_parts["invalid_actions"]) == (1.0, 1.0)


class Refusing(Guess):
    """Refuses a guess of 25."""

    fault: ClassVar[dict[str, Any]] = {"type": "less_than", "loc": ["guess"], "msg": "Input should be less than 25"}
    refuses = False

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        if self.refuses and action["guess"] == 25:
            raise Failure("VALIDATION_ERROR", "Invalid message", errors=[self.fault])
        return super().step(action)


@pytest.mark.parametrize("place", [["points"], []])
def test_an_observation_that_breaks_a_rule_is_an_error_and_no_fault_of_the_model(place: list[str]) -> None:
    class Broken(Refusing):
        fault: ClassVar = {**Refusing.fault, "loc": place}
        refuses = True

    with playing(Broken) as (_, env):
        [conversation] = env.draw()
        say(env, [conversation], "25")
        assert (conversation.done, conversation.reward) == (True, None)
        assert "Input should be less than 25 (VALIDATION_ERROR)" in str(conversation.error)


def test_a_reset_that_is_refused_is_an_error_and_no_prompt() -> None:
    class Closed(Guess):
        def reset(self, **arguments: Any) -> dict[str, Any]:  # type: ignore[override]
            raise Failure("VALIDATION_ERROR", "Invalid message", errors=[Refusing.fault])

    with (
        open_env_server(Closed) as server,
        closing(OpenEnv(server.url)) as env,
        pytest.raises(ToolError, match=r"no episode can be played: .*reset failed: guess: Input should be less"),
    ):
        env.start()


def test_an_action_that_is_refused_when_it_is_played_again_is_an_error() -> None:
    class Changing(Refusing):
        pass

    own: dict[str, Any] = {"num_envs": 2, "sessions": 1}
    with playing(Changing, settings=own) as (server, env), closing(OpenEnv(server.url, **own)) as fresh:
        conversations = env.draw()
        say(env, conversations, "15", "25")
        saved = [Conversation(**asdict(each)) for each in conversations]
        Changing.refuses = True
        fresh.start()
        for playing_on, those in ((env, conversations), (fresh, saved)):
            say(playing_on, those, *(str(digit_of(each)) for each in those))
            assert [each.valid for each in those] == [True, False]
        assert "step failed: guess: Input should be less than 25" in str(conversations[1].error)
        assert "the server shows another text than the model has read" in str(saved[1].error)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            '{"type": "error", "data": {"message": "boom", "code": "EXECUTION_ERROR"}}',
            "step failed: boom (EXECUTION_ERROR)",
        ),
        *(
            (
                f'{{"type": "error", "data": {{"message": "boom", "code": "VALIDATION_ERROR", "errors": {errors}}}}}',
                "step failed: boom (VALIDATION_ERROR)",
            )
            for errors in ('"bad"', '["bad"]', '[{"loc": null, "msg": "bad"}]')
        ),
        ("what?", "step was answered with something that is not a frame: 'what?'"),
        ('{"type": "observation", "data": {"observation": 3}}', "something that is not an observation"),
        ('{"type": "observation", "data": {"observation": {}, "reward": "1", "done": false}}', "not an observation"),
        ("x" * (17 * 2**20), "the server closed the session before step returned: sent 1009 (message too big)"),
    ],
)
def test_a_wrong_answer_is_an_error_by_name(answer: str, said: str) -> None:
    def twist(connection: ServerConnection, frame: dict[str, Any]) -> bool:
        if frame.get("data") == SPOILT:
            connection.send(answer)
            return True
        return False

    spoilt, _, _ = played_with(twist, "77")
    assert spoilt.error is not None
    assert said in spoilt.error


def test_a_flood_of_frames_that_nobody_asked_for_is_an_error_by_name() -> None:
    def flood(connection: ServerConnection, frame: dict[str, Any]) -> bool:
        if frame.get("data") == SPOILT:
            for _ in range(100):
                connection.send(json.dumps({"type": "observation", "data": seen("no, 1", 5.0)}))
            return True
        return False

    with playing(twist=flood) as (_, env):
        [conversation] = env.draw()
        say(env, [conversation], "77")
        say(env, [conversation], str(digit_of(conversation)))
        assert conversation.error is not None
        assert "the server sent a frame that nobody asked for: " in conversation.error
        [after] = env.draw()
        say(env, [after], str(digit_of(after)))
        assert after.reward == 1.0


def test_a_server_that_dies_is_an_error_by_name_and_one_that_is_back_is_played_on(
    server: OpenEnvServer, env_of: Any
) -> None:
    env = env_of(num_envs=2, start_seconds=1.0)
    conversations = env.draw()
    say(env, conversations, *(wrong_for(each) for each in conversations))
    server.stop()
    say(env, conversations, *(wrong_for(each) for each in conversations))
    assert [each.valid for each in conversations] == [False, False]
    assert all("the server closed the session before step returned" in str(each.error) for each in conversations)
    with pytest.raises(ToolError, match=r"no episode can be begun: ws://.*: nothing answers .*: start the server"):
        env.draw()
    server.start()
    conversations = env.draw()
    say(env, conversations, *(str(digit_of(each)) for each in conversations))
    assert [each.reward for each in conversations] == [1.0, 1.0]


def test_a_server_that_restarts_between_episodes_is_not_noticed(server: OpenEnvServer, env_of: Any) -> None:
    env = env_of()
    for _ in range(2):
        [conversation] = env.draw()
        say(env, [conversation], str(digit_of(conversation)))
        assert conversation.reward == 1.0
        server.stop()
        assert server.wait_until_idle()
        server.start()


def test_a_start_that_cannot_be_made_is_refused_by_name(server: OpenEnvServer, env_of: Any) -> None:
    server.stop()
    with pytest.raises(
        ToolError, match=r"GET http://127.0.0.1:\d+/schema gives no schema of actions .*start the OpenEnv"
    ):
        env_of().start()
    server.start()

    def hang(connection: ServerConnection, frame: dict[str, Any]) -> bool:
        return frame["type"] == "reset"

    server.twist = hang
    with pytest.raises(ToolError, match=r"no episode can be played: .*: reset did not return within 0\.5 s"):
        env_of(start_seconds=0.5).start()
    server.released.set()


@pytest.mark.parametrize(
    "schema", [{"properties": []}, {"properties": {"x": "integer"}}, {"properties": {"x": {"anyOf": "int"}}}]
)
def test_a_malformed_schema_is_refused_by_name(schema: dict[str, Any]) -> None:
    with open_env_server(schema=schema) as server, pytest.raises(ToolError, match="gives no schema of actions"):
        OpenEnv(server.url).start()


def test_a_port_that_does_not_speak_http_is_refused_by_name() -> None:
    def greet() -> None:
        client, _ = listening.accept()
        client.sendall(b"SSH-2.0-OpenSSH_9\r\n")
        client.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(ToolError, match="gives no schema of actions"):
            OpenEnv(f"ws://127.0.0.1:{listening.getsockname()[1]}").start()


def test_a_server_on_this_machine_is_asked_without_a_proxy(env_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    env_of().start()


def test_connecting_and_resetting_have_one_deadline() -> None:
    slow = threading.Event()

    class Slow(OpenEnvServer):
        def _answer_get(self, connection: ServerConnection, request: Any) -> Any:
            if request.path == "/ws" and slow.is_set():
                time.sleep(0.7)
            return super()._answer_get(connection, request)

    def twist(connection: ServerConnection, frame: dict[str, Any]) -> bool:
        if frame["type"] == "reset" and slow.is_set():
            time.sleep(0.7)
        return False

    server = Slow(twist=twist)
    with closing(OpenEnv(server.url, start_seconds=1.0)) as env:
        env.start()
        slow.set()
        with pytest.raises(ToolError, match="reset did not return within 1 s"):
            env.draw()
    server.stop()


def test_a_reset_that_is_refused_is_not_tried_in_each_free_session() -> None:
    refuses = threading.Event()

    class Moody(Guess):
        def reset(self, seed: int = 0, level: str = "easy") -> dict[str, Any]:
            if refuses.is_set():
                raise Failure("EXECUTION_ERROR", "no such level")
            return super().reset(seed, level)

    with playing(Moody, settings={"num_envs": 4}) as (server, env):
        conversations = env.draw()
        say(env, conversations, *(str(digit_of(each)) for each in conversations))
        refuses.set()
        before = len(server.frames)
        with pytest.raises(ToolError, match="no such level"):
            env.draw(1)
        assert [frame["type"] for frame in server.frames[before:]] == ["reset"]


def test_one_reset_that_fails_spoils_its_group_alone() -> None:
    fails = threading.Event()

    class Moody(Guess):
        def reset(self, seed: int = 0, level: str = "easy") -> dict[str, Any]:
            if fails.is_set():
                fails.clear()
                raise Failure("EXECUTION_ERROR", "hiccup")
            return super().reset(seed, level)

    with playing(Moody, settings={"num_envs": 3}) as (_, env):
        env.start()
        fails.set()
        conversations = env.draw()
        say(env, conversations, *(str(digit_of(each)) for each in conversations))
        assert sorted(each.reward or 0.0 for each in conversations) == [0.0, 1.0, 1.0]
        [spoilt] = [each for each in conversations if not each.valid]
        assert str(spoilt.error).endswith("reset failed: hiccup (EXECUTION_ERROR)")
        assert spoilt.reward is None


def test_a_transform_that_is_appended_after_the_start_is_started(env_of: Any) -> None:
    class Noted(Transform):
        started = False

        def start(self) -> None:
            self.started = True

    env, noted = env_of(), Noted()
    env.start()
    env.append_transform(noted)
    env.draw()
    assert noted.started


def test_an_episode_that_begins_unlike_its_group_is_invalid_by_name(server: OpenEnvServer, env_of: Any) -> None:
    env = env_of(repeats=3, num_envs=3)
    env.start()
    resets = len([frame for frame in server.frames if frame["type"] == "reset"])

    def unlike(connection: ServerConnection, frame: dict[str, Any]) -> bool:
        if frame["type"] == "reset" and sum(each["type"] == "reset" for each in server.frames) == resets + 2:
            connection.send(json.dumps({"type": "observation", "data": seen("Something else.", None)}))
            return True
        return False

    server.twist = unlike
    group = env.draw()
    say(env, group, *(str(digit_of(each)) for each in group))
    assert sorted(each.valid for each in group) in ([False, True, True], [False, False, True])
    assert f"reset does not always begin alike with the seed {group[0].task['start']}" in str([c.error for c in group])


def test_seeds_that_do_not_hold_are_refused_at_the_start() -> None:
    count = iter(range(100))

    class Random(Guess):
        def reset(self, **told: Any) -> dict[str, Any]:  # type: ignore[override]
            return seen(f"Game {next(count)}.", None)

    with (
        open_env_server(Random) as server,
        pytest.raises(DataError, match="two sessions that were reset with the seed"),
    ):
        OpenEnv(server.url).start()


# Sessions that do not suffice


def test_too_few_sessions_are_refused_with_the_number_that_the_server_has() -> None:
    with playing(most=1, settings={"num_envs": 4}) as (_, env):
        with pytest.raises(ConfigError) as refused:
            env.draw()
        assert "has 1 sessions at most" in str(refused.value)
        assert "a step plays as many episodes at once as it has completions" in str(refused.value).lower()
        assert "start the server with max_concurrent_envs=N" in str(refused.value).replace("Start", "start")
        assert "env.sessions=N" in str(refused.value)


@pytest.mark.parametrize("first", ["1", "77"])
def test_too_few_sessions_are_refused_also_after_a_failure_of_the_server(first: str) -> None:
    class Fragile(Guess):
        def step(self, action: dict[str, Any]) -> dict[str, Any]:
            if action["guess"] == 77:
                raise Failure("EXECUTION_ERROR", "boom")
            return super().step(action)

    with playing(Fragile, most=2, settings={"num_envs": 2, "start_seconds": 1.0}) as (_, env):
        say(env, env.draw(), first, "1")
        env.abandon()
        with pytest.raises(ConfigError, match="has 2 sessions at most"):
            env.draw(3)


def test_no_episode_takes_the_session_that_a_start_looks_at() -> None:
    looking = threading.Event()

    def twist(connection: ServerConnection, frame: dict[str, Any]) -> bool:
        if frame["type"] == "state":
            looking.set()
            time.sleep(0.2)
        return False

    own: dict[str, Any] = {"sessions": 1, "start_seconds": 20.0}
    with (
        playing(most=1, settings=own, twist=twist) as (server, env),
        closing(OpenEnv(server.url, split="test", **own)) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        env.start()
        looking.clear()
        starting = pool.submit(other.start)
        assert looking.wait(20)
        [conversation] = env.draw()
        say(env, [conversation], str(digit_of(conversation)))
        assert conversation.reward == 1.0
        starting.result()


def test_episodes_beyond_the_sessions_play_their_actions_again() -> None:
    with playing(most=1, settings={"num_envs": 3, "sessions": 1}) as (server, env):
        conversations = env.draw()
        for turn in range(2):
            say(env, conversations, *(wrong_for(each) for each in conversations))
            assert [each.messages[-1]["content"] for each in conversations] == [f"no, {turn + 1}"] * 3
        say(env, conversations, *(str(digit_of(each)) for each in conversations))
        assert [each.reward for each in conversations] == [0.5] * 3
        assert server.most_open == 1
        assert len(server.steps()) > 9


def test_episodes_are_played_from_many_threads_with_few_sessions() -> None:
    with playing(most=2, settings={"num_envs": 8, "sessions": 2}) as (server, env):
        conversations = env.draw()

        def play(conversation: Conversation) -> None:
            for reply in (wrong_for(conversation), str(digit_of(conversation))):
                conversation.add_completion(Completion([], [], reply, "stop", 0))
                env.respond([conversation])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(play, conversations))
        env.conclude(conversations)
        assert [each.reward for each in conversations] == [0.75] * 8
        assert server.most_open == 2


# Arguments of reset


def test_arguments_of_reset_that_nothing_shows_are_named(env_of: Any) -> None:
    env = env_of(reset={"level": "hard", "lvel": "easy"})
    env.start()
    [note] = env.notes
    assert "env.reset: neither the first observation nor the state changes with lvel;" in note


def test_a_state_that_differs_under_one_seed_is_named() -> None:
    class Loose(Guess):
        def state(self) -> dict[str, Any]:
            return {**super().state(), "secret": id(self)}

    with playing(Loose) as (_, env):
        env.start()
    [note] = env.notes
    assert "begin alike, but their states differ in secret" in note


# Actions and observations


FORMS: list[tuple[dict[str, Any], str, Any]] = [
    ({"x": {"type": "string"}}, '{"a": 1}', {"x": '{"a": 1}'}),
    ({"x": {"type": "string"}}, "print(1)", {"x": "print(1)"}),
    ({"x": {"type": "string"}}, "", ValueError("it is empty")),
    ({"x": {"type": "integer"}}, "7", {"x": 7}),
    ({"x": {"type": "integer"}}, "7.5", ValueError('"x" must be a whole number, and is 7.5')),
    ({"x": {"type": "integer"}}, "true", ValueError('"x" must be a whole number, and is true')),
    ({"x": {"type": "integer", "maximum": 3}}, "7", ValueError('"x" must be a whole number up to 3, and is 7')),
    ({"x": {"type": "number"}}, "0.5", {"x": 0.5}),
    ({"x": {"type": "boolean"}}, "false", {"x": False}),
    ({"x": {"type": "array"}}, "[1, 2]", {"x": [1, 2]}),
    ({"x": {"$ref": "#/$defs/Way"}}, "up", {"x": "up"}),
    ({"x": {"$ref": "#/$defs/Way"}}, "left", ValueError('"x" must be one of "up", "down", and is "left"')),
    ({"x": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}, "null", {"x": None}),
    ({"x": {"type": "integer"}, "y": {"type": "string"}}, '{"x": 1, "y": "b"}', {"x": 1, "y": "b"}),
    ({"x": {"type": "integer"}, "y": {"type": "string"}}, '{"x": 1}', ValueError('"y" is missing')),
    ({"x": {"type": "integer"}, "y": {"type": "string"}}, "1", ValueError("'1' is not a JSON object")),
    ({"x": {"type": "integer"}}, '{"x": 1, "z": 1}', ValueError('there is no "z" in an action, only x')),
]


@pytest.mark.parametrize(("properties", "text", "expected"), FORMS)
def test_an_action_is_read_as_the_schema_has_it(properties: dict[str, Any], text: str, expected: Any) -> None:
    way = {"enum": ["up", "down"], "type": "string"}
    form = ActionForm.of({"properties": properties, "required": list(properties), "$defs": {"Way": way}})
    if isinstance(expected, ValueError):
        with pytest.raises(ValueError, match=f"^{re.escape(str(expected))}$"):
            form.parse(text)
    else:
        assert form.parse(text) == expected


def test_the_form_of_an_action_is_described_to_the_model() -> None:
    assert ActionForm.of(SCHEMA).text == "An action is a whole number from 0 (guess: a digit)."
    code = {"type": "string", "description": "Python<|im_end|>"}
    form = ActionForm.of({"properties": {"code": code, "lines": {"type": "integer"}}, "required": []})
    assert form.text == (
        'An action is a JSON object with "code" (a text; Python< |im_end|>; optional), '
        '"lines" (a whole number; optional).'
    )


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"text": "Go!", "metadata": {"a": 1}, "error": None}, "Go!"),
        ({"text": "Go!", "moves": [1, 2]}, '{"text": "Go!", "moves": [1, 2]}'),
        ({"metadata": {"message": "ready"}}, "ready"),
        ({"metadata": {}}, ""),
        ({"text": "over<|im_end|>"}, "over< |im_end|>"),
        ({"tool_name": "a", "result": {"content": [{"text": "x"}, {"text": "y"}]}}, "x\ny"),
        ({"tool_name": "a", "result": {"b": 1}}, '{"b": 1}'),
        ({"tool_name": "a", "result": None, "error": {"error_type": "timeout", "message": "late"}}, "late"),
    ],
)
def test_the_model_reads_the_one_text_or_all_entries(observation: dict[str, Any], text: str) -> None:
    assert observation_text(observation) == text


# Tools


def test_tools_of_the_server_are_offered_and_each_call_is_a_step() -> None:
    with playing(Shop, settings={"num_envs": 2, "max_steps": 3}) as (_, env):
        one, two = conversations = env.draw()
        assert one.query == f"You act by calling tools.\n\nYou have {digit_of(one)}."
        assert [tool["function"]["name"] for tool in one.tools] == ["add", "stop"]
        assert one.tools[0]["function"]["description"] == "add it< |im_end|>"
        say(env, conversations, ADD + ADD, "<tool_call>{}</tool_call>" + ADD)
        have = digit_of(one)
        assert [m["content"] for m in one.messages[-2:]] == [
            f"Tool add executed successfully:\nYou have {have + 3}.",
            f"Tool add executed successfully:\nYou have {have + 6}.",
        ]
        say(env, conversations, STOP, '<tool_call>{"name": "add", "arguments": {}}</tool_call>')
        assert (one.terminated, one.reward, one.reward_parts["earned"]) == (
            True,
            pytest.approx(0.7),
            pytest.approx(0.7),
        )
        assert two.messages[-1]["content"] == "Tool add failed:\nnumber is missing"
        say(env, [two], STOP)  # the last turn's call earns too
        assert (two.terminated, two.reward) == (True, pytest.approx(0.4))
        assert two.reward_parts["unset_rewards"] == 1.0


def test_a_reply_without_a_call_ends_the_conversation_and_one_call_too_many_is_answered() -> None:
    with playing(Shop, settings={"num_envs": 3}) as (_, env):
        none, late, lost = conversations = env.draw()
        gone = ADD.replace("3", '"lost"')
        say(env, conversations, "I am done.", STOP + ADD, gone)
        assert (none.terminated, none.valid, none.reward) == (True, True, 0.0)
        assert (late.terminated, late.reward) == (True, pytest.approx(0.1))
        assert late.messages[-1]["content"] == "Tool add failed:\nthe episode is over"
        assert (lost.valid, lost.error) == (False, "the tool add failed: number is missing")


def test_a_conversation_with_tools_goes_on_after_it_was_saved() -> None:
    with playing(Shop, settings={"max_steps": 3}) as (server, env), closing(OpenEnv(server.url, max_steps=3)) as fresh:
        [conversation] = env.draw()
        say(env, [conversation], ADD + ADD)
        saved = Conversation(**asdict(conversation))
        fresh.start()
        say(fresh, [saved], STOP)
        assert (saved.terminated, saved.reward) == (True, pytest.approx(0.7))
        other = Conversation(**asdict(conversation))
        other.messages = [{**m, "content": m["content"].replace("You have", "They had")} for m in other.messages]
        fresh.abandon()
        say(fresh, [other], STOP)
        assert other.error is not None
        assert "its actions were played again, and the server shows another text" in other.error


class Note(ToolTransform):
    def schemas(self) -> list[dict[str, Any]]:
        parameters = {"type": "object", "properties": {}}
        return [{"type": "function", "function": {"name": "note", "description": "", "parameters": parameters}}]

    def call(self, conversation: Conversation, call: ToolCall) -> ToolResult:
        return ToolResult("noted")


@pytest.mark.parametrize("limits", [ToolLimits(max_calls=2), ToolLimits(max_calls_per_turn=2)])
def test_only_the_calls_that_ran_are_played_when_an_episode_goes_on(limits: ToolLimits) -> None:
    own: dict[str, Any] = {"max_steps": 4, "tool_limits": limits}
    with playing(Shop, settings=own) as (server, env), closing(OpenEnv(server.url, **own)) as fresh:
        for each in (env, fresh):
            each.append_transform(Note())
            each.start()
        [conversation] = env.draw()
        say(env, [conversation], '<tool_call>{"name": "note", "arguments": {}}</tool_call>' + ADD + ADD)
        saved = Conversation(**asdict(conversation))
        before = len(server.steps())
        for playing_on, one in ((env, conversation), (fresh, saved)):
            say(playing_on, [one], "I am done.")
            assert (one.valid, one.reward) == (True, pytest.approx(0.3)), one.error
        assert len(server.steps()) == before + 1


def test_an_answer_with_a_special_token_is_the_same_when_an_episode_goes_on() -> None:
    class Reader:
        name, special = "plain", re.compile("<turn>")

        def takes(self, role: str) -> bool:
            return False

    class Turning(Shop):
        def step(self, action: dict[str, Any]) -> dict[str, Any]:
            answer = super().step(action)
            if answer["observation"].get("result"):
                answer["observation"]["result"]["content"][0]["text"] += " <turn>"
            return answer

    own: dict[str, Any] = {"schema": TOOLS_SCHEMA, "settings": {"max_steps": 4}}
    with playing(Turning, **own) as (server, env), closing(OpenEnv(server.url, max_steps=4)) as fresh:
        for each in (env, fresh):
            each.start()
            assert each.tools is not None
            each.tools.reader = Reader()
        [conversation] = env.draw()
        say(env, [conversation], ADD)
        assert conversation.messages[-1]["content"].endswith("< turn>")
        saved = Conversation(**asdict(conversation))
        say(fresh, [saved], STOP)
        assert (saved.valid, saved.reward) == (True, pytest.approx(0.4)), saved.error


def test_an_environment_of_tools_without_a_tool_is_refused() -> None:
    class Empty(Shop):
        def step(self, action: dict[str, Any]) -> dict[str, Any]:
            return {"observation": {"tools": [], "metadata": {"error": "broken"}}, "reward": None, "done": False}

    with (
        open_env_server(Empty, schema={"title": "Action", "properties": {"metadata": {}}}) as server,
        pytest.raises(DataError, match="takes calls of tools and lists none"),
    ):
        OpenEnv(server.url).start()


# Resuming


def test_a_saved_conversation_goes_on_in_a_fresh_session(server: OpenEnvServer, env_of: Any) -> None:
    first, second = env_of(invalid_reward=-1.0), env_of(invalid_reward=-1.0)
    [conversation] = first.draw()
    say(first, [conversation], "nothing")
    say(first, [conversation], wrong_for(conversation))
    saved, cut, other = (Conversation(**asdict(conversation)) for _ in range(3))
    first.close()
    second.load_state_dict(first.state_dict())
    say(second, [saved], str(digit_of(saved)))
    assert (saved.reward, saved.reward_parts["invalid_actions"]) == (-0.25, 1.0)
    say(second, [cut], "1", reason="length")
    assert (cut.truncated, cut.reward) == (True, -1.25)
    other.messages[-1] = {"role": "user", "content": "no, 2"}
    say(second, [other], str(digit_of(other)))
    assert (other.valid, other.reward) == (False, None)
    assert "its actions were played again, and the server shows another text than the model has read" in str(
        other.error
    )


def test_a_text_of_the_server_is_never_taken_for_a_refusal_of_rlpost() -> None:
    class Rude(Guess):
        def step(self, action: dict[str, Any]) -> dict[str, Any]:
            answer = super().step(action)
            return answer if answer["done"] else {**answer, **seen("That is not a valid action here.", -0.25)}

    own: dict[str, Any] = {"invalid_reward": -1.0}
    with playing(Rude, settings=own) as (server, env), closing(OpenEnv(server.url, **own)) as fresh:
        [conversation] = env.draw()
        say(env, [conversation], wrong_for(conversation))
        say(env, [conversation], "seven")
        saved = Conversation(**asdict(conversation))
        fresh.start()
        for playing_on, one in ((env, conversation), (fresh, saved)):
            say(playing_on, [one], str(digit_of(one)))
            assert (one.reward, one.reward_parts["invalid_actions"]) == (-0.25, 1.0)


# Recorded frames


@pytest.mark.parametrize(
    ("name", "settings"), [("valid", {"reset": {"level": "hard"}, "num_envs": 1}), ("tools", {"num_envs": 1})]
)
def test_frames_of_the_real_server_are_written_and_read_as_recorded(name: str, settings: dict[str, Any]) -> None:
    recorded = RECORDED[name]
    talks = iter(recorded["talks"])
    running: dict[ServerConnection, Iterator[Any]] = {}
    wrong: list[Any] = []

    def replay(connection: ServerConnection, frame: dict[str, Any]) -> bool:
        if connection not in running:
            running[connection] = iter(next(talks))
        expected, answer = next(running[connection], (None, None))
        if frame != expected:
            wrong.append((frame, expected))
        connection.send(json.dumps(answer))
        return True

    with playing(schema=recorded["schema"]["action"], twist=replay, settings=settings) as (_, env):
        [conversation] = env.draw()
        for message in [m for m in recorded["messages"] if m["role"] == "assistant"]:
            say(env, [conversation], message["content"])
        assert wrong == []
        assert conversation.messages == recorded["messages"]
        assert (conversation.done, conversation.reward) == (True, recorded["reward"])


# Through the settings


def test_the_verb_env_test_plays_it(server: OpenEnvServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["env", "test", "openenv", f"env.url={server.url}", "env.split=train"]) == 0
    shown = capsys.readouterr().out
    assert "begins alike in two sessions with the seed" in shown
    assert "Guess a digit. It is" in shown
    assert "the action 0 earns" in shown


def test_tools_of_rlpost_beside_plain_actions_are_refused(server: OpenEnvServer) -> None:
    words = [
        "env=openenv",
        f"env.url={server.url}",
        "tools.use=python",
        "tools.python_sandbox=limits",
        "env.max_turns=2",
    ]
    settings = compose(EVAL, words).settings
    env = build_env(settings.env, tools=settings.tools)
    with pytest.raises(ConfigError, match="takes actions and not calls of tools: leave out"):
        env.start()


@pytest.mark.parametrize(
    ("words", "limit", "role"),
    [
        (["tools.max_calls=1"], 1, "user"),
        (["tools.role=tool"], None, "tool"),
    ],
)
def test_limits_and_role_of_tools_hold_for_those_of_the_server(words: list[str], limit: int | None, role: str) -> None:
    with open_env_server(Shop) as server:
        settings = compose(EVAL, ["env=openenv", f"env.url={server.url}", *words]).settings
        with closing(build_env(settings.env, tools=settings.tools)) as env:
            env.start()
            assert env.tools is not None
            assert (env.tools.limits.max_calls, env.tools.role) == (limit, role)
            assert env.tools.follows_role == (role == "user")
        with pytest.raises(ConfigError, match=r"tools\.mcp_file means nothing without its tool: add tools\.use=mcp"):
            compose(EVAL, ["env=openenv", f"env.url={server.url}", "tools.mcp_file=a.json"])


def test_calls_of_the_only_turn_are_read_as_the_template_writes_them() -> None:
    with playing(Shop, settings={"max_steps": 1}) as (_, env):
        env.start()
        check_template(env, tokenizer())
        assert env.tools is not None
        assert env.tools.reader is not None


def test_a_seed_among_the_arguments_of_reset_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.reset=\{seed: 3\} names the seed, .*: write env\.seed"):
        OpenEnvSettings(url="ws://host:1", reset="{seed: 3}")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.imports.is_installed", lambda package: False)
    with pytest.raises(MissingExtraError, match=r"env=openenv needs websockets.*pip install 'rlpost\[openenv\]'"):
        OpenEnv("ws://127.0.0.1:1").start()


def training(server: OpenEnvServer, *words: str) -> list[str]:
    own = ["model=tiny", "policy=scripted", "policy.replies=[3,8]", "env=openenv", f"env.url={server.url}"]
    return [
        *own,
        "env.max_turns=2",
        "prompts_per_step=2",
        "group_size=2",
        "eval.enabled=false",
        *words,
    ]


def test_a_training_plays_it_and_is_resumed(server: OpenEnvServer, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train_in(TRAIN_GRPO, folder, training(server, "steps=2", "checkpoint.every=1")) == 0
    assert server.wait_until_idle()
    assert train_in(TRAIN_GRPO, folder, training(server, "steps=3", "checkpoint.every=1"), resume="latest") == 0
    steps = [line for line in metrics(folder) if "reward/mean" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    seeds = [frame["data"]["seed"] for frame in server.frames if frame["type"] == "reset"]
    assert len(set(seeds)) == 6  # none comes twice


def test_a_training_whose_server_is_killed_fails_by_name(server: OpenEnvServer, tmp_path: Path) -> None:
    def die(connection: ServerConnection, frame: dict[str, Any]) -> bool:
        if len(server.steps()) != 9:
            return False
        threading.Thread(target=server.stop).start()  # which waits for this socket to end
        return True

    server.twist = die
    with pytest.raises(ToolError, match="nothing answers"):
        train_in(
            TRAIN_GRPO, tmp_path / "run", training(server, "steps=9", "env.start_seconds=0.5", "max_failed_share=1")
        )
