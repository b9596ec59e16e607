"""The Python tool in a conversation: what runs, what is said of it, and what lasts from turn to turn."""

from __future__ import annotations

import doctest
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

from rlpost.data.conversation import Completion, Conversation, Message
from rlpost.envs import ChatEnv, LLMEnv
from rlpost.envs.base import ToolLimits
from rlpost.envs.transforms import PythonInterpreter
from rlpost.errors import ConfigError, SandboxError
from rlpost.sandbox import Sandbox, SandboxMode
from tests.bubblewrap import sandbox

__all__ = ["sandbox"]  # a fixture


@pytest.fixture
def persistent(sandbox: Sandbox) -> Iterator[PythonInterpreter]:
    tool = PythonInterpreter(persistent=True, timeout=10.0, sandbox=sandbox)
    yield tool
    tool.close()


def block(code: str) -> str:
    return f"```python\n{code}\n```\n"


def called(code: Any, name: str = "python", **others: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'code': code, **others}})}\n</tool_call>"


def talk(tool: PythonInterpreter, role: str = "tool", limits: ToolLimits | None = None) -> ChatEnv:
    return ChatEnv(tool_role=role, tool_limits=limits).append_transform(tool)


def acted(tensordict: Any, reply: str) -> Any:
    return tensordict.clone().set("text_response", [reply])


def begun(env: ChatEnv) -> Conversation:
    return env.begin([{"query": "Work it out."}])[0]


def answers(env: ChatEnv, conversation: Conversation, reply: str, finish_reason: str = "stop") -> list[str]:
    before = len(conversation.messages)
    conversation.add_completion(Completion([], [], reply, finish_reason, 0))
    env.advance([conversation])
    return [message["content"] for message in conversation.messages[before + 1 :]]


# What runs, and what is said of it


def test_each_block_is_answered_in_its_order_by_a_message_of_its_own(sandbox: Sandbox) -> None:
    env = talk(PythonInterpreter(sandbox=sandbox))
    conversation = begun(env)
    said = answers(env, conversation, f"First {block('print(1)')} then {block('x = 2')} and {block('print(x)')} done.")
    assert said[:2] == ["Code block 1 executed successfully:\n1\n", "Code block 2 executed successfully:\n"]
    assert said[2].startswith("Code block 3 failed:\nTraceback (most recent call last):\n")
    assert said[2].endswith("NameError: name 'x' is not defined\n")  # each has an interpreter of its own
    assert conversation.messages[-1]["role"] == "tool"
    assert (conversation.tool_calls, conversation.tool_errors) == (3, 1)


@pytest.mark.parametrize(
    "reply",
    [
        "No code at all.",
        "```\nprint(1)\n```",
        "```bash\necho 1\n```",
        "Inline `print(1)` or ```python print(1)```.",
        "<think>\n```python\nprint(1)\n```\n</think> I shall not.",
    ],
)
def test_without_a_block_of_python_nothing_is_said(sandbox: Sandbox, reply: str) -> None:
    env = talk(PythonInterpreter(sandbox=sandbox))
    assert answers(env, begun(env), reply) == []


@pytest.mark.parametrize(
    ("reply", "stdout"),
    [
        ("```python\nprint('a')\n```", "a\n"),
        ("```Python \nprint('a')\n```", "a\n"),
        ("```py\r\nprint('a')\r\n```\r\n", "a\n"),
        ("1. So:\n   ```python\n   for x in 'ab':\n       print(x)\n   ```\n", "a\nb\n"),
        ("````python\nprint('''\n```\n''')\n````", "\n```\n\n"),
        ("It is ```python\nprint('a')\n``` as said.", "a\n"),
        ("```python\nprint('a')\n```<|im_end|>", "a\n"),
        ("```python\nprint('a')\n```python\nprint('b')\n", None),
        ("```python\n```", ""),
    ],
)
def test_blocks_are_read_as_models_write_them(sandbox: Sandbox, reply: str, stdout: str | None) -> None:
    env = talk(PythonInterpreter(sandbox=sandbox))
    said = answers(env, begun(env), reply)
    unclosed = "Code block 1 failed:\nthe code block is never closed with ```"
    assert said == [unclosed if stdout is None else f"Code block 1 executed successfully:\n{stdout}"]


def test_a_block_without_an_end_is_not_run(sandbox: Sandbox) -> None:
    env = talk(PythonInterpreter(sandbox=sandbox))
    said = answers(env, begun(env), "```python\nprint(1)\n")
    assert said == ["Code block 1 failed:\nthe code block is never closed with ```"]
    assert answers(env, begun(env), "```python\nprint(1)\n", finish_reason="length") == []  # cut: never meant to end


def test_a_model_is_shown_the_schema_if_it_is_to_be_described(sandbox: Sandbox) -> None:
    assert begun(talk(PythonInterpreter(sandbox=sandbox))).tools == []
    tool = PythonInterpreter(sandbox=sandbox)
    tool.described = True
    [schema] = begun(talk(tool)).tools
    assert schema["function"]["name"] == "python"
    assert schema["function"]["parameters"]["required"] == ["code"]


def test_a_tool_call_runs_its_code(sandbox: Sandbox) -> None:
    env = talk(PythonInterpreter(sandbox=sandbox))
    conversation = begun(env)
    assert answers(env, conversation, called("print(6 * 7)")) == ["Code block 1 executed successfully:\n42\n"]
    assert answers(env, conversation, '<tool>python\n{"code": "print(7)"}</tool>') == [
        "Code block 1 executed successfully:\n7\n"
    ]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (called(5), 'the program must be given as a string: {"code": "..."}, and is a int'),
        (called(None), 'the program must be given as a string: {"code": "..."}, and is missing'),
        (called("1", timeout=3), 'python takes "code" and nothing else, not timeout'),
        (called("print('\0')"), None),
        (called("print('\ud800')"), None),
    ],
)
def test_a_bad_call_is_an_observation(sandbox: Sandbox, call: str, said: str | None) -> None:
    env = talk(PythonInterpreter(sandbox=sandbox))
    conversation = begun(env)
    (answer,) = answers(env, conversation, call)
    assert answer.startswith("Code block 1 failed:\n")
    assert said is None or answer == f"Code block 1 failed:\n{said}"
    assert conversation.valid
    assert conversation.tool_errors == 1


def test_warnings_on_stderr_are_no_failure_and_long_output_is_cut_with_a_note(sandbox: Sandbox) -> None:
    env = talk(PythonInterpreter(sandbox=sandbox), limits=ToolLimits(max_output_chars=100))
    warned = answers(env, begun(env), block("import warnings; warnings.warn('old'); print('fine')"))
    assert warned == ["Code block 1 executed successfully:\nfine\n"]
    (long,) = answers(env, begun(env), block("print('x' * 1099)"))
    assert long == f"Code block 1 executed successfully:\n{'x' * 50}\n[1000 characters left out]\n{'x' * 49}\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("while True: pass", "Code execution timed out"),
        ("import sys; sys.exit(3)", "Python exited with code 3"),
        ("import os; os._exit(0)", "Python ended early with exit code 0"),
        ("import os; print('ok'); os.kill(os.getpid(), 9)", "Python was ended by SIGKILL"),
    ],
)
def test_what_did_not_end_well_says_why(sandbox: Sandbox, code: str, said: str) -> None:
    env = talk(PythonInterpreter(timeout=0.5 if "while" in code else 10.0, sandbox=sandbox))
    assert answers(env, begun(env), block(code)) == [f"Code block 1 failed:\n{said}"]


def test_the_value_of_a_last_expression_is_shown_where_that_is_asked_for(sandbox: Sandbox) -> None:
    env = talk(PythonInterpreter(sandbox=sandbox, show_last_value=True))
    assert answers(env, begun(env), block("x = 6\nx * 7")) == ["Code block 1 executed successfully:\n42\n"]


# An interpreter that persists


def test_names_last_from_block_to_block_and_from_turn_to_turn(persistent: PythonInterpreter) -> None:
    env = talk(persistent)
    conversation = begun(env)
    said = answers(env, conversation, block("def f(n): return 1 if n < 2 else n * f(n - 1)") + block("x = f(5)"))
    assert len(said) == 2
    assert answers(env, conversation, block("1 / 0"))[0].endswith("ZeroDivisionError: division by zero\n")
    assert answers(env, conversation, block("print(x, f(3))")) == ["Code block 1 executed successfully:\n120 6\n"]


def test_a_timeout_restarts_the_interpreter_and_says_so(sandbox: Sandbox) -> None:
    tool = PythonInterpreter(persistent=True, timeout=1.0, sandbox=sandbox)
    env = talk(tool)
    conversation = begun(env)
    answers(env, conversation, block("x = 1"))
    assert answers(env, conversation, block("while True: pass") + block("print('x' in globals())")) == [
        "Code block 1 failed:\nCode execution timed out - process restarted",
        "Code block 2 executed successfully:\nFalse\n",
    ]
    tool.close()


def test_conversations_do_not_share_names_and_their_end_releases_them(persistent: PythonInterpreter) -> None:
    env = ChatEnv([2], max_steps=2, tool_role="tool").append_transform(persistent)
    one, other = env.begin([{"query": "a"}, {"query": "b"}])
    for conversation in (one, other):
        conversation.add_completion(Completion([], [], block(f"x = {conversation.group_id}"), "stop", 0))
    env.advance([one, other])  # both at once
    assert set(persistent.interpreters) == {one.key, other.key}
    processes = [each.session.process for each in persistent.interpreters.values()]
    assert answers(env, one, "Done.") == []
    assert one.done
    assert set(persistent.interpreters) == {other.key}
    env.close()
    assert persistent.interpreters == {}
    assert [process is not None and process.ended for process in processes] == [True, True]


def test_a_reset_clears_what_was_defined(persistent: PythonInterpreter) -> None:
    env = talk(persistent, role="user")
    first = env.reset(TensorDict(text=["a"], batch_size=[1]))
    env.step(acted(first, block("x = 1")))
    assert len(persistent.interpreters) == 1
    second = env.reset(TensorDict(text=["b"], batch_size=[1]))
    assert persistent.interpreters == {}
    stepped = env.step(acted(second, block("print(x)")))
    assert "NameError" in messages_of(stepped)[-1]["content"]


def test_after_a_resumption_the_conversations_programs_run_once_more(sandbox: Sandbox) -> None:
    before, after = (PythonInterpreter(persistent=True, sandbox=sandbox) for _ in range(2))
    limits = ToolLimits(max_calls_per_turn=2)
    conversation = begun(talk(before, limits=limits))
    conversation.messages.insert(0, {"role": "assistant", "content": block("x = 'of the prompt'")})
    env = talk(before, limits=limits)
    answers(env, conversation, block("x = [1]") + called("x.append(2)") + block("x.append('over the limit of a turn')"))
    answers(env, conversation, block("x.append(3)\n1 / 0") + "```python\nx.append('never closed')")
    before.close()
    resumed = talk(after, limits=limits)
    assert answers(resumed, conversation, block("print(x)")) == ["Code block 1 executed successfully:\n[1, 2, 3]\n"]
    after.close()


def test_a_step_taken_twice_from_one_place_finds_the_same_names_twice(persistent: PythonInterpreter) -> None:
    env = talk(persistent, role="user")
    first = env.step(acted(env.reset(TensorDict(text=["a"], batch_size=[1])), block("x = [1]")))
    for _ in range(2):
        again = env.step(acted(first["next"], block("x.append(2); print(x)")))
        assert messages_of(again)[-1]["content"] == "\nCode block 1 executed successfully:\n[1, 2]\n\n"


# What cannot be


def test_only_an_environment_that_looks_for_calls_takes_it() -> None:
    with pytest.raises(ConfigError, match="only a ChatEnv runs tools"):
        LLMEnv(1).append_transform(PythonInterpreter())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sandbox": "bubblewrp"}, "bubblewrap"),
        ({"sandbox": "none"}, "sandbox=none is unknown"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PythonInterpreter(**settings)


def test_without_bubblewrap_it_refuses_before_anything_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    env = talk(PythonInterpreter())
    with pytest.raises(SandboxError, match="apt install bubblewrap"):
        env.start()
    assert PythonInterpreter(sandbox="limits").sandbox.mode is SandboxMode.limits


def messages_of(stepped: Any) -> list[Message]:
    return stepped["next", "conversation"][0].messages


@pytest.mark.usefixtures("sandbox")
def test_the_page_about_it_shows_what_happens() -> None:
    page = Path(__file__).parents[2] / "docs" / "python-tool.md"
    shown = "\n".join(re.findall(r"^```pycon\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(shown, {}, page.name, str(page), 0)
    assert len(examples.examples) == 16
    seen: list[str] = []
    doctest.DocTestRunner(verbose=False).run(examples, out=seen.append)
    assert seen == []
