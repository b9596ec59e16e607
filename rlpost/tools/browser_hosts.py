"""Which addresses a browser may fetch: hosts compared as a browser reads them, whole and not by their endings."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from rlpost.errors import ConfigError

Host = str | ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # an IPv4 address in its last 32 bits (RFC 6052)
# IPv4-compatible (RFC 4291), NAT64 of a site of its own (RFC 8215), and those of one link or site
_EMBEDDING = [ipaddress.IPv6Network(each) for each in ("::/96", "64:ff9b:1::/48", "fe80::/10", "fec0::/10")]

DEFAULT_PORTS = {"http": 80, "https": 443}

_NAME = re.compile(r"[a-z0-9_]([a-z0-9_\-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_\-]*[a-z0-9_])?)*")
_ODD = re.compile(r"[\x00-\x20\x7f\\]")  # what browsers drop, or take for a slash, and other parsers do not
_READ_IN_TWO_WAYS = "\u00df\u03c2\u200c\u200d"  # ß, final ς and joiners, where the two standards of IDNA differ


@dataclass(frozen=True)
class _Entry:
    """One line of the list: a host, with all names below it where it is a name of several parts."""

    host: Host
    port: int | None  # None: any

    def covers(self, host: Host, port: int) -> bool:
        if self.port not in (None, port):
            return False
        if isinstance(self.host, str) and isinstance(host, str) and "." in self.host:
            return host == self.host or host.endswith("." + self.host)
        return host == self.host


class AllowedHosts:
    """The hosts that may be reached, from entries as `example.org`, `localhost:8000`, `127.0.0.1` or `[::1]:80`.

    `example.org` stands for that name and every name below it; a name without a dot and an address for
    itself alone. With a port it is that port, without one any. Raises ConfigError for an entry that is
    none.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self.names = [entries] if isinstance(entries, str) else list(entries)
        if not self.names:
            raise ConfigError("allowed_domains is empty: name at least one host that the browser may visit")
        self._entries = [_entry(name) for name in self.names]

    def allows(self, host: Host, port: int) -> bool:
        """Whether `port` of `host`, as `host_of` gives it, may be reached."""
        return any(entry.covers(host, port) for entry in self._entries)

    def refusal(self, url: str) -> str | None:
        """Why `url` may not be fetched; None where it may."""
        try:
            scheme, host, port = parts_of(url)
        except ValueError as error:
            return f"{url[:200]!r} is no address: {error}"
        if scheme not in DEFAULT_PORTS:
            return f"{scheme}: addresses are not allowed, only http and https"
        if not self.allows(host, port):
            return f"{shown(host)}:{port} is not among the allowed domains: {', '.join(self.names)}"
        return None


def parts_of(url: str) -> tuple[str, Host, int]:
    """Scheme, host and port of a URL; of one that is neither http nor https only the scheme means anything.

    Raises ValueError for what browsers and servers might read in different ways.
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
    port = split.port  # raises ValueError where it is none
    return scheme, host_of(split.hostname or ""), DEFAULT_PORTS[scheme] if port is None else port


def host_of(text: str) -> Host:
    """A host in the one form in which it is compared: an address, or a name in lower case and punycode.

    Raises ValueError where it is none.
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
            raise ValueError(f"{text!r} is no host name") from error
    if not _NAME.fullmatch(name):
        raise ValueError(f"{text!r} is no host name" if text else "it names no host")
    return _ipv4(name) if _is_number(name.rpartition(".")[2]) else name


def shown(host: Host) -> str:
    """The host as it stands in a URL."""
    return f"[{host}]" if isinstance(host, ipaddress.IPv6Address) else str(host)


def _is_number(part: str) -> bool:
    return part.isdigit() or re.fullmatch(r"0x[0-9a-f]*", part) is not None


def is_of_the_internet(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether a packet to `address` goes to one host of the internet, and to no other network by what it embeds."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_of_the_internet(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if embedded := address.ipv4_mapped or address.sixtofour or (address.teredo and address.teredo[1]):
            return is_of_the_internet(embedded)
        if any(address in network for network in _EMBEDDING):
            return False
    return address.is_global and not address.is_multicast


def _ipv4(text: str) -> ipaddress.IPv4Address:
    """An address of up to four numbers, decimal, octal or hexadecimal, as the URL standard reads it.

    The last number fills all bytes that are left: 127.1 is 127.0.0.1, and so are 0x7f.1 and 2130706433.
    """
    parts = text.split(".")
    if len(parts) > 4 or not all(_is_number(part) for part in parts):
        raise ValueError(f"{text!r} is no address")
    numbers = [_number(part) for part in parts]
    *first, last = numbers
    if any(number > 255 for number in first) or last >= 256 ** (5 - len(parts)):
        raise ValueError(f"{text!r} is no address")
    return ipaddress.IPv4Address(sum(number << 8 * (3 - i) for i, number in enumerate(first)) + last)


def _number(part: str) -> int:
    if part.startswith("0x"):
        return int(part[2:] or "0", 16)
    return int(part, 8 if part.startswith("0") and part != "0" else 10)


def _entry(text: str) -> _Entry:
    """One entry of the list. Raises ConfigError where it is none."""
    wrong = f"allowed_domains names {text!r}, which is no host: write example.org, or localhost:8000 with a port"
    try:
        if not isinstance(text, str) or any(mark in text for mark in "/@*?#"):
            raise ValueError(text)
        if text.count(":") > 1 and not text.startswith("["):  # a bare IPv6 address
            return _Entry(host_of(text), None)
        split = urlsplit(f"//{text}")
        if not split.hostname or text.endswith(":"):
            raise ValueError(text)
        return _Entry(host_of(split.hostname), split.port)
    except ValueError as error:
        raise ConfigError(wrong) from error
