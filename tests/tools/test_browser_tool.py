"""The browser tool in a real Chromium: what it does, and that it goes nowhere else."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tensordict import TensorDict

from rlpost.data.conversation import Conversation
from rlpost.envs import ChatEnv
from rlpost.envs.base import ToolCall, ToolResult
from rlpost.envs.transforms import BrowserTransform
from rlpost.errors import ConfigError, MissingExtraError, ToolError
from rlpost.rewards.score import Score
from rlpost.tools.browser import PROGRAMS, Limits, found_program
from rlpost.tools.browser_proxy import AllowedHosts
from tests.processes import children
from tests.tools.web import Site, datagrams, served

Error = pytest.importorskip("playwright.async_api").Error

NO_CHROMIUM = not any(map(shutil.which, PROGRAMS))
needs_chromium = pytest.mark.skipif(NO_CHROMIUM, reason="no Chromium on the PATH")

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
def browser(good: Site) -> Iterator[BrowserTransform]:
    if NO_CHROMIUM:
        pytest.skip("no Chromium on the PATH")
    tool = BrowserTransform([f"127.0.0.1:{good.port}"], timeout=20)
    yield tool
    tool.close()


@pytest.fixture(autouse=True)
def nothing_seen(good: Site, bad: Site) -> None:
    good.visits.clear()
    bad.visits.clear()


@pytest.fixture(scope="module")
def conversation(browser: BrowserTransform) -> Iterator[Conversation]:
    conversation = Conversation({}, [])
    yield conversation
    browser.on_end([conversation])


class Asked:
    """A conversation's use of the tool."""

    def __init__(self, tool: BrowserTransform, conversation: Conversation, site: Site) -> None:
        self.tool = tool
        self.conversation = conversation
        self.site = site

    def __call__(self, action: str, **arguments: Any) -> ToolResult:
        return self.tool.call(self.conversation, ToolCall("browser", {"action": action, **arguments}, 0))

    def go(self, path: str) -> ToolResult:
        return self("navigate", url=f"http://127.0.0.1:{self.site.port}{path}")


@pytest.fixture
def ask(browser: BrowserTransform, conversation: Conversation, good: Site) -> Asked:
    """On no page; one page serves all tests, for a new one takes a while."""
    user = Asked(browser, conversation, good)
    tab = browser.pages.tabs.get(conversation.key)
    if tab is not None:
        try:
            browser.thread.run(tab.page.goto("about:blank"), 10)
            tab.forget()
        except Error:  # the last test's page is still on its way
            browser.on_end([conversation])
    return user


def calling(action: str, **arguments: Any) -> str:
    return f"<tool>browser\n{json.dumps({'action': action, **arguments})}</tool>"


# What it is for


def test_a_question_is_answered_from_a_page(browser: BrowserTransform, good: Site) -> None:
    class Quiz(ChatEnv):
        def score(self, conversation: Conversation) -> Score:
            return Score(float("the Niger" in conversation.response_text), {})

    env = Quiz((1,), max_steps=3)
    env.append_transform(browser)
    turn = env.reset(TensorDict(text="Which river flows through Glasstown?", batch_size=[1]))
    assert [tool["function"]["name"] for tool in turn["conversation"][0].tools] == ["browser"]
    reading = calling("navigate", url=f"http://127.0.0.1:{good.port}/") + calling("extract", selector="p")
    turn = env.step(turn.set("text_response", [reading]))["next"]  # pyright: ignore[reportArgumentType]
    first, second = [message["content"] for message in turn["history"].to_chats()[0]][-2:]
    assert first == f"Tool browser executed successfully:\nHome\nhttp://127.0.0.1:{good.port}/"
    river = re.fullmatch(r"Tool browser executed successfully:\nIts river is (.*)\.", second)
    assert river is not None
    turn = env.step(turn.set("text_response", [f"It is {river[1]}."]))["next"]  # pyright: ignore[reportArgumentType]
    assert turn["reward"].tolist() == [[1.0]]
    assert browser.num_pages == 0, "the page is closed with its conversation"


def test_a_click_leads_to_the_page_behind_a_link(ask: Asked) -> None:
    ask.go("/")
    result = ask("click", selector="text=second page")
    assert result == ToolResult(f"Two\nhttp://127.0.0.1:{ask.site.port}/two")


def test_what_is_typed_is_sent_with_a_form(ask: Asked) -> None:
    ask.go("/form")
    assert ask("type", selector="[name=q]", text="two words").ok
    assert ask("click", selector="button").text.startswith("Said\n")
    assert ask("extract").text == "you said {'q': ['two words']}"
    ask.go("/form")
    assert ask("type", selector="[name=q]", text="again", submit=True).text.startswith("Said\n")


def test_elements_are_read_as_text_html_or_by_an_attribute(ask: Asked) -> None:
    ask.go("/two")
    assert ask("extract", selector=".x").text == "one\ntwo"
    assert ask("extract", selector=".x", extract_type="html").text == (
        '<p class="x">one</p>\n<p class="x" title="t">two</p>'
    )
    assert ask("extract", extract_type="html").text.startswith("<html><head><title>Two</title>")
    assert ask("extract", selector="p", extract_type="attribute", attribute="title").text == "t"
    missing = ask("extract", selector="p", extract_type="attribute", attribute="href")
    assert missing == ToolResult("no element that matches has an attribute 'href'", ok=False)


def test_scrolling_says_what_is_in_view(ask: Asked) -> None:
    ask.go("/tall")
    first, second, third = (ask("scroll", **where) for where in ({}, {"amount": 100}, {"direction": "up"}))
    top, bottom = map(int, re.findall(r"\d+", first.text)[:2])
    assert top > 0
    assert second.text.startswith(f"pixels {top + 100} to {bottom + 100} of ")
    assert third.text.startswith("pixels 100 to ")


def test_a_long_text_is_cut_in_the_page(ask: Asked) -> None:
    ask.go("/big")
    assert ask("extract").text == "x" * 100_000


def test_every_conversation_has_a_page_and_cookies_of_its_own(ask: Asked, browser: BrowserTransform) -> None:
    other = Asked(browser, Conversation({}, [], sample=1), ask.site)
    ask.go("/cookie")
    other.go("/cookie")
    assert other("extract").text == "."
    ask.go("/cookie")
    assert ask("extract").text == "a=b."
    assert browser.num_pages == 2
    browser.on_end([other.conversation])
    assert browser.num_pages == 1
    assert other("extract") == ToolResult("no page is open: navigate to one first", ok=False)
    browser.on_reset()
    assert browser.num_pages == 0


def test_a_conversation_begins_without_a_page(ask: Asked, browser: BrowserTransform) -> None:
    ask.go("/")
    browser.on_begin([ask.conversation])
    assert not ask("extract").ok


def test_the_page_that_was_not_used_for_longest_makes_room(
    browser: BrowserTransform, good: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browser.pages, "max_pages", 2)
    first, second, third = (Asked(browser, Conversation({}, [], sample=i), good) for i in range(3))
    first.go("/")
    second.go("/")
    first.go("/two")
    third.go("/")
    assert browser.num_pages == 2
    assert not second("extract").ok
    assert third("extract").ok
    browser.on_reset()


def test_conversations_are_served_at_the_same_time(browser: BrowserTransform, good: Site) -> None:
    users = [Asked(browser, Conversation({}, [], sample=i), good) for i in range(3)]
    for each in users:
        each.go("/")
    results: list[ToolResult] = []
    threads = [threading.Thread(target=lambda each=each: results.append(each.go("/slow"))) for each in users]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.ok for result in results] == [True] * 3
    assert good.most_at_once > 1
    browser.on_reset()


# What fails


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "action is missing: give one of navigate, click, type, scroll, extract"),
        ({"action": "evaluate"}, "action must be one of navigate, click, type, scroll, extract, and is 'evaluate'"),
        ({"action": "navigate"}, "navigate needs url"),
        ({"action": "type", "selector": "p"}, "type needs text"),
        ({"action": "click", "selector": 5}, "selector must be string, and is 5"),
        ({"action": "scroll", "amount": True}, "amount must be integer, and is True"),
        ({"action": "scroll", "amount": -5}, "amount must be 0 to 100000 pixels"),
        ({"action": "scroll", "direction": "left"}, "direction must be one of down, up, and is 'left'"),
        ({"action": "extract", "extract_type": "attribute"}, "extract_type attribute needs attribute, the name of one"),
        ({"action": "extract", "script": "x"}, "there is no argument 'script'; there are action, url,"),
    ],
)
def test_wrong_arguments_are_a_failure_that_says_what_to_give(arguments: dict[str, Any], said: str) -> None:
    tool = BrowserTransform(["example.com"])  # starts nothing
    result = tool.call(Conversation({}, []), ToolCall("browser", arguments, 0))
    assert not result.ok
    assert result.text.startswith(said)


def test_what_is_not_there_is_a_failure(ask: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask("extract") == ToolResult("no page is open: navigate to one first", ok=False)
    assert ask("click", selector="p") == ToolResult("no page is open: navigate to one first", ok=False)
    lost = ask.go("/nowhere")
    assert not lost.ok
    assert lost.text.startswith("the server answered with status 404\nLost\n")
    monkeypatch.setattr(Limits, "find", 0.5)
    assert ask("click", selector="#none") == ToolResult("no element matches '#none'", ok=False)
    assert not ask("extract", selector="p[").ok


def test_a_server_that_is_not_there_is_a_failure(browser: BrowserTransform, ask: Asked) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(browser.allowed, "entries", AllowedHosts(["127.0.0.1"]).entries)
        results = [ask("navigate", url=f"{scheme}://127.0.0.1:999/") for scheme in ("http", "https")]
    for result in results:
        assert not result.ok
        assert re.match(r"https?://127.0.0.1:999/ cannot be reached: .*Connect call failed", result.text)


def test_a_page_that_hangs_is_closed_in_time(ask: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask.go("/spin").ok
    page = ask.tool.pages.tabs[ask.conversation.key].page
    ask.tool.thread.run(page.evaluate("setTimeout(spin)"), 10)
    wait_until(lambda: "GET /spinning" in ask.site.visits)  # from where on it answers nothing
    monkeypatch.setattr("rlpost.tools.browser.PROBE_SECONDS", 0.3)
    monkeypatch.setattr(Limits, "find", 0.5)
    begun = time.monotonic()
    assert ask("extract") == ToolResult("the page gave no result in time and was closed: navigate again", ok=False)
    assert time.monotonic() - begun < 15
    monkeypatch.undo()
    assert ask.go("/").ok


def test_dialogs_downloads_and_windows_do_not_get_in_the_way(ask: Asked) -> None:
    ask.go("/alert")
    assert ask("extract").text == "after"
    assert not ask.go("/file").ok
    ask.go("/windows")
    result = ask("click", selector="button")
    assert result.ok
    if not result.text.endswith("\n[a window that it opened was closed]"):  # it opens when the machine has time for it
        wait_until(lambda: ask("extract").text.endswith("\n[before this, a window that it opened was closed]"))


def test_a_window_that_opens_after_an_action_is_told_with_the_next(ask: Asked) -> None:
    ask.go("/later")
    page = ask.tool.pages.tabs[ask.conversation.key]
    wait_until(lambda: bool(page.closed_windows))
    assert ask("extract").text.endswith("\n[before this, a window that it opened was closed]")
    assert "window" not in ask("extract").text


def test_a_page_whose_scripts_lie_fails_alone(ask: Asked) -> None:
    ask.go("/lies")
    assert not ask("extract", selector="p", extract_type="attribute", attribute="id").ok
    assert ask("extract", selector="p") == ToolResult("7")
    assert ask("scroll") == ToolResult("the page does not say which part of it is in view", ok=False)


def test_a_page_that_crashes_is_replaced(ask: Asked) -> None:
    ask.go("/")
    for process, command in children().items():
        if "--type=renderer" in command:
            process.kill()
    wait_until(lambda: ask.tool.pages.tabs[ask.conversation.key].is_lost)
    assert ask("extract") == ToolResult("no page is open: navigate to one first", ok=False)
    assert ask.go("/").ok


@needs_chromium
def test_a_browser_killed_in_mid_call_is_a_failure_and_started_again(
    good: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    tool = BrowserTransform([f"127.0.0.1:{good.port}"], timeout=30)
    ask = Asked(tool, Conversation({}, []), good)
    tool.start()
    ask.go("/")
    family = {process: command for process, command in children().items() if process not in before}
    [main] = [p for p, command in family.items() if "--type=" not in command and "chrom" in p.name()]

    def kill() -> None:
        wait_until(lambda: "GET /slow" in good.visits)
        os.kill(main.pid, signal.SIGKILL)

    monkeypatch.setattr(good, "slow_seconds", 20.0)
    threading.Thread(target=kill, daemon=True).start()
    begun = time.monotonic()
    result = ask.go("/slow")
    assert not result.ok
    assert "lost" in result.text
    assert time.monotonic() - begun < 15
    assert ask.go("/").ok
    assert tool.restarts == 1
    tool.close()
    assert children().keys() - before.keys() == set(), "none is left"
    wait_until(lambda: not any(process.is_running() for process in family))
    tool.close()


# Where it does not go


@pytest.mark.parametrize("name", NAMES)
def test_a_page_may_not_reach_another_host(ask: Asked, bad: Site, name: str) -> None:
    ask.go(f"/out/{name}")
    follow(ask, name)
    time.sleep(0.1)
    assert f"GET /out/{name}" in ask.site.visits
    assert bad.visits == []


def test_the_same_pages_do_reach_a_host_that_is_allowed(
    ask: Asked, browser: BrowserTransform, bad: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above would fail without the walls."""
    both = AllowedHosts([f"127.0.0.1:{ask.site.port}", f"localhost:{bad.port}"])
    monkeypatch.setattr(browser.allowed, "entries", both.entries)
    windows = {"open-at-once", "button", "link-to-window"}  # they are closed before they get far
    for name in set(NAMES) - windows:
        ask.go(f"/out/{name}")
        follow(ask, name)
        wait_until(lambda name=name: any(visit.endswith(f" /{name}") for visit in bad.visits))


def wait_until(comes: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not comes():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
    listed = f"127.0.0.1:{ask.site.port}"
    assert result == ToolResult(f"refused: localhost:{bad.port} is not among the allowed domains: {listed}", ok=False)
    assert bad.visits == []
    assert ask.go("/").ok, "the tool can be used on"


def test_a_page_is_read_without_its_refused_parts_and_they_are_named(ask: Asked, bad: Site) -> None:
    result = ask.go("/out/image")
    assert result.ok
    assert f"[of its parts were refused: localhost:{bad.port} is not among the allowed domains" in result.text
    assert ask("extract") == ToolResult("text")


def test_a_page_that_leaves_between_two_actions_is_told(ask: Asked, bad: Site) -> None:
    ask.go("/two")
    tab = ask.tool.pages.tabs[ask.conversation.key]
    ask.tool.thread.run(tab.page.evaluate(f"setTimeout(() => location = 'http://localhost:{bad.port}/')"), 10)
    wait_until(lambda: bool(tab.refused_pages))
    assert ask("extract").text.startswith("one\n\ntwo\n[before this, the page was refused another: localhost:")
    assert ask("extract") == ToolResult("one\n\ntwo")


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "data:text/html,<p>x",
        "javascript:alert(1)",
        "view-source:http://127.0.0.1:{good}/",
        "blob:http://127.0.0.1:{good}/1",
        "chrome://version",
        "about:blank",
        "http://127.0.0.1:{good}@localhost:{bad}/",
        "http://localhost:{bad}\\@127.0.0.1:{good}/",
        "http://127.0.0.1.:{bad}/",
        "http://2130706433:{bad}/",
        "http://0x7f.0.0.1:{bad}/",
        "http://[::ffff:127.0.0.1]:{bad}/",
        "http://127.0.0.1.localhost:{bad}/",
    ],
)
def test_addresses_that_only_look_allowed_are_refused(ask: Asked, good: Site, bad: Site, url: str) -> None:
    result = ask("navigate", url=url.format(good=good.port, bad=bad.port))
    assert not result.ok
    assert result.text.startswith("refused: ")
    assert (good.visits, bad.visits) == ([], [])


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
        wait_until(lambda: ask("extract").text == "complete")
        with pytest.raises(BlockingIOError):
            port.recv(100)


# Beginning


def test_building_it_starts_nothing() -> None:
    before = children()
    tool = BrowserTransform(["example.com"])
    assert [schema["function"]["name"] for schema in tool.schemas()] == ["browser"]
    tool.on_begin([])
    tool.close()
    assert children().keys() == before.keys()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"allowed_domains": []}, "allowed_domains is empty"),
        ({"allowed_domains": ["http://x"]}, "allowed_domains names 'http://x'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BrowserTransform(**settings)


def test_a_chromium_that_does_not_start_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.tools.browser.BACK_OFF_SECONDS", 0.01)
    tool = BrowserTransform(["example.com"], executable_path="false")
    with pytest.raises(ToolError, match=r"^Chromium did not start in 3 attempts: .+"):
        tool.start()
    tool.close()


def test_without_a_chromium_the_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingExtraError, match="apt install chromium, or playwright install chromium"):
        found_program("/no/such/chromium")


def test_without_playwright_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.imports.is_installed", lambda package: package != "playwright")
    with pytest.raises(MissingExtraError, match=r"pip install 'rlpost\[browser\]'"):
        BrowserTransform(["example.com"])
