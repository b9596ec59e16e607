"""A chat template, tried on short conversations in a process of its own: it comes with a model, and may be anybody's.

What it would take of time, memory and text on three short conversations is what it would take of every row.
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
LONGEST_TEXT = 1_000_000  # characters that it may write of a conversation of some hundred
SECONDS = 5  # of CPU time
MEMORY = 1 << 30  # bytes of address space
FOUND = "found: "  # what the process writes in front of what is wrong
FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}


@cache
def greed_of(template: str) -> str | None:
    """What `template` takes too much of, as "takes more than 5 s"; None where it takes little, or only fails."""
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
    if child.returncode < 0:  # SIGXCPU: its time is over
        return f"takes more than {SECONDS} s"
    found = said.decode().rpartition(FOUND)[2]
    if child.returncode:
        return found or f"takes more than {MEMORY >> 30} GiB of memory"
    return None


def conversations() -> list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """Messages, and tools: one question, several turns, and calls with their answers."""
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
        except FAILURES:  # on this conversation; where one is rendered, that is said
            continue
    return None


def main() -> int:
    """Try the template on stdin under limits; 1 where it takes too much, which stdout then says."""
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
    except TemplateError:  # it is none: whoever reads it says where
        return 0
    if found is not None:
        sys.stdout.write(FOUND + found)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
