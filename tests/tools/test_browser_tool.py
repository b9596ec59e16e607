"""The browser tool in a real Chromium: what it does, and that it goes nowhere else."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tensordict import TensorDict

from rlpost.data.conversation import Conversation
from rlpost.envs import ChatEnv
from rlpost.envs.base import ToolCall, ToolResult
from rlpost.envs.transforms import BrowserTransform
from rlpost.errors import MissingExtraError, ToolError
from rlpost.rewards.score import Score
from rlpost.tools.browser import PROGRAMS, found_program
from tests.processes import children, wait_until
from tests.says import Says
from tests.tools.calls import result_in
from tests.tools.web import Site, datagrams, served

pytestmark = pytest.mark.thorough

Error = pytest.importorskip("playwright.async_api").Error

PAGES = {
    "/": "<title>Home</title><h1>Glasstown</h1><p>Its river is the Niger.</p><a href='/two'>second page</a>",
    "/two": "<title>Two</title><p class=x>one</p><p class=x title=t>two</p>",
    "/form": "<title>Form</title><form method=post action=/said><input name=q><button>Send</button></form>",
    "/tall": "<title>Tall</title><div style='height:5000px'>long</div>",
    "/alert": "<title>Alert</title><script>alert('boo')</script>after",
    "/cookie": "<title>Cookie</title><script>document.write(document.cookie);document.cookie='a=b'</script>.",
    "/spin": "<title>Spin</title>round<script>function spin() { x = new XMLHttpRequest();"
    "x.open('GET', '/spinning', false); x.send(); for (;;); }</script>",
    "/windows": "<title>Windows</title><button onclick=\"window.open('/two')\">more</button>",
    "/later": "<title>Later</title><script>setTimeout(() => window.open('/two'), 1000)</script>here",
    "/big": "<title>Big</title><p id=p></p><script>p.textContent = 'x'.repeat(3e6)</script>",
    "/slow": "<title>Slow</title>at last",
    "/lies": "<title>Lies</title><p id=p>t</p><script>Object.defineProperty(window, 'scrollY', {get() { return 'x' }});"
    "Element.prototype.getAttribute = () => ({a: 1}); String.prototype.slice = () => 7</script>",
    "/file": "binary",
    "/local": "<title>Local</title><iframe src='file:///etc/hostname'></iframe>"
    "<script>setTimeout(() => location = 'data:text/html,x', 20)</script>here",
}


def reaching_out(to: str, to_socket: str) -> dict[str, str]:
    """Pages that contact `to` by themselves, or with a click on `#go`, each in a way of its own."""
    script = {
        "location": f"location = '{to}/location'",
        "fetch": f"fetch('{to}/fetch', {{mode: 'no-cors'}})",
        "fetch-redirected": f"fetch('/to?{to}/fetch-redirected', {{mode: 'no-cors'}})",
        "xhr": f"x = new XMLHttpRequest(); x.open('GET', '{to}/xhr'); x.send()",
        "beacon": f"navigator.sendBeacon('{to}/beacon', 'x')",
        "web-socket": f"new WebSocket('{to_socket}/web-socket')",
        "event-source": f"new EventSource('{to}/event-source')",
        "open-at-once": f"open('{to}/open-at-once')",
        "worker": f"new Worker(URL.createObjectURL(new Blob([\"fetch('{to}/worker', {{mode: 'no-cors'}})\"])))",
        "worker-socket": f"new Worker(URL.createObjectURL(new Blob([\"new WebSocket('{to_socket}/worker-socket')\"])))",
    }
    html = {
        "meta-refresh": f"<meta http-equiv=refresh content='0;url={to}/meta-refresh'>",
        "iframe": f"<iframe src='{to}/iframe'></iframe>",
        "iframe-redirected": f"<iframe src='/to?{to}/iframe-redirected'></iframe>",
        "image": f"<img src='{to}/image'>",
        "image-redirected": f"<img src='/to?{to}/image-redirected'>",
        "script": f"<script src='{to}/script'></script>",
        "style": f"<link rel=stylesheet href='{to}/style'>",
        "prefetch": f"<link rel=prefetch href='{to}/prefetch'>",
        "object": f"<object data='{to}/object'></object>",
        "link": f"<a id=go href='{to}/link'>go</a>",
        "link-redirected": f"<a id=go href='/to?{to}/link-redirected'>go</a>",
        "link-to-window": f"<a id=go target=_blank href='{to}/link-to-window'>go</a>",
        "ping": f"<a id=go ping='{to}/ping' href='/two'>go</a>",
        "form": f"<form method=post action='{to}/form'><input name=secret value=1><button id=go>go</button></form>",
        "button": f"<button id=go onclick=\"window.open('{to}/button')\">go</button>",
    }
    pages = html | {name: f"<script>{code}</script>" for name, code in script.items()}
    return {f"/out/{name}": f"<title>{name}</title>{page}<p>text</p>" for name, page in pages.items()}


NAMES = [path.removeprefix("/out/") for path in reaching_out("", "")]


@pytest.fixture(scope="module")
def bad() -> Iterator[Site]:
    with served({}) as site:
        yield site


@pytest.fixture(scope="module")
def good(bad: Site) -> Iterator[Site]:
    with served(PAGES | reaching_out(f"http://localhost:{bad.port}", f"ws://localhost:{bad.port}")) as site:
        yield site


@pytest.fixture(scope="module")
def chromium() -> None:
    if not any(map(shutil.which, PROGRAMS)):
        pytest.skip("no Chromium on the PATH")


@pytest.fixture(scope="module")
def browser(good: Site, chromium: None) -> Iterator[BrowserTransform]:
    tool = BrowserTransform([f"127.0.0.1:{good.port}"], timeout=20)
    yield tool
    tool.close()


@pytest.fixture(scope="module")
def wide_browser(chromium: None) -> Iterator[BrowserTransform]:
    tool = BrowserTransform(["127.0.0.1", "localhost"], timeout=10, max_pages=2)
    yield tool
    tool.close()


@pytest.fixture
def wide(wide_browser: BrowserTransform) -> BrowserTransform:
    """A browser that may visit every port of this machine, with little time and room, and no page yet."""
    wide_browser.on_reset()
    return wide_browser


@pytest.fixture(autouse=True)
def nothing_seen(good: Site, bad: Site) -> None:
    good.released.clear()
    good.visits.clear()
    bad.visits.clear()


class Asked:
    """A conversation's use of the tool."""

    def __init__(self, tool: BrowserTransform, site: Site, sample: int = 0) -> None:
        self.tool = tool
        self.conversation = Conversation({}, [], sample=sample)
        self.site = site

    def __call__(self, action: str, **arguments: Any) -> ToolResult:
        return self.tool.call(self.conversation, ToolCall("browser", {"action": action, **arguments}, 0))

    def go(self, path: str) -> ToolResult:
        return self("navigate", url=f"http://127.0.0.1:{self.site.port}{path}")

    def text(self) -> str:
        return self("extract").text

    @property
    def tab(self) -> Any:
        return self.tool.pages.tabs[self.conversation.key]

    def evaluate(self, script: str) -> None:
        self.tool.thread.run(self.tab.page.evaluate(script), 10)


@pytest.fixture
def ask(browser: BrowserTransform, good: Site) -> Asked:
    """On no page; one page serves all tests, for a new one takes a while."""
    user = Asked(browser, good)
    if user.conversation.key in browser.pages.tabs:
        try:
            browser.thread.run(user.tab.page.goto("about:blank"), 10)
            user.tab.forget()
        except Error:  # the last test's page is still on its way
            browser.on_end([user.conversation])
    return user


# What it is for


def test_a_question_is_answered_from_a_page(browser: BrowserTransform, good: Site) -> None:
    class Quiz(ChatEnv):
        def score(self, conversation: Conversation) -> Score:
            return Score(float("the Niger" in conversation.response_text), {})

    def step(turn: Any, reply: str) -> Any:
        return env.step(turn.set("text_response", [reply]))["next"]

    env = Quiz((1,), max_steps=3)
    env.append_transform(browser)
    turn = env.reset(TensorDict(text="Which river flows through Glasstown?", batch_size=[1]))
    assert [tool["function"]["name"] for tool in turn["conversation"][0].tools] == ["browser"]
    calls = [{"action": "navigate", "url": f"http://127.0.0.1:{good.port}/"}, {"action": "extract", "selector": "p"}]
    turn = step(turn, "".join(f"<tool>browser\n{json.dumps(call)}</tool>" for call in calls))
    first, second = map(result_in, turn["history"].to_chats()[0][-2:])
    assert first == ToolResult(f"Home\nhttp://127.0.0.1:{good.port}/")
    turn = step(turn, f"It is {second.text.removeprefix('Its river is ')}")
    assert turn["reward"].tolist() == [[1.0]]
    assert browser.num_pages == 0  # the page is closed with its conversation


def test_a_click_leads_to_the_page_behind_a_link(ask: Asked) -> None:
    ask.go("/")
    assert ask("click", selector="a") == ToolResult(f"Two\nhttp://127.0.0.1:{ask.site.port}/two")


def test_what_is_typed_is_sent_with_a_form(ask: Asked) -> None:
    ask.go("/form")
    assert ask("type", selector="[name=q]", text="two words").ok
    assert ask("click", selector="button").text.startswith("Said\n")
    assert "{'q': ['two words']}" in ask.text()
    ask.go("/form")
    assert ask("type", selector="[name=q]", text="again", submit=True).text.startswith("Said\n")


def test_elements_are_read_as_text_html_or_by_an_attribute(ask: Asked) -> None:
    ask.go("/two")
    assert ask("extract", selector=".x").text == "one\ntwo"
    html = ask("extract", selector=".x", extract_type="html").text
    assert html.splitlines() == ['<p class="x">one</p>', '<p class="x" title="t">two</p>']
    assert ask("extract", extract_type="html").text.startswith("<html><head><title>Two</title>")
    titles, links = (
        ask("extract", selector="p", extract_type="attribute", attribute=name) for name in ("title", "href")
    )
    assert titles == ToolResult("t")
    assert (links.ok, "'href'" in links.text) == (False, True)


def test_scrolling_says_what_is_in_view(ask: Asked) -> None:
    ask.go("/tall")
    shown = [ask("scroll", **where).text for where in ({}, {"amount": 100}, {"direction": "up"})]
    (top, bottom, _), second, third = (list(map(int, re.findall(r"\d+", text))) for text in shown)
    assert top > 0
    assert second[:2] == [top + 100, bottom + 100]
    assert third[0] == 100


def test_a_long_text_is_cut_in_the_page(ask: Asked) -> None:
    ask.go("/big")
    assert ask.text() == "x" * 100_000


def test_every_conversation_has_a_page_and_cookies_of_its_own(ask: Asked, browser: BrowserTransform) -> None:
    other = Asked(browser, ask.site, sample=1)
    ask.go("/cookie")
    other.go("/cookie")
    assert other.text() == "."
    ask.go("/cookie")
    assert ask.text() == "a=b."
    assert browser.num_pages == 2
    browser.on_end([other.conversation])
    assert browser.num_pages == 1
    assert not other("extract").ok
    browser.on_begin([ask.conversation])  # without a page
    assert not ask("extract").ok
    browser.on_reset()
    assert browser.num_pages == 0


def test_the_least_recently_used_page_makes_room(wide: BrowserTransform, good: Site) -> None:
    first, second, third = (Asked(wide, good, sample) for sample in range(3))
    first.go("/")
    second.go("/")
    first.go("/two")
    third.go("/")
    assert wide.num_pages == 2
    assert not second("extract").ok
    assert third("extract").ok


def test_conversations_are_served_at_the_same_time(browser: BrowserTransform, good: Site) -> None:
    with ThreadPoolExecutor(3) as pool:
        going = [pool.submit(Asked(browser, good, sample).go, "/slow") for sample in range(3)]
        wait_until(lambda: good.visits.count("GET /slow") == 3)
        good.released.set()
        assert [each.result().ok for each in going] == [True] * 3
    browser.on_reset()


# What fails

WRONG: list[dict[str, Any]] = [
    {},
    {"action": "evaluate"},
    {"action": "navigate"},
    {"action": "type", "selector": "p"},
    {"action": "click", "selector": 5},
    {"action": "scroll", "amount": True},
    {"action": "scroll", "amount": -5},
    {"action": "scroll", "direction": "left"},
    {"action": "extract", "extract_type": "attribute"},
    {"action": "extract", "script": "x"},
]


def test_wrong_arguments_are_a_failure_that_says_what_to_give(says: Says) -> None:
    tool = BrowserTransform(["example.com"])  # starts nothing
    results = [tool.call(Conversation({}, []), ToolCall("browser", arguments, 0)) for arguments in WRONG]
    assert not any(result.ok for result in results)
    says("tools", "\n".join(result.text for result in results))


def test_what_is_not_there_is_a_failure(wide: BrowserTransform, good: Site, says: Says) -> None:
    ask = Asked(wide, good)
    failures = [ask("extract"), ask("click", selector="p"), ask.go("/nowhere"), ask("click", selector="#none")]
    assert not any(failure.ok for failure in failures)
    shown = "\n".join(failure.text for failure in failures)
    says("tools", shown.replace(str(good.port), "<port>"))
    assert not ask("extract", selector="p[").ok


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_server_that_is_not_there_is_a_failure(wide: BrowserTransform, good: Site, scheme: str) -> None:
    result = Asked(wide, good)("navigate", url=f"{scheme}://127.0.0.1:999/")
    assert not result.ok
    assert re.match(rf"{scheme}://127.0.0.1:999/ .*Connect call", result.text)


def test_a_page_that_hangs_is_closed_in_time(wide: BrowserTransform, good: Site, says: Says) -> None:
    ask = Asked(wide, good)
    assert ask.go("/spin").ok
    ask.evaluate("setTimeout(spin)")
    wait_until(lambda: "GET /spinning" in good.visits)  # from where on it answers nothing
    begun = time.monotonic()
    hanging = ask("extract")
    assert not hanging.ok
    says("tools", hanging.text)
    assert time.monotonic() - begun < 25
    assert ask.go("/").ok


def test_dialogs_downloads_and_windows_do_not_get_in_the_way(ask: Asked) -> None:
    ask.go("/alert")
    assert ask.text() == "after"
    assert not ask.go("/file").ok
    ask.go("/windows")
    result = ask("click", selector="button")
    assert result.ok
    if "window" not in result.text:  # it opens when the machine has time for it
        wait_until(lambda: "window" in ask.text())


def test_a_window_that_opens_is_closed_and_named_once(ask: Asked, says: Says) -> None:
    ask.go("/later")
    wait_until(lambda: ask.tab.closed_windows)
    says("tools", ask.text())
    assert "window" not in ask.text()


def test_a_page_whose_scripts_lie_fails_alone(ask: Asked) -> None:
    ask.go("/lies")
    assert not ask("extract", selector="p", extract_type="attribute", attribute="id").ok
    assert ask("extract", selector="p") == ToolResult("7")
    assert not ask("scroll").ok


def test_a_page_that_crashes_is_replaced(ask: Asked) -> None:
    ask.go("/")
    for process, command in children().items():
        if "--type=renderer" in command:
            process.kill()
    wait_until(lambda: ask.tab.is_lost)
    assert not ask("extract").ok
    assert ask.go("/").ok


def test_a_browser_killed_in_mid_call_is_started_again(wide: BrowserTransform, good: Site) -> None:
    wide.close()
    before, restarts = children(), wide.pages.restarts
    ask = Asked(wide, good)
    ask.go("/")
    family = {process: command for process, command in children().items() if process not in before}
    [main] = [p for p, command in family.items() if "--type=" not in command and "chrom" in p.name()]
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(ask.go, "/slow")
        wait_until(lambda: "GET /slow" in good.visits)
        main.kill()
        lost = going.result()  # in less time than the action has
    assert (lost.ok, "lost" in lost.text) == (False, True)
    assert ask.go("/").ok
    assert wide.pages.restarts == restarts + 1
    wide.close()
    assert children().keys() - before.keys() == set()
    wait_until(lambda: not any(process.is_running() for process in family))
    wide.close()


# Where it does not go


@pytest.mark.parametrize("name", NAMES)
def test_a_page_may_not_reach_another_host(ask: Asked, bad: Site, name: str) -> None:
    ask.go(f"/out/{name}")
    follow(ask, name)
    time.sleep(0.1)
    assert f"GET /out/{name}" in ask.site.visits
    assert bad.visits == []


def test_the_same_pages_do_reach_a_host_that_is_allowed(wide: BrowserTransform, good: Site, bad: Site) -> None:
    """So the test above would fail without the walls."""
    ask = Asked(wide, good)
    for name in set(NAMES) - {"open-at-once", "button", "link-to-window"}:  # windows are closed before they get far
        ask.go(f"/out/{name}")
        follow(ask, name)
        wait_until(lambda name=name: any(visit.endswith(f" /{name}") for visit in bad.visits))


def follow(ask: Asked, name: str) -> None:
    if "id=go" in ask.site.pages[f"/out/{name}"]:
        ask("click", selector="#go")


@pytest.mark.parametrize("path", ["", "/to?{bad}/x", "/to?/to?{bad}/x", "/out/location", "/out/link", "/out/form"])
def test_a_page_that_is_refused_is_a_failure_that_says_so(ask: Asked, bad: Site, path: str) -> None:
    elsewhere = f"http://localhost:{bad.port}"
    result = ask.go(path.format(bad=elsewhere)) if path else ask("navigate", url=elsewhere)
    if path in ("/out/link", "/out/form"):
        assert result.ok
        result = ask("click", selector="#go")
    assert not result.ok
    assert re.fullmatch(f"refused: localhost:{bad.port} is .*: 127.0.0.1:{ask.site.port}", result.text)
    assert bad.visits == []
    assert ask.go("/").ok  # the tool can be used on


def test_refused_parts_of_a_page_are_named(ask: Asked, bad: Site) -> None:
    result = ask.go("/out/image")
    assert result.ok
    assert re.search(rf"\n\[.* refused: localhost:{bad.port} is .*\]$", result.text)
    assert ask("extract") == ToolResult("text")


def test_a_page_that_leaves_between_two_actions_is_told(ask: Asked, bad: Site) -> None:
    ask.go("/two")
    ask.evaluate(f"setTimeout(() => location = 'http://localhost:{bad.port}/')")
    wait_until(lambda: ask.tab.refused_pages)
    assert re.match(rf"one\n\ntwo\n\[before .*: localhost:{bad.port} ", ask.text())
    assert ask.text() == "one\n\ntwo"


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "javascript:alert(1)", "http://127.0.0.1:{good}@localhost:{bad}/", "http://0x7f.1:{bad}/"],
)
def test_an_address_that_only_looks_allowed_is_refused(ask: Asked, bad: Site, url: str) -> None:
    """See test_browser_proxy.py for many more."""
    result = ask("navigate", url=url.format(good=ask.site.port, bad=bad.port))
    assert (result.ok, result.text.startswith("refused: ")) == (False, True)
    assert (ask.site.visits, bad.visits) == ([], [])


def test_a_page_opens_neither_files_nor_pages_of_its_own_making(ask: Asked) -> None:
    ask.go("/local")
    time.sleep(0.2)
    assert ask("extract").text.startswith("here")
    assert ask.tool.num_pages == 1


def test_no_datagram_leaves_the_browser(ask: Asked) -> None:
    """WebRTC sends them past a proxy unless it is told not to."""
    with datagrams() as port:
        address = f"stun:127.0.0.1:{port.getsockname()[1]}"
        ask.site.pages["/calls"] = (
            f"<p id=p>begun</p><script>c = new RTCPeerConnection({{iceServers: [{{urls: '{address}'}}]}});"
            "c.createDataChannel('x'); c.onicegatheringstatechange = () => p.textContent = c.iceGatheringState;"
            "c.createOffer().then(offer => c.setLocalDescription(offer))</script>"
        )
        ask.go("/calls")
        wait_until(lambda: ask.text() == "complete")
        with pytest.raises(BlockingIOError):
            port.recv(100)


# Beginning


def test_a_chromium_that_does_not_start_is_an_error() -> None:
    tool = BrowserTransform(["example.com"], executable_path="false")
    with pytest.raises(ToolError, match="3 attempts: "):
        tool.start()
    tool.close()


def test_without_a_chromium_the_packages_are_named(monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    monkeypatch.setenv("PATH", "")
    with says.refused("tools", MissingExtraError, "executable_path"):
        found_program("/no/such/chromium")
