"""Public names of a package that are imported when they are first asked for."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(
    package: str, file: str, elsewhere: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `package`, whose source is `file`.

    Its public names are those that the `if TYPE_CHECKING:` block of the source imports, which type
    checkers read, each as `from HOME import NAME as NAME`. A name of `elsewhere`, which TorchRL's users know and
    which is not here, raises ImportError with what to use instead.
    """

    @cache
    def homes() -> dict[str, tuple[str, str]]:
        checked = (node for node in ast.parse(Path(file).read_bytes()).body if isinstance(node, ast.If))
        imports = (node for block in checked for node in block.body if isinstance(node, ast.ImportFrom))
        return {a.asname or a.name: (node.module or "", a.name) for node in imports for a in node.names}

    def get(name: str) -> Any:
        if name in (elsewhere or {}):  # an AttributeError would lose its words in `from package import name`
            raise ImportError(f"{package} has no {name}: {(elsewhere or {})[name]}")
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, there = homes()[name]
        return import_module(f"{package}.{name}") if home == package else getattr(import_module(home), there)

    return get, lambda: sorted(homes())
