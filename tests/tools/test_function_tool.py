"""A plain function as a tool: what the model is shown of it, and what becomes of its mistakes."""

from __future__ import annotations

import threading

import pytest

from rlpost.data.conversation import Conversation
from rlpost.envs.base import ToolCall, ToolResult
from rlpost.errors import ConfigError, RewardError
from rlpost.tools.choice import FunctionTool


def divide(a: float, b: float = 2.0) -> float:
    """Divide one number by another.

    Args:
        a: What is divided.
        b: What it is divided by.
    """
    return a / b


def asked(tool: FunctionTool, **arguments: object) -> ToolResult:
    return tool.call(Conversation(task={}, messages=[]), ToolCall(tool.names()[0], arguments, 0))


def test_the_schema_says_what_signature_and_docstring_say() -> None:
    assert FunctionTool(divide, "quotient").schemas() == [
        {
            "type": "function",
            "function": {
                "name": "quotient",
                "description": "Divide one number by another.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "a": {"type": "number", "description": "What is divided."},
                        "b": {"type": "number", "description": "What it is divided by."},
                    },
                    "required": ["a"],
                },
            },
        }
    ]


def test_results_and_mistakes_are_told_to_the_model() -> None:
    tool = FunctionTool(divide)
    assert asked(tool, a=3) == ToolResult("1.5")
    assert asked(tool, a=1, b=0) == ToolResult("ZeroDivisionError: division by zero", ok=False)
    assert asked(tool, b=1) == ToolResult("divide cannot be called like that: missing a required argument: 'a'", False)
    assert asked(tool, a=1, c=2).text.endswith("got an unexpected keyword argument 'c'")
    assert not asked(tool, a="x").ok


def test_a_function_that_exits_ends_nothing() -> None:
    def leave(code: int) -> str:
        """Leave.

        Args:
            code: With which code.
        """
        raise SystemExit(code)

    assert asked(FunctionTool(leave), code=3) == ToolResult("SystemExit: 3", ok=False)


def test_a_function_that_never_returns_is_named() -> None:
    forever = threading.Event()

    def wait(word: str) -> str:
        """Wait.

        Args:
            word: For what.
        """
        forever.wait()
        return word

    with pytest.raises(RewardError, match=r"the tool wait did not return within 0\.1 s when called with {'word': 'x'}"):
        asked(FunctionTool(wait, timeout=0.1), word="x")
    forever.set()


def test_a_function_that_says_too_little_is_refused() -> None:
    def bare(a, b):  # type: ignore[no-untyped-def]
        return a

    def undescribed(a: int) -> int:
        """Do something."""
        return a

    for function in (bare, undescribed):
        with pytest.raises(ConfigError, match=f"the tool {function.__name__} does not say enough for a model to call"):
            FunctionTool(function)
