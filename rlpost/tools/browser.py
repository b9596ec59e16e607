"""A browser as a tool: pages of allowed hosts, read and used by the model in a real Chromium.

`BrowserTransform` is the tool. `Pages` are a Chromium and its pages, one a conversation, and run on one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from rlpost.data.conversation import Conversation
from rlpost.envs.base import ToolCall, ToolResult, ToolTransform
from rlpost.errors import MissingExtraError, ToolError
from rlpost.imports import require
from rlpost.remote.loop import LoopThread
from rlpost.text import first_line
from rlpost.tools.browser_proxy import AllowedHosts, FilterProxy, first_of, parts_of

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Frame, Locator, Page, Playwright, Request, Route

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LAUNCH_SECONDS = 30.0
LAUNCHES = 3  # most attempts to start Chromium
BACK_OFF_SECONDS = 0.2
CLOSE_SECONDS = 5.0
PROBE_SECONDS = 2.0  # for a page to show that its scripts do not block it
BEGIN_SECONDS = 0.1  # wait after a click or a key, in case a request follows
MAX_CHARS = 100_000  # most text that is taken from a page
MAX_SCROLL_PIXELS = 100_000


class BrowserTransform(ToolTransform):
    """Offers the function `browser`: navigate, click, type, scroll and extract, in one page a conversation.

    `allowed_domains` are the hosts that may be visited: `example.org`, which includes every name below it,
    `localhost:8000`, or an address. Nothing else is contacted, whatever the page requests: each request
    is checked before it is sent, and the browser's only way out is a proxy that connects to these hosts
    alone. A name that resolves to an address of this machine or its network is refused too, unless it is
    `localhost` or `private_addresses` is set.

    An action takes at most `timeout` seconds; a page that does not respond is closed. Each conversation has a page
    with its own cookies, which is closed with the conversation; above `max_pages` the least recently used one is
    closed. `executable_path` is the Chromium to run, by default the system's.

    Raises ConfigError for an empty or invalid list of hosts, MissingExtraError without
    playwright; when used, MissingExtraError without a Chromium, ToolError if Chromium does not start.
    """

    def __init__(
        self,
        allowed_domains: Sequence[str],
        headless: bool = True,
        timeout: float = 30.0,
        *,
        max_pages: int = 16,
        private_addresses: bool = False,
        executable_path: str | None = None,
    ) -> None:
        require("playwright", "browser", "BrowserTransform")
        self.allowed = AllowedHosts(allowed_domains)
        self.timeout = timeout
        self.at_once = max_pages  # a call waits for room here, not within its time limit
        proxy = FilterProxy(self.allowed, private_addresses=private_addresses)
        self.pages = Pages(proxy, headless, timeout, max_pages, executable_path)
        self._changing = threading.Lock()
        self.thread = LoopThread("rlpost-browser")
        # Without a close, the browser still ends with this object or with the interpreter.
        self._finalizer = weakref.finalize(self, _stop, self.pages, self.thread)

    def start(self) -> None:
        """Start the browser. Raises MissingExtraError without a Chromium, ToolError if it does not start."""
        with self._changing:
            self.thread.run(self.pages.start(), LAUNCHES * (LAUNCH_SECONDS + CLOSE_SECONDS))

    def schemas(self) -> list[dict[str, Any]]:
        """See `ToolTransform.schemas`."""
        return [{"type": "function", "function": _FUNCTION}]

    def on_begin(self, conversations: Sequence[Conversation]) -> None:
        """See `ToolTransform.on_begin`; each conversation starts without a page."""
        super().on_begin(conversations)
        self.on_end(conversations)

    def on_end(self, conversations: Sequence[Conversation]) -> None:
        """Close the pages of these conversations."""
        self._close([conversation.key for conversation in conversations])

    def on_reset(self) -> None:
        """Close every page."""
        self._close(None)

    def call(self, conversation: Conversation, call: ToolCall) -> ToolResult:
        """See `ToolTransform.call`."""
        if fault := _fault(call.arguments):
            return ToolResult(fault, ok=False)
        if call.arguments["action"] == "navigate" and (refusal := self.allowed.refusal(call.arguments["url"])):
            return ToolResult(f"refused: {refusal}", ok=False)
        launching = LAUNCHES * (LAUNCH_SECONDS + CLOSE_SECONDS)
        longest = launching + 3 * self.timeout + 2 * CLOSE_SECONDS  # for room, for a page, for the action
        return self.thread.run(self._act(conversation.key, call.arguments), longest)

    def close(self) -> None:
        """End the browser; when this returns, all of its processes are gone."""
        with self._changing:
            _stop(self.pages, self.thread)

    @property
    def num_pages(self) -> int:
        """How many pages are open."""
        return len(self.pages.tabs)

    def _close(self, keys: Sequence[tuple[int, int]] | None) -> None:
        if self.num_pages:
            self.thread.run(self.pages.close(keys), 2 * CLOSE_SECONDS)

    async def _act(self, key: tuple[int, int], arguments: Mapping[str, Any]) -> ToolResult:
        """Run one action in the page of this conversation."""
        try:
            async with self.pages.using(key) as tab, asyncio.timeout(self.timeout):
                earlier = [
                    f"before this, the page was refused another: {refusal}" for refusal in tab.refused_pages[-1:]
                ]
                earlier += ["before this, a window that it opened was closed"] if tab.closed_windows else []
                tab.forget()
                try:
                    result = ToolResult(await _ACTIONS[arguments["action"]](tab, arguments))
                except Failed as error:
                    result = ToolResult(str(error), ok=False)
                except _errors() as error:
                    if tab.is_lost:
                        return ToolResult(f"the page is lost, navigate again: {_message_of(error)}", ok=False)
                    result = ToolResult(_message_of(error), ok=False)
                answer = await self._checked(tab, arguments, result, earlier)
                tab.forget()  # all of it has been reported
                return answer
        except TimeoutError:
            await self.pages.close([key])
            return ToolResult("the page gave no result in time and was closed: navigate again", ok=False)
        except _errors() as error:
            return ToolResult(
                f"the browser failed, and the page is lost: {_message_of(error)}; navigate again", ok=False
            )

    async def _checked(
        self, tab: Tab, arguments: Mapping[str, Any], result: ToolResult, notes: list[str]
    ) -> ToolResult:
        """The result with notes of refused requests, or a refusal if the page went where it may not be."""
        if tab.refused_pages:
            return ToolResult(f"refused: {tab.refused_pages[-1]}", ok=False)
        url = tab.page.url
        if url not in ("", "about:blank") and not url.startswith("chrome-error:"):
            refusal = self.allowed.refusal(url)
            if refusal is not None:  # after a redirect, which the proxy refused
                with contextlib.suppress(*_errors()):  # an error page may load first
                    await tab.page.goto("about:blank")
                return ToolResult(f"refused: {refusal}", ok=False)
        if arguments["action"] == "navigate" and not result.ok:
            _, host, port = parts_of(arguments["url"])
            if why := self.pages.proxy.fault_of(host, port):
                return ToolResult(f"{arguments['url']} cannot be reached: {why}", ok=False)
        if tab.refused_parts:
            notes = [*notes, f"of its parts were refused: {'; '.join(sorted(set(tab.refused_parts)))[:500]}"]
        if tab.closed_windows:
            notes = [*notes, "a window that it opened was closed"]
        return ToolResult("\n".join([result.text, *(f"[{note}]" for note in notes)]), result.ok)


def _stop(pages: Pages, thread: LoopThread) -> None:
    """End the browser and the thread."""
    if thread.running:
        try:
            thread.run(pages.stop(), 4 * CLOSE_SECONDS)
        finally:
            thread.close()


# The actions

_NEEDED = {"navigate": ("url",), "click": ("selector",), "type": ("selector", "text"), "scroll": (), "extract": ()}
_TYPES = {"string": str, "boolean": bool, "integer": int}


def _property(kind: str, description: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "description": description, **more}


_FUNCTION: dict[str, Any] = {
    "name": "browser",
    "description": "Use a web browser. Navigate to a page first; then read it with extract, and use it.",
    "parameters": {
        "type": "object",
        "properties": {
            "action": _property("string", "What to do.", enum=list(_NEEDED)),
            "url": _property("string", "navigate: the address, with http:// or https://."),
            "selector": _property("string", "click, type, extract: a CSS selector, or text=... for a visible text."),
            "text": _property("string", "type: what the field shall hold."),
            "submit": _property("boolean", "type: whether to press Enter afterwards."),
            "direction": _property("string", "scroll: where to; down without it.", enum=["down", "up"]),
            "amount": _property("integer", "scroll: pixels; one screen without it."),
            "extract_type": _property(
                "string", "extract: of all elements that match; text without it.", enum=["text", "html", "attribute"]
            ),
            "attribute": _property("string", "extract: the name of the attribute, such as href."),
        },
        "required": ["action"],
    },
}


def _fault(arguments: Mapping[str, Any]) -> str | None:
    """The fault in the arguments of a call, worded for the model; None if they are fine."""
    known = _FUNCTION["parameters"]["properties"]
    for name, value in arguments.items():
        if name not in known:
            return f"there is no argument {name[:80]!r}; there are {', '.join(known)}"
        if type(value) is not _TYPES[known[name]["type"]]:
            return f"{name} must be {known[name]['type']}, and is {value!r:.80}"
        if value not in (choices := known[name].get("enum", [value])):
            return f"{name} must be one of {', '.join(choices)}, and is {value!r:.80}"
    if "action" not in arguments:
        return f"action is missing: give one of {', '.join(_NEEDED)}"
    for name in _NEEDED[arguments["action"]]:
        if name not in arguments:
            return f"{arguments['action']} needs {name}"
    if arguments.get("extract_type") == "attribute" and "attribute" not in arguments:
        return "extract_type attribute needs attribute, the name of one"
    if not 0 <= arguments.get("amount", 0) <= MAX_SCROLL_PIXELS:
        return f"amount must be 0 to {MAX_SCROLL_PIXELS} pixels"
    return None


class Failed(Exception):
    """An action that came to nothing, for a reason that is worded for the model."""


async def _navigate(tab: Tab, arguments: Mapping[str, Any]) -> str:
    response = await tab.page.goto(arguments["url"], wait_until="commit")
    place = await _led_to(tab)
    if response is not None and response.status >= 400:
        raise Failed(f"the server answered with status {response.status}\n{place}")
    return place


async def _click(tab: Tab, arguments: Mapping[str, Any]) -> str:
    element = await _found(tab, arguments["selector"])
    await element.first.click(timeout=tab.find_seconds * 1000)
    await asyncio.sleep(BEGIN_SECONDS)
    return await _led_to(tab)


async def _type(tab: Tab, arguments: Mapping[str, Any]) -> str:
    element = await _found(tab, arguments["selector"])
    await element.first.fill(arguments["text"], timeout=tab.find_seconds * 1000)
    if arguments.get("submit"):
        await element.first.press("Enter", timeout=tab.find_seconds * 1000)
        await asyncio.sleep(BEGIN_SECONDS)
    return await _led_to(tab)


async def _scroll(tab: Tab, arguments: Mapping[str, Any]) -> str:
    _check_page(tab)
    direction, amount = arguments.get("direction", "down"), arguments.get("amount")
    where = await tab.page.evaluate(_SCROLL, [direction, amount])
    if not isinstance(where, list) or [type(each) for each in where] != [int] * 3:  # its scripts may say anything
        raise Failed("the page does not say which part of it is in view")
    top, height, window = where
    return f"pixels {top} to {top + window} of {max(height, window)} are in view"


async def _extract(tab: Tab, arguments: Mapping[str, Any]) -> str:
    kind = arguments.get("extract_type", "text")
    elements = await _found(tab, arguments.get("selector", "html" if kind == "html" else "body"))
    attribute = arguments.get("attribute")
    values = await elements.evaluate_all(_EXTRACT, [kind, attribute, MAX_CHARS])
    if kind == "attribute" and not values:
        raise Failed(f"no element that matches has an attribute {attribute!r}")
    text = "\n".join(map(str, values)) if isinstance(values, list) else str(values)  # scripts may give anything
    return text[:MAX_CHARS]


_ACTIONS = {"navigate": _navigate, "click": _click, "type": _type, "scroll": _scroll, "extract": _extract}

# Texts are cut in the page: a document of gigabytes stays where it is.
_EXTRACT = """(elements, [kind, attribute, most]) => {
    const values = [];
    let left = most;
    for (const element of elements) {
        const value = kind === "attribute" ? element.getAttribute(attribute)
            : kind === "html" ? element.outerHTML : (element.innerText ?? element.textContent);
        if (value === null) continue;
        values.push(value.slice(0, left));
        left -= value.length + 1;
        if (left <= 0) break;
    }
    return values;
}"""
_SCROLL = """([direction, amount]) => {
    const step = amount ?? window.innerHeight;
    window.scrollBy({top: direction === "up" ? -step : step, behavior: "instant"});
    return [Math.round(window.scrollY), document.documentElement.scrollHeight, window.innerHeight];
}"""


async def _found(tab: Tab, selector: str) -> Locator:
    """The matching elements. Raises Failed without one, TimeoutError for a page that hangs."""
    from playwright.async_api import TimeoutError as TooLate

    _check_page(tab)
    elements = tab.page.locator(selector)
    try:
        await elements.first.wait_for(state="attached", timeout=tab.find_seconds * 1000)
    except TooLate:
        async with asyncio.timeout(PROBE_SECONDS):
            await tab.page.evaluate("0")
        raise Failed(f"no element matches {selector!r}") from None
    return elements


def _check_page(tab: Tab) -> None:
    if tab.page.url in ("", "about:blank"):
        raise Failed("no page is open: navigate to one first")


async def _led_to(tab: Tab) -> str:
    """Title and address of the page after an action, once it is readable; a page that keeps loading is usable too."""
    from playwright.async_api import TimeoutError as TooLate

    if not await tab.arrive():
        raise Failed("the page it leads to did not load in time")
    if tab.refused_pages:
        raise Failed("refused")  # `_checked` gives the reason
    with contextlib.suppress(TooLate):
        await tab.page.wait_for_load_state("load", timeout=tab.load_seconds * 1000)
    return f"{(await tab.page.title())[:200]}\n{tab.page.url}"


def _message_of(error: Exception) -> str:
    """playwright's message, without its log."""
    return first_line(error)[:300]


# The browser and its pages

# playwright's own flags turn off most background work of Chromium.
_FLAGS = (
    "--disable-quic",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",  # only the proxy looks names up
    # Otherwise WebRTC bypasses every proxy; newer and older versions use different names.
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
)


@dataclass(eq=False)
class Pages:
    """A Chromium with at most `max_pages` pages; the least recently used one makes room for another."""

    proxy: FilterProxy
    headless: bool
    seconds: float  # for an action
    max_pages: int
    executable_path: str | None
    restarts: int = 0
    tabs: OrderedDict[Hashable, Tab] = field(default_factory=OrderedDict)
    _playwright: Playwright | None = None
    _browser: Browser | None = None
    _busy: set[Hashable] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._renew()

    def _renew(self) -> None:
        """Make new locks: they belong to a loop, and each start may have another."""
        self._launching = asyncio.Lock()
        self._free = asyncio.Semaphore(self.max_pages)

    async def start(self) -> Browser:
        """The browser, launched if it is not running. Raises ToolError if that fails."""
        async with self._launching:
            if self._browser is not None and self._browser.is_connected():
                return self._browser
            if self._browser is not None:
                self.restarts += 1
                self.tabs.clear()
            await self.proxy.start()
            for attempt in count(1):
                try:
                    self._browser = await self._launch()
                    break
                except _errors() as error:
                    if attempt == LAUNCHES:
                        why = first_line(error)
                        raise ToolError(f"Chromium did not start in {attempt} attempts: {why}") from error
                    await asyncio.sleep(BACK_OFF_SECONDS * 2**attempt)
            assert self._browser is not None
            return self._browser

    async def _launch(self) -> Browser:
        from playwright.async_api import async_playwright

        if self._playwright is None:
            self._playwright = await async_playwright().start()
        return await self._playwright.chromium.launch(
            executable_path=self.executable_path or found_program(self._playwright.chromium.executable_path),
            headless=self.headless,
            chromium_sandbox=os.geteuid() != 0,  # Chromium does not run its sandbox as root
            proxy={"server": f"http://127.0.0.1:{self.proxy.port}", "bypass": "<-loopback>"},
            args=list(_FLAGS),
            timeout=LAUNCH_SECONDS * 1000,
        )

    @contextlib.asynccontextmanager
    async def using(self, key: Hashable) -> AsyncIterator[Tab]:
        """The page of `key`, opened if needed, and kept open inside the block. Raises TimeoutError."""
        async with asyncio.timeout(self.seconds):
            await self._free.acquire()
        self._busy.add(key)
        try:
            browser = await self.start()
            async with asyncio.timeout(self.seconds):
                tab = self.tabs.get(key)
                if tab is None or tab.is_lost:
                    await self.close([key])
                    await self._make_room()
                    tab = await self._open(browser)
                    self.tabs[key] = tab
            self.tabs.move_to_end(key)
            yield tab
        finally:
            self._busy.discard(key)
            self._free.release()

    async def close(self, keys: Iterable[Hashable] | None = None) -> None:
        """Close the pages of `keys`, or all of them."""
        chosen = list(self.tabs) if keys is None else keys
        tabs = [self.tabs.pop(key) for key in chosen if key in self.tabs]
        await asyncio.gather(*(_closed(tab.context) for tab in tabs))

    async def stop(self) -> None:
        """End the browser and the proxy."""
        browser, playwright = self._browser, self._playwright
        self._browser = self._playwright = None
        self.tabs.clear()
        if browser is not None:
            await _closed(browser)
        if playwright is not None:
            with contextlib.suppress(TimeoutError, *_errors()):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await playwright.stop()
        await self.proxy.close()
        self._renew()

    async def _make_room(self) -> None:
        """Close the least recently used idle pages until one more may be opened."""
        idle = [key for key in self.tabs if key not in self._busy]
        await self.close(idle[: max(0, len(self.tabs) + 1 - self.max_pages)])

    async def _open(self, browser: Browser) -> Tab:
        context = await browser.new_context(accept_downloads=False, service_workers="block")
        context.set_default_timeout(self.seconds * 900)  # milliseconds; less than the action's own limit
        tab = Tab(context, await context.new_page(), self.proxy.allowed, self.seconds)
        await tab.watch()
        return tab


class Tab:
    """The page of one conversation, and the requests that were refused since the last report."""

    def __init__(self, context: BrowserContext, page: Page, allowed: AllowedHosts, seconds: float) -> None:
        self.context = context
        self.page = page
        self.allowed = allowed
        # parts of the `seconds` of an action, together less
        self.find_seconds = min(5.0, seconds / 5)  # for an element to appear, and again for it to accept a click
        self.arrive_seconds = seconds * 0.4  # for the page that a click leads to
        self.load_seconds = min(5.0, seconds * 0.15)  # for a page's pictures and scripts after its text
        self.refused_pages: list[str] = []
        self.refused_parts: list[str] = []
        self.closed_windows = 0
        self._settled = asyncio.Event()  # clear while the page navigates
        self._settled.set()
        self._refused = asyncio.Event()
        self._crashed = False

    @property
    def is_lost(self) -> bool:
        """Whether the page has crashed or is closed."""
        return self._crashed or self.page.is_closed()

    async def watch(self) -> None:
        """Check every request, and close windows that the page opens."""
        await self.context.route("**/*", self._admit)
        self.context.on("page", self._shut_window)
        self.page.on("framenavigated", self._arrived)
        self.page.on("requestfailed", self._went_nowhere)
        self.page.on("crash", self._crash)

    async def arrive(self) -> bool:
        """Wait until the page that the last action leads to is readable or refused; False if neither comes in time."""
        done = await first_of(self._readable(), self._refused.wait(), seconds=self.arrive_seconds)
        for wait in done:
            wait.result()
        return bool(done)

    async def _readable(self) -> None:
        await self._settled.wait()
        await self.page.wait_for_load_state("domcontentloaded")

    def forget(self) -> None:
        """Clear the report before another action."""
        self.refused_pages, self.refused_parts, self.closed_windows = [], [], 0
        self._refused.clear()

    async def _admit(self, route: Route, request: Request) -> None:
        """Allow or refuse a request before it is sent; only the proxy sees the hops of a redirect."""
        whole_page = self._is_page(request)
        refusal = self.allowed.refusal(request.url)
        if refusal and not request.is_navigation_request() and request.url.startswith(("data:", "blob:")):
            refusal = None  # made by the page itself, not fetched
        if refusal and whole_page:
            self.refused_pages.append(refusal)
            self._refused.set()
        elif refusal:
            self.refused_parts.append(refusal)
        elif whole_page:
            self._settled.clear()
        with contextlib.suppress(*_errors()):  # the page is gone by now
            await (route.abort("aborted") if refusal else route.continue_())

    def _is_page(self, request: Request) -> bool:
        if not request.is_navigation_request():
            return False
        try:
            return request.frame == self.page.main_frame
        except _errors():  # a new window has no frame at its first request
            return False

    def _arrived(self, frame: Frame) -> None:
        if frame == self.page.main_frame:
            self._settled.set()

    def _went_nowhere(self, request: Request) -> None:
        if self._is_page(request):
            self._settled.set()

    def _crash(self, page: Page) -> None:
        self._crashed = True

    async def _shut_window(self, page: Page) -> None:
        if page != self.page:
            self.closed_windows += 1
            with contextlib.suppress(*_errors()):
                await page.close()


def found_program(own: str) -> str:
    """The Chromium to run: the system's, or playwright's `own`. Raises MissingExtraError if neither exists."""
    system = next((path for path in map(shutil.which, PROGRAMS) if path), None)
    if system is None and not os.path.exists(own):
        raise MissingExtraError(
            f"the browser tool needs Chromium, and none of {', '.join(PROGRAMS)} is on the PATH: "
            "apt install chromium, or playwright install chromium, or give executable_path"
        )
    return system or own


async def _closed(what: BrowserContext | Browser) -> None:
    """Close `what`, within `CLOSE_SECONDS`; otherwise it ends with the browser."""
    with contextlib.suppress(TimeoutError, *_errors()):
        async with asyncio.timeout(CLOSE_SECONDS):
            await what.close()


def _errors() -> tuple[type[Exception], ...]:
    """The errors that playwright raises."""
    from playwright.async_api import Error

    return (Error,)
