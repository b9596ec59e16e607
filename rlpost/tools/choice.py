"""Settings to tools: the one place that maps each name of `tools.use` to what it builds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlpost.envs.chat import ChatEnv
from rlpost.envs.tool import ToolLimits, ToolTransform
from rlpost.errors import ConfigError
from rlpost.home import expanded
from rlpost.settings import ToolsSettings
from rlpost.settings.registered import TOOLS
from rlpost.tools.functions import FunctionTool


def add_tools(env: ChatEnv, settings: ToolsSettings) -> None:
    """Append the tools that `settings.use` names to `env`. Raises ConfigError for what a plugin built that is none."""
    env.tool_role = settings.role.value
    env.tool_limits = ToolLimits(settings.max_calls, settings.max_calls_per_turn, settings.max_output_chars)
    for name in settings.use:
        tool = BUILDERS[name](settings) if name in BUILDERS else _registered(name, settings)
        tool.described = settings.describe
        env.append_transform(tool)


def _registered(name: str, settings: ToolsSettings) -> ToolTransform:
    """A plugin's tool. Raises ConfigError for a class that is no tool, and a function that does not say enough."""
    tool = TOOLS[name]
    if not isinstance(tool, type):
        return FunctionTool(tool, name, timeout=settings.timeout_seconds)
    if not issubclass(tool, ToolTransform):
        raise ConfigError(
            f"the tool {name} is the class {tool.__name__}, which is not derived from rlpost.envs.ToolTransform: "
            "derive it, or register a function"
        )
    return tool()


def _python(settings: ToolsSettings) -> ToolTransform:
    from rlpost.tools.python import PythonInterpreter

    return PythonInterpreter(
        persistent=settings.python_persistent,
        timeout=settings.timeout_seconds,
        sandbox=settings.python_sandbox.value,
        memory_mb=settings.python_memory_mb,
    )


def _mcp(settings: ToolsSettings) -> ToolTransform:
    from rlpost.tools.mcp import MCPToolTransform, load_servers

    assert settings.mcp_file is not None
    return MCPToolTransform(load_servers(Path(expanded(settings.mcp_file))), timeout=settings.timeout_seconds)


def _browser(settings: ToolsSettings) -> ToolTransform:
    from rlpost.tools.browser import BrowserTransform

    return BrowserTransform(settings.allowed_domains, timeout=settings.timeout_seconds)


BUILDERS: dict[str, Callable[[ToolsSettings], ToolTransform]] = {"python": _python, "mcp": _mcp, "browser": _browser}
