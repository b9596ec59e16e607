"""A server on this machine that speaks /v1/chat/completions with scripted answers, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[dict[str, Any]], str | int]  # a request's body -> the model's reply, or a status


class JudgeServer(ThreadingHTTPServer):
    """Answers as `script` says."""

    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.script = script
        self.asked: list[dict[str, Any]] = []  # bodies
        self.keys: list[str | None] = []  # what each request had to authorise it
        self.active = self.most_active = 0
        self.counting = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Answer(BaseHTTPRequestHandler):
    @property
    def judge(self) -> JudgeServer:
        assert isinstance(self.server, JudgeServer)
        return self.server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.judge.counting:
            self.judge.asked.append(body | {"path": self.path})
            self.judge.keys.append(self.headers["Authorization"])
            self.judge.active += 1
            self.judge.most_active = max(self.judge.most_active, self.judge.active)
        said = self.judge.script(body)
        with self.judge.counting:
            self.judge.active -= 1
        if isinstance(said, int):
            self.send_response(said)
            self.send_header("Location", f"http://127.0.0.1:{self.judge.server_port}/elsewhere")
            answer = b"no"
        else:
            self.send_response(200)
            choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
            answer = json.dumps({"choices": [choice]}).encode()
        self.send_header("Content-Length", str(len(answer)))
        with suppress(BrokenPipeError):  # who asked may wait no longer
            self.end_headers()
            self.wfile.write(answer)

    def do_GET(self) -> None:
        """Where a redirected request arrives."""
        self.judge.keys.append(self.headers["Authorization"])
        self.send_error(418)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(script: Script) -> Iterator[JudgeServer]:
    """A server for the time of a block."""
    with JudgeServer(script) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def reply_of(body: dict[str, Any]) -> str:
    """The reply that a request asks to be judged."""
    fenced = body["messages"][1]["content"].partition("The reply:\n")[2]
    return "\n".join(fenced.split("\n")[1:-1])
