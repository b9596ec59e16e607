"""Tries a chat template on three short conversations, in a process with limits on time, memory and text.

A template comes with a model and may be anyone's; one that exceeds the limits here would do so on every row.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from functools import cache
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlpost.remote.child import kill_group, python_module

GENERATION_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
LONGEST_TEMPLATE = 1_000_000  # characters; the longest of a known model has 30,000
LONGEST_TEXT = 1_000_000  # characters rendered from a conversation of a few hundred
SECONDS = 5  # of CPU time
MEMORY = 1 << 30  # bytes of address space
FOUND = "found: "  # prefix of the fault that the process prints
FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}


@cache
def greed_of(template: str) -> str | None:
    """The limit that `template` exceeds, like "takes more than 5 s"; None if it exceeds none, or only fails."""
    if len(template) > LONGEST_TEMPLATE:
        return f"is longer than {LONGEST_TEMPLATE:,} characters"
    child = python_module(
        "rlpost.data.template_trial", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        said, _ = child.communicate(template.encode("utf-8", "replace"), timeout=12 * SECONDS)
    except subprocess.TimeoutExpired:
        kill_group(child.pid)
        child.communicate()
        return f"takes more than {SECONDS} s"
    if child.returncode < 0:  # SIGXCPU: its CPU time is used up
        return f"takes more than {SECONDS} s"
    found = said.decode().rpartition(FOUND)[2]
    if child.returncode:
        return found or f"takes more than {MEMORY >> 30} GiB of memory"
    return None


def conversations() -> list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """(messages, tools) of three conversations: one question, several turns, a call with its answer."""
    question = {"role": "user", "content": "2 + 2?"}
    answer = {"role": "assistant", "content": "4"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
    call["tool_calls"][0]["function"]["arguments"] = {"a": 2}
    system = {"role": "system", "content": "Be brief."}
    return [
        ([question], None),
        ([system, *[question, answer] * 4, question], None),
        ([question, call, {"role": "tool", "name": "add", "content": "4"}, answer], [_TOOL]),
    ]


def _try(template: str) -> str | None:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: form}
    compiled = environment.from_string(GENERATION_TAGS.sub("", template))
    for messages, tools in conversations():
        written = 0
        try:
            for part in compiled.generate(
                messages=messages, tools=tools, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
            ):
                written += len(part)
                if written > LONGEST_TEXT:
                    return f"writes more than {LONGEST_TEXT:,} characters of a short conversation"
        except FAILURES:  # on this conversation; rendering reports it later
            continue
    return None


def main() -> int:
    """Try the template on stdin under limits; returns 1 and prints the limit that it exceeds."""
    template = sys.stdin.buffer.read().decode()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        found = _try(template)
    except MemoryError:
        found = f"takes more than {MEMORY >> 30} GiB of memory"
    except RecursionError:
        found = "is nested too deep"
    except TemplateError:  # malformed: its reader reports where
        return 0
    if found is not None:
        sys.stdout.write(FOUND + found)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
