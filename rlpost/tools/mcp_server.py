"""A connection to one MCP server that is made again when the server dies; everything here runs on one asyncio loop."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlpost import __version__
from rlpost.envs.tool import ToolResult
from rlpost.errors import ToolError
from rlpost.tools.mcp_process import ServerCommand, ServerProcess

if TYPE_CHECKING:
    from anyio import CancelScope
    from mcp import Client
    from mcp.types import CallToolResult, Tool

_BACK_OFF_SECONDS = 0.1  # before the second start without an answered call in between; doubles from there
_MAX_BACK_OFF_SECONDS = 5.0
_MAX_TOOL_PAGES = 100  # a list of tools that never ends cannot hold up a start


class _Connection:
    """One life of a server: its process and the SDK's client on it."""

    def __init__(self, command: ServerCommand) -> None:
        self.process = ServerProcess(command)
        self.settled = asyncio.Event()  # ready, or known not to become so
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
        """Start the server, greet it, and hold the connection until it is over."""
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
        except Exception as error:  # noqa: BLE001  whatever it is, it means that this server cannot be used
            ended = self.process.over.is_set()
            self.fault = "ended before it was ready" if ended else f"cannot be used: {_innermost(error)}"
        finally:
            self.process.over.set()
            self.settled.set()

    async def end(self) -> None:
        """End the process; comes back when it is gone, after a few seconds at most."""
        self.process.over.set()
        if self._starting is not None and not self.settled.is_set():
            self._starting.cancel()
        if self.task is not None:
            await asyncio.wait([self.task])


class Server:
    """One server by its name: calls go to its present process, which is replaced when it has died or hangs.

    `timeout` and `startup_timeout` in seconds. A replacement is tried `max_restarts` times in a row.
    """

    def __init__(self, command: ServerCommand, *, timeout: float, startup_timeout: float, max_restarts: int) -> None:
        self.command = command
        self.timeout = timeout
        self.startup_timeout = startup_timeout
        self.max_restarts = max_restarts
        self.restarts = 0
        self._unanswered_starts = 0  # since the last call that was answered
        self._given_up: str | None = None  # why it is not started again
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._checks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """The present process, where there is one."""
        return self._connection.process.pid if self._connection and self._connection.usable else None

    async def start(self) -> list[Tool]:
        """Start the server and return its tools. Raises ToolError, with what it wrote on stderr."""
        async with self._connecting:
            self._given_up = None
            if self._connection is None or not self._connection.usable:
                await self._open()
            assert self._connection is not None
            return self._connection.tools

    async def close(self) -> None:
        """End the server; comes back when its process is gone."""
        self._given_up = f"the MCP server {self.command.name} was closed"
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.end()
        self._connecting = asyncio.Lock()  # one belongs to the loop that used it, and the next start has another

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """What `tool` answers. Raises ToolError where a server that died cannot be replaced."""
        import anyio
        from mcp.types import CallToolRequestParams

        try:
            CallToolRequestParams(name=tool, arguments=dict(arguments)).model_dump_json()
        except ValueError as error:  # half a surrogate pair, nested without end
            return _failed("the arguments cannot be sent", str(error))
        connection = await self._connected()
        assert connection.client is not None
        try:
            with anyio.fail_after(self.timeout):  # the SDK's own limit is one of a round, and a call may have several
                result = await connection.client.call_tool(tool, dict(arguments))
        except TimeoutError:
            self._check(connection)
            return _failed(f"no answer within {self.timeout:g} s", connection.process.junk())
        except Exception as error:  # noqa: BLE001  an error of the server's, or an answer that the SDK refuses
            if connection.process.over.is_set():
                return _failed(f"the server {self.command.name} stopped in mid-call", connection.process.junk())
            self._unanswered_starts = 0
            return ToolResult(str(_innermost(error)), ok=False)
        self._unanswered_starts = 0
        return ToolResult(text_of(result), ok=not result.is_error)

    async def _connected(self) -> _Connection:
        """The present connection, else a new one."""
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
        """Wait before a start, the longer the more of them no call has been answered after."""
        if self._unanswered_starts:
            await asyncio.sleep(min(_BACK_OFF_SECONDS * 2.0 ** (self._unanswered_starts - 1), _MAX_BACK_OFF_SECONDS))
        self._unanswered_starts = min(self._unanswered_starts + 1, 10)
        self.restarts += 1

    async def _open(self) -> None:
        """A new connection. Raises ToolError where the server does not become ready."""
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
        """After a call that was not answered in time: end a server which does not even list its tools any more."""

        async def check() -> None:
            import anyio
            from mcp import MCPError

            assert connection.client is not None
            try:
                with anyio.fail_after(self.timeout):
                    await connection.client.list_tools()
            except TimeoutError:
                connection.process.over.set()
            except (MCPError, ValueError):  # a refusal, or a list that is none, is an answer too
                pass
            finally:
                connection.under_watch = False

        if not connection.under_watch:
            connection.under_watch = True
            task = asyncio.create_task(check())
            self._checks.add(task)  # the loop itself holds a task only weakly
            task.add_done_callback(self._checks.discard)


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


def text_of(result: CallToolResult) -> str:
    """A result for the model to read; of an image and the like it says what is there."""
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
    """How many bytes a base64 text stands for."""
    return len(base64) * 3 // 4 - base64[-2:].count("=")


def _innermost(error: BaseException) -> BaseException:
    """The first cause in groups of exceptions, which task groups make of one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
