"""The tools of MCP servers, for a model to call."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpost.data.conversation import Conversation
from rlpost.envs.tool import ToolCall, ToolResult, ToolTransform
from rlpost.errors import ConfigError, DataError
from rlpost.extras import require
from rlpost.loop_thread import LoopThread
from rlpost.nearest import did_you_mean, nearest
from rlpost.tools.calls import AT_ONCE, json_object, without_control_tokens
from rlpost.tools.mcp_process import ServerCommand
from rlpost.tools.mcp_server import Server

_FIELDS = ("command", "args", "env", "cwd", "type")
_NAME = re.compile(r"[\w\-]+")  # of a server: what a call can name before the dot
_NOT_IN_A_CALL = re.compile(r"[^\w.\-]")  # in a tool's name: no call could hold it
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_CLOSE_SECONDS = 10.0


class MCPToolTransform(ToolTransform):
    """Offers the tools of MCP servers, each a process that speaks the protocol on its stdin and stdout.

    `servers` gives, by name, what starts each: `{"command": ..., "args": [...], "env": {...}, "cwd": ...}`.
    A server sees the variables HOME, LOGNAME, PATH, SHELL, TERM and USER and those of its `env`, where
    `${NAME}` stands for a variable of this process: nothing else of this environment reaches it.

    The model is shown `server.tool` and may leave the `server.` out: the first server that has the tool
    answers. Beside the forms that every tool understands, `tool_call_pattern`, a regular expression with
    a group for the name and one for the JSON, finds calls; so does the tag `<tool_name>`.

    The processes start with the first `start` or `schemas`, each ready within `startup_timeout` seconds,
    and are shared by all conversations. A call that is not answered within `timeout` seconds, and one
    during which its server dies, is a failure that the model reads. A server that died, or hangs, is
    started again for the next call, after a pause that doubles while calls stay unanswered.

    Raises ConfigError for `servers` that cannot be, MissingExtraError without the SDK; and when it is
    used ToolError for a server that does not start, or not again in `max_restarts` attempts in a row.
    """

    def __init__(
        self,
        servers: Mapping[str, Mapping[str, Any]],
        tool_call_pattern: str | None = None,
        tool_name: str = "tool",
        timeout: float = 10.0,
        *,
        startup_timeout: float = 30.0,
        max_restarts: int = 3,
    ) -> None:
        require("mcp", "mcp", "MCPToolTransform")
        if timeout <= 0 or startup_timeout <= 0 or max_restarts < 1:
            raise ConfigError(
                f"timeout={timeout:g} and startup_timeout={startup_timeout:g} must be above 0, "
                f"and max_restarts={max_restarts} at least 1"
            )
        commands = [server_command(name, content) for name, content in servers.items()]
        if not commands:
            raise ConfigError("servers is empty: name at least one MCP server and its command")
        self.at_once = AT_ONCE  # a server may answer one call after the other, and the last has to be in time too
        self.timeout = timeout
        self.startup_timeout = startup_timeout
        self.max_restarts = max_restarts
        self._pattern = _pattern(tool_call_pattern, tool_name)
        self._servers = [
            Server(each, timeout=timeout, startup_timeout=startup_timeout, max_restarts=max_restarts)
            for each in commands
        ]
        self._functions: dict[str, tuple[Server, str]] = {}  # as shown -> whose and which tool
        self._short: dict[str, str] = {}  # without the server -> as shown
        self._schemas: list[dict[str, Any]] | None = None
        self._starting = threading.Lock()
        self._thread = LoopThread("rlpost-mcp")
        # Without a close, the servers still end with this object or with the interpreter.
        self._finalizer = weakref.finalize(self, _close, self._servers, self._thread)

    def start(self) -> None:
        """Start the servers, all at once, and learn their tools. Raises ToolError for one that does not start."""
        with self._starting:
            if self._schemas is None:
                try:
                    found = self._thread.run(_start_all(self._servers), self.startup_timeout + _CLOSE_SECONDS)
                except BaseException:
                    _close(self._servers, self._thread)
                    raise
                self._schemas = self._learn(found)

    def schemas(self) -> list[dict[str, Any]]:
        """See `ToolTransform.schemas`; starts the servers where they are not."""
        self.start()
        assert self._schemas is not None
        return self._schemas

    def takes(self, name: str) -> bool:
        """See `ToolTransform.takes`: a tool may be called without its server's name."""
        return name in self._functions or name in self._short

    def calls_in(self, reply: str) -> list[ToolCall]:
        """See `ToolTransform.calls_in`."""
        return [_call(match) for match in self._pattern.finditer(reply)] if self._pattern else []

    def call(self, conversation: Conversation, call: ToolCall) -> ToolResult:
        """See `ToolTransform.call`."""
        self.start()
        server, tool = self._functions[self._short.get(call.name, call.name)]
        restarting = self.max_restarts * (self.startup_timeout + _CLOSE_SECONDS)
        return self._thread.run(server.call(tool, call.arguments), restarting + self.timeout + _CLOSE_SECONDS)

    def message(self, number: int, call: ToolCall, result: ToolResult) -> str:
        """See `ToolTransform.message`; names the server."""
        name = self._short.get(call.name, call.name)
        return f"Tool {name} {'executed successfully' if result.ok else 'failed'}:\n{result.text}"

    @property
    def restarts(self) -> dict[str, int]:
        """How often each server was started again."""
        return {server.command.name: server.restarts for server in self._servers}

    @property
    def pids(self) -> dict[str, int | None]:
        """The present process of each server."""
        return {server.command.name: server.pid for server in self._servers}

    def close(self) -> None:
        """End the servers; none is left when this returns."""
        with self._starting:
            self._schemas = None
            _close(self._servers, self._thread)

    def _learn(self, found: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
        """The functions to show; notes whose each is."""
        self._functions, self._short = {}, {}
        schemas = []
        for server, tools in zip(self._servers, found, strict=True):
            for tool in tools:
                legal = _NOT_IN_A_CALL.sub("_", tool.name)
                name = f"{server.command.name}.{legal}"
                if name in self._functions:
                    continue  # a server that lists a tool twice
                self._functions[name] = (server, tool.name)
                self._short.setdefault(legal, name)
                told = {"description": tool.description or "", "parameters": tool.input_schema}
                # a server's words must not end the turn that shows them
                told = json.loads(without_control_tokens(json.dumps(told, ensure_ascii=False)))
                schemas.append({"type": "function", "function": {"name": name, **told}})
        self._short = {short: name for short, name in self._short.items() if short not in self._functions}
        return schemas


def load_servers(path: str | Path) -> dict[str, dict[str, Any]]:
    """The servers of a JSON file `{"mcpServers": {name: {"command": ..., "args": [...], "env": {...}}}}`.

    Raises DataError, with the file and the field, for what cannot be used.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; name the JSON file of the MCP servers") from error
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise DataError(f'{path} names no MCP servers: it must hold {{"mcpServers": {{"NAME": {{"command": ...}}}}}}')
    for name, each in servers.items():
        try:
            server_command(name, each)
        except ConfigError as error:
            raise DataError(f"{path}, mcpServers.{name}: {error}") from error
    return servers


def server_command(name: str, content: Any) -> ServerCommand:
    """One entry of `servers`. Raises ConfigError, with the field, for what cannot be."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"the server name {name!r} cannot stand in a call: use letters, digits, _ and -")
    if not isinstance(content, Mapping):
        raise ConfigError(f'the server {name} is {type(content).__name__}: give {{"command": ..., "args": [...]}}')
    if "url" in content or content.get("type", "stdio") != "stdio":
        raise ConfigError(f"the server {name} is no stdio server: give the command that starts one")
    for field in content:
        if field not in _FIELDS:
            hint = did_you_mean(nearest(str(field), _FIELDS), f"there are {', '.join(_FIELDS)}")
            raise ConfigError(f"the server {name} has a field {field!r} that means nothing{hint}")
    command, args, env = content.get("command"), content.get("args", []), content.get("env", {})
    if not isinstance(command, str) or not command:
        raise ConfigError(f"the server {name} has no command: give the program that starts it")
    if isinstance(args, str) or not isinstance(args, Sequence) or not _are_strings(args):
        raise ConfigError(f"the server {name}: args must be a list of strings, and is {args!r}")
    if not isinstance(env, Mapping) or not _are_strings([*env, *env.values()]):
        raise ConfigError(f"the server {name}: env must map names to strings")
    cwd = content.get("cwd")
    if cwd is not None and not isinstance(cwd, str | Path):
        raise ConfigError(f"the server {name}: cwd must be a folder, and is {cwd!r}")
    filled = {variable: _filled(value, name) for variable, value in env.items()}
    return ServerCommand(name, command, tuple(args), filled, None if cwd is None else str(cwd))


def _are_strings(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _filled(value: str, server: str) -> str:
    """`value` with each `${NAME}` replaced by that variable of this process."""

    def variable(match: re.Match[str]) -> str:
        if match.group(1) not in os.environ:
            raise ConfigError(
                f"the server {server}: env names ${{{match.group(1)}}}, which is not set: export it first"
            )
        return os.environ[match.group(1)]

    return _VARIABLE.sub(variable, value)


def _pattern(pattern: str | None, tool_name: str) -> re.Pattern[str] | None:
    """What finds calls beside the forms that every tool understands; None where there is no more to find."""
    if pattern is None:
        if not _NAME.fullmatch(tool_name):
            raise ConfigError(f"tool_name={tool_name!r} cannot be a tag: use letters, digits, _ and -")
        return (
            None if tool_name == "tool" else re.compile(rf"<{tool_name}>\s*([\w.\-]+)\s*(.*?)</{tool_name}>", re.DOTALL)
        )
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"tool_call_pattern={pattern!r} is no regular expression: {error}") from error
    if compiled.groups != 2:
        raise ConfigError(f"tool_call_pattern={pattern!r} needs two groups: the name, and the JSON of the arguments")
    return compiled


def _call(match: re.Match[str]) -> ToolCall:
    """A call where the pattern was found."""
    name, body = match.group(1) or "", match.group(2) or ""
    arguments, fault = json_object(body) if body.strip() else ({}, None)
    return ToolCall(name, arguments, match.start(), fault, match.end())


async def _start_all(servers: Sequence[Server]) -> list[Any]:
    """The tools of each server."""
    found = await asyncio.gather(*(server.start() for server in servers), return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def _close(servers: Sequence[Server], thread: LoopThread) -> None:
    """End the servers and the thread."""

    async def close_all() -> None:
        await asyncio.gather(*(server.close() for server in servers))

    if thread.running:
        try:
            thread.run(close_all(), _CLOSE_SECONDS)
        finally:
            thread.close()
