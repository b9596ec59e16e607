"""A server on this machine that speaks OpenEnv's frames, with a small game, tools, and every way to fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from socket import SHUT_RDWR
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import Server, ServerConnection, serve

GUESS = {"description": "a digit", "type": "integer", "minimum": 0}
SCHEMA = {"title": "GuessAction", "properties": {"metadata": {"type": "object"}, "guess": GUESS}, "required": ["guess"]}
TOOLS_SCHEMA = {
    "title": "CallToolAction",
    "properties": {"type": {"const": "call_tool"}, "tool_name": {"type": "string"}, "arguments": {"type": "object"}},
    "required": ["tool_name"],
}


class Failure(Exception):
    """Answered as an error frame."""

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.data = {"message": message, "code": code, **more}


class Guess:
    """A digit that the seed decides; 1 for the digit, -0.25 for another one, three guesses."""

    def __init__(self) -> None:
        self.seed, self.level, self.guesses = 0, "easy", 0

    def reset(self, seed: int = 0, level: str = "easy") -> dict[str, Any]:
        self.seed, self.level, self.guesses = seed, level, 0
        return seen(f"Guess a digit. It is {'even' if seed % 2 == 0 else 'odd'}; {level}.", None)

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        self.guesses += 1
        right = action["guess"] == self.seed % 10
        return seen("yes" if right else f"no, {self.guesses}", 1.0 if right else -0.25, right or self.guesses == 3)

    def state(self) -> dict[str, Any]:
        return {"episode_id": str(id(self)), "step_count": self.guesses, "level": self.level}


class Shop(Guess):
    """Tools, as an MCP environment has them: `add` earns its sum, `stop` ends."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def reset(self, seed: int = 0) -> dict[str, Any]:  # type: ignore[override]  it knows no level
        self.total = seed % 10
        return {**seen("", 0.0), "observation": {"metadata": {"message": f"You have {self.total}."}}}

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        if action["type"] == "list_tools":
            numbers = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
            tools = [
                {"name": name, "description": f"{name} it<|im_end|>", "input_schema": numbers}
                for name in ("add", "stop")
            ]
            return {"observation": {"tools": tools}, "reward": None, "done": False}
        name, number = action["tool_name"], action["arguments"].get("number")
        if not isinstance(number, int):
            kind = "transport_error" if number == "lost" else "invalid_args"
            error = {"error_type": kind, "message": "number is missing"}
            return {"observation": {"tool_name": name, "result": None, "error": error}, "reward": None, "done": False}
        self.total += number
        content = [{"type": "text", "text": f"You have {self.total}."}]
        result = {"content": content, "is_error": False, "data": self.total}
        observation = {"tool_name": name, "result": result, "error": None}
        return {"observation": observation, "reward": number / 10, "done": name == "stop"}


def seen(text: str, reward: float | None, done: bool = False) -> dict[str, Any]:
    """The data of an observation with one text."""
    return {"observation": {"text": text, "metadata": {}}, "reward": reward, "done": done}


class OpenEnvServer:
    """Plays `game`, a fresh one for each socket, at most `most` at once, and remembers what it was sent.

    `twist(socket, frame)` may take a frame, and answer it in a way of its own: it returns True then.
    """

    def __init__(
        self,
        game: Callable[[], Any] = Guess,
        schema: Mapping[str, Any] | None = None,
        most: int = 64,
        twist: Callable[[ServerConnection, dict[str, Any]], bool] = lambda socket, frame: False,
    ) -> None:
        self.game, self.most, self.twist = game, most, twist
        self.schema = schema or (TOOLS_SCHEMA if game is Shop else SCHEMA)
        self.frames: list[dict[str, Any]] = []
        self.opened = 0  # sockets so far
        self.sockets: list[ServerConnection] = []  # of the sessions that are open
        self.most_open = 0
        self.released = threading.Event()  # ends what hangs
        self.changed = threading.Condition()
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, at the same port as before."""
        self.server: Server = serve(
            self._serve, "127.0.0.1", self.port, process_request=self._answer_get, max_size=None, close_timeout=0.1
        )
        self.port = self.server.socket.getsockname()[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Die: the sockets are gone without a word, and nothing listens any more."""
        for socket in list(self.sockets):
            with suppress(OSError):
                socket.socket.shutdown(SHUT_RDWR)
        self.server.shutdown()

    def steps(self) -> list[Any]:
        """The actions that were sent."""
        return [frame["data"] for frame in self.frames if frame["type"] == "step"]

    def wait_until_idle(self, seconds: float = 20.0) -> bool:
        """Whether all sessions end in time."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.sockets, seconds)

    def _answer_get(self, connection: ServerConnection, request: Any) -> Any:
        if request.path == "/schema":
            return connection.respond(200, json.dumps({"action": self.schema, "observation": {}, "state": {}}))
        return None if request.path == "/ws" else connection.respond(404, "there is nothing")

    def _serve(self, socket: ServerConnection) -> None:
        with self.changed:
            if len(self.sockets) >= self.most:
                full = f"Server at capacity: {len(self.sockets)}/{self.most} sessions active."
                self._fail(socket, Failure("CAPACITY_REACHED", full, max_sessions=self.most))
                return
            self.sockets.append(socket)
            self.opened += 1
            self.most_open = max(self.most_open, len(self.sockets))
        game = self.game()
        try:
            for text in socket:
                frame = json.loads(text)
                self.frames.append(frame)
                if frame["type"] == "close":
                    return
                if not self.twist(socket, frame):
                    self._answer(socket, game, frame)
        except ConnectionClosed:
            pass
        finally:
            with self.changed:
                self.sockets.remove(socket)
                self.changed.notify_all()

    def _answer(self, socket: ServerConnection, game: Any, frame: dict[str, Any]) -> None:
        try:
            if frame["type"] == "state":
                return socket.send(json.dumps({"type": "state", "data": game.state()}))
            if frame["type"] == "reset":
                known = game.reset.__code__.co_varnames
                data = game.reset(**{name: value for name, value in frame["data"].items() if name in known})
            else:
                data = game.step(frame["data"])
            socket.send(json.dumps({"type": "observation", "data": data}))
        except Failure as failure:
            self._fail(socket, failure)

    def _fail(self, socket: ServerConnection, failure: Failure) -> None:
        socket.send(json.dumps({"type": "error", "data": failure.data}))


@contextmanager
def open_env_server(game: Callable[[], Any] = Guess, **more: Any) -> Iterator[OpenEnvServer]:
    """A server that is gone after the block; sessions that stay open in it fail the test."""
    server = OpenEnvServer(game, **more)
    try:
        yield server
        server.released.set()
        assert server.wait_until_idle(), "sessions were left open"
    finally:
        server.released.set()
        server.stop()
