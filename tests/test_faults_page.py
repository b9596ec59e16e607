"""docs/faults.md: each of the faults has a test, and every test that is named is there."""

from __future__ import annotations

import re

from tests.named_tests import ROOT, check_named

ROWS = [line for line in (ROOT / "docs/faults.md").read_text().splitlines() if re.match(r"\| \d+ \|", line)]


def test_every_fault_has_a_number_and_tests_that_are_there() -> None:
    assert [int(row.split("|")[1]) for row in ROWS] == list(range(1, 65))
    for row in ROWS:
        check_named(row)


def test_every_fault_says_what_becomes_of_it() -> None:
    for row in ROWS:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 4, row
        assert all(cells), row
