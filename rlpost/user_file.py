"""A Python file of the user's own: checked without running it, or imported; its errors name its line."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from rlpost.errors import ConfigError, named
from rlpost.files import expanded
from rlpost.text import did_you_mean, nearest

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def import_file(path: str, shown: str | None = None) -> ModuleType:
    """The module of the file at `path`, run once per process; it can import files beside it, and they can import it.

    Raises ConfigError, naming the file (as `shown` if given) and its line, if running it fails.
    """
    file = expanded(path).resolve()
    name = f"rlpost_user_file:{file}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module  # dataclasses and type hints look their module up
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # at the end, so that no file of the user hides a library
    try:
        with contextlib.redirect_stdout(sys.stderr):  # its prints are not the command's output
            exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if isinstance(error, SyntaxError) and error.filename == str(file):
            raise ConfigError(f"{shown or path}, line {error.lineno}: this is not valid Python: {error.msg}") from error
        raise ConfigError(f"{where_in(file, error, shown or path)}: importing it failed: {named(error)}") from error
    if _is_imported_as(file.stem, file):
        sys.modules.setdefault(file.stem, module)  # files beside it that import it get this module, not a second one
    return module


def check_file(path: str, word: str) -> ast.Module:
    """Parse the file at `path`; every message begins with `word` (`plugin=./my_env.py`).

    Raises ConfigError if the file is missing, not a .py file, unreadable or not valid Python.
    """
    file = expanded(path)
    if file.suffix != ".py":
        meant = next((f for f in (path.rstrip(":"), f"{path}.py") if f.endswith(".py") and expanded(f).is_file()), None)
        raise ConfigError(f"{word}: {path or 'nothing'} is not a .py file{did_you_mean(meant)}")
    if not file.is_file():
        raise ConfigError(f"{word}: there is no file {path}{did_you_mean(_neighbour(file))}")
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno}: this is not valid Python: {error.msg}") from error


def check_defines(path: str, name: str, word: str, kind: str = "function") -> None:
    """Raise ConfigError, which calls it a `kind`, unless the file at `path` defines `name`; does not run the file."""
    tree = check_file(path, word)
    names = list(_names_bound(tree))
    if name in names or "*" in names:
        return
    known = functions_of(tree) if kind == "function" else classes_of(tree)
    otherwise = f"it defines {', '.join(known)}" if known else f"it defines no {kind}"
    near = nearest(name, known) if name else None
    raise ConfigError(f"{word}: {path} defines no {kind} {name or '(none is named)'}{did_you_mean(near, otherwise)}")


def functions_of(tree: ast.Module) -> list[str]:
    """The public functions at the top of a parsed file."""
    functions = (node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [name for name in functions if not name.startswith("_")]


def classes_of(tree: ast.Module) -> list[str]:
    """The public classes at the top of a parsed file."""
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def where_in(file: str | Path, error: BaseException, shown: str | Path) -> str:
    """`FILE, line N`: the innermost line of `file` in the traceback of `error`, or the file alone."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if frame.filename == str(file)), None)
    return f"{shown}, line {line}" if line is not None else str(shown)


def _is_imported_as(name: str, file: Path) -> bool:
    """Whether `import name` would run `file`."""
    spec = importlib.util.find_spec(name) if name.isidentifier() and name not in sys.modules else None
    return spec is not None and spec.origin == str(file)


def _names_bound(tree: ast.Module) -> Iterator[str]:
    """Every name bound at the top level of a file; `*` for `from x import *`."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if not isinstance(node, _SCOPES):
            waiting += ast.iter_child_nodes(node)


def _neighbour(missing: Path) -> str | None:
    """The Python file beside `missing` with the nearest name."""
    try:
        names = sorted(file.name for file in missing.parent.glob("*.py"))
    except OSError:  # the folder cannot be listed, so there is nothing to suggest
        return None
    near = nearest(missing.name, names)
    return str(missing.parent / near) if near else None
