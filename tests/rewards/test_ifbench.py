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

from rlpost.errors import DataError, RewardError
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
    ("count:unique_word_count", {"N": 2.0}, "the mill", "the the"),
    ("count:conjunctions", {"small_n": 2.0}, "this and that, but not it", "this and that and it"),
    ("count:numbers", {"N": 2.0}, "10 or 20", "10 or 20 or 30"),
    ("count:keywords_multiple", {f"keyword{n}": w for n, w in enumerate("abcde", 1)}, "a bb ccc ddddd eeeeeee", "a b"),
    ("words:alphabet", {}, "all bees come down", "all bees do"),
    ("words:last_first", {}, "He saw rain. Rain fell.", "He saw rain. It fell."),
    ("words:no_consecutive", {}, "a big cat", "a big bat"),
    ("words:palindrome", {}, "level radar civic kayak refer madam rotor tenet stats minim", "level radar"),
    ("words:prime_lengths", {}, "to all seven", "a four"),
    ("words:repeats", {"small_n": 2.0}, "two two one", "two two two"),
    ("sentence:keyword", {"N": 2.0, "word": "mill"}, "It rained. The mill stood.", "The mill. It stood."),
    ("sentence:increment", {"small_n": 1.0}, "Rain fell. It fell down.", "Rain fell. It fell all day."),
    ("format:list", {"sep": "!?!?"}, "!?!? one\n!?!? two", "- one\n- two"),
    ("format:newline", {}, "one\ntwo\nthree", "one two\nthree four\nfive six"),
    ("format:no_whitespace", {}, "onetwo", "one two"),
    ("format:options", {"options": "yes/no/maybe"}, "Maybe.", "Perhaps."),
    ("format:output_template", {}, "My Answer: a My Conclusion: b Future Outlook: c", "My Answer: a"),
    ("ratio:sentence_type", {}, "It rains. It pours. Does it?", "It rains. Does it?"),
    ("ratio:sentence_balance", {}, "It rains. Does it? Yes!", "It rains. Does it?"),
    ("custom:multiples", {}, "14, 21, 28, 35, 42, 49", "7, 14, 21"),
    ("repeat:repeat_change", {"prompt_to_repeat": "Say it again"}, "Shout it again", "Say it again"),
    ("repeat:repeat_span", {"prompt_to_repeat": "Say it once again", "n_start": 1, "n_end": 3}, " It once\n", "it"),
]


@pytest.fixture(autouse=True)
def nltk_data(monkeypatch: pytest.MonkeyPatch) -> None:
    find_nltk_data_in([str(NLTK_DATA)], monkeypatch)


@pytest.mark.parametrize(("kind", "kwargs", "follows", "breaks"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_kind_is_followed_or_not(kind: str, kwargs: dict[str, Any], follows: str, breaks: str) -> None:
    assert verdicts([kind], [kwargs], "", follows) == ([True], [True])
    assert verdicts([kind], [kwargs], "", breaks) == ([False], [False])


def test_an_unknown_kind_is_named_with_the_nearest() -> None:
    with pytest.raises(DataError, match="'format:emojis' is not an instruction of IFBench; did you mean format:emoji"):
        verdicts(["format:emojis"], [{}], "", "A reply")
    with pytest.raises(DataError, match="is not an instruction of IFBench; its families are count, ratio, words"):
        verdicts(["punctuation:no_comma"], [{}], "", "A reply")


def test_a_check_that_raises_is_an_error_with_the_name_of_its_instruction() -> None:
    with pytest.raises(RewardError, match="format:quote_unquote cannot be checked on a reply to 'Quote': IndexError"):
        verdicts(["format:quote_unquote"], [{}], "Quote", "1234")


@needs_ifbench
def test_each_row_can_be_checked_without_a_draw_and_its_58_kinds_are_all() -> None:
    rows = [row for row in rows_of(IFBENCH_ROWS) if TAGGED not in row["instruction_id_list"]]
    before = random.getstate()
    assert [IFBENCH.complaint(row) for row in rows] == [None] * 294
    assert random.getstate() == before
    assert {kind for row in rows for kind in row["instruction_id_list"]} | {TAGGED} == set(IFBENCH.checkers())
    assert len(IFBENCH.checkers()) == 58


def test_the_import_of_the_checkers_downloads_nothing(tmp_path: Path) -> None:
    program = (
        "import socket\n"
        "def refused(*_): print('the network was asked for')\n"
        "socket.socket.connect = socket.getaddrinfo = refused\n"
        "import nltk\n"
        "before = nltk.download\n"
        "from rlpost.rewards.ifbench import verdicts\n"
        "print(verdicts(['format:no_whitespace'], [{}], '', 'one'), nltk.download == before)\n"
    )
    surroundings = {**os.environ, "HOME": str(tmp_path), "NLTK_DATA": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=surroundings, check=True
    )
    assert (done.stdout, done.stderr) == ("([True], [True]) True\n", "")
    assert list(tmp_path.iterdir()) == []
