"""A Chromium and its pages, one a conversation; everything here runs on one asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlpost.errors import MissingExtraError, ToolError
from rlpost.text import first_line
from rlpost.tools.browser_hosts import AllowedHosts
from rlpost.tools.browser_proxy import FilterProxy

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Frame, Page, Playwright, Request, Route

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
