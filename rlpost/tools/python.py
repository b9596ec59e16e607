"""A Python interpreter for a model to use."""

from __future__ import annotations

import os
import re
import textwrap
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlpost.data.conversation import Conversation
from rlpost.envs.base import ToolCall, ToolResult, ToolTransform
from rlpost.envs.tool_calls import AT_ONCE, Tools, calls_of_message
from rlpost.settings.base import member
from rlpost.tools.sandbox.process import Execution, Limits
from rlpost.tools.sandbox.sandbox import Sandbox, SandboxMode, Session

_BLOCK = re.compile(
    r"(?:^(?P<indent>[ \t]+))?(?<!`)(?P<fence>`{3,})(?:python3?|py)[ \t]*\r?\n"
    r"(?P<code>.*?)(?:^[ \t]*(?P=fence)`*(?![\w`])|(?P<unclosed>\Z))",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
_ANSWER = re.compile(r"\s*Code block \d+ (executed successfully|failed):\n")


class PythonInterpreter(ToolTransform):
    """Runs the Python that a model writes, in a sandbox, and shows it what the program printed.

    Each fenced block of python in a reply is a program; so is the argument `code` of a call of
    `tool_name`, whose schema the model is shown with `described` alone: the system prompt says how to write
    code. The answer is the stdout of a program that succeeds, otherwise its stderr and what ended it;
    warnings are not failures.

    Each program has an interpreter of its own, or, with `persistent`, each conversation has one,
    where names last from program to program until the conversation ends or the environment is reset.
    A missing interpreter is rebuilt from the conversation: after a resumption its earlier programs run once more.
    A program that exceeds `timeout` seconds or the sandbox's limits, or ends the interpreter, loses the names.

    `sandbox` is bubblewrap, or limits, a weaker mode for machines without it, or a `Sandbox` of your
    own; `memory_mb` (None: 512), `packages` (whether installed ones can be imported) and `python` (which
    interpreter; None: the one that runs this) are the sandbox's. With `show_last_value` the value of a
    final expression is printed too, as in a notebook.

    Raises ConfigError for an invalid setting; SandboxError, when started or used, if programs cannot be isolated
    from this machine: then none is run.
    """

    described = False

    def __init__(
        self,
        tool_name: str = "python",
        persistent: bool = False,
        timeout: float = 10.0,
        *,
        sandbox: str | SandboxMode | Sandbox = SandboxMode.bubblewrap,
        memory_mb: int | None = None,
        packages: bool = False,
        python: str | None = None,
        show_last_value: bool = False,
    ) -> None:
        self.tool_name = tool_name
        self.persistent = persistent
        self.timeout = timeout
        self.show_last_value = show_last_value
        if isinstance(sandbox, Sandbox):
            self.sandbox = sandbox
        else:
            limits = Limits() if memory_mb is None else Limits(memory_mb=memory_mb)
            self.sandbox = Sandbox(
                member(SandboxMode, "sandbox", sandbox), limits=limits, python=python, packages=packages
            )
        self.at_once = max(AT_ONCE, 4 * (os.cpu_count() or 1))  # more would use up each other's time limit
        self.interpreters: dict[tuple[int, int], _Interpreter] = {}  # key of a conversation -> its interpreter
        self._lock = threading.Lock()  # guards `interpreters`

    def start(self) -> None:
        """See `Transform.start`; raises SandboxError if programs cannot be isolated."""
        self.sandbox.prove()

    def schemas(self) -> list[dict[str, Any]]:
        """See `ToolTransform.schemas`."""
        kept = "What it defines can be used by later programs. " if self.persistent else ""
        code = {"type": "string", "description": "A complete Python program."}
        function = {
            "name": self.tool_name,
            "description": f"Runs a Python program and returns what it prints. {kept}There is no network and no input.",
            "parameters": {"type": "object", "properties": {"code": code}, "required": ["code"]},
        }
        return [{"type": "function", "function": function}]

    def calls_in(self, reply: str) -> list[ToolCall]:
        """The fenced blocks of Python in `reply`; one without an end is a faulty call."""
        return [self._block(match) for match in _BLOCK.finditer(reply)]

    def _block(self, match: re.Match[str]) -> ToolCall:
        code = textwrap.dedent(match["code"]) if match["indent"] else match["code"]
        fault = None if match["unclosed"] is None else f"the code block is never closed with {match['fence']}"
        return ToolCall(self.tool_name, {"code": code}, match.start(), fault, match.end())

    def call(self, conversation: Conversation, call: ToolCall) -> ToolResult:
        """Run one program. Raises SandboxError if it cannot be isolated from this machine."""
        code = call.arguments.get("code")
        if not isinstance(code, str):
            kind = "missing" if code is None else f"a {type(code).__name__}"
            return ToolResult(f'the program must be given as a string: {{"code": "..."}}, and is {kind}', ok=False)
        if others := sorted(set(call.arguments) - {"code"}):
            return ToolResult(f'{self.tool_name} takes "code" and nothing else, not {", ".join(others)}', ok=False)
        if not self.persistent:
            execution = self.sandbox.run(code, timeout_seconds=self.timeout, show_last_value=self.show_last_value)
        else:
            execution = self._interpreter_of(conversation).run(code, self.timeout, self.show_last_value)
        return (
            ToolResult(execution.stdout) if execution.claims_success else ToolResult(self._failure(execution), ok=False)
        )

    def message(self, number: int, call: ToolCall, result: ToolResult) -> str:
        """See `ToolTransform.message`; under the role user, on lines of its own."""
        outcome = "executed successfully" if result.ok else "failed"
        text = f"Code block {number} {outcome}:\n{result.text}"
        return f"\n{text}\n" if self.role == "user" else text

    def _failure(self, execution: Execution) -> str:
        """The program's stderr, and what ended it."""
        reason = execution.reason
        if reason and self.persistent:
            reason += " - process restarted"
        if not reason and not execution.stderr:
            reason = f"Python exited with code {execution.exit_code}"
        return execution.stderr + reason

    # Interpreters that persist

    def _interpreter_of(self, conversation: Conversation) -> _Interpreter:
        """The conversation's interpreter, in the state that its programs so far have left.

        If another snapshot of the conversation has run other programs there, a fresh one runs this conversation's
        programs once more.
        """
        before = self._ran_in(conversation)
        with self._lock:
            kept = self.interpreters.get(conversation.key)
        if kept is not None and kept.ran == before:
            return kept
        if kept is not None:
            kept.session.close()
        fresh = _Interpreter(self.sandbox.session())
        with self._lock:
            self.interpreters[conversation.key] = fresh
        for code in before:
            fresh.run(code, self.timeout, self.show_last_value)
        return fresh

    def _ran_in(self, conversation: Conversation) -> list[str]:
        """The programs that this conversation has run, which are those with an answer."""
        places = [n for n, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        own = places[len(places) - conversation.turns :]  # without assistant messages of its prompt
        ran: list[str] = []
        for place, end in zip(own, [*own[1:], len(conversation.messages)], strict=True):
            message = conversation.messages[place]
            calls = calls_of_message(message)
            if calls is None:
                calls = Tools(transforms=[self]).calls_of(message["content"])
            mine = [call for call in calls if self.takes(call.name)]
            answers = [m for m in conversation.messages[place + 1 : end] if _ANSWER.match(m["content"])]
            for call, _ in zip(mine, answers, strict=False):  # calls over the limit of a turn have no answer
                code = call.arguments.get("code")
                if call.fault is None and isinstance(code, str):
                    ran.append(code)
        return ran

    def on_end(self, conversations: Sequence[Conversation]) -> None:
        """See `Transform.on_end`: their interpreters end."""
        for conversation in conversations:
            with self._lock:
                ended = self.interpreters.pop(conversation.key, None)
            if ended is not None:
                ended.session.close()

    def on_reset(self) -> None:
        """See `Transform.on_reset`: all interpreters end."""
        self.close()

    def close(self) -> None:
        """See `Transform.close`: all interpreters end."""
        with self._lock:
            ended, self.interpreters = list(self.interpreters.values()), {}
        for interpreter in ended:
            interpreter.session.close()


@dataclass
class _Interpreter:
    """A session, and the programs it has run."""

    session: Session
    ran: list[str] = field(default_factory=list)

    def run(self, code: str, timeout: float, show_last_value: bool) -> Execution:
        self.ran.append(code)
        return self.session.run(code, timeout_seconds=timeout, show_last_value=show_last_value)
