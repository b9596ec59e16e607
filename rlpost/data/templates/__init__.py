"""Chat formats of model families: how each writes a conversation (NAME.jinja), and how its text is read back."""

from __future__ import annotations

from functools import cache
from importlib import resources


def jinja(name: str) -> str:
    """The chat template that is shipped under that name."""
    return resources.files(__name__).joinpath(f"{name}.jinja").read_text(encoding="utf-8")


@cache
def own_templates() -> frozenset[str]:
    """All chat templates that are shipped."""
    files = [file for file in resources.files(__name__).iterdir() if file.name.endswith(".jinja")]
    return frozenset(file.read_text(encoding="utf-8") for file in files)
