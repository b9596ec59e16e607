"""Which addresses may be fetched."""

from __future__ import annotations

import ipaddress

import pytest

from rlpost.errors import ConfigError
from rlpost.tools.browser_proxy import AllowedHosts, host_of, is_of_the_internet, shown


@pytest.mark.parametrize(
    ("entry", "url"),
    [
        ("example.com", "http://example.com"),
        ("example.com", "https://www.example.com/path?q=1#part"),
        ("example.com", "https://a.b.example.com:8443/"),
        ("example.com", "HTTP://EXAMPLE.COM./"),
        ("Example.COM.", "http://example.com/"),
        ("example.com", "http://example.com/?q=two words\\"),
        ("example.com:8080", "http://example.com:8080/"),
        ("example.com:443", "https://example.com/"),
        ("localhost", "http://localhost:9999/"),
        ("127.0.0.1:80", "http://127.0.0.1/"),
        ("127.0.0.1", "http://2130706433/"),  # the same address in other words
        ("127.0.0.1", "http://0x7f.1/"),
        ("127.0.0.1", "http://0177.0.0.01/"),
        ("127.0.0.1", "http://127.0.0.1./"),
        ("::1", "http://[0:0:0:0:0:0:0:1]/"),
        ("[::1]:8000", "http://[::1]:8000/"),
        ("bücher.example", "http://xn--bcher-kva.example/"),
        ("xn--bcher-kva.example", "http://BÜCHER.example/"),
        ("bücher.example", "http://www。bücher.example/"),
    ],
)
def test_a_listed_host_and_the_names_below_it_are_allowed(entry: str, url: str) -> None:
    assert AllowedHosts([entry]).refusal(url) is None


@pytest.mark.parametrize(
    ("entry", "url"),
    [
        ("example.com", "http://badexample.com/"),
        ("example.com", "http://example.com.evil.net/"),
        ("example.com", "http://example.org/"),
        ("www.example.com", "http://example.com/"),
        ("example.com", "http://com/"),
        ("example.com:8080", "http://example.com/"),
        ("example.com:8080", "http://www.example.com:8081/"),
        ("example.com", "http://example.com@evil.net/"),
        ("example.com", "http://user:secret@example.com/"),
        ("example.com", "http://evil.net\\@example.com/"),
        ("example.com", "http://evil.net\\.example.com/"),
        ("example.com", "http://evil.net#@example.com/"),
        ("example.com", "http://evil.net?.example.com/"),
        ("example.com", "http://evil.net/.example.com"),
        ("example.com", "http://example%2ecom/"),
        ("example.com", "http://exa\tmple.com/"),
        ("example.com", " http://example.com/"),
        ("example.com", "http://example.com../"),
        ("example.com", "http://.example.com/"),
        ("example.com", "http:example.com"),
        ("example.com", "http:///example.com"),
        ("example.com", "//example.com/"),
        ("example.com", "example.com"),
        ("example.com", "http://example.com:65536/"),
        ("example.com", "http://example.com:x/"),
        ("example.com", ""),
        ("example.com", "file:///etc/passwd"),
        ("example.com", "data:text/html,x"),
        ("example.com", "javascript:alert(1)"),
        ("example.com", "view-source:http://example.com/"),
        ("example.com", "blob:http://example.com/5"),
        ("example.com", "ftp://example.com/"),
        ("example.com", "ws://example.com/"),
        ("localhost", "http://sub.localhost/"),
        ("localhost", "http://127.0.0.1/"),
        ("127.0.0.1", "http://localhost/"),
        ("127.0.0.1", "http://[::ffff:127.0.0.1]/"),
        ("127.0.0.1", "http://a.127.0.0.1/"),
        ("10.0.0.1", "http://110.0.0.1/"),
        ("127.0.0.1", "http://127.0.0.256/"),
        ("127.0.0.1", "http://4294967296/"),
        ("127.0.0.1", "http://127.0.0.09/"),
        ("fass.example", "http://faß.example/"),
    ],
)
def test_everything_else_is_refused(entry: str, url: str) -> None:
    assert AllowedHosts([entry]).refusal(url)


def test_a_refusal_names_the_host_and_the_list() -> None:
    refusal = AllowedHosts(["example.com", "localhost:80"]).refusal("https://evil.net/x")
    assert refusal == "evil.net:443 is not among the allowed domains: example.com, localhost:80"


@pytest.mark.parametrize(
    "entry",
    [
        *("http://example.com", "example.com/path", "example.com?x", "user@example.com", "*.example.com"),
        *("", "a b", "example..com", "example.com:", "example.com:70000", "[::1", "1.2.3.4.5", "faß.example"),
    ],
)
def test_an_entry_that_is_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="allowed_domains names"):
        AllowedHosts(["example.com", entry])


def test_an_empty_list_is_refused_and_a_string_is_one_entry() -> None:
    with pytest.raises(ConfigError, match="allowed_domains is empty"):
        AllowedHosts([])
    assert AllowedHosts("example.com").refusal("http://example.com") is None
    assert AllowedHosts("example.com").refusal("http://e") is not None


def test_hosts_are_shown_as_they_stand_in_an_address() -> None:
    assert [shown(host_of(text)) for text in ("[::1]", "LOCALHOST.", "0x7f000001")] == [
        "[::1]",
        "localhost",
        "127.0.0.1",
    ]


@pytest.mark.parametrize(
    ("address", "of_the_internet"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("64:ff9b::8.8.8.8", True),  # NAT64 to a host of the internet
        ("127.0.0.1", False),
        ("::1", False),
        ("224.0.0.251", False),  # multicast
        ("ff0e::1", False),
        ("64:ff9b::127.0.0.1", False),
        ("64:ff9b::10.0.0.1", False),
        ("64:ff9b:1::8.8.8.8", False),  # NAT64 of somebody's own network
        ("2002:7f00:1::", False),  # 6to4 of 127.0.0.1
        ("2002:c0a8:101::1", False),  # of 192.168.1.1
        ("2001:0:4136:e378:8000:63bf:80ff:fffe", False),  # Teredo of 127.0.0.1
        ("::ffff:10.0.0.1", False),
        ("::10.0.0.1", False),
        ("::8.8.8.8", False),
        ("fe80::1", False),
        ("fec0::1", False),
    ],
)
def test_an_address_is_judged_by_where_it_leads(address: str, of_the_internet: bool) -> None:
    assert is_of_the_internet(ipaddress.ip_address(address)) is of_the_internet
