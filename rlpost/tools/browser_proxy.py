"""The browser's only way out: an HTTP proxy on the loopback that connects to allowed hosts alone.

Whatever a page requests, each hop of a redirect, sockets, workers and the browser's own requests all come
through here. The proxy looks each name up, once per connection, checks the address it finds and connects to that
one: an allowed name that is later made to point at this machine or its network leads nowhere.

Hosts are compared as a browser reads them, as a whole and not by their endings (`AllowedHosts`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any
from urllib.parse import urlsplit

from rlpost.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Host = str | Address
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

DEFAULT_PORTS = {"http": 80, "https": 443}
CONNECT_SECONDS = 10.0
IDLE_SECONDS = 60.0  # for a browser to send its request after connecting
GOODBYE_SECONDS = 1.0  # for a refused browser to stop sending
MAX_HEAD_BYTES = 256 * 1024
FAULTS_KEPT = 100

_CHUNK = 65536
_END_OF_HEAD = b"\r\n\r\n"
_OF_THIS_HOP = ("connection", "proxy-connection", "keep-alive", "proxy-authorization", "te", "upgrade")


class AllowedHosts:
    """The hosts that may be reached, from entries as `example.org`, `localhost:8000`, `127.0.0.1` or `[::1]:80`.

    `example.org` stands for that name and every name below it; a name without a dot and an address stand for
    themselves alone. An entry without a port allows any port. Raises ConfigError for an invalid entry.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self.names = [entries] if isinstance(entries, str) else list(entries)
        if not self.names:
            raise ConfigError("allowed_domains is empty: name at least one host that the browser may visit")
        self.entries = [_entry(name) for name in self.names]

    def allows(self, host: Host, port: int) -> bool:
        """Whether `port` of `host`, in the form of `host_of`, may be reached."""
        return any(its_port in (None, port) and _covers(entry, host) for entry, its_port in self.entries)

    def refusal(self, url: str) -> str | None:
        """Why `url` may not be fetched; None if it may."""
        try:
            scheme, host, port = parts_of(url)
        except ValueError as error:
            return f"{url[:200]!r} is not an address: {error}"
        if scheme not in DEFAULT_PORTS:
            return f"{scheme}: addresses are not allowed, only http and https"
        if not self.allows(host, port):
            return f"{shown(host)}:{port} is not among the allowed domains: {', '.join(self.names)}"
        return None


class FilterProxy:
    """Serves one browser. With `private_addresses` a name may also lead to this machine or its network."""

    def __init__(self, allowed: AllowedHosts, *, private_addresses: bool = False) -> None:
        self.allowed = allowed
        self.private_addresses = private_addresses
        self._faults: dict[str, str] = {}  # host:port -> why it was not reached
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._server is not None
        return self._server.sockets[0].getsockname()[1]

    async def start(self) -> None:
        """Listen on a free port of the loopback."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=MAX_HEAD_BYTES)

    async def close(self) -> None:
        """Stop listening, and close open connections."""
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
        except asyncio.CancelledError:  # by `close`: asyncio would log a server's task that ends cancelled
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
            await _say(browser, "400 Bad Request", "this is not a request to a proxy")

    async def _answer(self, browser: Streams) -> None:
        async with asyncio.timeout(IDLE_SECONDS):
            head = await browser[0].readuntil(_END_OF_HEAD)
        request, *fields = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        method, target, version = request.split(" ")
        if method == "CONNECT":  # https and every web socket
            name, _, port = target.rpartition(":")
            async with self._connected(host_of(name), int(port)) as server:
                browser[1].write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                # if either direction ends, so does the connection
                await first_of(_pump(browser[0], server[1]), _pump(server[0], browser[1]))
            return
        scheme, host, port = parts_of(target)
        if scheme != "http":
            raise Refused(f"{scheme}: addresses are not fetched")
        path = "/" + target.split("://", 1)[1].partition("/")[2]
        length = _body_length(fields)
        async with self._connected(host, port) as server:
            server[1].write(_head(f"{method} {path} {version}", fields))
            await first_of(_send_body(browser[0], server[1], length), _send_response(server[0], browser[1]))

    @contextlib.asynccontextmanager
    async def _connected(self, host: Host, port: int) -> AsyncIterator[Streams]:
        """A connection to an allowed host."""
        if not self.allowed.allows(host, port):
            self._refuse(host, port, f"{shown(host)}:{port} is not among the allowed domains")
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                streams = await self._first_that_answers(await self._addresses_of(host, port), port)
        except OSError as error:  # TimeoutError is one
            self.note_fault(host, port, str(error) or "no connection in time")
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
        """The addresses of `host` that may be connected to, at least one. Raises Refused if there is none."""
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
        """Why the last connection failed; None if it did not."""
        return self._faults.get(f"{shown(host)}:{port}")

    def _refuse(self, host: Host, port: int, why: str) -> None:
        self.note_fault(host, port, why)
        raise Refused(why)

    def note_fault(self, host: Host, port: int, why: str) -> None:
        """Remember why a connection failed, for `fault_of`."""
        if len(self._faults) >= FAULTS_KEPT:
            self._faults.clear()
        self._faults[f"{shown(host)}:{port}"] = why


class Refused(Exception):
    """A request that the proxy does not pass on."""


def _plain(address: Address) -> Address:
    """`address`, or the IPv4 address that it maps into IPv6."""
    return getattr(address, "ipv4_mapped", None) or address


def _head(first: str, fields: list[str]) -> bytes:
    """The head of a message that closes its connection: later requests on a kept one could be for another host."""
    kept = [field for field in fields if field.partition(":")[0].strip().lower() not in _OF_THIS_HOP]
    return "\r\n".join([first, *kept, "Connection: close"]).encode("latin-1") + _END_OF_HEAD


def _body_length(fields: list[str]) -> int:
    """How many bytes of body follow a head. Raises Refused for a body in chunks."""
    length = 0
    for field in fields:
        name, _, value = field.partition(":")
        if name.strip().lower() == "transfer-encoding":
            raise Refused("a body in chunks is not passed on")
        if name.strip().lower() == "content-length":
            length = int(value)
    return length


async def _send_body(browser: asyncio.StreamReader, server: asyncio.StreamWriter, left: int) -> None:
    """Pass on the `left` bytes of the body and no more, then wait until the browser closes."""
    while left > 0 and (chunk := await browser.read(min(left, _CHUNK))):
        left -= len(chunk)
        server.write(chunk)
        await server.drain()
    while await browser.read(_CHUNK):
        pass


async def _send_response(server: asyncio.StreamReader, browser: asyncio.StreamWriter) -> None:
    """Pass on the answer, with a head that closes the connection after it."""
    while True:
        head = (await server.readuntil(_END_OF_HEAD)).decode("latin-1").removesuffix("\r\n\r\n")
        first, *fields = head.split("\r\n")
        if not first.split(" ")[1].startswith("1"):  # 100 and 103 come before the answer
            break
    browser.write(_head(first, fields))
    await _pump(server, browser)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end of the stream, and end the other stream too."""
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


async def first_of(*works: Coroutine[Any, Any, Any], seconds: float | None = None) -> set[asyncio.Task[Any]]:
    """Run `works` until one ends or fails, then cancel the others.

    Returns the works that ended: none if `seconds` pass first (None: no limit).
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return (await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED))[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _say(browser: Streams, status: str, why: str) -> None:
    """Send the proxy's own answer and close the connection.

    Reads what the browser still sends for a moment: closing a connection with unread bytes resets it, and the answer
    would be lost.
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


# Which addresses may be fetched

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # an IPv4 address in its last 32 bits (RFC 6052)
# IPv4-compatible (RFC 4291), NAT64 of a site of its own (RFC 8215), and those of one link or site
_EMBEDDING = [ipaddress.IPv6Network(each) for each in ("::/96", "64:ff9b:1::/48", "fe80::/10", "fec0::/10")]

_NAME = re.compile(r"[a-z0-9_]([a-z0-9_\-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_\-]*[a-z0-9_])?)*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # a name whose last part is a number is an IPv4 address
_ODD = re.compile(r"[\x00-\x20\x7f\\]")  # browsers drop these or read them as a slash, other parsers do not
_READ_IN_TWO_WAYS = "\u00df\u03c2\u200c\u200d"  # ß, final ς and joiners, on which the two standards of IDNA differ


def _covers(entry: Host, host: Host) -> bool:
    """Whether `host` is that of an entry, or a name below it if that has several parts."""
    below = isinstance(entry, str) and isinstance(host, str) and "." in entry and host.endswith("." + entry)
    return below or host == entry


def _entry(text: str) -> tuple[Host, int | None]:
    """Host and port (None: any) of one entry of the list. Raises ConfigError if it is invalid."""
    wrong = f"allowed_domains names {text!r}, which is not a host: write example.org, or localhost:8000 with a port"
    try:
        if not isinstance(text, str) or any(mark in text for mark in "/@*?#"):
            raise ValueError(text)
        if text.count(":") > 1 and not text.startswith("["):  # a bare IPv6 address
            return host_of(text), None
        split = urlsplit(f"//{text}")
        if not split.hostname or text.endswith(":"):
            raise ValueError(text)
        return host_of(split.hostname), split.port
    except ValueError as error:
        raise ConfigError(wrong) from error


def parts_of(url: str) -> tuple[str, Host, int]:
    """Scheme, host and port of a URL; host and port are empty unless the scheme is http or https.

    Raises ValueError for URLs that browsers and servers might read in different ways.
    """
    if odd := _ODD.search(re.split("[?#]", url, maxsplit=1)[0]):
        raise ValueError(f"it holds {odd.group()!r}")
    split = urlsplit(url)
    scheme = split.scheme.lower()
    if scheme not in DEFAULT_PORTS:
        if not scheme:
            raise ValueError("it must begin with http:// or https://")
        return scheme, "", 0
    if "@" in split.netloc:
        raise ValueError("it names a user")
    port = split.port  # raises ValueError for an invalid port
    return scheme, host_of(split.hostname or ""), DEFAULT_PORTS[scheme] if port is None else port


def host_of(text: str) -> Host:
    """A host in its canonical form: an address, or a name in lower case and punycode.

    Raises ValueError if `text` is not a host.
    """
    name = (text[1:-1] if text.startswith("[") and text.endswith("]") else text).lower()
    if ":" in name:
        return ipaddress.IPv6Address(name)
    name = name.removesuffix(".")
    if not name.isascii():
        if any(letter in _READ_IN_TWO_WAYS for letter in name):
            raise ValueError(f"{text!r} can be read as two names: write it in punycode, xn--...")
        try:
            name = name.encode("idna").decode()
        except UnicodeError as error:
            raise ValueError(f"{text!r} is not a host name") from error
    if not _NAME.fullmatch(name):
        raise ValueError(f"{text!r} is not a host name" if text else "it names no host")
    if not _NUMBER.fullmatch(name.rpartition(".")[2]):
        return name
    try:
        # up to four numbers, decimal, octal or hexadecimal, and the last one fills all remaining bytes, as browsers
        # read them: 127.1 is 127.0.0.1, and so are 0x7f.1 and 2130706433
        return ipaddress.IPv4Address(socket.inet_aton(name))
    except OSError as error:
        raise ValueError(f"{text!r} is not an address") from error


def shown(host: Host) -> str:
    """The host as written in a URL."""
    return f"[{host}]" if isinstance(host, ipaddress.IPv6Address) else str(host)


def is_of_the_internet(address: Address) -> bool:
    """Whether a packet to `address`, or to the address it embeds, goes to one host of the public internet."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_of_the_internet(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if embedded := address.ipv4_mapped or address.sixtofour or (address.teredo and address.teredo[1]):
            return is_of_the_internet(embedded)
        if any(address in network for network in _EMBEDDING):
            return False
    return address.is_global and not address.is_multicast
