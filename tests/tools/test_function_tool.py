"""A plain function as a tool: what the model is shown of it, and what becomes of its mistakes."""

from __future__ import annotations

import threading

import pytest

from rlpost.data.conversation import Conversation
from rlpost.envs.base import ToolCall, ToolResult
from rlpost.errors import ConfigError, RewardError
from rlpost.tools.choice import FunctionTool


def divide(a: float, b: float = 2.0) -> float:
    """Divide.

    Args:
        a: Dividend.
        b: Divisor.
    """
    return a / b


def asked(tool: FunctionTool, **arguments: object) -> ToolResult:
    return tool.call(Conversation(task={}, messages=[]), ToolCall(tool.names()[0], arguments, 0))


def test_the_schema_says_what_signature_and_docstring_say() -> None:
    [schema] = FunctionTool(divide, "quotient").schemas()
    assert (schema["type"], schema["function"].pop("parameters")) == (
        "function",
        {
            "type": "object",
            "properties": {
                "a": {"type": "number", "description": "Dividend."},
                "b": {"type": "number", "description": "Divisor."},
            },
            "required": ["a"],
        },
    )
    assert schema["function"] == {"name": "quotient", "description": "Divide."}


def leave(code: int) -> str:
    """Leave.

    Args:
        code: With which code.
    """
    raise SystemExit(code)


def test_results_and_mistakes_are_told_to_the_model() -> None:
    assert asked(FunctionTool(divide), a=3) == ToolResult("1.5")
    assert asked(FunctionTool(leave), code=3) == ToolResult("SystemExit: 3", ok=False)
    mistakes: list[tuple[dict[str, object], str]] = [
        ({"a": 1, "b": 0}, "ZeroDivisionError: "),
        ({"b": 1}, "'a'"),
        ({"a": 1, "c": 2}, "'c'"),
        ({"a": "x"}, "TypeError: "),
    ]
    for arguments, part in mistakes:
        result = asked(FunctionTool(divide), **arguments)
        assert (result.ok, part in result.text) == (False, True)


def test_a_function_that_never_returns_is_named() -> None:
    forever = threading.Event()

    def wait(word: str) -> str:
        """Wait.

        Args:
            word: For what.
        """
        forever.wait()
        return word

    with pytest.raises(RewardError, match=r"wait .* 0\.1 s .*{'word': 'x'}"):
        asked(FunctionTool(wait, timeout=0.1), word="x")
    forever.set()


def test_a_function_that_says_too_little_is_refused() -> None:
    def bare(a, b):  # type: ignore[no-untyped-def]
        return a

    def undescribed(a: int) -> int:
        """Do something."""
        return a

    for function in (bare, undescribed):
        with pytest.raises(ConfigError, match=f"tool {function.__name__} "):
            FunctionTool(function)
