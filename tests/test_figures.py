"""How large the package is, and how much of it a training passes through, do not grow unnoticed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from test_layers import LATE_DOORS

SCRIPT = Path(__file__).parents[1] / "scripts" / "figures.py"
MORE = 1.1  # beyond so many times what is written here, a figure is lowered again or written anew, with the reason
HELD = {
    "code lines": 38_300,  # with what runs on a Ray cluster, rlpost doctor, and answers to other tools' words
    "modules": 172,  # with the gate, the diagnosis and incident.json: a run that goes wrong is noticed and says how
    "lines": 22_500,  # with rank.py, ranks.py and sending.py of train/, which one rank goes through too
    "functions": 525,
    "functions from learn on": 224,
}


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_code_lines_leave_out_blank_lines_comments_and_docstrings(figures: ModuleType) -> None:
    source = '''"""A module.

It says more.
"""

# a comment
def f(a,  # behind code
      b):
    """Says what."""
    text = """two

    and a blank line in it"""
    return text
'''
    assert figures.code_lines(source) == 2 + 3 + 1


def test_the_package_and_what_a_training_passes_through_have_not_grown(figures: ModuleType) -> None:
    road, loaded = figures.passed_through()
    assert {module for doors in LATE_DOORS.values() for module in doors} & set(loaded) == set()
    measured = figures.size() | road
    grown = {name: measured[name] for name, held in HELD.items() if measured[name] > MORE * held}
    assert grown == {}
