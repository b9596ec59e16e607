"""IFBench's verdicts: kinds by hand, every row can be checked, and nothing is drawn or downloaded."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("if_verifiable")

from rlpost.rewards.ifbench import IFBENCH, verdicts
from tests.rewards.instruction_data import (
    IFBENCH_ROWS,
    NLTK_DATA,
    find_nltk_data_in,
    needs_ifbench,
    rows_of,
)

ROOT = Path(__file__).parents[2]
TAGGED = "words:start_verb"  # needs a tagger that NLTK downloads, which no package brings

# kind, arguments, a reply that follows it, one that does not, not even loosely
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("count:word_count_range", {"min_words": 2.0, "max_words": 3.0}, "one two three", "one two three four"),
    ("count:keywords_multiple", {f"keyword{n}": w for n, w in enumerate("abcde", 1)}, "a bb ccc ddddd eeeeeee", "a b"),
    ("words:alphabet", {}, "all bees come down", "all bees do"),
    ("sentence:keyword", {"N": 2.0, "word": "mill"}, "It rained. The mill stood.", "The mill. It stood."),
    ("format:options", {"options": "yes/no/maybe"}, "Maybe.", "Perhaps."),
    ("repeat:repeat_change", {"prompt_to_repeat": "Say it again"}, "Shout it again", "Say it again"),
    ("repeat:repeat_span", {"prompt_to_repeat": "Say it once again", "n_start": 1, "n_end": 3}, " It once\n", "it"),
    ("repeat:repeat_span", {"prompt_to_repeat": "Say it once again", "n_start": 0, "n_end": 2}, "say it", "it"),
]


@pytest.fixture(autouse=True)
def nltk_data(monkeypatch: pytest.MonkeyPatch) -> None:
    find_nltk_data_in([str(NLTK_DATA)], monkeypatch)


@pytest.mark.parametrize(("kind", "kwargs", "follows", "breaks"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_kind_is_followed_or_not(kind: str, kwargs: dict[str, Any], follows: str, breaks: str) -> None:
    assert verdicts([kind], [kwargs], "", follows) == ([True], [True])
    assert verdicts([kind], [kwargs], "", breaks) == ([False], [False])


@needs_ifbench
def test_each_row_of_the_58_kinds_is_checked_without_a_draw() -> None:
    rows = [row for row in rows_of(IFBENCH_ROWS) if TAGGED not in row["instruction_id_list"]]
    before = random.getstate()
    assert [IFBENCH.complaint(row) for row in rows] == [None] * 294
    assert random.getstate() == before
    assert {kind for row in rows for kind in row["instruction_id_list"]} | {TAGGED} == set(IFBENCH.checkers())
    assert len(IFBENCH.checkers()) == 58


def test_the_import_of_the_checkers_downloads_nothing(tmp_path: Path) -> None:
    program = """
import socket
def refused(*_): print("the network was asked for")
socket.socket.connect = socket.getaddrinfo = refused
import nltk
before = nltk.download
from rlpost.rewards.ifbench import verdicts
print(verdicts(["format:no_whitespace"], [{}], "", "one"), nltk.download == before)
"""
    surroundings = {**os.environ, "HOME": str(tmp_path), "NLTK_DATA": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=surroundings, check=True
    )
    assert (done.stdout, done.stderr) == ("([True], [True]) True\n", "")
    assert list(tmp_path.iterdir()) == []
