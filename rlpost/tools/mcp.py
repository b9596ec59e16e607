"""The tools of MCP servers, for a model to call.

`MCPToolTransform` is the tool. A `Server` is one MCP server: the SDK's client and the process it starts, which is
replaced when it dies or hangs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost import __version__
from rlpost.data.conversation import Conversation
from rlpost.envs.base import ToolCall, ToolResult, ToolTransform
from rlpost.envs.tool_calls import AT_ONCE, json_object, without_control_tokens
from rlpost.errors import ConfigError, DataError, ToolError
from rlpost.imports import require
from rlpost.remote.loop import LoopThread
from rlpost.text import first_line, printable

if TYPE_CHECKING:
    from mcp import Client, StdioServerParameters
    from mcp.types import CallToolResult, Tool

STDERR_SHOWN_BYTES = 4000
_PAUSE_SECONDS = 1.0  # before a start after one without an answered call
_CLOSE_SECONDS = 15.0
_NOT_IN_A_CALL = re.compile(r"[^\w.\-]")  # characters of a name that a call cannot write
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class MCPToolTransform(ToolTransform):
    """Offers the tools of MCP servers, each a process that speaks the protocol on its stdin and stdout.

    `servers` maps a name to how that server starts: `{"command": ..., "args": [...], "env": {...}, "cwd": ...}`.
    A server gets the variables HOME, LOGNAME, PATH, SHELL, TERM and USER and those of its `env`, where
    `${NAME}` stands for a variable of this process; it sees no other variable of this process.

    The model sees `server.tool` and may leave out `server.`: the first server that has the tool
    answers. Beside the forms that every tool understands, a call may have the form `tool_call_pattern`, a
    regular expression with a group for the name and one for the JSON, or the tag `<tool_name>`.

    The processes start with the first `start` or `schemas`, each within `startup_timeout` seconds, and all
    conversations share them. If a call has no answer within `timeout` seconds, or its server dies meanwhile, the
    model reads a failure. A server that died or hangs is restarted for the next call, after a pause if no call was
    answered since the last start.

    Raises ConfigError for invalid `servers`, MissingExtraError without the SDK; when used, ToolError for a server
    that does not start, or cannot be restarted in `max_restarts` attempts in a row.
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
        commands = {name: _server_command(name, content) for name, content in servers.items()}
        self.at_once = AT_ONCE  # a server may answer calls one by one, all within the time limit
        self.timeout = timeout
        self.startup_timeout = startup_timeout
        self.max_restarts = max_restarts
        self._pattern = _pattern(tool_call_pattern, tool_name)
        limits = timeout, startup_timeout, max_restarts
        self._servers = [Server(name, each, *limits) for name, each in commands.items()]
        self._functions: dict[str, tuple[Server, str]] = {}  # name for the model -> server and its tool
        self._short: dict[str, str] = {}  # name without the server -> name for the model
        self._schemas: list[dict[str, Any]] | None = None
        self._starting = threading.Lock()
        self._thread = LoopThread("rlpost-mcp")
        # Without a close, the servers still end with this object or with the interpreter.
        self._finalizer = weakref.finalize(self, _close, self._servers, self._thread)

    def start(self) -> None:
        """Start all servers at once and learn their tools. Raises ToolError if one does not start."""
        with self._starting:
            if self._schemas is None:
                try:
                    found = self._thread.run(self._start_all(), self.startup_timeout + _CLOSE_SECONDS)
                except BaseException:
                    _close(self._servers, self._thread)
                    raise
                self._schemas = self._learn(found)

    def schemas(self) -> list[dict[str, Any]]:
        """See `ToolTransform.schemas`; starts the servers if needed."""
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
        """See `ToolTransform.message`; includes the server's name."""
        name = self._short.get(call.name, call.name)
        return f"Tool {name} {'executed successfully' if result.ok else 'failed'}:\n{result.text}"

    @property
    def restarts(self) -> dict[str, int]:
        """How often each server was restarted."""
        return {server.name: server.restarts for server in self._servers}

    def close(self) -> None:
        """End the servers; when this returns, all of their processes are gone."""
        with self._starting:
            self._schemas = None
            _close(self._servers, self._thread)

    async def _start_all(self) -> list[list[Tool]]:
        return await asyncio.gather(*(server.start() for server in self._servers))

    def _learn(self, found: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
        """The schemas of all tools; records which server has which."""
        self._functions, self._short = {}, {}
        schemas = []
        for server, tools in zip(self._servers, found, strict=True):
            for tool in tools:
                legal = _NOT_IN_A_CALL.sub("_", tool.name)
                name = f"{_NOT_IN_A_CALL.sub('_', server.name)}.{legal}"
                self._functions[name] = (server, tool.name)
                self._short.setdefault(legal, name)
                schema = {"description": tool.description or "", "parameters": tool.input_schema}
                # a server's words must not end the turn that shows them
                schema = json.loads(without_control_tokens(json.dumps(schema, ensure_ascii=False)))
                schemas.append({"type": "function", "function": {"name": name, **schema}})
        self._short = {short: name for short, name in self._short.items() if short not in self._functions}
        return schemas


def load_servers(path: str | Path) -> dict[str, dict[str, Any]]:
    """The servers of a JSON file `{"mcpServers": {name: {"command": ..., "args": [...], "env": {...}}}}`.

    Raises DataError if there are none.
    """
    try:
        return dict(json.loads(Path(path).read_text(encoding="utf-8-sig"))["mcpServers"])
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise DataError(
            f"{path} names no MCP servers ({first_line(error)}): it must be JSON such as "
            '{"mcpServers": {"NAME": {"command": "npx", "args": ["-y", "PACKAGE"]}}}'
        ) from error


def _server_command(name: str, content: Mapping[str, Any]) -> StdioServerParameters:
    """How the server starts. Raises ConfigError, naming the field, if the entry is invalid."""
    from mcp import StdioServerParameters
    from pydantic import ValidationError

    if "url" in content or content.get("type", "stdio") != "stdio":
        raise ConfigError(f"the MCP server {name} is not a stdio server: give the command that starts one")

    def variable(match: re.Match[str]) -> str:
        if match.group(1) not in os.environ:
            raise ConfigError(f"the MCP server {name}: ${{{match.group(1)}}} in env is not set: export it first")
        return os.environ[match.group(1)]

    env = {key: _VARIABLE.sub(variable, value) for key, value in content.get("env", {}).items()}
    try:
        return StdioServerParameters(**{**content, "env": env})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"the MCP server {name}: {first['loc'][0]}: {first['msg']}") from error


def _pattern(pattern: str | None, tool_name: str) -> re.Pattern[str] | None:
    """The pattern of further calls, beside the forms that every tool understands; None if there is none."""
    if pattern is None and tool_name != "tool":
        pattern = rf"<{tool_name}>\s*([\w.\-]+)\s*(.*?)</{tool_name}>"
    return re.compile(pattern, re.DOTALL) if pattern is not None else None


def _call(match: re.Match[str]) -> ToolCall:
    """The call in a match of the pattern."""
    name, body = match.group(1) or "", match.group(2) or ""
    arguments, fault = json_object(body) if body.strip() else ({}, None)
    return ToolCall(name, arguments, match.start(), fault, match.end())


def _close(servers: Sequence[Server], thread: LoopThread) -> None:
    """End the servers and the thread."""

    async def close_all() -> None:
        await asyncio.gather(*(server.close() for server in servers))

    if thread.running:
        try:
            thread.run(close_all(), _CLOSE_SECONDS)
        finally:
            thread.close()


@dataclass(eq=False)
class Server:
    """One MCP server: calls go to its current process, which is replaced when it dies or hangs.

    `timeout` and `startup_timeout` are in seconds. A replacement is tried `max_restarts` times in a row.
    """

    name: str
    command: StdioServerParameters
    timeout: float
    startup_timeout: float
    max_restarts: int
    restarts: int = 0
    _has_answered: bool = True  # a call since the latest restart
    _given_up: str | None = None  # why it is not restarted any more
    _connection: _Connection | None = None
    _tools: list[Tool] = field(default_factory=list)
    _connecting: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        # one traceback for every line on stdout that is not a message
        logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)

    async def start(self) -> list[Tool]:
        """Start the server and return its tools. Raises ToolError, with the end of its stderr."""
        async with self._connecting:
            self._given_up = None
            if self._connection is None:
                await self._open()
            return self._tools

    async def close(self) -> None:
        """End the server; returns when its process is gone."""
        self._given_up = f"the MCP server {self.name} was closed"
        if self._connection is not None:
            await self._connection.end()
            self._connection = None
        self._connecting = asyncio.Lock()  # a lock belongs to a loop, and the next start may have another

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call `tool` and return its answer. Raises ToolError if a server that died cannot be replaced."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        connection = await self._connected()
        assert connection.client is not None
        try:
            async with asyncio.timeout(self.timeout):  # the SDK's own limit is per round, and a call may have several
                result = await connection.client.call_tool(tool, dict(arguments))
        except TimeoutError:
            connection.late = True
            return ToolResult(f"no answer within {self.timeout:g} s", ok=False)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                connection.over.set()
                return ToolResult(f"the server {self.name} stopped in mid-call", ok=False)
            return self._answered(ToolResult(str(error), ok=False))
        except (ValueError, RuntimeError) as error:  # arguments or an answer that the SDK refuses
            return self._answered(ToolResult(str(error), ok=False))
        return self._answered(ToolResult(_text_of(result), ok=not result.is_error))

    def _answered(self, result: ToolResult) -> ToolResult:
        self._has_answered = True
        return result

    async def _connected(self) -> _Connection:
        """The current connection, or a new one if it is over, or late and does not even list its tools in time."""
        async with self._connecting:
            for attempt in range(1, self.max_restarts + 1):
                if self._given_up is not None:
                    raise ToolError(self._given_up)
                if self._connection is not None and await self._connection.answers(self.timeout):
                    break
                if self._connection is not None:
                    await self._connection.end()
                if not self._has_answered:
                    await asyncio.sleep(_PAUSE_SECONDS)
                self._has_answered = False
                self.restarts += 1
                try:
                    await self._open()
                except ToolError as error:
                    if attempt == self.max_restarts:
                        self._given_up = f"started again {attempt} times without success: {error}"
                        raise ToolError(self._given_up) from error
            assert self._connection is not None
            return self._connection

    async def _open(self) -> None:
        """Open a new connection. Raises ToolError if the server does not become ready."""
        connection = _Connection(self.command, self.startup_timeout)
        try:
            self._tools = await connection.ready
        except ToolError as error:
            await connection.end()
            line = printable(shlex.join([self.command.command, *self.command.args]))  # not env, which may hold secrets
            reason = f"the MCP server {self.name} ({line}) {error}; run that command to see why"
            raise ToolError(reason) from error
        self._connection = connection


class _Connection:
    """One process of a server and the SDK's client on it, which a task opens and closes."""

    def __init__(self, command: StdioServerParameters, startup_seconds: float) -> None:
        self.ready: asyncio.Future[list[Tool]] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()
        self.late = False  # a call had no answer in time
        self.client: Client | None = None
        self._task = asyncio.create_task(self._live(command, startup_seconds))

    async def _live(self, command: StdioServerParameters, startup_seconds: float) -> None:
        """Start the server, greet it, and keep the connection until it is over."""
        from mcp import Client
        from mcp.client.stdio import stdio_client
        from mcp.types import Implementation

        ourselves = Implementation(name="rlpost", version=__version__)
        fault = "was closed"
        with tempfile.TemporaryFile("w+", errors="replace") as stderr:
            client = Client(stdio_client(command, errlog=stderr), client_info=ourselves, cache=None)
            try:
                async with asyncio.timeout(startup_seconds) as starting, client:
                    tools = await _all_tools(client)
                    starting.reschedule(None)
                    self.client = client
                    self.ready.set_result(tools)
                    await self.over.wait()
            except TimeoutError:
                fault = f"was not ready within {startup_seconds:g} s"
            except Exception as error:  # noqa: BLE001  any error means that this server cannot be used
                fault = f"cannot be used: {_innermost(error)}"
            finally:
                self.over.set()
                if not self.ready.done():
                    stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - STDERR_SHOWN_BYTES))
                    lines = [line.strip() for line in stderr.read().splitlines() if line.strip()]
                    printed = "; its stderr ends: " + printable(" | ".join(lines[-5:])) if lines else ""
                    self.ready.set_exception(ToolError(fault + printed))

    async def answers(self, seconds: float) -> bool:
        """Whether the server can be called; one that was late is asked for its tools."""
        if self.late and not self.over.is_set():
            assert self.client is not None
            with suppress(TimeoutError):
                await asyncio.wait_for(self.client.list_tools(), seconds)
                self.late = False
        return not (self.late or self.over.is_set())

    async def end(self) -> None:
        """End the process; returns when it is gone, after a few seconds at most."""
        self.over.set()
        await asyncio.wait([self._task])


async def _all_tools(client: Client) -> list[Tool]:
    page = await client.list_tools()
    tools = page.tools
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _text_of(result: CallToolResult) -> str:
    """A result as text for the model; images and the like are described."""
    parts = [_text_of_part(part) for part in result.content]
    if result.structured_content is not None and not any(part.type == "text" for part in result.content):
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)


def _text_of_part(part: Any) -> str:
    if part.type == "text":
        return part.text
    held = getattr(part, "resource", part)
    about = [getattr(held, name, None) for name in ("uri", "name", "mime_type")]
    described = f"[{part.type}: {', '.join(str(each) for each in about if each)}]"
    text = getattr(held, "text", None)
    return described if text is None else f"{described}\n{text}"


def _innermost(error: BaseException) -> BaseException:
    """The first error inside nested groups of exceptions, which task groups raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
