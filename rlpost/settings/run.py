"""Where one run writes, and what was asked for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunRequest:
    """One run as the command line asked for it.

    `resume` is None (a new run), "auto" (go on where there is a checkpoint, else begin), "latest"
    (go on from the newest checkpoint) or the path of a checkpoint or run folder. `overrides` are
    the recipe's and the user's settings as `key=value` words that compose to the same settings
    again; `command` is what was typed; `config_yaml` the resolved configuration. `plain` asks for one
    line a step where there would be a live picture.
    """

    folder: Path
    resume: str | None
    overrides: list[str]
    command: list[str]
    config_yaml: str
    plain: bool = False


def says_where(command: Sequence[str]) -> bool:
    """Whether the words of a command say where its run is: `--name` or `--out`."""
    return any(word.partition("=")[0] in ("--out", "--name") for word in command)
