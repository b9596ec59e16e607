"""docs/faults.md: each of the faults has a test, and every test that is named is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = [line for line in (ROOT / "docs/faults.md").read_text().splitlines() if re.match(r"\| \d+ \|", line)]


def test_every_fault_has_a_number_and_tests_that_are_there() -> None:
    assert [int(row.split("|")[1]) for row in ROWS] == list(range(1, 61))
    for row in ROWS:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, name in named:
            tree = ast.parse((ROOT / file).read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, name)


def test_every_fault_says_what_becomes_of_it() -> None:
    for row in ROWS:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 4, row
        assert all(cells), row
