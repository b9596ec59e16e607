"""Public names of a package that are imported when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `package`, whose public names live where `homes` says.

    A home is a module of the package, or `module:NAME` by its full name where the name is another
    there; an empty one makes the name a module of the package itself.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, there = homes[name].partition(":")
        if not module:
            return import_module(f"{package}.{name}")
        return getattr(import_module(module if there else f"{package}.{module}"), there or name)

    return get, lambda: sorted(homes)
