"""The Python tool in a conversation: what runs, what the model reads of it, and what lasts from turn to turn."""

from __future__ import annotations

import doctest
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

from rlpost.data.conversation import Completion
from rlpost.envs import ChatEnv, LLMEnv
from rlpost.envs.base import ToolLimits, ToolResult
from rlpost.envs.transforms import PythonInterpreter
from rlpost.errors import ConfigError, SandboxError
from rlpost.sandbox import Sandbox, SandboxMode
from tests.says import Says
from tests.tools.calls import begun, replied, result_in


class Talk:
    """A conversation with the tool: called with a reply, it gives the result of each program in it."""

    def __init__(self, tool: PythonInterpreter, limits: ToolLimits | None = None) -> None:
        self.tool = tool
        self.env = ChatEnv(tool_role="tool", tool_limits=limits).append_transform(tool)
        self.conversation = begun(self.env)

    def __call__(self, reply: str) -> list[ToolResult]:
        return list(map(result_in, replied(self.env, self.conversation, reply)))


Talking = Callable[..., Talk]


@pytest.fixture
def talk(sandbox: Sandbox) -> Iterator[Talking]:
    """Begins a conversation; the tool's settings are given by keyword."""
    with ExitStack() as ending:

        def begin(limits: ToolLimits | None = None, **settings: Any) -> Talk:
            tool = PythonInterpreter(sandbox=sandbox, **settings)
            ending.callback(tool.close)
            return Talk(tool, limits)

        yield begin


def block(code: str) -> str:
    return f"```python\n{code}\n```\n"


def called(code: Any, **others: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code, **others}})}\n</tool_call>"


# What runs, and what is said of it


def test_each_block_is_answered_by_a_message_of_its_own(talk: Talking) -> None:
    ask = talk()
    first, second, third = ask(f"First {block('print(1)')} then {block('x = 2')} and {block('print(x)')} done.")
    assert (first, second, third.ok) == (ToolResult("1\n"), ToolResult(""), False)
    assert "NameError" in third.text  # each has an interpreter of its own
    said = ask.conversation.messages[-3:]
    assert [message["role"] for message in said] == ["tool"] * 3
    assert [message["content"][:12] for message in said] == [f"Code block {number}" for number in (1, 2, 3)]
    assert (ask.conversation.tool_calls, ask.conversation.tool_errors) == (3, 1)


@pytest.mark.parametrize(
    ("reply", "printed"),
    [
        ("No code at all.", []),
        ("```\nprint(1)\n```", []),
        ("```bash\necho 1\n```", []),
        ("Inline `print(1)` or ```python print(1)```.", []),
        ("<think>\n```python\nprint(1)\n```\n</think> I shall not.", []),
        ("```python\nprint('a')\n```", ["a\n"]),
        ("```Python \nprint('a')\n```", ["a\n"]),
        ("```py\r\nprint('a')\r\n```\r\n", ["a\n"]),
        ("1. So:\n   ```python\n   for x in 'ab':\n       print(x)\n   ```\n", ["a\nb\n"]),
        ("````python\nprint('''\n```\n''')\n````", ["\n```\n\n"]),
        ("It is ```python\nprint('a')\n``` as said.", ["a\n"]),
        ("```python\nprint('a')\n```<|im_end|>", ["a\n"]),
        ("```python\n```", [""]),
        (called("print(6 * 7)"), ["42\n"]),
        ('<tool>python\n{"code": "print(7)"}</tool>', ["7\n"]),
        (block("import warnings; warnings.warn('old'); print('fine')"), ["fine\n"]),  # no failure
    ],
)
def test_programs_are_read_as_models_write_them(talk: Talking, reply: str, printed: list[str]) -> None:
    assert talk()(reply) == list(map(ToolResult, printed))


def test_a_model_is_shown_the_schema_if_it_is_to_be_described(talk: Talking) -> None:
    ask = talk()
    assert ask.conversation.tools == []
    ask.tool.described = True
    [schema] = begun(ask.env).tools
    assert schema["function"]["name"] == "python"
    assert schema["function"]["parameters"]["required"] == ["code"]


FAILING = {
    "no text": called(5),
    "no code": called(None),
    "another argument": called("1", timeout=3),
    "open block": "```python\nprint(1)\n",
    "open block before another": "```python\nprint('a')\n```python\nprint('b')\n",
    "spins": block("while True: pass"),
    "exits": block("import sys; sys.exit(3)"),
    "ends early": block("import os; os._exit(0)"),
    "kills itself": block("import os; print('ok'); os.kill(os.getpid(), 9)"),
}


def test_a_failure_says_why(talk: Talking, says: Says) -> None:
    shown = []
    for name, reply in FAILING.items():
        ask = talk(timeout=0.5 if name == "spins" else 10.0)
        [result] = ask(reply)
        assert (result.ok, ask.conversation.valid, ask.conversation.tool_errors) == (False, True, 1)
        shown.append(f"{name}: {result.text}")
    says("tools", "\n".join(shown))


@pytest.mark.parametrize("code", ["print('\0')", "print('\ud800')"])
def test_a_program_that_is_no_text_is_a_failure(talk: Talking, code: str) -> None:
    ask = talk()
    assert [result.ok for result in ask(called(code))] == [False]
    assert (ask.conversation.valid, ask.conversation.tool_errors) == (True, 1)


@pytest.mark.parametrize("persistent", [False, True])
def test_the_value_of_a_last_expression_is_shown_if_asked_for(talk: Talking, persistent: bool) -> None:
    ask = talk(show_last_value=True, persistent=persistent)
    assert ask(block("x = 6\nx * 7")) == [ToolResult("42\n")]


# An interpreter that persists


def test_names_last_from_block_to_block_and_from_turn_to_turn(talk: Talking) -> None:
    ask = talk(persistent=True)
    assert len(ask(block("def f(n): return 1 if n < 2 else n * f(n - 1)") + block("x = f(5)"))) == 2
    assert ask(block("1 / 0"))[0].text.splitlines()[-1].startswith("ZeroDivisionError")
    assert ask(block("print(x, f(3))")) == [ToolResult("120 6\n")]


def test_a_timeout_restarts_the_interpreter_and_says_so(talk: Talking, says: Says) -> None:
    ask = talk(persistent=True, timeout=1.0)
    ask(block("x = 1"))
    late, after = ask(block("while True: pass") + block("print('x' in globals())"))
    says("tools", late.text)
    assert (late.ok, after) == (False, ToolResult("False\n"))


def test_conversations_share_no_names_and_release_them(talk: Talking) -> None:
    tool = talk(persistent=True).tool
    env = ChatEnv([2], max_steps=2, tool_role="tool").append_transform(tool)
    one, other = env.begin([{"query": "a"}, {"query": "b"}])
    for conversation in (one, other):
        conversation.add_completion(Completion([], [], block(f"x = {conversation.group_id}"), "stop", 0))
    env.advance([one, other])  # both at once
    assert set(tool.interpreters) == {one.key, other.key}
    processes = [each.session.process for each in tool.interpreters.values()]
    assert replied(env, one, "Done.") == []
    assert one.done
    assert set(tool.interpreters) == {other.key}
    env.close()
    assert tool.interpreters == {}
    assert [process is not None and process.ended for process in processes] == [True, True]


def test_a_resumed_conversations_programs_run_once_more(talk: Talking) -> None:
    limits = ToolLimits(max_calls_per_turn=2)
    ask, resumed = (talk(limits, persistent=True) for _ in range(2))
    resumed.conversation = ask.conversation
    ask.conversation.messages.insert(0, {"role": "assistant", "content": block("x = 'of the prompt'")})
    ask(block("x = [1]") + called("x.append(2)") + block("x.append('over the limit of a turn')"))
    ask(block("x.append(3)\n1 / 0") + "```python\nx.append('never closed')")
    assert resumed(block("print(x)")) == [ToolResult("[1, 2, 3]\n")]


def acted(tensordict: Any, reply: str) -> Any:
    return tensordict.clone().set("text_response", [reply])


def said_last(stepped: Any) -> str:
    return stepped["next", "conversation"][0].messages[-1]["content"]


def test_a_step_taken_twice_finds_the_same_names_until_a_reset(talk: Talking) -> None:
    tool = talk(persistent=True).tool
    env = ChatEnv(tool_role="user").append_transform(tool)
    first = env.step(acted(env.reset(TensorDict(text=["a"], batch_size=[1])), block("x = [1]")))
    for _ in range(2):
        again = env.step(acted(first["next"], block("x.append(2); print(x)")))
        assert said_last(again).endswith(":\n[1, 2]\n\n")  # lines of their own under the role user
    assert len(tool.interpreters) == 1
    second = env.reset(TensorDict(text=["b"], batch_size=[1]))
    assert tool.interpreters == {}
    assert "NameError" in said_last(env.step(acted(second, block("print(x)"))))


# What cannot be


def test_only_an_environment_that_looks_for_calls_takes_it() -> None:
    with pytest.raises(ConfigError, match="ChatEnv"):
        LLMEnv(1).append_transform(PythonInterpreter())


@pytest.mark.parametrize(("name", "part"), [("bubblewrp", "bubblewrap"), ("none", "sandbox=none")])
def test_an_unknown_sandbox_is_refused(name: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        PythonInterpreter(sandbox=name)


def test_without_bubblewrap_it_refuses_before_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SandboxError, match="bubblewrap"):
        ChatEnv().append_transform(PythonInterpreter()).start()
    assert PythonInterpreter(sandbox="limits").sandbox.mode is SandboxMode.limits


@pytest.mark.usefixtures("sandbox")
def test_the_page_about_it_shows_what_happens() -> None:
    page = Path(__file__).parents[2] / "docs" / "python-tool.md"
    shown = "\n".join(re.findall(r"^```pycon\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(shown, {}, page.name, str(page), 0)
    assert len(examples.examples) == 16
    seen: list[str] = []
    doctest.DocTestRunner(verbose=False).run(examples, out=seen.append)
    assert seen == []
