"""The browser's way out, without a browser: which addresses may be fetched, what it passes on, and to whom."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Callable, Iterator

import pytest

from rlpost.errors import ConfigError
from rlpost.tools.browser_proxy import AllowedHosts, FilterProxy, host_of, is_of_the_internet
from tests.says import Says
from tests.tools.web import Site, served

# Which addresses may be fetched

ALLOWED = {
    "example.com": [
        *("http://example.com", "HTTP://EXAMPLE.COM./", "http://example.com/?q=two words\\"),
        *("https://www.example.com/path?q=1#part", "https://a.b.example.com:8443/"),
    ],
    "Example.COM.": ["http://example.com/"],
    "example.com:8080": ["http://example.com:8080/"],
    "example.com:443": ["https://example.com/"],
    "localhost": ["http://localhost:9999/"],
    "127.0.0.1:80": ["http://127.0.0.1/"],
    "127.0.0.1": [  # the same address in other words
        *("http://2130706433/", "http://0x7f.1/", "http://0177.0.0.01/", "http://127.0.0.1./"),
    ],
    "::1": ["http://[0:0:0:0:0:0:0:1]/"],
    "[::1]:8000": ["http://[::1]:8000/"],
    "bücher.example": ["http://xn--bcher-kva.example/", "http://www。bücher.example/"],
    "xn--bcher-kva.example": ["http://BÜCHER.example/"],
}
REFUSED = {
    "example.com": [
        *("http://badexample.com/", "http://example.com.evil.net/", "http://example.org/", "http://com/"),
        *("http://example.com@evil.net/", "http://user:secret@example.com/"),
        *("http://evil.net\\@example.com/", "http://evil.net\\.example.com/", "http://evil.net#@example.com/"),
        *("http://evil.net?.example.com/", "http://evil.net/.example.com", "http://example%2ecom/"),
        *("http://exa\tmple.com/", " http://example.com/", "http://example.com../", "http://.example.com/"),
        *("http:example.com", "http:///example.com", "//example.com/", "example.com", ""),
        *("http://example.com:65536/", "http://example.com:x/"),
        *("file:///etc/passwd", "data:text/html,x", "javascript:alert(1)", "chrome://version", "about:blank"),
        *("view-source:http://example.com/", "blob:http://example.com/5", "ftp://example.com/", "ws://example.com/"),
    ],
    "www.example.com": ["http://example.com/"],
    "example.com:8080": ["http://example.com/", "http://www.example.com:8081/"],
    "localhost": ["http://sub.localhost/", "http://127.0.0.1/"],
    "127.0.0.1": [
        *("http://localhost/", "http://[::ffff:127.0.0.1]/", "http://a.127.0.0.1/", "http://127.0.0.1.localhost/"),
        *("http://127.0.0.256/", "http://4294967296/", "http://127.0.0.09/"),
    ],
    "127.0.0.1:80": [
        *("http://127.0.0.1.:81/", "http://2130706433:81/", "http://0x7f.0.0.1:81/"),
        *("http://127.0.0.1:80@localhost:81/", "http://localhost:81\\@127.0.0.1:80/"),
    ],
    "10.0.0.1": ["http://110.0.0.1/"],
    "fass.example": ["http://faß.example/"],
}


def pairs(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(entry, url) for entry, urls in table.items() for url in urls]


@pytest.mark.parametrize(("entry", "url"), pairs(ALLOWED))
def test_a_listed_host_and_the_names_below_it_are_allowed(entry: str, url: str) -> None:
    assert AllowedHosts([entry]).refusal(url) is None


@pytest.mark.parametrize(("entry", "url"), pairs(REFUSED))
def test_everything_else_is_refused(entry: str, url: str) -> None:
    assert AllowedHosts([entry]).refusal(url)


def test_a_refusal_names_the_host_and_the_list(says: Says) -> None:
    hosts = AllowedHosts(["example.com", "localhost:80"])
    urls = ("https://evil.net/x", "http://[::1]/", "http://LOCALHOST.:81/", "http://0x7f000001/")
    says("tools", "\n".join(str(hosts.refusal(url)) for url in urls))


@pytest.mark.parametrize(
    "entry",
    [
        *("http://example.com", "example.com/path", "example.com?x", "user@example.com", "*.example.com"),
        *("", "a b", "example..com", "example.com:", "example.com:70000", "[::1", "1.2.3.4.5", "faß.example"),
    ],
)
def test_an_entry_that_is_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="allowed_domains"):
        AllowedHosts(["example.com", entry])


def test_an_empty_list_is_refused_and_a_string_is_one_entry() -> None:
    with pytest.raises(ConfigError, match="allowed_domains"):
        AllowedHosts([])
    assert AllowedHosts("example.com").refusal("http://example.com") is None
    assert AllowedHosts("example.com").refusal("http://e") is not None


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::8.8.8.8"])  # the last: NAT64
def test_an_address_of_the_internet_is_known(address: str) -> None:
    assert is_of_the_internet(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "::1", "fe80::1", "fec0::1", "::10.0.0.1", "::8.8.8.8", "::ffff:10.0.0.1"),
        *("224.0.0.251", "ff0e::1"),  # multicast
        *("64:ff9b::127.0.0.1", "64:ff9b::10.0.0.1"),  # NAT64
        "64:ff9b:1::8.8.8.8",  # NAT64 of somebody's own network
        *("2002:7f00:1::", "2002:c0a8:101::1"),  # 6to4 of 127.0.0.1 and of 192.168.1.1
        "2001:0:4136:e378:8000:63bf:80ff:fffe",  # Teredo of 127.0.0.1
    ],
)
def test_an_address_is_judged_by_where_it_leads(address: str) -> None:
    assert not is_of_the_internet(ipaddress.ip_address(address))


# What is passed on


@pytest.fixture
def good() -> Iterator[Site]:
    with served({"/": "welcome"}) as site:
        yield site


@pytest.fixture
def proxy(good: Site) -> FilterProxy:
    """Lets through to the good site alone."""
    return FilterProxy(AllowedHosts([f"127.0.0.1:{good.port}"]))


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


def test_an_allowed_request_is_passed_on_once(good: Site, proxy: FilterProxy) -> None:
    head, _, body = told(proxy, get(f"127.0.0.1:{good.port}")).partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 ")
    assert "Connection: close" in head
    assert body == "welcome"
    assert good.visits == ["GET /"]


def test_a_second_request_on_the_connection_goes_nowhere(good: Site, bad: Site, proxy: FilterProxy) -> None:
    """It would reach the server of the first one, whatever host it names."""
    post = f"POST http://127.0.0.1:{good.port}/said HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\na=b"
    answer = told(proxy, post + get(f"127.0.0.1:{bad.port}"))
    assert "{'a': ['b']}" in answer
    assert answer.count("HTTP/1.1") == 1
    assert (good.visits, bad.visits) == (["POST /said"], [])


@pytest.mark.parametrize(
    "asked",
    [
        *(get(f"{host}:PORT") for host in ("127.0.0.1", "localhost", "2130706433", "[::ffff:127.0.0.1]")),
        *(f"CONNECT {host}:PORT HTTP/1.1\r\n\r\n" + get("x") for host in ("127.0.0.1", "localhost")),
    ],
)
def test_any_other_host_is_refused_and_not_contacted(bad: Site, proxy: FilterProxy, asked: str) -> None:
    answer = told(proxy, asked.replace("PORT", str(bad.port)))
    assert answer.startswith("HTTP/1.1 403 ")
    assert bad.visits == []


def test_a_tunnel_to_an_allowed_host_carries_both_ways(good: Site, proxy: FilterProxy) -> None:
    through = "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = told(proxy, f"CONNECT 127.0.0.1:{good.port} HTTP/1.1\r\n\r\n", through)
    assert re.match(r"HTTP/1.1 200 [^\r]*\r\n\r\nHTTP/1.1 200 OK", answer)
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
def test_anything_but_a_request_for_an_allowed_page_is_refused(message: str, status: int) -> None:
    assert told(FilterProxy(AllowedHosts(["127.0.0.1"])), message).startswith(f"HTTP/1.1 {status} ")


@pytest.fixture
def every_name_leads_to(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_to(*addresses: str) -> None:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    return set_to


Leading = Callable[..., None]


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1"]
)
def test_an_allowed_name_may_not_lead_to_the_own_network(
    good: Site, every_name_leads_to: Leading, address: str
) -> None:
    every_name_leads_to(address)
    answer = told(FilterProxy(AllowedHosts(["wiki.example"])), get(f"wiki.example:{good.port}"))
    assert answer.startswith("HTTP/1.1 403 ")
    assert good.visits == []


def test_names_of_the_own_network_are_reached_if_wanted(good: Site, every_name_leads_to: Leading) -> None:
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
    assert "Connect call" in (proxy.fault_of(address, 1) or "")
    for host in ("nowhere.invalid", "example.com"):
        told(proxy, get(host))
        assert proxy.fault_of(host, 80)
    proxy.note_fault(address, good.port, "it was down")
    told(proxy, get(f"127.0.0.1:{good.port}"))
    assert proxy.fault_of(address, good.port) is None


def test_closing_ends_connections_that_are_open(proxy: FilterProxy) -> None:
    async def open_and_close() -> bytes:
        await proxy.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        await asyncio.sleep(0.05)
        await proxy.close()
        left = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return left

    assert asyncio.run(open_and_close()) == b""
