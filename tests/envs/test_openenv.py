"""env=openenv against a small server of our own, and against recorded frames of OpenEnv 0.10.0."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
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
from rlpost.errors import ConfigError, DataError, ToolError
from rlpost.settings import OpenEnvSettings
from tests.collectors.talk import tokenizer
from tests.envs.episodes import call, digit_of, error_of, say, say_right, say_wrong, wrong_for
from tests.openenv_server import SCHEMA, TOOLS_SCHEMA, Failure, Guess, OpenEnvServer, Shop, open_env_server, seen
from tests.says import Says
from tests.trainings import metrics, train_in

RECORDED = json.loads((Path(__file__).parent / "openenv_frames.json").read_text())
PATIENT = {"start_seconds": 20.0, "step_seconds": 20.0}


ADD, STOP = call("add", number=3), call("stop", number=1)


@pytest.fixture
def server() -> Iterator[OpenEnvServer]:
    with open_env_server() as server:
        yield server


@pytest.fixture
def env_of(server: OpenEnvServer) -> Iterator[Any]:
    """Makes environments, which are closed before their server looks for open sessions."""
    with ExitStack() as opened:
        yield lambda **settings: opened.enter_context(closing(OpenEnv(server.url, **{**PATIENT, **settings})))


@contextmanager
def playing(
    game: Any = Guess, *, settings: dict[str, Any] | None = None, **server: Any
) -> Iterator[tuple[OpenEnvServer, OpenEnv]]:
    """A server of a game, and an environment that plays it."""
    own: dict[str, Any] = {**PATIENT, **(settings or {})}
    with open_env_server(game, **server) as running, closing(OpenEnv(running.url, **own)) as env:
        yield running, env


def saved(conversation: Conversation) -> Conversation:
    """The conversation as a run loads it."""
    return Conversation(**asdict(conversation))


def steady(text: object) -> str:
    """The text without the port, and without the words of Python and of websockets."""
    shown = re.sub(r"127\.0\.0\.1:\d+", "HOST:PORT", str(text))
    return re.sub(r"( returned: ).*|( actions \().*(?=\))", r"\1\2...", shown)


# Episodes


def test_an_episode_earns_the_sum_of_its_steps(server: OpenEnvServer, env_of: Any, says: Says) -> None:
    env = env_of(success_return=0.5, repeats=2, num_envs=2, reset={"level": "hard"})
    conversation, other = env.draw()
    assert conversation.messages == other.messages
    says("env", conversation.query)
    say(env, [conversation, other], f"<action>{wrong_for(conversation)}</action>", str(digit_of(other)))
    assert conversation.messages[-1] == {"role": "user", "content": "no, 1"}
    assert (other.terminated, other.reward, other.accuracy_strict) == (True, 1.0, 1.0)
    say(env, [conversation], f'Then <action>{{"guess": {digit_of(conversation)}}}</action>')
    assert (conversation.terminated, conversation.truncated, conversation.reward) == (True, False, 0.75)
    assert conversation.reward_parts == {"earned": 0.75, "invalid_actions": 0.0, "unset_rewards": 0.0}
    guesses = sorted(action["guess"] for action in server.steps())
    assert guesses == sorted([int(wrong_for(conversation)), *[digit_of(conversation)] * 2])


def test_sessions_serve_one_episode_after_the_other(server: OpenEnvServer, env_of: Any) -> None:
    env = env_of(num_envs=3)
    env.start()
    assert server.wait_until_idle()  # a start leaves no session open
    before = server.opened
    for _ in range(4):
        conversations = env.draw()
        say_right(env, conversations)
        assert [each.reward for each in conversations] == [1.0] * 3
    assert server.opened == before + 3
    env.close()
    assert server.wait_until_idle()
    assert env.draw()[0].query  # and it can begin again


def test_two_environments_of_one_server_share_its_sessions(server: OpenEnvServer, env_of: Any) -> None:
    training, testing = env_of(num_envs=2), env_of(split="test", num_envs=2)
    for env in (training, testing):
        say_right(env, env.draw())
    assert server.most_open == 2
    training.close()
    assert testing.draw()[0].query


def test_an_invalid_reply_is_answered_and_not_sent(server: OpenEnvServer, env_of: Any, says: Says) -> None:
    env = env_of(invalid_reward=-1.0, max_steps=2)
    [conversation] = env.draw()
    say(env, [conversation], "<action>seven</action>")
    says("env", conversation.messages[-1]["content"])
    assert server.steps() == []
    say_right(env, [conversation])
    assert (conversation.reward, conversation.reward_parts["invalid_actions"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("reason", "settings", "reward", "sent"), [("length", {}, 0.0, 0), ("stop", {"max_steps": 1}, -0.25, 1)]
)
def test_a_truncated_reply_and_the_last_turn_cut_an_episode(
    reason: str, settings: dict[str, Any], reward: float, sent: int, server: OpenEnvServer, env_of: Any
) -> None:
    env = env_of(**settings)
    [conversation] = env.draw()
    say(env, [conversation], wrong_for(conversation), reason=reason)
    assert (conversation.terminated, conversation.truncated, conversation.valid) == (False, True, True)
    assert (conversation.reward, len(server.steps())) == (reward, sent)


def test_the_server_may_be_named_by_http_and_with_a_path() -> None:
    assert OpenEnv("http://host:1/").url == OpenEnv("ws://host:1/ws").url == "ws://host:1/ws"
    assert OpenEnv("https://host/a").url == "wss://host/a/ws"
    assert OpenEnvSettings(url="ws://[::1]:80/a").url == "ws://[::1]:80/a"


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"url": "host:8000"}, "env.url=host:8000"),
        ({"url": "ws://HOST:PORT"}, "env.url=ws://HOST:PORT"),
        ({"url": "ws://host:1", "reset": "{seed: 3}"}, "env.seed"),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(part)):
        OpenEnvSettings(**given)


def test_an_unset_reward_is_skipped_and_counted_and_never_0() -> None:
    class Unset(Guess):
        def step(self, action: dict[str, Any]) -> dict[str, Any]:
            return {**super().step(action), "reward": None if action["guess"] > 1 else 0.5}

    with playing(Unset, settings={"num_envs": 2, "max_steps": 2}) as (_, env):
        some, none = conversations = env.draw()
        say(env, conversations, "12", "13")
        say(env, conversations, "1", "14")
        assert (some.reward, some.reward_parts["unset_rewards"]) == (0.5, 1.0)
        assert "2 steps" in error_of(none)


# Failures of the server


SPOILT = {"guess": 77}


def spoilt_by(answer: Any) -> Any:
    """The twist of a server that does `answer(socket)` instead of answering a guess of 77."""

    def twist(connection: ServerConnection, frame: dict[str, Any]) -> bool:
        if frame.get("data") == SPOILT:
            answer(connection)
        return frame.get("data") == SPOILT

    return twist


def error_after(answer: Any, **settings: Any) -> tuple[str, int]:
    """Play two conversations, one with the guess 77. Returns its error and how many sessions were opened after it."""
    with playing(twist=spoilt_by(answer), settings={"num_envs": 2, **settings}) as (server, env):
        spoilt, right = conversations = env.draw()
        before = server.opened
        say(env, conversations, "77", str(digit_of(right)))
        server.released.set()
        assert (right.valid, right.reward) == (True, 1.0)
        error = error_of(spoilt)
        for _ in range(2):
            again = env.draw()
            say_right(env, again)
            assert [each.reward for each in again] == [1.0, 1.0]  # no answer of before comes up again
        return error, server.opened - before


def test_a_late_step_is_an_error_and_its_session_is_dropped() -> None:
    asked: list[Any] = []
    error, opened = error_after(asked.append, step_seconds=1.0)
    assert error.endswith("within 1 s")
    assert (opened, len(asked)) == (1, 1)


def error_frame(code: str, errors: Any = None) -> str:
    return json.dumps({"type": "error", "data": {"message": "boom", "code": code, "errors": errors}})


def fault(kind: str, *place: str) -> dict[str, Any]:
    """A finding of pydantic about a frame."""
    return {"type": kind, "loc": list(place), "msg": "Input should be less than 25"}


WRONG_ANSWERS = {
    "an error of the game": error_frame("EXECUTION_ERROR"),
    "faults that are no list": error_frame("VALIDATION_ERROR", "bad"),
    "a fault of the observation": error_frame("VALIDATION_ERROR", [fault("less_than", "points")]),
    "a fault of the frame": error_frame("VALIDATION_ERROR", [fault("less_than")]),
    "no JSON": "what?",
    "no observation": '{"type": "observation", "data": {"observation": 3}}',
    "a reward of text": '{"type": "observation", "data": {"observation": {}, "reward": "1", "done": false}}',
    "too long": "x" * (17 * 2**20),
}


@pytest.mark.parametrize("answer", WRONG_ANSWERS.values(), ids=WRONG_ANSWERS)
def test_a_wrong_answer_is_an_error_by_name(answer: str, says: Says) -> None:
    error, _ = error_after(lambda connection: connection.send(answer))
    says("env", steady(error))


class Refusing(Guess):
    """Refuses a guess of 25, by a rule that its schema does not show."""

    refuses: ClassVar = True

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        if self.refuses and action["guess"] == 25:
            raise Failure("VALIDATION_ERROR", "Invalid message", errors=[fault("less_than", "guess")])
        return super().step(action)


def test_the_model_reads_a_finer_rule_of_the_server(says: Says) -> None:
    with playing(Refusing) as (_, env):
        [conversation] = env.draw()
        say(env, [conversation], "25")
        says("env", conversation.messages[-1]["content"])
        say_right(env, [conversation])
        assert (conversation.reward, conversation.reward_parts["invalid_actions"]) == (1.0, 1.0)


def test_an_action_that_is_refused_the_second_time_is_an_error(says: Says) -> None:
    class Changing(Refusing):
        refuses = False

    own: dict[str, Any] = {"num_envs": 2, "sessions": 1}
    with playing(Changing, settings=own) as (server, env), closing(OpenEnv(server.url, **own)) as fresh:
        conversations = env.draw()
        say(env, conversations, "15", "25")
        loaded = [saved(each) for each in conversations]
        Changing.refuses = True
        fresh.start()
        for playing_on, those in ((env, conversations), (fresh, loaded)):
            say_right(playing_on, those)
            assert [each.valid for each in those] == [True, False]
            says("env", steady(those[1].error))


class Moody(Guess):
    """Refuses the next `failures` resets."""

    failures: ClassVar = 0

    def reset(self, seed: int = 0, level: str = "easy") -> dict[str, Any]:
        if Moody.failures > 0:
            Moody.failures -= 1
            raise Failure("VALIDATION_ERROR", "Invalid message", errors=[fault("less_than", "guess")])
        return super().reset(seed, level)


def test_a_reset_that_is_refused_is_not_tried_in_each_session() -> None:
    with playing(Moody, settings={"num_envs": 4}) as (server, env):
        say_right(env, env.draw())
        before, Moody.failures = len(server.frames), 1
        with pytest.raises(ToolError, match="less than 25"):
            env.draw(1)
        assert [frame["type"] for frame in server.frames[before:]] == ["reset"]


def test_one_reset_that_fails_spoils_its_group_alone() -> None:
    with playing(Moody, settings={"num_envs": 3}) as (_, env):
        env.start()
        Moody.failures = 1
        conversations = env.draw()
        say_right(env, conversations)
        assert sorted(each.reward or 0.0 for each in conversations) == [0.0, 1.0, 1.0]
        [spoilt] = [each for each in conversations if not each.valid]
        assert "less than 25" in error_of(spoilt)


def test_a_server_that_died_and_is_back_is_played_on(server: OpenEnvServer, env_of: Any, says: Says) -> None:
    env = env_of(num_envs=2, start_seconds=1.0)
    conversations = env.draw()
    say_wrong(env, conversations)
    server.stop()
    say_wrong(env, conversations)
    says("env", "\n".join(steady(error_of(each)) for each in conversations))
    with pytest.raises(ToolError, match=re.escape(f"{server.url}/ws")):
        env.draw()
    server.start()
    conversations = env.draw()
    say_right(env, conversations)
    assert [each.reward for each in conversations] == [1.0, 1.0]


def test_a_server_that_restarts_between_episodes_is_not_noticed(server: OpenEnvServer, env_of: Any) -> None:
    env = env_of()
    for _ in range(2):
        [conversation] = env.draw()
        say_right(env, [conversation])
        assert conversation.reward == 1.0
        server.stop()
        assert server.wait_until_idle()
        server.start()


def test_a_start_that_cannot_be_made_is_refused_by_name(server: OpenEnvServer, env_of: Any) -> None:
    server.stop()
    with pytest.raises(ToolError, match=r"/schema .*env\.url"):
        env_of().start()
    server.start()
    server.twist = lambda connection, frame: frame["type"] == "reset"  # no answer
    with pytest.raises(ToolError, match=r"reset .* 0\.5 s"):
        env_of(start_seconds=0.5).start()
    server.released.set()


class Unlike(Guess):
    begun: ClassVar = 0

    def reset(self, **arguments: Any) -> dict[str, Any]:  # type: ignore[override]
        Unlike.begun += 1
        return seen(f"Game {Unlike.begun}.", None)


class Empty(Shop):
    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        return {"observation": {"tools": [], "metadata": {"error": "broken"}}, "reward": None, "done": False}


@pytest.mark.parametrize(
    ("server", "error"),
    [
        ({"schema": {"properties": []}}, ToolError),
        ({"schema": {"properties": {"x": "integer"}}}, ToolError),
        ({"schema": {"properties": {"x": {"anyOf": "int"}}}}, ToolError),
        ({"game": Moody}, ToolError),
        ({"game": Unlike}, DataError),
        ({"game": Empty, "schema": {"title": "Action", "properties": {"metadata": {}}}}, DataError),
    ],
    ids=["list of fields", "field of text", "choices of text", "failure", "unlike", "no tools"],
)
def test_an_environment_that_cannot_be_played_is_refused(
    server: dict[str, Any], error: type[Exception], says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unlike, "begun", 0)
    monkeypatch.setattr(Moody, "failures", 1)
    with open_env_server(**server) as running, pytest.raises(error) as refused:
        OpenEnv(running.url).start()
    says("env", steady(refused.value))


def test_a_port_that_does_not_speak_http_is_refused_by_name() -> None:
    def greet() -> None:
        client, _ = listening.accept()
        client.sendall(b"SSH-2.0-OpenSSH_9\r\n")
        client.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(ToolError, match=r"env\.url"):
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
            time.sleep(0.7 if request.path == "/ws" and slow.is_set() else 0)
            return super()._answer_get(connection, request)

    def twist(connection: ServerConnection, frame: dict[str, Any]) -> bool:
        time.sleep(0.7 if frame["type"] == "reset" and slow.is_set() else 0)
        return False

    server = Slow(twist=twist)
    with closing(OpenEnv(server.url, start_seconds=1.0)) as env:
        env.start()
        slow.set()
        with pytest.raises(ToolError, match=r"reset .* 1 s"):
            env.draw()
    server.stop()


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


def test_an_episode_that_begins_unlike_its_group_is_invalid(server: OpenEnvServer, env_of: Any) -> None:
    env = env_of(repeats=3, num_envs=3)
    env.start()
    is_other = iter([False, True, False])  # of the resets

    def unlike(connection: ServerConnection, frame: dict[str, Any]) -> bool:
        if taken := frame["type"] == "reset" and next(is_other):
            connection.send(json.dumps({"type": "observation", "data": seen("Something else.", None)}))
        return taken

    server.twist = unlike
    group = env.draw()
    say_right(env, group)
    assert sorted(each.valid for each in group) in ([False, True, True], [False, False, True])
    failed = [error_of(each) for each in group if not each.valid]
    assert all(error.endswith(f"the seed {group[0].task['start']}") for error in failed)


# Sessions that do not suffice


def test_too_few_sessions_are_refused_with_their_number(says: Says) -> None:
    with playing(most=1, settings={"num_envs": 4}) as (_, env):
        with pytest.raises(ConfigError) as refused:
            env.draw()
        says("env", steady(refused.value))


@pytest.mark.parametrize("first", ["1", "77"])
def test_too_few_sessions_are_refused_also_after_a_failure(first: str) -> None:
    twist = spoilt_by(lambda connection: connection.send(error_frame("EXECUTION_ERROR")))
    with playing(twist=twist, most=2, settings={"num_envs": 2, "start_seconds": 1.0}) as (_, env):
        say(env, env.draw(), first, "1")
        env.abandon()
        with pytest.raises(ConfigError, match=r"2 sessions .*env\.sessions"):
            env.draw(3)


def test_episodes_beyond_the_sessions_play_their_actions_again() -> None:
    with playing(most=1, settings={"num_envs": 3, "sessions": 1}) as (server, env):
        conversations = env.draw()
        for turn in range(2):
            say_wrong(env, conversations)
            assert [each.messages[-1]["content"] for each in conversations] == [f"no, {turn + 1}"] * 3
        say_right(env, conversations)
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


def test_the_form_of_an_action_is_described_to_the_model(says: Says) -> None:
    says("env", ActionForm.of(SCHEMA).text)
    code = {"type": "string", "description": "Python<|im_end|>"}
    form = ActionForm.of({"properties": {"code": code, "lines": {"type": "integer"}}, "required": []})
    says("env", form.text)


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


def last_words(conversation: Conversation, messages: int) -> list[str]:
    """The last word of each of the last messages."""
    return [message["content"].split()[-1] for message in conversation.messages[-messages:]]


def test_tools_of_the_server_are_offered_and_each_call_is_a_step(says: Says) -> None:
    with playing(Shop, settings={"num_envs": 2, "max_steps": 3}) as (_, env):
        one, two = conversations = env.draw()
        says("env", one.query)
        assert [tool["function"]["name"] for tool in one.tools] == ["add", "stop"]
        assert one.tools[0]["function"]["description"].endswith("it< |im_end|>")
        say(env, conversations, ADD + ADD, "<tool_call>{}</tool_call>" + ADD)
        assert last_words(one, 2) == [f"{digit_of(one) + 3}.", f"{digit_of(one) + 6}."]
        say(env, conversations, STOP, call("add"))
        assert one.terminated
        assert (one.reward, one.reward_parts["earned"]) == (pytest.approx(0.7), pytest.approx(0.7))
        assert last_words(two, 1) == ["missing"]
        say(env, [two], STOP)  # the last turn's call earns too
        assert (two.terminated, two.reward) == (True, pytest.approx(0.4))
        assert two.reward_parts["unset_rewards"] == 1.0


def test_a_reply_without_a_call_ends_the_conversation() -> None:
    with playing(Shop, settings={"num_envs": 3}) as (_, env):
        none, late, lost = conversations = env.draw()
        say(env, conversations, "Done.", STOP + ADD, call("add", number="lost"))
        assert (none.terminated, none.valid, none.reward) == (True, True, 0.0)
        assert (late.terminated, late.reward) == (True, pytest.approx(0.1))
        assert last_words(late, 1) == ["over"]
        assert "tool add" in error_of(lost)


def test_a_conversation_with_tools_goes_on_after_it_was_saved(says: Says) -> None:
    with playing(Shop, settings={"max_steps": 3}) as (server, env), closing(OpenEnv(server.url, max_steps=3)) as fresh:
        [conversation] = env.draw()
        say(env, [conversation], ADD + ADD)
        loaded, other = saved(conversation), saved(conversation)
        fresh.start()
        say(fresh, [loaded], STOP)
        assert (loaded.terminated, loaded.reward) == (True, pytest.approx(0.7))
        other.messages = [{**m, "content": m["content"].replace("You have", "They had")} for m in other.messages]
        fresh.abandon()
        say(fresh, [other], STOP)
        says("env", steady(error_of(other)))


class Note(ToolTransform):
    def schemas(self) -> list[dict[str, Any]]:
        parameters = {"type": "object", "properties": {}}
        return [{"type": "function", "function": {"name": "note", "description": "", "parameters": parameters}}]

    def call(self, conversation: Conversation, call: ToolCall) -> ToolResult:
        return ToolResult("noted")


@pytest.mark.parametrize("limits", [ToolLimits(max_calls=2), ToolLimits(max_calls_per_turn=2)])
def test_only_the_calls_that_ran_are_played_again(limits: ToolLimits) -> None:
    own: dict[str, Any] = {"max_steps": 4, "tool_limits": limits}
    with playing(Shop, settings=own) as (server, env), closing(OpenEnv(server.url, **own)) as fresh:
        for each in (env, fresh):
            each.append_transform(Note())
            each.start()
        [conversation] = env.draw()
        say(env, [conversation], call("note") + ADD + ADD)
        loaded, before = saved(conversation), len(server.steps())
        for playing_on, one in ((env, conversation), (fresh, loaded)):
            say(playing_on, [one], "Done.")
            assert (one.valid, one.reward) == (True, pytest.approx(0.3)), one.error
        assert len(server.steps()) == before + 1


def test_an_answer_with_a_special_token_is_the_same_again() -> None:
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
        loaded = saved(conversation)
        say(fresh, [loaded], STOP)
        assert (loaded.valid, loaded.reward) == (True, pytest.approx(0.4)), loaded.error


# Resuming


def test_a_saved_conversation_goes_on_in_a_fresh_session(server: OpenEnvServer, env_of: Any, says: Says) -> None:
    first, second = env_of(invalid_reward=-1.0), env_of(invalid_reward=-1.0)
    [conversation] = first.draw()
    say(first, [conversation], "nothing")
    say_wrong(first, [conversation])
    loaded, cut, other = (saved(conversation) for _ in range(3))
    first.close()
    second.load_state_dict(first.state_dict())
    say_right(second, [loaded])
    assert (loaded.reward, loaded.reward_parts["invalid_actions"]) == (-0.25, 1.0)
    say(second, [cut], "1", reason="length")
    assert (cut.truncated, cut.reward) == (True, -1.25)
    other.messages[-1] = {"role": "user", "content": "no, 2"}
    say_right(second, [other])
    says("env", steady(error_of(other)))


def test_a_text_of_the_server_is_not_taken_for_a_refusal() -> None:
    class Rude(Guess):
        def step(self, action: dict[str, Any]) -> dict[str, Any]:
            answer = super().step(action)
            return answer if answer["done"] else {**answer, **seen("That is not a valid action here.", -0.25)}

    own: dict[str, Any] = {"invalid_reward": -1.0}
    with playing(Rude, settings=own) as (server, env), closing(OpenEnv(server.url, **own)) as fresh:
        [conversation] = env.draw()
        say_wrong(env, [conversation])
        say(env, [conversation], "seven")
        loaded = saved(conversation)
        fresh.start()
        for playing_on, one in ((env, conversation), (fresh, loaded)):
            say_right(playing_on, [one])
            assert (one.reward, one.reward_parts["invalid_actions"]) == (-0.25, 1.0)


# Recorded frames


@pytest.mark.parametrize(("name", "settings"), [("valid", {"reset": {"level": "hard"}}), ("tools", {})])
def test_frames_of_the_real_server_are_written_and_read(name: str, settings: dict[str, Any]) -> None:
    recorded = RECORDED[name]
    talks = iter(recorded["talks"])
    running: defaultdict[ServerConnection, Iterator[Any]] = defaultdict(lambda: iter(next(talks)))
    wrong: list[Any] = []

    def replay(connection: ServerConnection, frame: dict[str, Any]) -> bool:
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


def test_the_verb_env_test_plays_it(server: OpenEnvServer, capsys: pytest.CaptureFixture[str], says: Says) -> None:
    assert run_cli(["env", "test", "openenv", f"env.url={server.url}", "env.split=train"]) == 0
    says("env", steady(capsys.readouterr().out))


def test_tools_of_rlpost_beside_plain_actions_are_refused(server: OpenEnvServer) -> None:
    words = ["tools.use=python", "tools.python_sandbox=limits", "env.max_turns=2"]
    settings = compose(EVAL, ["env=openenv", f"env.url={server.url}", *words]).settings
    with pytest.raises(ConfigError, match=r"tools\.use"):
        build_env(settings.env, tools=settings.tools).start()


@pytest.mark.parametrize(("word", "limit", "role"), [("max_calls=1", 1, "user"), ("role=tool", None, "tool")])
def test_limits_and_role_of_tools_hold_for_those_of_the_server(word: str, limit: int | None, role: str) -> None:
    with open_env_server(Shop) as server:
        settings = compose(EVAL, ["env=openenv", f"env.url={server.url}", f"tools.{word}"]).settings
        with closing(build_env(settings.env, tools=settings.tools)) as env:
            env.start()
            assert env.tools is not None
            assert (env.tools.limits.max_calls, env.tools.role) == (limit, role)
            assert env.tools.follows_role == (role == "user")


def test_calls_of_the_only_turn_are_read_by_the_template() -> None:
    with playing(Shop, settings={"max_steps": 1}) as (_, env):
        env.start()
        check_template(env, tokenizer())
        assert env.tools is not None
        assert env.tools.reader is not None


def training(server: OpenEnvServer, *words: str) -> list[str]:
    own = ["model=tiny", "policy=scripted", "policy.replies=[3,8]", "env=openenv", f"env.url={server.url}"]
    return [*own, "env.max_turns=2", "prompts_per_step=2", "group_size=2", "eval.enabled=false", *words]


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
    words = training(server, "steps=9", "env.start_seconds=0.5", "max_failed_share=1")
    with pytest.raises(ToolError, match=r"env\.url"):
        train_in(TRAIN_GRPO, tmp_path / "run", words)
