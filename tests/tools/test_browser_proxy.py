"""The browser's way out, without a browser: what it passes on, and to whom."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from rlpost.tools.browser_proxy import AllowedHosts, FilterProxy, host_of
from tests.tools.web import Site, served


@pytest.fixture
def good() -> Iterator[Site]:
    with served({"/": "welcome"}) as site:
        yield site


@pytest.fixture
def bad() -> Iterator[Site]:
    with served({"/": "evil"}) as site:
        yield site


def told(proxy: FilterProxy, *messages: str) -> str:
    """What the proxy answers to `messages` on one connection, until it ends that."""

    async def talk() -> str:
        await proxy.start()
        try:
            async with asyncio.timeout(60):
                reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
                for message in messages:
                    writer.write(message.encode())
                answer = await reader.read()
                writer.close()
                return answer.decode()
        finally:
            await proxy.close()

    return asyncio.run(talk())


def get(address: str, host: str = "x") -> str:
    return f"GET http://{address}/ HTTP/1.1\r\nHost: {host}\r\nProxy-Connection: keep-alive\r\n\r\n"


def test_an_allowed_request_is_passed_on_and_its_connection_ended(good: Site) -> None:
    answer = told(FilterProxy(AllowedHosts([f"127.0.0.1:{good.port}"])), get(f"127.0.0.1:{good.port}"))
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 ")
    assert "Connection: close" in head
    assert body == "welcome"
    assert good.visits == ["GET /"]


def test_a_second_request_on_the_connection_goes_nowhere(good: Site, bad: Site) -> None:
    """It would reach the server of the first one, whatever host it names."""
    proxy = FilterProxy(AllowedHosts([f"127.0.0.1:{good.port}"]))
    post = f"POST http://127.0.0.1:{good.port}/said HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\na=b"
    answer = told(proxy, post + get(f"127.0.0.1:{bad.port}"))
    assert "you said {'a': ['b']}" in answer
    assert answer.count("HTTP/1.1") == 1
    assert (good.visits, bad.visits) == (["POST /said"], [])


@pytest.mark.parametrize(
    "request_of",
    [
        lambda port: get(f"127.0.0.1:{port}"),
        lambda port: get(f"localhost:{port}"),
        lambda port: get(f"2130706433:{port}"),
        lambda port: get(f"[::ffff:127.0.0.1]:{port}"),
        lambda port: f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n" + get("x"),
        lambda port: f"CONNECT localhost:{port} HTTP/1.1\r\n\r\n" + get("x"),
    ],
)
def test_any_other_host_is_refused_and_not_contacted(good: Site, bad: Site, request_of: Callable[[int], str]) -> None:
    proxy = FilterProxy(AllowedHosts([f"127.0.0.1:{good.port}"]))
    answer = told(proxy, request_of(bad.port))
    assert answer.startswith("HTTP/1.1 403 ")
    assert "is not among the allowed domains" in answer
    assert bad.visits == []
    assert proxy.num_refused == 1


def test_a_tunnel_to_an_allowed_host_carries_both_ways(good: Site) -> None:
    proxy = FilterProxy(AllowedHosts([f"127.0.0.1:{good.port}"]))
    through = "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = told(proxy, f"CONNECT 127.0.0.1:{good.port} HTTP/1.1\r\n\r\n", through)
    assert answer.startswith("HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK")
    assert answer.endswith("welcome")


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("GET / HTTP/1.1\r\n\r\n", 400),  # to the proxy itself
        ("nonsense\r\n\r\n", 400),
        ("GET http://127.0.0.1:x/ HTTP/1.1\r\n\r\n", 400),
        ("CONNECT 127.0.0.1 HTTP/1.1\r\n\r\n", 400),
        ("GET file:///etc/passwd HTTP/1.1\r\n\r\n", 403),
        ("GET https://127.0.0.1/ HTTP/1.1\r\n\r\n", 403),
        ("POST http://127.0.0.1/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 403),
        ("GET http://127.0.0.1:1/ HTTP/1.1\r\n\r\n", 502),  # nobody listens there
        ("x" * 3_000_000, 400),  # refused long before it has been sent
        (f"POST https://127.0.0.1/ HTTP/1.1\r\nContent-Length: 3000000\r\n\r\n{'x' * 3_000_000}", 403),
    ],
)
def test_what_is_no_request_for_an_allowed_page_is_answered_by_the_proxy(message: str, status: int) -> None:
    assert told(FilterProxy(AllowedHosts(["127.0.0.1"])), message).startswith(f"HTTP/1.1 {status} ")


@pytest.fixture
def every_name_leads_to(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_to(*addresses: str) -> None:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    return set_to


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1"]
)
def test_an_allowed_name_may_not_lead_to_this_machine_or_its_network(
    good: Site, every_name_leads_to: Callable[..., None], address: str
) -> None:
    every_name_leads_to(address)
    proxy = FilterProxy(AllowedHosts(["wiki.example"]))
    answer = told(proxy, get(f"wiki.example:{good.port}"))
    assert answer.startswith("HTTP/1.1 403 ")
    assert "an address of this machine or its network" in answer
    assert good.visits == []


def test_names_of_the_own_network_are_reached_where_that_is_wanted(
    good: Site, every_name_leads_to: Callable[..., None]
) -> None:
    every_name_leads_to("127.0.0.1")
    proxy = FilterProxy(AllowedHosts(["wiki.example"]), private_addresses=True)
    assert told(proxy, get(f"wiki.example:{good.port}")).endswith("welcome")


def test_a_name_with_several_addresses_is_tried_at_each(good: Site) -> None:
    """localhost often stands for ::1 first, where this server does not listen."""
    assert told(FilterProxy(AllowedHosts(["localhost"])), get(f"localhost:{good.port}")).endswith("welcome")


def test_why_a_host_is_not_reached_is_known_until_it_is(good: Site) -> None:
    proxy = FilterProxy(AllowedHosts(["127.0.0.1", "nowhere.invalid"]))
    address = host_of("127.0.0.1")
    told(proxy, get("127.0.0.1:1"))
    assert "Connect call failed" in (proxy.fault_of(address, 1) or "")
    told(proxy, get("nowhere.invalid"))
    assert proxy.fault_of("nowhere.invalid", 80)
    told(proxy, get("example.com"))
    assert proxy.fault_of("example.com", 80) == "example.com:80 is not among the allowed domains"
    proxy.note_fault(address, good.port, "it was down")
    told(proxy, get(f"127.0.0.1:{good.port}"))
    assert proxy.fault_of(address, good.port) is None


def test_closing_ends_connections_that_are_open() -> None:
    async def open_and_close() -> bytes:
        proxy = FilterProxy(AllowedHosts(["127.0.0.1"]))
        await proxy.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        await asyncio.sleep(0.05)
        await proxy.close()
        left = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return left

    run: Callable[[Coroutine[Any, Any, bytes]], bytes] = asyncio.run
    assert run(open_and_close()) == b""
