"""Chat formats of model families: how each writes a conversation (NAME.jinja), and how its text is read back."""

from __future__ import annotations

from importlib import resources


def jinja(name: str) -> str:
    """The chat template that is shipped under that name."""
    return resources.files(__name__).joinpath(f"{name}.jinja").read_text(encoding="utf-8")
