"""Tests that a page of the documentation names, as `tests/FILE.py::NAME`."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


def check_named(row: str) -> None:
    """Fail where this line of a page names no test, or one that is not there."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
    assert named, row
    for file, name in named:
        assert name in _tests_of(file), (file, name)


@cache
def _tests_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
