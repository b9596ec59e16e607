"""SECURITY.md: behind each of its lines stands a test that is there."""

from __future__ import annotations

from tests.named_tests import ROOT, check_named

PAGE = ROOT / "SECURITY.md"


def rows() -> list[str]:
    """The lines of the tables, without their heads."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return [line for line in lines if not line.startswith(("| it may ", "|---"))]


def test_every_line_names_tests_that_are_there() -> None:
    assert len(rows()) > 25
    for row in rows():
        check_named(row)
