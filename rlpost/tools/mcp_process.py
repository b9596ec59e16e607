"""The process of an MCP server, and the messages on its pipes: a transport for the SDK's client.

The SDK's own stdio transport tells neither how a server ended nor what it wrote on stderr, logs a
traceback for every line that is no message, holds a line of any length, and leaves behind what a
server that died had started. An environment has to name all that and contain it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlpost.child import ending, kill_group
from rlpost.text import counted, printable

MAX_LINE_BYTES = 16 * 2**20  # of one message
MAX_JUNK_LINES = 1000  # in a row on stdout that are no messages: a flood, not a greeting
STDERR_KEPT_BYTES = 4000
EXIT_SECONDS = 2.0  # for a server to leave by itself after its stdin has closed, as the protocol asks
TERMINATE_SECONDS = 1.0  # between SIGTERM and SIGKILL
_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class ServerCommand:
    """How a server is started; `env` is added to the few variables that every server is given."""

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None

    @property
    def line(self) -> str:
        """The command as a shell would take it; what is in `env` may be secret and is not part of it."""
        return printable(shlex.join([self.command, *self.args]))


class ServerProcess:
    """One process from its start to its end; `over` is set when no more messages come of it."""

    def __init__(self, command: ServerCommand) -> None:
        self.command = command
        self.over = asyncio.Event()
        self.pid: int | None = None
        self._process: Process | None = None
        self._left = False  # by itself, before it was asked to
        self._junk_lines = 0
        self._last_junk = b""
        self._stderr = b""

    @contextlib.asynccontextmanager
    async def streams(self) -> AsyncIterator[tuple[Any, Any]]:
        """Start the server; what the SDK reads from it and writes to it. Raises OSError where it cannot be run."""
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
            start_new_session=True,  # a group of its own, to be ended as one; Ctrl-C is not for it
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
        """Hand each line of stdout on that is a message, and count the others."""
        import anyio
        from mcp.shared.message import SessionMessage
        from mcp.types import jsonrpc_message_adapter

        assert process.stdout is not None
        in_a_row = 0
        with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # the session has ended
            while in_a_row <= MAX_JUNK_LINES:
                try:
                    line = await process.stdout.readline()
                except ValueError:  # longer than the limit
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
        self.over.set()  # before the session learns of it, so that a call which fails with it can say why
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
        except OSError:  # it has closed its stdin: the session must not wait for an answer
            self.over.set()

    async def _listen_to_stderr(self, process: Process) -> None:
        """Keep the end of what the server writes there."""
        assert process.stderr is not None
        while chunk := await process.stderr.read(65536):
            self._stderr = (self._stderr + chunk)[-STDERR_KEPT_BYTES:]

    async def _stop(self, process: Process) -> None:
        """End the server, at first as the protocol asks, and whatever else is left in its process group."""
        assert process.stdin is not None
        self._left = self.over.is_set()
        process.stdin.close()
        if not await _has_ended(process, EXIT_SECONDS):
            kill_group(process.pid, signal.SIGTERM)
            await _has_ended(process, TERMINATE_SECONDS)
        kill_group(process.pid)
        await _has_ended(process, TERMINATE_SECONDS)
        # asyncio closes the pipes at their end alone, which a descendant in another group can put off for ever.
        process._transport.close()  # pyright: ignore[reportAttributeAccessIssue]

    def account(self) -> str:
        """How the server ended, if it has, and what else it left: its stdout's junk, and its stderr's last lines."""
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
        """What stdout had that is no message, or nothing."""
        if not self._junk_lines:
            return ""
        last = self._last_junk.decode(errors="replace").strip()
        return f"it wrote {counted(self._junk_lines, 'line')} besides JSON-RPC on stdout, the last {last!r}"


async def _has_ended(process: Process, seconds: float) -> bool:
    """Whether it ends in time; `process.wait()` would also wait for whoever else holds its pipes."""
    end = asyncio.get_running_loop().time() + seconds
    while process.returncode is None and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(_POLL_SECONDS)
    return process.returncode is not None
