"""Classes in the shape that TRL takes, one object a conversation: tools, rewards, deadlines, resuming."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_DPO, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.cli.main import run
from rlpost.config.compose import compose
from rlpost.config.schema import options
from rlpost.data.conversation import Conversation
from rlpost.envs.base import ToolCall, ToolLimits
from rlpost.envs.build import build_env
from rlpost.envs.factory import FactoryEnv
from rlpost.errors import ConfigError
from tests.envs.episodes import call, error_of, played, say
from tests.says import Says
from tests.trainings import ends_alike, train_in_parts, untimed

STUBS = Path(__file__).with_name("stubs")
COUNTER = (STUBS / "counter.py").read_text()
ECHO = (STUBS / "echo.py").read_text()
BROKEN = (STUBS / "broken.py").read_text()
DONE = "I am done."


USE = call("use", word="x")


def add(step: int) -> str:
    """A reply that lets the counter count."""
    return call("increment", step=step)


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the rows, in the folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    lines = [{"prompt": [{"role": "user", "content": f"Reach {goal}."}], "goal": goal} for goal in range(1, 9)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, lines)))


Make = Callable[..., FactoryEnv]


@pytest.fixture
def made() -> Iterator[Make]:
    """Makes the environment of a class's source; closed at the end, with no thread of it waiting on."""

    def make(source: str, name: str, *words: str, group_size: int = 1, num_prompts: int = 1) -> FactoryEnv:
        file = Path(f"{name.lower()}.py")
        file.write_text(source)
        given = ["env=factory", f"env.factory={file}:{name}", "env.path=rows.jsonl", "env.shuffle=false", *words]
        settings = compose(TRAIN_GRPO, given).settings
        env = build_env(settings.env, num_prompts=num_prompts, group_size=group_size, tools=settings.tools)
        assert isinstance(env, FactoryEnv)
        return opened.enter_context(closing(env))

    with ExitStack() as opened:
        yield make
        for module in [each for name, each in sys.modules.items() if name.endswith("/broken.py")]:
            module.GATE.set()  # no call of a test waits on behind it


def broken_code(**bodies: str) -> str:
    """The source of a class, with these bodies in place of some methods' own."""
    code = BROKEN
    for method, body in bodies.items():
        code = re.sub(f"return .* # body of {method}", body, code)
    return code


def broken(made: Make, *words: str, num_prompts: int = 1, group_size: int = 1, **bodies: Any) -> FactoryEnv:
    """The environment of such a class."""
    return made(broken_code(**bodies), "Broken", *words, num_prompts=num_prompts, group_size=group_size)


def tool_texts(conversation: Conversation) -> list[str]:
    """The last line of each message that a tool has answered."""
    texts = [message["content"] for message in conversation.messages]
    return [text.rpartition("\n")[2] for text in texts if text.startswith("Tool ")]


# As TRL plays them


def test_a_counter_is_begun_called_and_scored_by_its_own_object(made: Make) -> None:
    env = made(COUNTER, "Counter", group_size=2)
    first, second = env.draw()
    assert first.messages == [{"role": "user", "content": "Reach 1. Counter: 0."}]
    assert [tool["function"]["name"] for tool in first.tools] == ["increment"]
    parameters = first.tools[0]["function"]["parameters"]
    assert parameters["properties"] == {"step": {"type": "integer", "description": "added"}}
    say(env, [first, second], add(1), add(5) + add(-2))
    assert [tool_texts(first), tool_texts(second)] == [["1"], ["5", "3"]]
    say(env, [first, second], DONE, DONE)
    assert (first.reward, second.reward) == (1.0, 0.0)
    assert first.reward_parts == {"Counter": 1.0}
    assert all(each.terminated and each.valid for each in (first, second))
    assert env.episodes == {}


def test_an_echo_of_async_methods_begins_without_a_text(made: Make) -> None:
    conversation = played(made(ECHO, "Echo"), call("echo", message="hello"), call("echo", message="you"), DONE)
    assert conversation.messages[0]["content"] == "Reach 1."
    assert tool_texts(conversation) == ["hello", "you"]
    assert conversation.reward == 0.8


def test_reset_sees_every_column_and_changes_no_row(made: Make) -> None:
    env = broken(made, reset="columns['prompt'][0]['content'] = ''; return ','.join(sorted(columns))")
    first, second = played(env, DONE), played(env, DONE)
    assert first.messages[0]["content"] == "Reach 1.goal,prompt"
    assert second.messages[0]["content"] == "Reach 2.goal,prompt"
    assert env.not_used == ""


def test_the_limits_of_turns_and_of_tokens_end_an_episode(made: Make) -> None:
    env = made(COUNTER, "Counter", "env.max_turns=2")
    conversation = played(env, add(1), add(1))
    assert conversation.truncated
    assert conversation.reward == 1.0  # the last turn's call is not run
    [cut] = env.draw()
    say(env, [cut], add(2), reason="length")
    assert (cut.truncated, cut.reward, cut.valid) == (True, 0.0, True)


def test_rewards_beside_the_class_are_added(made: Make) -> None:
    Path("brief.py").write_text("def brief(completions, goal): return [each / 10 for each in goal]\n")
    conversation = played(made(COUNTER, "Counter", "env.reward=brief.py:brief"), add(1), DONE)
    assert conversation.reward == pytest.approx(1.1)
    assert conversation.reward_parts == {"Counter": 1.0, "brief": 0.1}
    without = COUNTER.replace("get_reward", "_unused").replace("class Counter", "class Bare")
    assert played(made(without, "Bare", "env.reward=brief.py:brief"), DONE).reward == pytest.approx(0.1)


def test_a_reward_that_takes_the_environments_is_refused(made: Make) -> None:
    Path("theirs.py").write_text("def solved(completions, environments): return [1.0 for _ in completions]\n")
    with pytest.raises(ConfigError, match=r"theirs\.py:solved .*environments"):
        made(COUNTER, "Counter", "env.reward=theirs.py:solved").start()


# Refused at the start


REFUSED = {
    "no reset": COUNTER.replace("def reset", "def begin"),
    "no reward": COUNTER.replace("def get_reward", "def _reward"),
    "arguments": COUNTER.replace("__init__(self)", "__init__(self, url)"),
    "other columns": COUNTER.replace("(self, **columns)", "(self, goal)"),
    "no Python": "def Counter(:",
    "missing module": "import no_such_module\nclass Counter: pass",
    "other name": "class Count: pass",
}


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED)
def test_a_class_that_cannot_be_played_is_refused_by_name(source: str, made: Make, says: Says) -> None:
    with says.refused("env", ConfigError, "ounter"):  # Counter, or counter.py
        made(source, "Counter").start()


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (COUNTER.replace("step: int", "step"), "increment .* type"),
        (f"{COUNTER}\n    def shout(self, word: str) -> str:\n        return word.upper()\n", "shout .* docstring"),
        (
            "from __future__ import annotations\n" + COUNTER.replace(": int", ": Sequence[int]"),
            "increment .*'Sequence'",
        ),
    ],
)
def test_a_tool_that_is_not_described_is_refused(source: str, part: str, made: Make) -> None:
    with pytest.raises(ConfigError, match=f"the tool {part}"):
        made(source, "Counter").start()


def test_a_class_with_the_name_of_a_figure_is_refused(made: Make) -> None:
    with pytest.raises(ConfigError, match=r"mean\.py:mean: reward/mean"):
        made(COUNTER.replace("class Counter", "class mean"), "mean").start()


def test_a_prompt_from_outside_begins_an_episode(made: Make) -> None:
    [conversation] = broken(made, reset="return ' go'").begin([{"query": "Reach 1.", "prompt": "Reach 1."}])
    assert conversation.messages[0]["content"] == "Reach 1. go"


def test_a_name_without_a_file_is_refused_while_composing() -> None:
    with pytest.raises(ConfigError, match=r"env\.factory=Counter"):
        compose(TRAIN_GRPO, ["env=factory", "env.factory=Counter", "env.path=rows.jsonl"])


def test_trainings_on_rows_do_not_offer_it() -> None:
    assert "factory" in options("env", TRAIN_GRPO)
    others: list[Command[Any]] = [TRAIN_SFT, TRAIN_DPO]
    for command in others:
        assert "factory" not in options("env", command)
        with pytest.raises(ConfigError, match=r"env=factory"):
            compose(command, ["env=factory", "env.path=rows.jsonl"])


# Errors while it is played


def test_an_exception_of_a_tool_is_read_by_the_model_and_counted(made: Make) -> None:
    conversation = played(broken(made, use="raise KeyError(word)"), USE, call("use", words=1), DONE)
    first, second = tool_texts(conversation)
    assert "KeyError: 'x'" in first
    assert "'word'" in second
    assert (conversation.tool_errors, conversation.valid, conversation.reward) == (2, True, 1.0)


FAILING = {
    "reset raises": {"reset": "raise OSError('no disk')"},
    "reset returns a list": {"reset": "return ['a']"},
    "reset hangs": {"reset": "GATE.wait(60)"},
    "a tool hangs": {"use": "GATE.wait(60)"},
    "get_reward exits": {"get_reward": "raise SystemExit(3)"},
    "get_reward hangs": {"get_reward": "GATE.wait(60)"},
    "a reward of None": {"get_reward": "return None"},
    "a reward of nan": {"get_reward": "return float('nan')"},
    "a reward of text": {"get_reward": "return '1.0'"},
    "a late judge": {"get_reward": "raise TimeoutError('slow judge')"},
}


@pytest.mark.parametrize("bodies", FAILING.values(), ids=FAILING)
def test_a_failed_episode_is_invalid_and_never_a_zero(bodies: dict[str, Any], made: Make, says: Says) -> None:
    env = broken(made, "env.reset_seconds=0.2", "env.step_seconds=0.2", **bodies)
    says("env", error_of(played(env, USE, DONE)))
    assert env.episodes == {}


def test_a_late_object_leaves_the_others_alone(made: Make) -> None:
    use = "GATE.wait(60) if word == 'wait' else None; return word"
    env = broken(made, "env.step_seconds=0.2", num_prompts=2, use=use)
    late, good = env.draw()
    say(env, [late, good], call("use", word="wait"), call("use", word="go"))
    assert (late.valid, late.done) == (False, True)
    assert tool_texts(good) == ["go"]
    say(env, [good], DONE)
    assert (good.valid, good.reward) == (True, 1.0)


def test_failed_episodes_are_named_in_the_log(made: Make, caplog: pytest.LogCaptureFixture, says: Says) -> None:
    env = broken(made, num_prompts=2, get_reward="raise OSError('the judge is down')")
    with caplog.at_level("INFO", "rlpost"):
        say(env, env.draw(), DONE, DONE)
    says("env", caplog.messages[-1])


def test_async_methods_of_all_episodes_share_one_loop(made: Make) -> None:
    noting = "LOOPS.add(asyncio.get_running_loop())\n        return len(LOOPS)"
    source = ECHO.replace('return len("".join(self.said)) / 10', noting)
    env = made(f"import asyncio\nLOOPS = set()\n{source}", "Echo")
    assert [played(env, DONE).reward for _ in range(3)] == [1.0] * 3


@pytest.mark.parametrize(
    "use",
    [
        "time.sleep(0.15); return asyncio.sleep(60)",
        "return asyncio.sleep(60)",
        "ctypes.PyDLL(None).usleep(300_000)",  # without giving the GIL back
    ],
)
def test_a_late_call_is_named_whatever_it_waits_for(use: str, made: Make) -> None:
    env = broken(made, "env.step_seconds=0.1", use=f"import asyncio, ctypes, time; {use}")
    assert "within 0.1 s" in error_of(played(env, USE, DONE))
    assert played(env, DONE).reward == 1.0


def test_a_call_that_keeps_the_gil_for_good_ends_the_process() -> None:
    program = (
        "import ctypes\nfrom rlpost.envs import game_calls\ngame_calls.GRACE_SECONDS = 0.1\n"
        "def stuck(): ctypes.PyDLL(None).sleep(60)\nwith game_calls.ended_if_stuck(0.1): stuck()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 1
    assert "in stuck" in ended.stderr


def test_a_tool_that_changes_its_arguments_changes_nothing_else(made: Make) -> None:
    source = broken_code(use="word.append('b'); return len(word)")
    env = made(source.replace("word: str", "word: list[str]"), "Broken")
    [conversation] = env.draw()
    asked = ToolCall("use", {"word": ["a"]}, 0)
    assert env.methods is not None
    assert env.methods.call(conversation, asked).text == "2"
    assert asked.arguments == {"word": ["a"]}


# Draws from the process-wide generators


def test_a_class_that_draws_globally_has_generators_an_episode(made: Make, caplog: pytest.LogCaptureFixture) -> None:
    def dice() -> FactoryEnv:
        return broken(made, group_size=3, use="import random; return random.random()")

    env = dice()
    random.seed(0)
    expected = random.random()
    random.seed(0)
    conversations = env.draw()
    for _ in range(2):
        say(env, conversations, USE, USE, USE)
    assert random.random() == expected
    assert caplog.text.count("draws from") == 1
    first, *others = map(tool_texts, conversations)
    assert len(set(first)) == 2
    assert others == [first, first]
    assert [c.tool_calls for c in conversations] == [2, 2, 2]
    saved = conversations[0].copy()
    say(env, conversations[:1], USE)
    say(dice(), [saved], USE)
    assert (saved.messages, saved.error) == (conversations[0].messages, None)


@pytest.mark.parametrize(
    "bodies",
    [
        {"reset": "import random; return f' {random.random()}'"},
        {"get_reward": "import random; return random.random()"},
    ],
)
def test_draws_of_reset_and_get_reward_are_isolated_too(bodies: dict[str, Any], made: Make) -> None:
    env = broken(made, group_size=2, **bodies)
    first, second = conversations = env.draw()
    say(env, conversations, DONE, DONE)
    assert (first.messages, first.reward) == (second.messages, second.reward)
    assert first.valid


# Saved in the middle


def test_a_saved_conversation_goes_on_with_a_fresh_object(made: Make) -> None:
    [conversation] = made(COUNTER, "Counter").draw()
    env = made(COUNTER, "Counter")
    say(env, [conversation], add(-2))
    say(env, [conversation], add(1) + call("nothing") + call("increment", steps=4))
    say(made(COUNTER, "Counter"), [conversation], add(2))
    assert tool_texts(conversation)[-1] == "1"
    say(made(COUNTER, "Counter"), [conversation], DONE)
    assert (conversation.reward, conversation.valid, conversation.error) == (1.0, True, None)


def test_a_step_taken_again_is_played_from_its_turn(made: Make) -> None:
    env = made(COUNTER, "Counter")
    [conversation] = env.draw()
    say(env, [conversation], add(3))
    saved = conversation.copy()
    say(env, [conversation], add(3))
    say(env, [saved], add(-2))
    assert tool_texts(saved)[-1] == "1"
    say(env, [saved], DONE)
    assert saved.reward == 1.0


def test_calls_beyond_the_limits_are_not_repeated(made: Make) -> None:
    def few() -> FactoryEnv:
        env = made(COUNTER, "Counter")
        env.tool_limits = ToolLimits(max_calls=3, max_calls_per_turn=2)
        return env

    [conversation] = few().draw()
    say(few(), [conversation], add(1) * 3)
    say(few(), [conversation], add(1) * 2)
    assert conversation.tool_calls == 3
    env = few()
    say(env, [conversation], add(1))
    assert env.episodes[conversation.key].object.value == 3
    assert conversation.valid


@pytest.mark.parametrize(
    ("bodies", "part"),
    [({"use": "return str(id(self)) + word"}, "use answers"), ({"reset": "return f' {id(self)}'"}, "reset was called")],
)
def test_an_object_that_plays_otherwise_again_is_an_error(bodies: dict[str, Any], part: str, made: Make) -> None:
    before = broken(made, **bodies)
    [conversation] = before.draw()
    say(before, [conversation], USE)
    say(broken(made, **bodies), [conversation], USE)
    assert part in error_of(conversation)


# Whole commands


def test_env_test_says_what_it_found(capsys: pytest.CaptureFixture[str], says: Says) -> None:
    Path("counter.py").write_text(COUNTER)
    assert run(["env", "test", "factory", "env.path=rows.jsonl", "env.factory=counter.py:Counter"]) == 0
    says("env", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("bodies", "part"),
    [
        ({"reset": "return f' {id(self)}'"}, "reset begins"),
        ({"get_reward": "return None"}, "returned None"),
    ],
)
def test_env_test_fails_by_name(bodies: dict[str, Any], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.py").write_text(broken_code(**bodies))
    assert run(["env", "test", "factory", "env.path=rows.jsonl", "env.factory=broken.py:Broken"]) == 3
    assert part in " ".join(capsys.readouterr().err.split())


def test_it_is_trained_and_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    Path("counter.py").write_text(COUNTER)
    words = [
        *("model=tiny", "env=factory", "env.factory=counter.py:Counter", "env.path=rows.jsonl", "env.max_turns=2"),
        *("policy=scripted", f"policy.replies={json.dumps([add(1), DONE])}", "prompts_per_step=8", "group_size=2"),
        *("eval.enabled=false", "env.max_completion_tokens=100", "env.held_out=0", "optim.schedule=constant"),
    ]
    whole, parted = train_in_parts(TRAIN_GRPO, tmp_path, words)
    assert [line["reward/mean"] for line in untimed(whole)] == [1 / 16] * 4
    assert all(line["grad_norm"] > 0 for line in untimed(whole))
    assert ends_alike(whole, parted)
