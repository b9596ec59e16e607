"""The tools of MCP servers, for a model to call.

`MCPToolTransform` is the tool. A `Server` is one MCP server by its name; it is connected again when its process dies.
`ServerProcess` is that process, and a transport for the SDK's client on its pipes. The SDK's own stdio transport hides
how a server ended and what it wrote on stderr, logs a traceback for every line that is not a message, reads lines of
any length, and leaves behind whatever a dead server had started; an environment must report and contain all that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import shlex
import signal
import threading
import weakref
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost import __version__
from rlpost.data.conversation import Conversation
from rlpost.envs.base import ToolCall, ToolResult, ToolTransform
from rlpost.envs.tool_calls import AT_ONCE, json_object, without_control_tokens
from rlpost.errors import ConfigError, DataError, ToolError
from rlpost.imports import require
from rlpost.remote.child import ending, kill_group
from rlpost.remote.loop import LoopThread
from rlpost.text import counted, did_you_mean, nearest, printable

if TYPE_CHECKING:
    from anyio import CancelScope
    from mcp import Client
    from mcp.types import CallToolResult, Tool

MAX_LINE_BYTES = 16 * 2**20  # longest message
MAX_JUNK_LINES = 1000  # most lines in a row on stdout that are not messages
STDERR_KEPT_BYTES = 4000
EXIT_SECONDS = 2.0  # for a server to exit after its stdin has closed, as the protocol asks
TERMINATE_SECONDS = 1.0  # between SIGTERM and SIGKILL

_POLL_SECONDS = 0.01
_BACK_OFF_SECONDS = 0.1  # before a start after one without an answered call; doubles each time
_MAX_BACK_OFF_SECONDS = 5.0
_MAX_TOOL_PAGES = 100  # an endless list of tools must not block a start
_CLOSE_SECONDS = 10.0
_FIELDS = ("command", "args", "env", "cwd", "type")
_NAME = re.compile(r"[\w\-]+")  # of a server, as a call writes it before the dot
_NOT_IN_A_CALL = re.compile(r"[^\w.\-]")  # characters of a tool's name that a call cannot write
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
    model reads a failure. A server that died or hangs is restarted for the next call, after a pause that doubles
    while calls stay unanswered.

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
        commands = [_server_command(name, content) for name, content in servers.items()]
        self.at_once = AT_ONCE  # a server may answer calls one by one, all within the time limit
        self.timeout = timeout
        self.startup_timeout = startup_timeout
        self.max_restarts = max_restarts
        self._pattern = _pattern(tool_call_pattern, tool_name)
        self._servers = [
            Server(each, timeout=timeout, startup_timeout=startup_timeout, max_restarts=max_restarts)
            for each in commands
        ]
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
                    found = self._thread.run(_start_all(self._servers), self.startup_timeout + _CLOSE_SECONDS)
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
        return {server.command.name: server.restarts for server in self._servers}

    @property
    def pids(self) -> dict[str, int | None]:
        """The current process of each server."""
        return {server.command.name: server.pid for server in self._servers}

    def close(self) -> None:
        """End the servers; when this returns, all of their processes are gone."""
        with self._starting:
            self._schemas = None
            _close(self._servers, self._thread)

    def _learn(self, found: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
        """The schemas of all tools; records which server has which."""
        self._functions, self._short = {}, {}
        schemas = []
        for server, tools in zip(self._servers, found, strict=True):
            for tool in tools:
                legal = _NOT_IN_A_CALL.sub("_", tool.name)
                name = f"{server.command.name}.{legal}"
                if name in self._functions:
                    continue  # the server lists a tool twice
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

    Raises DataError, naming the file and the field, for invalid content.
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
            _server_command(name, each)
        except ConfigError as error:
            raise DataError(f"{path}, mcpServers.{name}: {error}") from error
    return servers


def _server_command(name: str, content: Any) -> ServerCommand:
    """Parse one entry of `servers`. Raises ConfigError, naming the field, if it is invalid."""
    if "url" in content or content.get("type", "stdio") != "stdio":
        raise ConfigError(f"the server {name} is no stdio server: give the command that starts one")
    for key in content:
        if key not in _FIELDS:
            hint = did_you_mean(nearest(str(key), _FIELDS), f"there are {', '.join(_FIELDS)}")
            raise ConfigError(f"the server {name} has a field {key!r} that means nothing{hint}")
    command, args, env = content.get("command"), content.get("args", []), content.get("env", {})
    cwd = content.get("cwd")
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
    """The pattern of further calls, beside the forms that every tool understands; None if there is none."""
    if pattern is None:
        return (
            None if tool_name == "tool" else re.compile(rf"<{tool_name}>\s*([\w.\-]+)\s*(.*?)</{tool_name}>", re.DOTALL)
        )
    return re.compile(pattern, re.DOTALL)


def _call(match: re.Match[str]) -> ToolCall:
    """The call in a match of the pattern."""
    name, body = match.group(1) or "", match.group(2) or ""
    arguments, fault = json_object(body) if body.strip() else ({}, None)
    return ToolCall(name, arguments, match.start(), fault, match.end())


async def _start_all(servers: Sequence[Server]) -> list[Any]:
    """Start all servers and return the tools of each."""
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


# A server, whose process is replaced when it dies


@dataclass(frozen=True)
class ServerCommand:
    """How to start a server; `env` is added to the few variables that every server gets."""

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None

    @property
    def line(self) -> str:
        """The command as for a shell, without `env`, which may hold secrets."""
        return printable(shlex.join([self.command, *self.args]))


class Server:
    """One server by its name: calls go to its current process, which is replaced when it dies or hangs.

    `timeout` and `startup_timeout` are in seconds. A replacement is tried `max_restarts` times in a row.
    """

    def __init__(self, command: ServerCommand, *, timeout: float, startup_timeout: float, max_restarts: int) -> None:
        self.command = command
        self.timeout = timeout
        self.startup_timeout = startup_timeout
        self.max_restarts = max_restarts
        self.restarts = 0
        self._unanswered_starts = 0  # starts since the last answered call
        self._given_up: str | None = None  # why it is not restarted any more
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._checks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """The current process; None if there is none."""
        return self._connection.process.pid if self._connection and self._connection.usable else None

    async def start(self) -> list[Tool]:
        """Start the server and return its tools. Raises ToolError, with the end of its stderr."""
        async with self._connecting:
            self._given_up = None
            if self._connection is None or not self._connection.usable:
                await self._open()
            assert self._connection is not None
            return self._connection.tools

    async def close(self) -> None:
        """End the server; returns when its process is gone."""
        self._given_up = f"the MCP server {self.command.name} was closed"
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.end()
        self._connecting = asyncio.Lock()  # a lock belongs to a loop, and the next start may have another

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call `tool` and return its answer. Raises ToolError if a server that died cannot be replaced."""
        import anyio
        from mcp.types import CallToolRequestParams

        try:
            CallToolRequestParams(name=tool, arguments=dict(arguments)).model_dump_json()
        except ValueError as error:  # half a surrogate pair, or endless nesting
            return _failed("the arguments cannot be sent", str(error))
        connection = await self._connected()
        assert connection.client is not None
        try:
            with anyio.fail_after(self.timeout):  # the SDK's own limit is per round, and a call may have several
                result = await connection.client.call_tool(tool, dict(arguments))
        except TimeoutError:
            self._check(connection)
            return _failed(f"no answer within {self.timeout:g} s", connection.process.junk())
        except Exception as error:  # noqa: BLE001  an error from the server, or an answer that the SDK refuses
            if connection.process.over.is_set():
                return _failed(f"the server {self.command.name} stopped in mid-call", connection.process.junk())
            self._unanswered_starts = 0
            return ToolResult(str(_innermost(error)), ok=False)
        self._unanswered_starts = 0
        return ToolResult(_text_of(result), ok=not result.is_error)

    async def _connected(self) -> _Connection:
        """The current connection, or a new one."""
        async with self._connecting:
            for attempt in range(1, self.max_restarts + 1):
                if self._given_up is not None:
                    raise ToolError(self._given_up)
                if self._connection is not None and self._connection.usable:
                    break
                if self._connection is not None:
                    await self._connection.end()
                await self._back_off()
                try:
                    await self._open()
                except ToolError as error:
                    if attempt == self.max_restarts:
                        self._given_up = f"started again {attempt} times in vain: {error}"
                        raise ToolError(self._given_up) from error
            assert self._connection is not None
            return self._connection

    async def _back_off(self) -> None:
        """Wait before a start, longer after each start without an answered call."""
        if self._unanswered_starts:
            await asyncio.sleep(min(_BACK_OFF_SECONDS * 2.0 ** (self._unanswered_starts - 1), _MAX_BACK_OFF_SECONDS))
        self._unanswered_starts = min(self._unanswered_starts + 1, 10)
        self.restarts += 1

    async def _open(self) -> None:
        """Open a new connection. Raises ToolError if the server does not become ready."""
        connection = self._connection = _Connection(self.command)
        connection.task = asyncio.create_task(connection.live(self.startup_timeout))
        await connection.settled.wait()
        if not connection.usable:
            await connection.end()
            what = [connection.fault, connection.process.account(), "run that command by hand to see why"]
            raise ToolError(
                f"the MCP server {self.command.name} ({self.command.line}) {'; '.join(part for part in what if part)}"
            )

    def _check(self, connection: _Connection) -> None:
        """After a call without an answer in time: end the server if it does not even list its tools."""

        async def check() -> None:
            import anyio
            from mcp import MCPError

            assert connection.client is not None
            try:
                with anyio.fail_after(self.timeout):
                    await connection.client.list_tools()
            except TimeoutError:
                connection.process.over.set()
            except (MCPError, ValueError):  # a refusal or an invalid list is an answer too
                pass
            finally:
                connection.under_watch = False

        if not connection.under_watch:
            connection.under_watch = True
            task = asyncio.create_task(check())
            self._checks.add(task)  # the loop holds only a weak reference to a task
            task.add_done_callback(self._checks.discard)


class _Connection:
    """One life of a server: its process and the SDK's client on it."""

    def __init__(self, command: ServerCommand) -> None:
        self.process = ServerProcess(command)
        self.settled = asyncio.Event()  # it is ready, or never will be
        self.client: Client | None = None
        self.tools: list[Tool] = []
        self.fault = ""
        self.under_watch = False
        self.task: asyncio.Task[None] | None = None
        self._starting: CancelScope | None = None

    @property
    def usable(self) -> bool:
        return self.client is not None and not self.process.over.is_set()

    async def live(self, startup_seconds: float) -> None:
        """Start the server, greet it, and keep the connection until it is over."""
        import anyio
        from mcp import Client
        from mcp.types import Implementation

        try:
            with anyio.CancelScope(deadline=anyio.current_time() + startup_seconds) as self._starting:
                ourselves = Implementation(name="rlpost", version=__version__)
                async with Client(self.process.streams(), client_info=ourselves, cache=None) as client:
                    self.tools = await _all_tools(client)
                    self._starting.deadline = math.inf
                    self.client = client
                    self.settled.set()
                    await self.process.over.wait()
            self.fault = "ended" if self.client else f"was not ready within {startup_seconds:g} s"
        except Exception as error:  # noqa: BLE001  any error means that this server cannot be used
            ended = self.process.over.is_set()
            self.fault = "ended before it was ready" if ended else f"cannot be used: {_innermost(error)}"
        finally:
            self.process.over.set()
            self.settled.set()

    async def end(self) -> None:
        """End the process; returns when it is gone, after a few seconds at most."""
        self.process.over.set()
        if self._starting is not None and not self.settled.is_set():
            self._starting.cancel()
        if self.task is not None:
            await asyncio.wait([self.task])


async def _all_tools(client: Client) -> list[Tool]:
    tools: list[Tool] = []
    cursor = None
    for _ in range(_MAX_TOOL_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


def _failed(what: str, more: str) -> ToolResult:
    return ToolResult(f"{what}: {more}" if more else what, ok=False)


def _text_of(result: CallToolResult) -> str:
    """A result as text for the model; images and the like are described."""
    parts = [_text_of_part(part) for part in result.content]
    if result.structured_content is not None and not any(part.type == "text" for part in result.content):
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)


def _text_of_part(part: Any) -> str:
    if part.type == "text":
        return part.text
    if part.type == "resource_link":
        return f"[resource {part.uri}: {part.name}]"
    if part.type == "resource":
        resource = part.resource
        content = getattr(resource, "text", None)
        if content is not None:
            return f"[resource {resource.uri}]\n{content}"
        return f"[resource {resource.uri}: {resource.mime_type or 'binary'}, {_num_bytes(resource.blob)} bytes]"
    return f"[{part.type}: {part.mime_type}, {_num_bytes(part.data)} bytes]"


def _num_bytes(base64: str) -> int:
    """How many bytes a base64 text encodes."""
    return len(base64) * 3 // 4 - base64[-2:].count("=")


def _innermost(error: BaseException) -> BaseException:
    """The first error inside nested groups of exceptions, which task groups raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# The process of a server, and the messages on its pipes


class ServerProcess:
    """One process of a server, from start to end; `over` is set when it sends no more messages."""

    def __init__(self, command: ServerCommand) -> None:
        self.command = command
        self.over = asyncio.Event()
        self.pid: int | None = None
        self._process: Process | None = None
        self._left = False  # exited by itself
        self._junk_lines = 0
        self._last_junk = b""
        self._stderr = b""

    @contextlib.asynccontextmanager
    async def streams(self) -> AsyncIterator[tuple[Any, Any]]:
        """Start the server; gives the streams that the SDK reads and writes. Raises OSError if it cannot be run."""
        import anyio
        from mcp.client.stdio import get_default_environment

        process = await asyncio.create_subprocess_exec(
            *[self.command.command, *self.command.args],
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env={**get_default_environment(), **self.command.env},
            cwd=self.command.cwd,
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # its own process group: killed as one, and not reached by Ctrl-C
        )
        self._process, self.pid = process, process.pid
        received, incoming = anyio.create_memory_object_stream(0)
        outgoing, to_send = anyio.create_memory_object_stream(0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read, process, received)
            tasks.start_soon(self._write, process, to_send)
            tasks.start_soon(self._listen_to_stderr, process)
            try:
                yield incoming, outgoing
            finally:
                with anyio.CancelScope(shield=True):
                    await self._stop(process)
                    for stream in (received, incoming, outgoing, to_send):
                        await stream.aclose()
                tasks.cancel_scope.cancel()

    async def _read(self, process: Process, received: Any) -> None:
        """Pass on each line of stdout that is a message, and count the others."""
        import anyio
        from mcp.shared.message import SessionMessage
        from mcp.types import jsonrpc_message_adapter

        assert process.stdout is not None
        in_a_row = 0
        with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # the session has ended
            while in_a_row <= MAX_JUNK_LINES:
                try:
                    line = await process.stdout.readline()
                except ValueError:  # the line is longer than the limit
                    self._note_junk(b"a line of more than 16 MiB")
                    break
                if not line:
                    break
                try:
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    self._note_junk(line)
                    in_a_row += 1
                    continue
                in_a_row = 0
                await received.send(SessionMessage(message))
        self.over.set()  # before the session learns of it, so that a failing call can say why
        await received.aclose()

    def _note_junk(self, line: bytes) -> None:
        self._junk_lines += 1
        self._last_junk = line[:200]

    async def _write(self, process: Process, to_send: Any) -> None:
        """Write each message as a line of stdin."""
        assert process.stdin is not None
        try:
            async for each in to_send:
                line = each.message.model_dump_json(by_alias=True, exclude_unset=True) + "\n"
                process.stdin.write(line.encode())
                await process.stdin.drain()
        except OSError:  # the server has closed its stdin: the session must not wait for an answer
            self.over.set()

    async def _listen_to_stderr(self, process: Process) -> None:
        """Keep the end of the server's stderr."""
        assert process.stderr is not None
        while chunk := await process.stderr.read(65536):
            self._stderr = (self._stderr + chunk)[-STDERR_KEPT_BYTES:]

    async def _stop(self, process: Process) -> None:
        """End the server, first as the protocol asks, then everything left in its process group."""
        assert process.stdin is not None
        self._left = self.over.is_set()
        process.stdin.close()
        if not await _has_ended(process, EXIT_SECONDS):
            kill_group(process.pid, signal.SIGTERM)
            await _has_ended(process, TERMINATE_SECONDS)
        kill_group(process.pid)
        await _has_ended(process, TERMINATE_SECONDS)
        # asyncio closes a pipe only at its end, which a descendant in another group can delay for ever
        process._transport.close()  # pyright: ignore[reportAttributeAccessIssue]

    def account(self) -> str:
        """How the server ended, if it has, the junk on its stdout, and the last lines of its stderr."""
        status = self._process.returncode if self._process is not None and self._left else None
        parts = []
        if status is not None:
            parts.append(ending(status))
        if junk := self.junk():
            parts.append(junk)
        lines = [line.strip() for line in self._stderr.decode(errors="replace").splitlines() if line.strip()]
        if lines:
            parts.append("its stderr ends: " + printable(" | ".join(lines[-5:])))
        return "; ".join(parts)

    def junk(self) -> str:
        """The lines on stdout that were not messages, in words; empty if there were none."""
        if not self._junk_lines:
            return ""
        last = self._last_junk.decode(errors="replace").strip()
        return f"it wrote {counted(self._junk_lines, 'line')} besides JSON-RPC on stdout, the last {last!r}"


async def _has_ended(process: Process, seconds: float) -> bool:
    """Whether it ends in time; `process.wait()` would also wait for other holders of its pipes."""
    end = asyncio.get_running_loop().time() + seconds
    while process.returncode is None and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(_POLL_SECONDS)
    return process.returncode is not None
