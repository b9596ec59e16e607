"""The only way out of the browser: an HTTP proxy on the loopback that connects to allowed hosts alone.

What a page asks for, each hop of a redirect, sockets, workers and the browser's own requests all come
through here, whatever the browser's interfaces show of them. A name is looked up here, once a
connection, and the address found is checked and is the one connected to: an allowed name that is made
to point at this machine or its network afterwards leads nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from rlpost.tools.browser_hosts import AllowedHosts, Host, host_of, is_of_the_internet, parts_of, shown

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 60.0  # for a browser that opened a connection to say what it wants
GOODBYE_SECONDS = 1.0  # for a browser that was refused to stop sending
MAX_HEAD_BYTES = 256 * 1024
FAULTS_KEPT = 100

_CHUNK = 65536
_END_OF_HEAD = b"\r\n\r\n"
_OF_THIS_HOP = ("connection", "proxy-connection", "keep-alive", "proxy-authorization", "te", "upgrade")

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Refused(Exception):
    """A request that is not passed on."""


class FilterProxy:
    """Serves one browser. With `private_addresses` a name may also lead to this machine or its network."""

    def __init__(self, allowed: AllowedHosts, *, private_addresses: bool = False) -> None:
        self.allowed = allowed
        self.private_addresses = private_addresses
        self.num_refused = 0
        self._faults: OrderedDict[str, str] = OrderedDict()  # host:port -> why it is not reached, the newest last
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        return self._server.sockets[0].getsockname()[1]

    async def start(self) -> None:
        """Listen on a free port of the loopback."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=MAX_HEAD_BYTES)

    async def close(self) -> None:
        """Listen no more, and end what is open."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open, timeout=1.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the browser: one request, or one tunnel."""
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._answer_or_refuse((reader, writer))
        except asyncio.CancelledError:  # closed: a task of asyncio's server that ends cancelled would be logged
            return
        finally:
            self._open.discard(task)
            writer.close()

    async def _answer_or_refuse(self, browser: Streams) -> None:
        try:
            await self._answer(browser)
        except Refused as error:
            await _say(browser, "403 Forbidden", str(error))
        except OSError as error:
            await _say(browser, "502 Bad Gateway", str(error) or "no connection in time")
        except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await _say(browser, "400 Bad Request", "this is no request to a proxy")

    async def _answer(self, browser: Streams) -> None:
        async with asyncio.timeout(IDLE_SECONDS):
            head = await browser[0].readuntil(_END_OF_HEAD)
        request, *fields = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        method, target, version = request.split(" ")
        if method == "CONNECT":  # https and every web socket
            name, _, port = target.rpartition(":")
            async with self._connected(host_of(name), int(port)) as server:
                browser[1].write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                await _first_of(_pump(browser[0], server[1]), _pump(server[0], browser[1]))
            return
        scheme, host, port = parts_of(target)
        if scheme != "http":
            raise Refused(f"{scheme}: addresses are not fetched")
        path = "/" + target.split("://", 1)[1].partition("/")[2]
        length = _body_length(fields)
        async with self._connected(host, port) as server:
            server[1].write(_head(f"{method} {path} {version}", fields))
            await _first_of(_send_body(browser[0], server[1], length), _send_response(server[0], browser[1]))

    @contextlib.asynccontextmanager
    async def _connected(self, host: Host, port: int) -> AsyncIterator[Streams]:
        """A connection to an allowed host."""
        if not self.allowed.allows(host, port):
            self._refuse(host, port, f"{shown(host)}:{port} is not among the allowed domains")
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                streams = await self._first_that_answers(await self._addresses_of(host, port), port)
        except OSError as error:  # TimeoutError is one
            self._note(host, port, str(error) or "no connection in time")
            raise
        self._faults.pop(f"{shown(host)}:{port}", None)
        try:
            yield streams
        finally:
            streams[1].close()

    async def _first_that_answers(self, addresses: list[Address], port: int) -> Streams:
        for address in addresses[:-1]:
            with contextlib.suppress(OSError):
                return await asyncio.open_connection(str(address), port, limit=MAX_HEAD_BYTES)
        return await asyncio.open_connection(str(addresses[-1]), port, limit=MAX_HEAD_BYTES)

    async def _addresses_of(self, host: Host, port: int) -> list[Address]:
        """The addresses that may be connected to; at least one."""
        if not isinstance(host, str):
            return [host]
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [_plain(ipaddress.ip_address(each[4][0])) for each in found]
        local_name = host == "localhost" or host.endswith(".localhost")
        usable = [each for each in addresses if is_of_the_internet(each) or self.private_addresses or local_name]
        if not usable:
            self._refuse(host, port, f"{host} leads to {addresses[0]}, an address of this machine or its network")
        return usable

    def fault_of(self, host: Host, port: int) -> str | None:
        """Why the last connection to it came to nothing, if it did."""
        return self._faults.get(f"{shown(host)}:{port}")

    def _refuse(self, host: Host, port: int, why: str) -> None:
        self.num_refused += 1
        self._note(host, port, why)
        raise Refused(why)

    def _note(self, host: Host, port: int, why: str) -> None:
        self._faults[f"{shown(host)}:{port}"] = why
        while len(self._faults) > FAULTS_KEPT:
            self._faults.popitem(last=False)


def _plain(address: Address) -> Address:
    """An IPv4 address that is written as one of IPv6, as what it is."""
    return getattr(address, "ipv4_mapped", None) or address


def _head(first: str, fields: list[str]) -> bytes:
    """The head of a message with a connection of its own: what follows on a kept one could be for another host."""
    kept = [field for field in fields if field.partition(":")[0].strip().lower() not in _OF_THIS_HOP]
    return "\r\n".join([first, *kept, "Connection: close"]).encode("latin-1") + _END_OF_HEAD


def _body_length(fields: list[str]) -> int:
    """How many bytes follow a head. Raises Refused where it does not say."""
    length = 0
    for field in fields:
        name, _, value = field.partition(":")
        if name.strip().lower() == "transfer-encoding":
            raise Refused("a body in chunks is not passed on")
        if name.strip().lower() == "content-length":
            length = int(value)
    return length


async def _send_body(browser: asyncio.StreamReader, server: asyncio.StreamWriter, left: int) -> None:
    """Pass the `left` bytes of the body on and no more, then wait for the browser to go away."""
    while left > 0 and (chunk := await browser.read(min(left, _CHUNK))):
        left -= len(chunk)
        server.write(chunk)
        await server.drain()
    while await browser.read(_CHUNK):
        pass


async def _send_response(server: asyncio.StreamReader, browser: asyncio.StreamWriter) -> None:
    """Pass the answer on, with a head that ends the connection after it."""
    while True:
        head = (await server.readuntil(_END_OF_HEAD)).decode("latin-1").removesuffix("\r\n\r\n")
        first, *fields = head.split("\r\n")
        if not first.split(" ")[1].startswith("1"):  # 100 and 103 come before the answer
            break
    browser.write(_head(first, fields))
    await _pump(server, browser)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end, and pass the end on."""
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


async def _first_of(*works: Coroutine[Any, Any, None]) -> None:
    """Run them until one ends, well or not: with either direction the whole connection is over."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _say(browser: Streams, status: str, why: str) -> None:
    """An answer of the proxy's own, and the end of the connection.

    What the browser still sends is read for a moment: a connection closed over unread bytes is reset, and
    the answer is lost with it.
    """
    reader, writer = browser
    body = f"{why}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}"
    with contextlib.suppress(OSError):
        writer.write(head.encode() + b"\r\nConnection: close" + _END_OF_HEAD + body)
        await writer.drain()
        writer.write_eof()
        async with asyncio.timeout(GOODBYE_SECONDS):
            while await reader.read(_CHUNK):
                pass
