"""The files of wording hold what tests show, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import says as wording
from tests.says import Says


def test_every_section_belongs_to_a_test_that_shows_it() -> None:
    headings = [heading for file in wording.FOLDER.glob("*.txt") for heading in wording.read(file)]
    assert wording.tests_of(iter(headings)) - wording.existing() == set()


def test_a_text_is_written_with_the_flag_and_compared_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wording, "FOLDER", tmp_path)
    hidden = {str(tmp_path): "<tmp>"}
    written = Says("a.py::test_b", hidden, write=True)
    written("train", f"no {tmp_path}/rows\n")
    written("train", "two\nlines\n")
    assert (tmp_path / "train.txt").read_text() == "=== a.py::test_b\nno <tmp>/rows\n=== a.py::test_b 2\ntwo\nlines\n"
    compared = Says("a.py::test_b", hidden, write=False)
    with compared.refused("train", ValueError, "rows"):
        raise ValueError(f"no {tmp_path}/rows")
    with pytest.raises(AssertionError, match="--snapshots"):
        compared("train", "two lines")
