"""Connections between machines: whether an address answers, free ports, and processes that come to this one."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

from rlpost.remote.process import RemoteObject, listen


def reach(host: str, port: int, seconds: float) -> None:
    """Raise OSError unless something takes connections at `host:port` within `seconds`."""
    socket.create_connection((host, port), seconds).close()


def free_port(address: str) -> int:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def connected(host: str, port: int, secret: str) -> Connection:
    """A connection to the process that waits at `host:port` and knows the same `secret`."""
    connection = Client((host, port), authkey=secret.encode())
    _keep_alive(connection)
    return connection


class Listener:
    """Takes connections of processes that know `secret`; see `listening`."""

    def __init__(self, server: socket.socket, secret: str) -> None:
        self._server = server
        self._secret = secret.encode()
        self.port: int = server.getsockname()[1]

    def next(self, until: float) -> Connection:
        """The next connection. Raises TimeoutError where none comes before `until`, by `time.monotonic`."""
        self._server.settimeout(max(0.1, until - time.monotonic()))
        came, _ = self._server.accept()
        connection = Connection(came.detach())
        deliver_challenge(connection, self._secret)
        answer_challenge(connection, self._secret)
        _keep_alive(connection)
        return connection


@contextmanager
def listening(host: str, port: int, secret: str) -> Iterator[Listener]:
    """A block in which connections are taken; an empty `host` means every address of this machine, port 0 any port."""
    with socket.create_server((host, port)) as server:
        yield Listener(server, secret)


def _keep_alive(connection: Connection) -> None:
    """Have the kernel notice within half a minute that the machine at the other end is gone."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class JoinedProcess(RemoteObject):
    """A process that somebody else has started and that has connected to this one."""

    def __init__(self, build: Any, connection: Connection, **how: Any) -> None:
        super().__init__(build, **how)
        self._connection = connection

    @property
    def _is_open(self) -> bool:
        return True

    def _open(self, seconds: float) -> None:
        self._heard = time.monotonic()
        listen(self, self._connection)

    def _write(self, message: bytes) -> None:
        with suppress(OSError):  # the thread that reads notices the loss
            self._connection.send_bytes(message)

    def _end(self) -> None:
        with suppress(OSError):
            self._connection.close()  # then the other side ends itself
