"""One process that answers requests, and the pipes to it; `rlpost.rewards.workers` drives it."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rlpost.child import ending, framed, kill_group, put, python_module, readable_within, taken, unframed
from rlpost.orphans import guard, kill_marked

STACK_SECONDS = 2.0  # longest wait for a process to say where it is, before it is killed
OUTPUT_KEPT = 2000  # bytes of what a call prints
LONGEST_ANSWER = 1 << 28  # bytes
LONGEST_STACK = 1 << 20  # bytes
WORKER = "RLPOST_REWARD_WORKER"  # a variable that tells what one worker has started


@dataclass
class Process:
    """A process and its pipes: requests to it, answers and output from it, and one whose closing ends it."""

    popen: subprocess.Popen[bytes]
    requests: int
    answers: int
    output: int
    life: int
    owner: int  # the process that started it
    mark: str  # which all that it starts inherits
    is_ready: bool = False
    has_hung_up: bool = False
    output_is_open: bool = True
    outgoing: bytearray = field(default_factory=bytearray)
    incoming: bytearray = field(default_factory=bytearray)
    printed: bytearray = field(default_factory=bytearray)

    @classmethod
    def started(cls, environment: Mapping[str, str]) -> Process:
        """A new one, with `environment` on top of this one's."""
        pipes = [os.pipe() for _ in range(4)]
        (its_requests, requests), (answers, its_answers), (output, its_output), (its_life, life) = pipes
        passed = (its_requests, its_answers, its_life)
        guard()
        mark = uuid.uuid4().hex
        popen = python_module(
            "rlpost.rewards.worker",
            *passed,
            environment={**environment, WORKER: mark},
            stdin=subprocess.DEVNULL,
            stdout=its_output,
            stderr=its_output,
            pass_fds=passed,
        )
        for end in (*passed, its_output):
            os.close(end)
        for end in (requests, output):
            os.set_blocking(end, False)
        return cls(popen, requests, answers, output, life, os.getpid(), mark)

    def send(self) -> None:
        """As much of what is to be sent as fits into the pipe; that it is gone, the pipe of its answers tells."""
        del self.outgoing[: put(self.requests, self.outgoing)]

    def receive(self) -> Any:
        """The next answer, None while it is not whole; `has_hung_up` once there will be none."""
        received = os.read(self.answers, 1 << 20)
        self.has_hung_up = not received
        self.incoming += received
        try:
            content = unframed(self.incoming, LONGEST_ANSWER)
            return None if content is None else json.loads(content)
        except (ValueError, RecursionError):
            return ()  # no answer of a worker's

    def keep_output(self) -> bool:
        """Take printed text out of the pipe and keep the first of it; whether there was any."""
        output = self._take_output()
        self.printed += output[: max(0, OUTPUT_KEPT - len(self.printed))]
        return bool(output)

    def what_was_printed(self) -> str:
        """The first of what was printed since the last request, all that is in the pipe read."""
        for _ in range(64):  # more is not of a call that is over, but of something that goes on
            if not self.keep_output():
                break
        return self.printed.decode(errors="replace")

    def stack(self) -> str:
        """Where its Python code is now, if it still says so."""
        self.what_was_printed()
        with suppress(ProcessLookupError):
            os.kill(self.popen.pid, signal.SIGUSR1)
        said = b""
        while self.output_is_open and len(said) < LONGEST_STACK:
            patience = STACK_SECONDS if not said else 0.2  # its lines follow at once
            if not readable_within(self.output, patience):
                break
            said += self._take_output()
        return said.decode(errors="replace")

    def _take_output(self) -> bytes:
        output = taken(self.output, 1 << 16)
        self.output_is_open = output is not None
        return output or b""

    def ending(self) -> str:
        """How it ended, now that it has closed its pipes."""
        try:
            return f"its process {ending(self.popen.wait(1.0))}"
        except subprocess.TimeoutExpired:
            return "closed the pipe of its answers"

    def end(self) -> None:
        """Kill it and what it has started, and close the pipes; a second call does nothing."""
        if self.requests < 0:
            return
        if self.owner == os.getpid():  # a fork of that process has copies of the pipes alone
            kill_group(self.popen.pid)
            self.popen.wait()
            kill_marked(WORKER, self.mark)  # what has left its group
        for end in (self.requests, self.answers, self.output, self.life):
            os.close(end)
        self.requests = -1


def frame(content: Any) -> bytes:
    """A request as it goes through the pipe."""
    return framed(pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL))
