"""The descriptions of settings: comments beside the fields of their classes, and first lines of options' files.

Read for help, completion and messages alone.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import textwrap
import tokenize
from functools import cache
from pathlib import Path
from typing import Any

from rlpost.catalog import CHOICES, Command
from rlpost.config.schema import NULL, Key, classes_of, conf_file, groups_of, keys_of, types_of

FOR_CHECKERS = re.compile(r"#\s*pyright: ignore\[\w+\]\s*")  # a comment that is for the type checker alone


@cache
def docs_of(settings: type) -> dict[str, str]:
    """Field name -> the comment beside it, of a settings class and its bases; None is written null, as users do."""
    docs: dict[str, str] = {}
    for cls in reversed(settings.__mro__):
        if dataclasses.is_dataclass(cls):
            docs.update(_comments_of(cls))
    return docs


def _comments_of(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except OSError:  # an installation without source files: the keys are still listed, without comments
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    by_line = {t.start[0]: FOR_CHECKERS.sub("", t.string).lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    comments = {line: re.sub(r"\bNone\b", NULL, comment) for line, comment in by_line.items() if comment}
    body = ast.iter_child_nodes(ast.parse(source).body[0])
    return {
        ast.unparse(node.target): comments[line]
        for node in body
        if isinstance(node, ast.AnnAssign)
        for line in (node.lineno, node.end_lineno)
        if line in comments
    }


def describe(group: str, option: str) -> str:
    """The description of an option: the first line of its file, or its row's."""
    file = conf_file(f"{group}/{option}")
    return CHOICES[group][option].line if file is None else description(file)


def description(file: Path) -> str:
    """The comment on the first line of an option's or recipe's file; empty if it has none."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[0].lstrip("# ") if lines and lines[0].startswith("#") else ""


def meanings(command: Command[Any]) -> dict[str, tuple[Key, str]]:
    """Every key of `command` under any of its options, with the comment beside it, or its type where there is none."""
    parts = types_of(command.settings)
    groups = groups_of(command.settings)
    classes = [(cls, f"{group}.") for group in groups for cls in classes_of(command, group).values()]
    found: dict[str, tuple[Key, str]] = {}
    for settings, prefix in [(command.settings, ""), *classes]:
        for key in keys_of(settings, prefix):
            part, _, field = key.name.rpartition(".")
            owner = parts[part] if part and not prefix else settings
            found[key.name] = key, docs_of(owner).get(field) or key.type_name
    return {name: row for name, row in found.items() if name not in command.without}
