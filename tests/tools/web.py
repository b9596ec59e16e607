"""Web servers on this machine that record every visit, for tests of the browser tool."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote


@dataclass
class Site:
    """Serves `pages` by path, `/slow` once it is `released`.

    `/to?URL` redirects, `/file` is a download, and what is posted to `/said` is shown.
    """

    pages: dict[str, str] = field(default_factory=dict)
    visits: list[str] = field(default_factory=list)
    port: int = 0
    released: threading.Event = field(default_factory=threading.Event)


@contextlib.contextmanager
def served(pages: Mapping[str, str], address: str = "127.0.0.1") -> Iterator[Site]:
    site = Site(dict(pages))

    class Page(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            site.visits.append(f"{self.command} {self.path}")
            path, _, query = self.path.partition("?")
            if path == "/slow":
                site.released.wait(60)
            if path == "/to":
                self.send_response(302)
                self.send_header("Location", unquote(query))
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            body = site.pages.get(path)
            self.send_response(404 if body is None else 200)
            if path == "/file":
                self.send_header("Content-Disposition", "attachment; filename=x.bin")
            self._send(f"<title>Lost</title>nothing at {path}" if body is None else body)

        def do_POST(self) -> None:
            site.visits.append(f"{self.command} {self.path}")
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self._send(f"<title>Said</title><p>you said {form}</p>")

        do_HEAD = do_OPTIONS = do_CONNECT = do_GET

        def _send(self, text: str) -> None:
            body = text.encode()
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            with contextlib.suppress(OSError):  # who asked may wait no longer
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((address, 0), Page)
    server.daemon_threads = True
    site.port = server.server_port
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def datagrams() -> Iterator[socket.socket]:
    """A port that takes datagrams."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        port.bind(("127.0.0.1", 0))
        port.setblocking(False)
        yield port
