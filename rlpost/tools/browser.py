"""A browser as a tool: pages of allowed hosts, read and used by the model in a real Chromium.

A Chromium and its pages, one a conversation; everything here runs on one asyncio loop.
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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlpost.data.conversation import Conversation
from rlpost.envs.base import ToolCall, ToolResult, ToolTransform
from rlpost.errors import ConfigError, MissingExtraError, ToolError
from rlpost.imports import require
from rlpost.remote.loop import LoopThread
from rlpost.text import first_line
from rlpost.tools.browser_proxy import AllowedHosts, FilterProxy, parts_of

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Frame, Locator, Page, Playwright, Request, Route

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LAUNCH_SECONDS = 30.0
LAUNCHES = 3  # in a row
BACK_OFF_SECONDS = 0.2
CLOSE_SECONDS = 5.0

# Beside these, playwright turns off most of what Chromium does in the background.
_FLAGS = (
    "--disable-quic",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",  # no name is looked up but by the proxy
    # WebRTC sends datagrams past every proxy otherwise; the two names are those of newer and older versions.
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
)


@dataclass(frozen=True)
class Limits:
    """Seconds for the parts of an action, together less than it may take."""

    whole: float

    @property
    def find(self) -> float:
        """For an element to appear, and again for it to take a click."""
        return min(5.0, self.whole / 5)

    @property
    def arrive(self) -> float:
        """For the page that a click leads to."""
        return self.whole * 0.4

    @property
    def load(self) -> float:
        """For a page's pictures and scripts after its text."""
        return min(5.0, self.whole * 0.15)


class Tab:
    """The page of one conversation, and what was refused to it since that was last told."""

    def __init__(self, context: BrowserContext, page: Page, allowed: AllowedHosts, limits: Limits) -> None:
        self.context = context
        self.page = page
        self.allowed = allowed
        self.limits = limits
        self.refused_pages: list[str] = []
        self.refused_parts: list[str] = []
        self.closed_windows = 0
        self._settled = asyncio.Event()  # clear while the page is on its way to another
        self._settled.set()
        self._refused = asyncio.Event()
        self._crashed = False

    @property
    def is_lost(self) -> bool:
        """Whether nothing more can come of it."""
        return self._crashed or self.page.is_closed()

    async def watch(self) -> None:
        """Look at every request, and keep to one page."""
        await self.context.route("**/*", self._admit)
        self.context.on("page", self._shut_window)
        self.page.on("framenavigated", self._arrived)
        self.page.on("requestfailed", self._went_nowhere)
        self.page.on("crash", self._crash)

    async def arrive(self) -> bool:
        """Wait for the page that the last action leads to, if to one; whether it came, or was refused, in time."""
        waits = [asyncio.ensure_future(self._readable()), asyncio.ensure_future(self._refused.wait())]
        try:
            done, _ = await asyncio.wait(waits, timeout=self.limits.arrive, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        for wait in done:
            wait.result()
        return bool(done)

    async def _readable(self) -> None:
        await self._settled.wait()
        await self.page.wait_for_load_state("domcontentloaded")

    def forget(self) -> None:
        """Begin another action."""
        self.refused_pages, self.refused_parts, self.closed_windows = [], [], 0
        self._refused.clear()

    async def _admit(self, route: Route, request: Request) -> None:
        """The first wall: each request before it is sent, hops of redirects excepted, which the proxy sees."""
        from playwright.async_api import Error

        whole_page = self._is_page(request)
        refusal = self.allowed.refusal(request.url)
        if refusal and not request.is_navigation_request() and request.url.startswith(("data:", "blob:")):
            refusal = None  # made by the page itself: nothing is fetched
        if refusal and whole_page:
            self.refused_pages.append(refusal)
            self._refused.set()
        elif refusal:
            self.refused_parts.append(refusal)
        elif whole_page:
            self._settled.clear()
        with contextlib.suppress(Error):  # the page has gone in the meantime
            await (route.abort("aborted") if refusal else route.continue_())

    def _is_page(self, request: Request) -> bool:
        from playwright.async_api import Error

        if not request.is_navigation_request():
            return False
        try:
            return request.frame == self.page.main_frame
        except Error:  # it is the first request of a new window, which has no frame yet
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
        from playwright.async_api import Error

        if page != self.page:
            self.closed_windows += 1
            with contextlib.suppress(Error):
                await page.close()


class Pages:
    """At most `max_pages` pages; the one that was not used for longest makes room for another."""

    def __init__(
        self,
        allowed: AllowedHosts,
        *,
        headless: bool,
        timeout: float,
        max_pages: int,
        private_addresses: bool,
        executable_path: str | None,
    ) -> None:
        self.allowed = allowed
        self.headless = headless
        self.limits = Limits(timeout)
        self.max_pages = max_pages
        self.executable_path = executable_path
        self.proxy = FilterProxy(allowed, private_addresses=private_addresses)
        self.restarts = 0
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._tabs: OrderedDict[Hashable, Tab] = OrderedDict()
        self._busy: set[Hashable] = set()
        self._renew()

    def _renew(self) -> None:
        """Locks belong to the loop that used them; each start may have another."""
        self._launching = asyncio.Lock()
        self._free = asyncio.Semaphore(self.max_pages)

    @property
    def num_open(self) -> int:
        """How many pages there are."""
        return len(self._tabs)

    async def start(self) -> Browser:
        """The browser, launched where it is not running. Raises ToolError where it cannot be."""
        async with self._launching:
            if self._browser is not None and self._browser.is_connected():
                return self._browser
            if self._browser is not None:
                self.restarts += 1
                self._tabs.clear()
            await self.proxy.start()
            for attempt in range(1, LAUNCHES + 1):
                try:
                    self._browser = await self._launch()
                    return self._browser
                except _errors() as error:
                    if attempt == LAUNCHES:
                        why = first_line(error)
                        raise ToolError(f"Chromium was not started in {attempt} attempts: {why}") from error
                    await asyncio.sleep(BACK_OFF_SECONDS * 2**attempt)
            raise AssertionError("the last attempt returns or raises")

    async def _launch(self) -> Browser:
        from playwright.async_api import async_playwright

        if self._playwright is None:
            self._playwright = await async_playwright().start()
        return await self._playwright.chromium.launch(
            executable_path=self.executable_path or found_program(self._playwright.chromium.executable_path),
            headless=self.headless,
            chromium_sandbox=os.geteuid() != 0,  # Chromium refuses to sandbox what root runs
            proxy={"server": f"http://127.0.0.1:{self.proxy.port}", "bypass": "<-loopback>"},
            args=list(_FLAGS),
            timeout=LAUNCH_SECONDS * 1000,
        )

    @contextlib.asynccontextmanager
    async def using(self, key: Hashable) -> AsyncIterator[Tab]:
        """The page of `key`, opened where there is none; it stays while it is in use. Raises TimeoutError."""
        async with asyncio.timeout(self.limits.whole):
            await self._free.acquire()
        self._busy.add(key)
        try:
            browser = await self.start()
            async with asyncio.timeout(self.limits.whole):
                tab = self._tabs.get(key)
                if tab is None or tab.is_lost:
                    await self.close([key])
                    await self._make_room()
                    tab = await self._open(browser)
                    self._tabs[key] = tab
            self._tabs.move_to_end(key)
            yield tab
        finally:
            self._busy.discard(key)
            self._free.release()

    async def close(self, keys: Iterable[Hashable] | None = None) -> None:
        """Close the pages of `keys`, or all of them."""
        chosen = list(self._tabs) if keys is None else keys
        tabs = [self._tabs.pop(key) for key in chosen if key in self._tabs]
        await asyncio.gather(*(_closed(tab.context) for tab in tabs))

    async def stop(self) -> None:
        """End the browser and the proxy."""
        browser, playwright = self._browser, self._playwright
        self._browser = self._playwright = None
        self._tabs.clear()
        if browser is not None:
            await _closed(browser)
        if playwright is not None:
            with contextlib.suppress(TimeoutError, *_errors()):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await playwright.stop()
        await self.proxy.close()
        self._renew()

    async def _make_room(self) -> None:
        """Close the idle pages that were not used for longest, until one more may be opened."""
        idle = [key for key in self._tabs if key not in self._busy]
        await self.close(idle[: max(0, len(self._tabs) + 1 - self.max_pages)])

    async def _open(self, browser: Browser) -> Tab:
        context = await browser.new_context(accept_downloads=False, service_workers="block")
        context.set_default_timeout(self.limits.whole * 900)  # milliseconds; playwright's own errors come first
        tab = Tab(context, await context.new_page(), self.allowed, self.limits)
        await tab.watch()
        return tab


def found_program(own: str) -> str:
    """The Chromium to run: the system's, else playwright's `own`. Raises MissingExtraError where there is none."""
    system = next((path for path in map(shutil.which, PROGRAMS) if path), None)
    if system is None and not os.path.exists(own):
        raise MissingExtraError(
            f"the browser tool needs Chromium, and none of {', '.join(PROGRAMS)} is on the PATH: "
            "apt install chromium, or playwright install chromium, or give executable_path"
        )
    return system or own


async def _closed(what: BrowserContext | Browser) -> None:
    """Close it, unless that takes too long: then the end of the browser is its end too."""
    with contextlib.suppress(TimeoutError, *_errors()):
        async with asyncio.timeout(CLOSE_SECONDS):
            await what.close()


def _errors() -> tuple[type[Exception], ...]:
    """What playwright raises."""
    from playwright.async_api import Error

    return (Error,)


PROBE_SECONDS = 2.0  # for a page to show that its own scripts leave it time
BEGIN_SECONDS = 0.1  # after a click or a key, which do not say whether a request will follow
MAX_CHARS = 100_000  # taken out of a page
MAX_SCROLL_PIXELS = 100_000

_NEEDED = {"navigate": ("url",), "click": ("selector",), "type": ("selector", "text"), "scroll": (), "extract": ()}
_TYPES = {"string": str, "boolean": bool, "integer": int}

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


class BrowserTransform(ToolTransform):
    """Offers the function `browser`: navigate, click, type, scroll and extract, in one page a conversation.

    `allowed_domains` are the hosts that may be visited: `example.org`, which stands for every name below it
    too, `localhost:8000`, an address. Nothing else is contacted, whatever the page asks for: each request
    is looked at before it is sent, and the browser's only way out is a proxy that connects to these hosts
    alone. A name that leads to an address of this machine or its network is refused too, unless it is
    `localhost` or `private_addresses` is set.

    An action takes at most `timeout` seconds; a page that does not come back is closed. A conversation's
    page, with cookies of its own, is closed with the conversation; of more than `max_pages` the one that
    was not used for longest is. `executable_path` is the Chromium to run, by default the system's.

    Raises ConfigError for a list that names no host or a program that is none, MissingExtraError without
    playwright; and when it is used MissingExtraError without a Chromium, ToolError for one that does not start.
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
        if timeout <= 0 or max_pages < 1:
            raise ConfigError(f"timeout={timeout:g} must be above 0, and max_pages={max_pages} at least 1")
        if executable_path is not None and shutil.which(executable_path) is None:
            raise ConfigError(f"executable_path={executable_path!r} is no program: name a Chromium, or leave it out")
        self.allowed = AllowedHosts(allowed_domains)
        self.timeout = timeout
        self.at_once = max_pages  # a call waits for room here, not within its time limit
        self._pages = Pages(
            self.allowed,
            headless=headless,
            timeout=timeout,
            max_pages=max_pages,
            private_addresses=private_addresses,
            executable_path=executable_path,
        )
        self._changing = threading.Lock()
        self._thread = LoopThread("rlpost-browser")
        # Without a close, the browser still ends with this object or with the interpreter.
        self._finalizer = weakref.finalize(self, _stop, self._pages, self._thread)

    def start(self) -> None:
        """Start the browser. Raises MissingExtraError without a Chromium, ToolError where it does not start."""
        with self._changing:
            self._thread.run(self._pages.start(), LAUNCHES * (LAUNCH_SECONDS + CLOSE_SECONDS))

    def schemas(self) -> list[dict[str, Any]]:
        """See `ToolTransform.schemas`."""
        return [{"type": "function", "function": _FUNCTION}]

    def on_begin(self, conversations: Sequence[Conversation]) -> None:
        """See `ToolTransform.on_begin`; each conversation begins without a page."""
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
        return self._thread.run(self._act(conversation.key, call.arguments), longest)

    def close(self) -> None:
        """End the browser; nothing of it is left when this returns."""
        with self._changing:
            _stop(self._pages, self._thread)

    @property
    def restarts(self) -> int:
        """How often the browser died and was started again."""
        return self._pages.restarts

    @property
    def num_pages(self) -> int:
        """How many pages are open."""
        return self._pages.num_open

    @property
    def num_refused(self) -> int:
        """Connections that the proxy refused: hops of redirects, sockets, and what Chromium asks for of its own."""
        return self._pages.proxy.num_refused

    def _close(self, keys: Sequence[tuple[int, int]] | None) -> None:
        if self._pages.num_open:
            self._thread.run(self._pages.close(keys), 2 * CLOSE_SECONDS)

    async def _act(self, key: tuple[int, int], arguments: Mapping[str, Any]) -> ToolResult:
        """One action in the page of this conversation."""
        from playwright.async_api import Error

        try:
            async with self._pages.using(key) as tab, asyncio.timeout(self.timeout):
                earlier = [
                    f"before this, the page was refused another: {refusal}" for refusal in tab.refused_pages[-1:]
                ]
                earlier += ["before this, a window that it opened was closed"] if tab.closed_windows else []
                tab.forget()
                try:
                    result = await _ACTIONS[arguments["action"]](tab, arguments)
                    return await self._checked(tab, arguments, result, earlier)
                except Error as error:
                    if tab.is_lost:
                        return ToolResult(f"the page is lost, navigate again: {_said(error)}", ok=False)
                    return await self._checked(tab, arguments, ToolResult(_said(error), ok=False), earlier)
                finally:
                    tab.forget()  # it is told
        except TimeoutError:
            await self._pages.close([key])
            return ToolResult("the page gave no result in time and was closed: navigate again", ok=False)
        except Error as error:
            return ToolResult(f"the browser failed, and the page is lost: {_said(error)}; navigate again", ok=False)

    async def _checked(
        self, tab: Tab, arguments: Mapping[str, Any], result: ToolResult, notes: list[str]
    ) -> ToolResult:
        """The result with notes of what was refused, or why it does not count: the page may not be where it is."""
        from playwright.async_api import Error

        if tab.refused_pages:
            return ToolResult(f"refused: {tab.refused_pages[-1]}", ok=False)
        url = tab.page.url
        if url not in ("", "about:blank") and not url.startswith("chrome-error:"):
            refusal = self.allowed.refusal(url)
            if refusal is not None:  # a redirect, which the proxy answered
                with contextlib.suppress(Error):  # an error page on its way in comes before this one
                    await tab.page.goto("about:blank")
                return ToolResult(f"refused: {refusal}", ok=False)
        if arguments["action"] == "navigate" and not result.ok:
            _, host, port = parts_of(arguments["url"])
            if why := self._pages.proxy.fault_of(host, port):
                return ToolResult(f"{arguments['url']} cannot be reached: {why}", ok=False)
        if tab.refused_parts:
            notes = [*notes, f"of its parts were refused: {'; '.join(sorted(set(tab.refused_parts)))[:500]}"]
        if tab.closed_windows:
            notes = [*notes, "a window that it opened was closed"]
        return ToolResult("\n".join([result.text, *(f"[{note}]" for note in notes)]), result.ok)


async def _navigate(tab: Tab, arguments: Mapping[str, Any]) -> ToolResult:
    response = await tab.page.goto(arguments["url"], wait_until="commit")
    result = await _led_to(tab)
    if result.ok and response is not None and response.status >= 400:
        return ToolResult(f"the server answered with status {response.status}\n{result.text}", ok=False)
    return result


async def _click(tab: Tab, arguments: Mapping[str, Any]) -> ToolResult:
    element, missing = await _found(tab, arguments["selector"])
    if element is None:
        return missing
    await element.first.click(timeout=tab.limits.find * 1000)
    await asyncio.sleep(BEGIN_SECONDS)
    return await _led_to(tab)


async def _type(tab: Tab, arguments: Mapping[str, Any]) -> ToolResult:
    element, missing = await _found(tab, arguments["selector"])
    if element is None:
        return missing
    await element.first.fill(arguments["text"], timeout=tab.limits.find * 1000)
    if arguments.get("submit"):
        await element.first.press("Enter", timeout=tab.limits.find * 1000)
        await asyncio.sleep(BEGIN_SECONDS)
    return await _led_to(tab)


async def _scroll(tab: Tab, arguments: Mapping[str, Any]) -> ToolResult:
    if missing := _no_page(tab):
        return missing
    direction, amount = arguments.get("direction", "down"), arguments.get("amount")
    where = await tab.page.evaluate(_SCROLL, [direction, amount])
    if not isinstance(where, list) or [type(each) for each in where] != [int] * 3:  # its scripts may say anything
        return ToolResult("the page does not say which part of it is in view", ok=False)
    top, height, window = where
    return ToolResult(f"pixels {top} to {top + window} of {max(height, window)} are in view")


async def _extract(tab: Tab, arguments: Mapping[str, Any]) -> ToolResult:
    kind = arguments.get("extract_type", "text")
    elements, missing = await _found(tab, arguments.get("selector", "html" if kind == "html" else "body"))
    if elements is None:
        return missing
    attribute = arguments.get("attribute")
    values = await elements.evaluate_all(_EXTRACT, [kind, attribute, MAX_CHARS])
    if kind == "attribute" and not values:
        return ToolResult(f"no element that matches has an attribute {attribute!r}", ok=False)
    text = "\n".join(map(str, values)) if isinstance(values, list) else str(values)  # scripts may give anything
    return ToolResult(text[:MAX_CHARS])


_ACTIONS = {"navigate": _navigate, "click": _click, "type": _type, "scroll": _scroll, "extract": _extract}


async def _found(tab: Tab, selector: str) -> tuple[Locator | None, ToolResult]:
    """The elements that match, or the failure to find one. Raises TimeoutError for a page that hangs."""
    from playwright.async_api import TimeoutError as TooLate

    if missing := _no_page(tab):
        return None, missing
    elements = tab.page.locator(selector)
    try:
        await elements.first.wait_for(state="attached", timeout=tab.limits.find * 1000)
    except TooLate:
        async with asyncio.timeout(PROBE_SECONDS):
            await tab.page.evaluate("0")
        return None, ToolResult(f"no element matches {selector!r}", ok=False)
    return elements, ToolResult("")


def _no_page(tab: Tab) -> ToolResult | None:
    if tab.page.url in ("", "about:blank"):
        return ToolResult("no page is open: navigate to one first", ok=False)
    return None


async def _led_to(tab: Tab) -> ToolResult:
    """Where an action led, once it can be read; a page that never stops loading can be used all the same."""
    from playwright.async_api import TimeoutError as TooLate

    if not await tab.arrive():
        return ToolResult("the page it leads to did not load in time", ok=False)
    if tab.refused_pages:
        return ToolResult("", ok=False)
    with contextlib.suppress(TooLate):
        await tab.page.wait_for_load_state("load", timeout=tab.limits.load * 1000)
    return ToolResult(f"{(await tab.page.title())[:200]}\n{tab.page.url}")


def _said(error: Exception) -> str:
    """What playwright says, without its log."""
    return first_line(error)[:300]


def _fault(arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments of a call, for the model to read."""
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


def _stop(pages: Pages, thread: LoopThread) -> None:
    """End the browser and the thread."""
    if thread.running:
        try:
            thread.run(pages.stop(), 4 * CLOSE_SECONDS)
        finally:
            thread.close()
