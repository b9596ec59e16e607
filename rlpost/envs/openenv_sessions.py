"""Sessions of OpenEnv servers: their WebSocket frames, and the episodes that are played in them.

One socket is one environment of the server. A frame is answered by exactly one frame, which names no request. So after
a late answer a socket is not used again.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from rlpost.errors import ConfigError, ToolError
from rlpost.remote.loop import LoopThread
from rlpost.text import first_line

LARGEST_FRAME = 16 * 2**20  # bytes
CLOSE_SECONDS = 5.0  # that are waited for the server to end a session
RETRY_SECONDS = 0.2  # between two attempts to connect
LOCAL = ("localhost", "127.0.0.1", "::1")
UNLIKE = "its actions were played again, and the server shows another text than the model has read"
CAPACITY, INVALID_FRAME = "CAPACITY_REACHED", "VALIDATION_ERROR"  # codes of errors


class Refused(ToolError):
    """An error that the server answered; `faults` are pydantic's findings about the frame, if it lists them."""

    def __init__(self, kind: str, error: Mapping[str, Any]) -> None:
        self.code = str(error.get("code"))
        self.sessions = error.get("max_sessions")  # that the server has at most
        found = error.get("errors") or ()
        self.faults = [each for each in found if isinstance(each, dict) and isinstance(each.get("loc"), list)]
        why = "; ".join(map(fault_text, self.faults)) or error.get("message")
        super().__init__(f"{kind} failed: {why} ({self.code})")


def fault_text(fault: Mapping[str, Any]) -> str:
    """A finding of pydantic, after the name of the field; a fault of the whole frame has none."""
    return ": ".join(filter(None, (".".join(map(str, fault["loc"])), str(fault.get("msg")))))


@dataclass(frozen=True)
class Answer:
    """An observation of the server; `reward` is None where the environment set none."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class Session:
    """One socket of a server: sends a frame, and waits for its answer."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._is_open = False

    @classmethod
    async def open(cls, url: str) -> Self:
        """Connect. Raises OSError where nothing listens, ToolError where the server speaks no WebSocket."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidHandshake

        proxy = None if urlsplit(url).hostname in LOCAL else True
        try:
            # the step's own deadline replaces pings: a server that computes in its loop answers none
            socket = await connect(
                url, max_size=LARGEST_FRAME, ping_interval=None, open_timeout=None, compression=None, proxy=proxy
            )
        except InvalidHandshake as error:
            raise ToolError(f"there is no OpenEnv server: {first_line(error)}") from error
        return cls(socket)

    async def ask(self, kind: str, data: Mapping[str, Any] | None, seconds: float) -> dict[str, Any]:
        """The data of the answer to a frame of this kind.

        Raises Refused for an error of the server, ToolError for a late or malformed answer, a closed socket, or a frame
        that came before this one was sent: it would be taken for the answer.
        """
        from websockets.exceptions import ConnectionClosed

        if self._is_open:  # before, a frame is the server's reason to refuse the session
            with suppress(TimeoutError, ConnectionClosed):
                async with asyncio.timeout(0):
                    stray = await self._socket.recv()
                    raise ToolError(f"the server sent a frame that nobody asked for: {str(stray)[:80]!r}")
        self._is_open = True
        try:
            async with asyncio.timeout(seconds):
                with suppress(ConnectionClosed):  # the last frames of the server, or its reason, are read below
                    await self._socket.send(
                        json.dumps({"type": kind} if data is None else {"type": kind, "data": data})
                    )
                text = await self._socket.recv()
        except TimeoutError:
            raise ToolError(f"{kind} did not return within {seconds:g} s") from None
        except ConnectionClosed as error:
            raise ToolError(f"the server closed the session before {kind} returned: {first_line(error)}") from error
        try:
            frame = json.loads(text)
            what, content = frame["type"], dict(frame["data"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ToolError(f"{kind} was answered with something that is not a frame: {str(text)[:80]!r}") from None
        if what == "error":
            raise Refused(kind, content)
        return content

    async def play(self, kind: str, data: Mapping[str, Any], seconds: float) -> Answer:
        """The observation that answers a reset or a step. Raises as `ask` does."""
        content = await self.ask(kind, data, seconds)
        observation, reward, done = content.get("observation"), content.get("reward"), content.get("done", False)
        if isinstance(observation, dict) and isinstance(reward, int | float | None) and isinstance(done, bool):
            return Answer(observation, None if reward is None else float(reward), done)
        raise ToolError(f"{kind} was answered with something that is not an observation: {str(content)[:80]}")

    def abort(self) -> None:
        """Drop the socket without a word."""
        self._socket.transport.abort()

    async def close(self) -> None:
        """End the session, and wait until the server has: only then it has room for another one."""
        from websockets.exceptions import ConnectionClosed

        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._socket.send('{"type": "close"}')
                await self._socket.wait_closed()
        except (ConnectionClosed, TimeoutError):
            self._socket.transport.abort()


@dataclass(frozen=True)
class Rules:
    """How episodes are begun and read: arguments of reset beside the seed, deadlines, and what the model reads.

    `refusal` gives the model's text for an action that the server refuses through the model's fault, else None.
    """

    reset: Mapping[str, Any]
    start_seconds: float
    step_seconds: float
    show: Callable[[Mapping[str, Any]], str]
    refusal: Callable[[Refused], str | None] = lambda refused: None


@dataclass(eq=False)
class Episode:
    """An episode: the actions so far, the texts shown behind them, and their rewards.

    `shown` begins with the first observation. `invalid` counts replies that were no action, of `turns` in all. `text`
    is what the model reads next.
    """

    rules: Rules
    seed: int
    actions: list[dict[str, Any]] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    turns: int = 0
    invalid: int = 0
    total: float = 0.0
    rewarded: int = 0  # steps that had a reward
    text: str = ""
    done: bool = False
    error: str | None = None
    session: Session | None = None
    busy: bool = False  # no other episode may have its session

    def see(self, answer: Answer, place: int) -> None:
        """Take in the answer to action `place` - 1, or to reset. Raises ToolError if another text was shown there."""
        text = self.rules.show(answer.observation)
        if self.shown[place : place + 1] not in ([], [text]):
            raise ToolError(UNLIKE)
        self.shown[place : place + 1] = [text]
        if not place:
            self.total, self.rewarded = 0.0, 0  # those of reset do not count
        elif answer.reward is not None:
            self.total, self.rewarded = self.total + answer.reward, self.rewarded + 1
        self.done, self.text = answer.done, text


class Sessions:
    """The sessions of one server, at most `limit` at once (None: any number), for all environments of this process.

    An episode keeps its session until it ends. Beyond `limit` it is taken from the episode that moved least recently,
    which plays its actions again in another one when it goes on. A session whose episode has ended serves the next
    one. Everything but `of`, `leave`, `run` and `free` happens in the thread of a loop.
    """

    _shared: ClassVar[dict[tuple[str, int | None], Sessions]] = {}
    _sharing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, url: str, limit: int | None) -> None:
        self.url, self.limit = url, limit
        self._users = 0
        self._thread = LoopThread("rlpost-openenv")
        self._free: list[Session] = []
        self._holders: dict[Episode, None] = {}  # those that moved least recently first
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._open = 0  # sessions, those that are being opened included
        self._reached = False  # whether a server has ever answered
        self._failed = -math.inf  # when an episode failed last: the server may still compute in its session

    @classmethod
    def of(cls, url: str, limit: int | None) -> Sessions:
        """The sessions at `url` that this process shares; call `leave` when they are not needed any more."""
        with cls._sharing:
            shared = cls._shared.setdefault((url, limit), cls(url, limit))
            shared._users += 1
            return shared

    def leave(self) -> None:
        """Close all sessions unless another environment uses them."""
        with self._sharing:
            self._users -= 1
            if self._users:
                return
            del self._shared[self.url, self.limit]
            self.run(self._end_all())
        self._thread.close()

    def run(self, *work: Coroutine[Any, Any, Any]) -> list[Any]:
        """Run `work` at the same time; its results. Each has deadlines of its own."""

        async def together() -> list[Any]:
            done = await asyncio.gather(*work, return_exceptions=True)  # none may still open a session behind an error
            if failed := [each for each in done if isinstance(each, BaseException)]:
                raise failed[0]
            return done

        return self._thread.submit(together()).result() if work else []

    def free(self, episodes: Sequence[Episode]) -> None:
        """Let the next ones have the sessions of these episodes, soon."""
        self._thread.submit(self.end(episodes))

    # Episodes, in the loop

    async def play(self, episode: Episode, action: dict[str, Any] | None = None) -> Answer | None:
        """Begin the episode unless it has a session, and play an action; the answer, None without one.

        An action that the server refuses through the model's fault changes the text alone. Any other failure becomes
        the episode's `error`, and its session is dropped. Raises ConfigError where the server has too few sessions.
        """
        episode.busy = True
        try:
            if episode.session is None:
                episode.see(await self._begin(episode), 0)
                for place, earlier in enumerate(episode.actions, start=1):
                    episode.see(await self._step(episode, earlier), place)
            self._holders[episode] = self._holders.pop(episode, None)  # the last one to have moved
            if action is None or episode.done:
                return None
            try:
                answer = await self._step(episode, action)
            except Refused as refused:
                if (text := episode.rules.refusal(refused)) is None:
                    raise
                episode.text, episode.invalid = text, episode.invalid + 1
                return None
            episode.actions.append(action)
            episode.see(answer, len(episode.actions))
            return answer
        except ToolError as error:
            episode.error = f"{self.url}: {error}"
            self._failed = asyncio.get_running_loop().time()
            self._drop(episode)
        except BaseException:
            self._drop(episode)
            raise
        finally:
            episode.busy = False
            self._wake()
        return None

    async def look(self, episode: Episode, action: dict[str, Any] | None = None) -> Answer | None:
        """Begin an episode of no conversation; the answer to `action`. No session stays open. Raises ToolError."""
        try:
            answer = await self.play(episode, action)
            if episode.error is not None:
                raise ToolError(f"no episode can be played: {episode.error}")
            return answer
        finally:
            session, episode.session = episode.session, None
            self._holders.pop(episode, None)
            if session is not None:
                await session.close()
                self._open -= 1
                self._wake()

    async def end(self, episodes: Sequence[Episode]) -> None:
        """Let the next ones have the sessions of these episodes."""
        for episode in episodes:
            session, episode.session = episode.session, None
            self._holders.pop(episode, None)
            if session is not None:
                self._free.append(session)
        self._wake()

    async def _end_all(self) -> None:
        await self.end(list(self._holders))
        closing, self._free = self._free, []
        await asyncio.gather(*(session.close() for session in closing))
        self._open -= len(closing)
        self._wake()

    async def _step(self, episode: Episode, action: Mapping[str, Any]) -> Answer:
        assert episode.session is not None
        return await episode.session.play("step", action, episode.rules.step_seconds)

    async def _begin(self, episode: Episode) -> Answer:
        """Reset a session for the episode, which has it from now on."""
        loop, seconds, deadline = asyncio.get_running_loop(), episode.rules.start_seconds, None
        arguments = {"seed": episode.seed, **episode.rules.reset}
        try:
            async with asyncio.timeout(None) as limit:
                while True:
                    used = await self._take()
                    deadline = deadline or loop.time() + seconds  # the wait for another episode does not count
                    limit.reschedule(deadline)
                    episode.session = used or await self._connect(deadline)
                    self._holders[episode] = None
                    try:
                        return await episode.session.play("reset", arguments, seconds)
                    except ToolError as error:
                        full = isinstance(error, Refused) and error.code == CAPACITY
                        if full and loop.time() > self._failed + seconds / 2:  # what failed has long ended
                            raise ConfigError(self._too_few(error)) from error
                        if not full and (used is None or isinstance(error, Refused)):  # else closed since it was used
                            raise
                        self._drop(episode)
                        if full:
                            await asyncio.sleep(RETRY_SECONDS)
        except TimeoutError:
            late = "no session" if episode.session is None else "reset did not return"
            raise ToolError(f"{late} within {seconds:g} s") from None

    async def _take(self) -> Session | None:
        """A session whose episode has ended, or None where one may be opened, which counts from now on.

        Waits where all of `limit` are moving.
        """
        while True:
            if self._free:
                return self._free.pop()
            if self.limit is None or self._open < self.limit:
                self._open += 1
                return None
            idle = next((each for each in self._holders if not each.busy), None)
            if idle is not None:
                await self.end([idle])
                continue
            room = asyncio.get_running_loop().create_future()
            self._waiting.append(room)
            await room

    async def _connect(self, deadline: float) -> Session:
        """A new socket; a server that was there before may be away until the deadline."""
        try:
            while True:
                try:
                    session = await Session.open(self.url)
                    self._reached = True
                    return session
                except OSError as error:
                    if not self._reached or asyncio.get_running_loop().time() + RETRY_SECONDS > deadline:
                        why = f"nothing answers ({first_line(error)})"
                        raise ToolError(f"{why}: start the server, or correct env.url") from error
                await asyncio.sleep(RETRY_SECONDS)
        except BaseException:
            self._open -= 1
            self._wake()
            raise

    def _drop(self, episode: Episode) -> None:
        """Give up the session of the episode, whatever state it is in."""
        session, episode.session = episode.session, None
        self._holders.pop(episode, None)
        if session is not None:
            session.abort()
            self._open -= 1
            self._wake()

    def _wake(self) -> None:
        while self._waiting:
            room = self._waiting.popleft()
            if not room.done():
                room.set_result(None)

    def _too_few(self, error: ToolError) -> str:
        has = getattr(error, "sessions", None)
        most = "too few sessions" if has is None else f"{has} sessions at most"
        return (
            f"{self.url} has {most} ({error}). A step plays as many episodes at once as it has completions, an "
            "evaluation up to 256, and each process has sessions of its own. Start the server with "
            "max_concurrent_envs=N, large enough for all of them (its environment class needs "
            "SUPPORTS_CONCURRENT_SESSIONS = True), or add env.sessions=N, the most of one process, which is slower: "
            "episodes then play their actions again"
        )
