"""The settings that make something run: code to import, a program to start, a wall to take down, a machine to send to.

A field that does so says it in its `metadata`. `rlpost.config.code` lets such a value come from a command line alone,
where a person typed it: a recipe, a file of conf/ and a run folder may be anybody's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NAME = re.compile(r"[A-Za-z][\w-]*")  # of an environment, a reward or a tool; no file is called so
RUNS = "rlpost.runs"  # the key in a field's metadata


@dataclass(frozen=True)
class Runs:
    """What a value makes run: `no_file` goes on "a file cannot ...", `by` is whether this value does it.

    `beside` says which values do not, and `example` is one that does.
    """

    no_file: str
    by: Callable[[Any], bool]
    beside: str = ""
    example: str = ""


def _said(value: Any) -> bool:
    return value is not None and value != []


def _beyond_names(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return _said(value) and not all(isinstance(name, str) and NAME.fullmatch(name) for name in names)


CODE = {RUNS: Runs("name code to run", _said)}
CODE_UNLESS_NAMES = {  # of rewards: a name stands for what is there
    RUNS: Runs("name code to run", _beyond_names, "a name", "FILE.py:FUNCTION")
}
CODE_IF_MODULE = {
    RUNS: Runs("name code to run", lambda value: any(mark in str(value) for mark in (":", "${")), "a name")
}
MACHINE = {  # whose workers are sent the code, the model and the rows
    RUNS: Runs(
        "send code and data to another machine",
        lambda value: value not in ("auto", "local"),
        "auto or local",
        "HOST:6379",
    )
}
PROGRAM = {RUNS: Runs("name a program to start", _said)}
SANDBOX = {
    RUNS: Runs(
        "let programs out of the sandbox", lambda value: getattr(value, "name", value) != "bubblewrap", "bubblewrap"
    )
}
