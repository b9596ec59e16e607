"""Classes in the shape that TRL takes, one object a conversation: tools, rewards, deadlines, resuming."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_DPO, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.cli.main import run
from rlpost.config.compose import compose
from rlpost.config.schema import options
from rlpost.data.conversation import Completion, Conversation
from rlpost.envs.base import ToolCall, ToolLimits
from rlpost.envs.build import build_env
from rlpost.envs.factory import FactoryEnv
from rlpost.errors import ConfigError
from tests.trainings import train_in, untimed

COUNTER = '''
class Counter:
    def __init__(self):
        self.value, self.goal = 0, 0

    def reset(self, **columns):
        self.value, self.goal = 0, columns["goal"]
        return f" The counter is at {self.value}."

    def increment(self, step: int) -> int:
        """Add to the counter.

        Args:
            step: how much is added
        """
        self.value += step
        return self.value

    def _hidden(self):
        raise AssertionError

    @property
    def never(self):
        raise AssertionError("properties are not looked at")

    def get_reward(self):
        return float(self.value == self.goal)
'''
ECHO = '''
class Echo:
    def reset(self, **columns):
        self.said = []

    async def echo(self, message: str) -> str:
        """Say a message back.

        Args:
            message: what is said
        """
        self.said.append(message)
        return f"You said: {message}"

    async def get_reward(self):
        return len("".join(self.said)) / 10
'''
# {}: what stands in place of the body of a method
BROKEN = '''
import threading

GATE = threading.Event()

class Broken:
    def reset(self, **columns):
        {reset}

    def use(self, word: str) -> str:
        """Use a word.

        Args:
            word: any word
        """
        {use}

    def get_reward(self):
        {get_reward}
'''
DONE = "I am done."


def call(name: str, **arguments: Any) -> str:
    """A reply that calls a tool."""
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the rows, in the folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    lines = [{"prompt": [{"role": "user", "content": f"Reach {goal}."}], "goal": goal} for goal in range(1, 9)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path / "rows.jsonl"


Make = Callable[..., FactoryEnv]


@pytest.fixture
def made() -> Iterator[Make]:
    """Makes the environment of a class's source; closed at the end, with no thread of it waiting on."""
    environments: list[FactoryEnv] = []

    def make(source: str, name: str, *words: str, group_size: int = 1, num_prompts: int = 1) -> FactoryEnv:
        file = Path(f"{name.lower()}.py")
        file.write_text(source)
        given = ["env=factory", f"env.factory={file}:{name}", "env.path=rows.jsonl", "env.shuffle=false", *words]
        settings = compose(TRAIN_GRPO, given).settings
        env = build_env(settings.env, num_prompts=num_prompts, group_size=group_size, tools=settings.tools)
        assert isinstance(env, FactoryEnv)
        environments.append(env)
        return env

    yield make
    for module in [each for name, each in sys.modules.items() if name.endswith("/broken.py")]:
        module.GATE.set()  # no call of a test waits on behind it
    for env in environments:
        env.close()


def broken(made: Make, *words: str, **bodies: str) -> FactoryEnv:
    """The environment of a class of which some methods have these bodies."""
    good = {"reset": "return None", "use": "return word", "get_reward": "return 1.0"}
    return made(BROKEN.format(**good | bodies), "Broken", *words)


def say(env: FactoryEnv, conversations: Sequence[Conversation], *replies: str) -> None:
    """Let the model reply, the i-th conversation with the i-th reply."""
    for conversation, reply in zip(conversations, replies, strict=True):
        conversation.add_completion(Completion([1], [0.0], reply, "stop", 0))
    env.advance(conversations)


def played(env: FactoryEnv, *replies: str) -> Conversation:
    """A conversation of one of the env's prompts with these replies, as far as it goes."""
    [conversation] = env.draw()
    for reply in replies:
        if not conversation.done:
            say(env, [conversation], reply)
    return conversation


# As TRL plays them


def test_a_counter_is_begun_called_and_scored_by_its_own_object(made: Make) -> None:
    env = made(COUNTER, "Counter", group_size=2)
    first, second = env.draw()
    assert first.messages == [{"role": "user", "content": "Reach 1. The counter is at 0."}]
    assert [tool["function"]["name"] for tool in first.tools] == ["increment"]
    parameters = first.tools[0]["function"]["parameters"]
    assert parameters["properties"] == {"step": {"type": "integer", "description": "how much is added"}}
    say(env, [first, second], call("increment", step=1), call("increment", step=5) + call("increment", step=-2))
    assert first.messages[-1]["content"] == "Tool increment executed successfully:\n1"
    assert [m["content"][-1] for m in second.messages[-2:]] == ["5", "3"]
    say(env, [first, second], DONE, DONE)
    assert (first.reward, second.reward) == (1.0, 0.0)
    assert first.reward_parts == {"Counter": 1.0}
    assert all(each.terminated and each.valid for each in (first, second))
    assert env.episodes == {}


def test_an_echo_of_async_methods_begins_without_a_text(made: Make) -> None:
    env = made(ECHO, "Echo")
    conversation = played(env, call("echo", message="hello"), call("echo", message="you"), DONE)
    assert conversation.messages[0]["content"] == "Reach 1."
    assert [m["content"].rpartition("\n")[2] for m in conversation.messages if "Tool" in m["content"]] == [
        "You said: hello",
        "You said: you",
    ]
    assert conversation.reward == 0.8


def test_reset_sees_every_column_and_changes_no_row(made: Make) -> None:
    env = broken(made, reset="columns['prompt'][0]['content'] = ''; return ','.join(sorted(columns))")
    first, second = played(env, DONE), played(env, DONE)
    assert first.messages[0]["content"] == "Reach 1.goal,prompt"
    assert second.messages[0]["content"] == "Reach 2.goal,prompt"
    assert env.not_used == ""


def test_the_models_turns_end_with_the_limit_of_turns_or_of_tokens(made: Make) -> None:
    env = made(COUNTER, "Counter", "env.max_turns=2")
    conversation = played(env, call("increment", step=1), call("increment", step=1))
    assert conversation.truncated
    assert conversation.reward == 1.0  # the last turn's call is not run
    [cut] = env.draw()
    cut.add_completion(Completion([1], [0.0], call("increment", step=2), "length", 0))
    env.advance([cut])
    assert (cut.truncated, cut.reward, cut.valid) == (True, 0.0, True)


def test_rewards_beside_the_class_are_added(made: Make) -> None:
    Path("brief.py").write_text("def brief(completions, goal): return [each / 10 for each in goal]\n")
    env = made(COUNTER, "Counter", "env.reward=brief.py:brief")
    conversation = played(env, call("increment", step=1), DONE)
    assert conversation.reward == pytest.approx(1.1)
    assert conversation.reward_parts == {"Counter": 1.0, "brief": 0.1}
    without = COUNTER.replace("get_reward", "_unused").replace("class Counter", "class Bare")
    assert played(made(without, "Bare", "env.reward=brief.py:brief"), DONE).reward == pytest.approx(0.1)


def test_a_reward_that_takes_the_environments_is_refused_by_name(made: Make) -> None:
    Path("theirs.py").write_text("def solved(completions, environments): return [1.0 for _ in completions]\n")
    with pytest.raises(ConfigError, match=r"theirs.py:solved takes environments, which rlpost does not offer"):
        made(COUNTER, "Counter", "env.reward=theirs.py:solved").start()


# Refused at the start


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (COUNTER.replace("step: int", "step"), r"the tool increment does not say enough .* a type"),
        (COUNTER.replace("def reset", "def begin"), r"Counter has no method reset"),
        (COUNTER.replace("def get_reward", "def _reward"), r"Counter has no method get_reward: .*env.reward"),
        (COUNTER.replace("__init__(self)", "__init__(self, url)"), r"Counter\(\) cannot be made: TypeError"),
        (COUNTER.replace("(self, **columns)", "(self, goal)"), r"cannot be called with the columns .*prompt.*columns"),
        ("def Counter(:", r"counter.py, line 1: this is not valid Python"),
        ("import no_such_module\nclass Counter: pass", r"counter.py, line 1: importing it failed"),
        ("class Count: pass", r"counter.py defines no class Counter; did you mean Count"),
    ],
)
def test_a_class_that_cannot_be_played_is_refused_by_name(source: str, said: str, made: Make) -> None:
    with pytest.raises(ConfigError, match=said):
        made(source, "Counter").start()


def test_a_method_without_a_docstring_is_refused_by_name(made: Make) -> None:
    source = COUNTER + "\n    def shout(self, word: str) -> str:\n        return word.upper()\n"
    with pytest.raises(ConfigError, match=r"the tool shout does not say enough for a model to call it"):
        made(source, "Counter").start()


def test_a_tool_whose_type_is_not_imported_is_named(made: Make) -> None:
    source = "from __future__ import annotations\n" + COUNTER.replace("step: int", "step: Sequence[int]")
    with pytest.raises(ConfigError, match=r"the tool increment does not say enough .*Sequence"):
        made(source, "Counter").start()


def test_a_class_with_the_name_of_a_figure_is_refused(made: Make) -> None:
    with pytest.raises(ConfigError, match=r"mean.py:mean: reward/mean is a figure of every step"):
        made(COUNTER.replace("class Counter", "class mean"), "mean").start()


def test_a_prompt_from_outside_begins_an_episode_before_any_start(made: Make) -> None:
    [conversation] = broken(made, reset="return ' go'").begin([{"query": "Reach 1.", "prompt": "Reach 1."}])
    assert conversation.messages[0]["content"] == "Reach 1. go"


def test_a_name_without_a_file_is_refused_while_composing() -> None:
    with pytest.raises(ConfigError, match=r"env.factory=Counter is not FILE.py:CLASS"):
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
    env = broken(made, use="raise KeyError(word)")
    conversation = played(env, call("use", word="x"), call("use", words=1), DONE)
    answers = [m["content"] for m in conversation.messages if m["content"].startswith("Tool use failed")]
    assert "KeyError: 'x'" in answers[0]
    assert "use cannot be called like that" in answers[1]
    assert (conversation.tool_errors, conversation.valid, conversation.reward) == (2, True, 1.0)


@pytest.mark.parametrize(
    ("bodies", "said"),
    [
        ({"reset": "raise OSError('no disk')"}, "Broken: reset failed: OSError: no disk"),
        ({"reset": "return ['a']"}, "Broken: reset failed: TypeError: it must return text or None, and returned list"),
        ({"reset": "GATE.wait(60)"}, "Broken: reset did not return within 0.2 s"),
        ({"use": "GATE.wait(60)"}, "the tool use failed: RuntimeError: Broken: use did not return within 0.2 s"),
        ({"get_reward": "raise SystemExit(3)"}, "Broken: get_reward failed: SystemExit: 3"),
        ({"get_reward": "GATE.wait(60)"}, "Broken: get_reward did not return within 0.2 s"),
        ({"get_reward": "return None"}, "TypeError: it must return a finite number, and returned None"),
        ({"get_reward": "return float('nan')"}, "it must return a finite number, and returned float nan"),
        ({"get_reward": "return '1.0'"}, "it must return a finite number, and returned str '1.0'"),
        ({"get_reward": "raise TimeoutError('slow judge')"}, "Broken: get_reward failed: TimeoutError: slow judge"),
    ],
)
def test_a_failed_episode_is_invalid_by_name_and_never_a_zero(bodies: dict[str, str], said: str, made: Make) -> None:
    env = broken(made, "env.reset_seconds=0.2", "env.step_seconds=0.2", **bodies)
    conversation = played(env, call("use", word="x"), DONE)
    assert said in (conversation.error or "")
    assert (conversation.done, conversation.valid, conversation.reward) == (True, False, None)
    assert env.episodes == {}


def test_a_late_object_leaves_the_others_alone(made: Make) -> None:
    env = broken(made, "env.step_seconds=0.2", use="GATE.wait(60) if word == 'wait' else None; return word")
    env.batch_size = env.batch_size.__class__([2])
    late, good = env.draw(2)
    say(env, [late, good], call("use", word="wait"), call("use", word="go"))
    assert (late.valid, late.done) == (False, True)
    assert good.messages[-1]["content"].endswith("go")
    say(env, [good], DONE)
    assert (good.valid, good.reward) == (True, 1.0)


@pytest.mark.parametrize("value", ["True", "__import__('numpy').float32(0.5)", "__import__('torch').tensor(2)"])
def test_numbers_of_other_libraries_are_rewards(value: str, made: Make) -> None:
    conversation = played(broken(made, get_reward=f"return {value}"), DONE)
    assert conversation.reward == float(eval(value))


def test_failed_episodes_are_named_in_the_log(made: Make, caplog: pytest.LogCaptureFixture) -> None:
    env = broken(made, get_reward="raise OSError('the judge is down')")
    env.batch_size = env.batch_size.__class__([2])
    with caplog.at_level("INFO", "rlpost"):
        say(env, env.draw(2), DONE, DONE)
    assert "2 of 2 rewards failed; the first: Broken: get_reward failed: OSError: the judge is down" in caplog.text


def test_async_methods_of_all_episodes_share_one_loop(made: Make) -> None:
    source = ECHO.replace("class Echo", "import asyncio\nLOOPS = set()\nclass Echo").replace(
        'return len("".join(self.said)) / 10', "LOOPS.add(asyncio.get_running_loop())\n        return len(LOOPS)"
    )
    env = made(source, "Echo")
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
    conversation = played(env, call("use", word="x"), DONE)
    assert "Broken: use did not return within 0.1 s" in (conversation.error or "")
    assert (conversation.valid, conversation.reward) == (False, None)
    assert played(env, DONE).reward == 1.0


def test_a_call_that_keeps_the_gil_for_good_ends_the_process_with_its_stack() -> None:
    program = (
        "import ctypes\nfrom rlpost.envs import game_calls\ngame_calls.GRACE_SECONDS = 0.1\n"
        "def stuck(): ctypes.PyDLL(None).sleep(60)\nwith game_calls.ended_if_stuck(0.1): stuck()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 1
    assert "in stuck" in ended.stderr


def test_a_tool_that_changes_its_arguments_leaves_the_conversation_alone(made: Make) -> None:
    source = BROKEN.format(reset="return None", use="word.append('b'); return len(word)", get_reward="return 1.0")
    env = made(source.replace("word: str", "word: list[str]"), "Broken")
    [conversation] = env.draw()
    asked = ToolCall("use", {"word": ["a"]}, 0)
    assert env.methods is not None
    assert env.methods.call(conversation, asked).text == "2"
    assert asked.arguments == {"word": ["a"]}


# Draws from the process-wide generators


def test_a_class_that_draws_globally_has_a_state_of_the_generators_for_each_episode(
    made: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def dice() -> FactoryEnv:
        body = {"reset": "return None", "use": "import random; return random.random()", "get_reward": "return 1.0"}
        return made(BROKEN.format(**body), "Broken", group_size=3)

    env = dice()
    random.seed(0)
    expected = random.random()
    random.seed(0)
    conversations = env.draw()
    for _ in range(2):
        say(env, conversations, *[call("use", word="x")] * 3)
    assert random.random() == expected
    assert "Broken draws from the process-wide random or numpy.random" in caplog.text
    assert caplog.text.count("draws from") == 1
    first, *others = [[m["content"] for m in c.messages if "executed" in m["content"]] for c in conversations]
    assert len(set(first)) == 2
    assert others == [first, first]
    assert [c.tool_calls for c in conversations] == [2, 2, 2]
    saved = conversations[0].copy()
    say(env, conversations[:1], call("use", word="x"))
    say(dice(), [saved], call("use", word="x"))
    assert (saved.messages, saved.error) == (conversations[0].messages, None)


@pytest.mark.parametrize("method", ["reset", "get_reward"])
def test_draws_of_reset_and_get_reward_are_isolated_too(method: str, made: Make) -> None:
    draw = {
        "reset": "import random; return f' {random.random()}'",
        "get_reward": "import random; return random.random()",
    }
    good = {"reset": "return None", "use": "return word", "get_reward": "return 1.0"}
    env = made(BROKEN.format(**{**good, method: draw[method]}), "Broken", group_size=2)
    conversations = env.draw()
    say(env, conversations, DONE, DONE)
    first, second = conversations
    assert (first.messages, first.reward) == (second.messages, second.reward)
    assert first.valid


# Saved in the middle


def test_a_saved_conversation_goes_on_with_a_fresh_object(made: Make) -> None:
    [conversation] = made(COUNTER, "Counter").draw()
    env = made(COUNTER, "Counter")
    say(env, [conversation], call("increment", step=-2))
    say(env, [conversation], call("increment", step=1) + call("nothing") + call("increment", steps=4))
    resumed = made(COUNTER, "Counter")
    say(resumed, [conversation], call("increment", step=2))
    assert conversation.messages[-1]["content"].endswith("\n1")
    say(made(COUNTER, "Counter"), [conversation], DONE)
    assert (conversation.reward, conversation.valid, conversation.error) == (1.0, True, None)


def test_a_step_taken_again_from_the_same_turn_is_played_from_that_turn(made: Make) -> None:
    env = made(COUNTER, "Counter")
    [conversation] = env.draw()
    say(env, [conversation], call("increment", step=3))
    saved = conversation.copy()
    say(env, [conversation], call("increment", step=3))
    say(env, [saved], call("increment", step=-2))
    assert saved.messages[-1]["content"].endswith("\n1")
    say(env, [saved], DONE)
    assert saved.reward == 1.0


def test_calls_beyond_the_limits_are_not_repeated(made: Make) -> None:
    def few() -> FactoryEnv:
        env = made(COUNTER, "Counter")
        env.tool_limits = ToolLimits(max_calls=3, max_calls_per_turn=2)
        return env

    [conversation] = few().draw()
    say(few(), [conversation], call("increment", step=1) * 3)
    say(few(), [conversation], call("increment", step=1) * 2)
    assert conversation.tool_calls == 3
    assert "all 3 tool calls are used" in conversation.messages[-1]["content"]
    env = few()
    say(env, [conversation], call("increment", step=1))
    assert env.episodes[conversation.key].object.value == 3
    assert conversation.valid


@pytest.mark.parametrize(
    ("bodies", "said"),
    [
        ({"use": "return str(id(self)) + word"}, "its calls were made again, and use answers 'Tool use executed"),
        ({"reset": "return f' {id(self)}'"}, "reset was called again, and its text is not the one"),
    ],
)
def test_an_object_that_plays_otherwise_when_its_calls_are_repeated_is_an_error(
    bodies: dict[str, str], said: str, made: Make
) -> None:
    before = broken(made, **bodies)
    [conversation] = before.draw()
    say(before, [conversation], call("use", word="a"))
    say(broken(made, **bodies), [conversation], call("use", word="b"))
    assert said in (conversation.error or "")
    assert (conversation.done, conversation.valid, conversation.reward) == (True, False, None)


# Whole commands


def test_env_test_says_what_it_found(made: Make, capsys: pytest.CaptureFixture[str]) -> None:
    Path("counter.py").write_text(COUNTER)
    words = ["env", "test", "factory", "env.path=rows.jsonl"]
    assert run([*words, "env.factory=counter.py:Counter"]) == 0
    told = capsys.readouterr().out
    assert "its tools, which were not called: increment" in told
    assert "6 episodes, each begun twice: both times alike" in told
    good = {"reset": "return None", "use": "return word", "get_reward": "return 1.0"}
    for number, (bodies, said) in enumerate(
        [
            ({"reset": "return f' {id(self)}'"}, "reset begins with another text each time"),
            ({"get_reward": "return None"}, "it must return a finite number, and returned None"),
            ({"reset": "raise OSError('no disk')"}, "Broken: reset failed: OSError: no disk"),
        ]
    ):
        Path(f"broken{number}.py").write_text(BROKEN.format(**good | bodies))
        assert run([*words, f"env.factory=broken{number}.py:Broken"]) == 3
        assert said in " ".join(capsys.readouterr().err.split())


def test_it_is_trained_and_a_resumed_run_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    Path("counter.py").write_text(COUNTER)
    replies = json.dumps([call("increment", step=1), DONE])
    words = [
        *("model=tiny", "env=factory", "env.factory=counter.py:Counter", "env.path=rows.jsonl", "env.max_turns=2"),
        *("policy=scripted", f"policy.replies={replies}", "prompts_per_step=8", "group_size=2", "eval.enabled=false"),
        *(
            "checkpoint.every=2",
            "env.max_completion_tokens=100",
            "env.held_out=0",
            "steps=3",
            "optim.schedule=constant",
        ),
    ]
    assert train_in(TRAIN_GRPO, Path("whole"), words) == 0
    assert [line["reward/mean"] for line in untimed(Path("whole"))] == [1 / 16] * 3
    assert all(line["grad_norm"] > 0 for line in untimed(Path("whole")))
    assert train_in(TRAIN_GRPO, Path("parts"), [*words, "steps=2"]) == 0
    assert train_in(TRAIN_GRPO, Path("parts"), words, resume="latest") == 0
    assert untimed(Path("parts")) == untimed(Path("whole"))
