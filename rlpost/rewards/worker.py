"""The process in which a function is called for `rlpost.rewards.workers`: `python -m rlpost.rewards.worker`.

Requests come as pickled data of rlpost's own; answers go back as JSON, since the function may write
anything there. A frame is its length in 8 bytes, then its content. The first request is the order; its
answer says that the function is ready.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import pickle
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from rlpost.errors import RlpostError
from rlpost.imports import named
from rlpost.remote.child import LENGTH_BYTES, framed

MEMORY_BYTES = 4 << 30  # enough for sympy and NumPy; a number of a billion digits fails instead of filling the machine


def main() -> None:
    """Answer requests until there are no more."""
    request_end, answer_end, life_end = map(int, sys.argv[1:4])
    for end in (request_end, answer_end, life_end):
        os.set_inheritable(end, False)  # not for what the function starts
    _prepare(life_end)
    with os.fdopen(request_end, "rb") as requests, os.fdopen(answer_end, "wb") as answers:
        order = _read(requests)
        function: Callable[[Any], Any] | None = None

        def begin() -> Any:
            nonlocal function
            function, about = order.carry_out()
            return about

        _write(answers, _said(begin))
        while function is not None and (request := _read(requests)) is not None:
            _write(answers, _said(lambda call=function, item=request[0]: call(item)))


@dataclass(frozen=True)
class Order:
    """Which function, as `module:name`. With `arguments` it is called with them once and returns (function, about)."""

    function: str
    arguments: tuple[Any, ...] = ()

    def carry_out(self) -> tuple[Callable[[Any], Any], Any]:
        """The function to call, and data about it."""
        module, _, name = self.function.partition(":")
        function = getattr(import_module(module), name)
        return function(*self.arguments) if self.arguments else (function, None)


def limit_memory(num_bytes: int = MEMORY_BYTES) -> None:
    """Let every later request for more memory than this fail, with a MemoryError."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))


def _prepare(life_end: int) -> None:
    """Die with the parent process; leave no core file; be the first process killed when memory runs out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with suppress(OSError):  # only Linux has it
        Path("/proc/self/oom_score_adj").write_text("1000")
    faulthandler.register(signal.SIGUSR1, file=os.dup(2), all_threads=True)
    if hasattr(fcntl, "F_SETSIG"):  # the kernel kills the whole group, whatever it is busy with
        fcntl.fcntl(life_end, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life_end, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life_end, fcntl.F_SETFL, fcntl.fcntl(life_end, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_end_with, args=[life_end], daemon=True).start()  # the parent may be gone already


def _end_with(life_end: int) -> None:
    os.read(life_end, 1)  # nothing is ever written: this returns when the other end is closed
    os.killpg(0, signal.SIGKILL)


def _said(call: Callable[[], Any]) -> bytes:
    """The outcome of a call, as JSON: its value, its error, or an error of rlpost's to be raised again."""
    try:
        answer: dict[str, Any] = {"value": call()}
    except RlpostError as error:
        answer = {"raise": [type(error).__name__, str(error)]}
    except BaseException as error:  # noqa: BLE001  SystemExit too: any exception is reported
        answer = {"error": named(error)}
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed or replaced by the function
            stream.flush()
    try:
        return json.dumps(answer).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return json.dumps({"error": f"its answer is no plain data: {named(error)}"}).encode()


def _read(stream: IO[bytes]) -> Any:
    """The next request, None at the end."""
    head = stream.read(LENGTH_BYTES)
    return pickle.loads(stream.read(int.from_bytes(head))) if len(head) == LENGTH_BYTES else None


def _write(stream: IO[bytes], content: bytes) -> None:
    stream.write(framed(content))
    stream.flush()


if __name__ == "__main__":
    main()
