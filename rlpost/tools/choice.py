"""Makes the tools of `tools.use`, see `BUILT_IN_TOOLS` of the catalogue.

A plain Python function becomes a tool too (`FunctionTool`).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

from rlpost.data.conversation import Conversation
from rlpost.envs.base import ToolCall, ToolResult, ToolTransform
from rlpost.envs.tool_calls import schema_of
from rlpost.errors import RewardError
from rlpost.files import expanded
from rlpost.settings import ToolsSettings
from rlpost.settings.base import TOOLS


def python(name: str, settings: ToolsSettings) -> ToolTransform:
    """`tools.use=[python]`."""
    from rlpost.tools.python import PythonInterpreter

    return PythonInterpreter(
        persistent=settings.python_persistent,
        timeout=settings.timeout_seconds,
        sandbox=settings.python_sandbox.value,
        memory_mb=settings.python_memory_mb,
    )


def mcp(name: str, settings: ToolsSettings) -> ToolTransform:
    """`tools.use=[mcp]`."""
    from rlpost.tools.mcp import MCPToolTransform, load_servers

    assert settings.mcp_file is not None
    return MCPToolTransform(load_servers(expanded(settings.mcp_file)), timeout=settings.timeout_seconds)


def browser(name: str, settings: ToolsSettings) -> ToolTransform:
    """`tools.use=[browser]`."""
    from rlpost.tools.browser import BrowserTransform

    return BrowserTransform(settings.allowed_domains, timeout=settings.timeout_seconds)


def own(name: str, settings: ToolsSettings) -> ToolTransform:
    """A plugin's tool. Raises ConfigError for a class that is not a tool and an undocumented function."""
    tool = TOOLS[name]
    if not isinstance(tool, type):
        return FunctionTool(tool, name, timeout=settings.timeout_seconds)
    return tool()


class FunctionTool(ToolTransform):
    """Offers `function` to the model under `name`.

    The model sees its signature with type hints and its docstring: a description, and under `Args:` a line
    `name: description` for each parameter. The model reads the result as text, or the exception, which is counted.
    Several conversations may call it at the same time, each from a thread. Raises ConfigError for a function
    without types or descriptions; `call` raises RewardError for one that does not return within `timeout` seconds,
    as a thread cannot be killed.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None, *, timeout: float = 10.0) -> None:
        self.function = function
        self.timeout = timeout
        self._schema = schema_of(function, name or function.__name__)
        self._signature = inspect.signature(function)

    def schemas(self) -> list[dict[str, Any]]:
        """See `ToolTransform.schemas`."""
        return [self._schema]

    def call(self, conversation: Conversation, call: ToolCall) -> ToolResult:
        """See `ToolTransform.call`."""
        try:
            bound = self._signature.bind(**call.arguments)
        except TypeError as error:
            return ToolResult(f"{call.name} cannot be called like that: {error}", ok=False)
        results: list[ToolResult] = []
        thread = threading.Thread(target=lambda: results.append(self._result(bound)), name=call.name, daemon=True)
        thread.start()
        thread.join(self.timeout)
        if not results:
            raise RewardError(
                f"the tool {call.name} did not return within {self.timeout:g} s when called with "
                f"{dict(call.arguments)!r:.200}: give what it waits for a deadline, or raise tools.timeout_seconds"
            )
        return results[0]

    def _result(self, bound: inspect.BoundArguments) -> ToolResult:
        try:
            return ToolResult(str(self.function(*bound.args, **bound.kwargs)))
        except (Exception, SystemExit) as error:  # noqa: BLE001  shown to the model and counted in tools/errors
            return ToolResult(f"{type(error).__name__}: {error}", ok=False)
