"""IFEval's verdicts: kind by kind, against the published ones, and the same wherever and however they are asked for."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

pytest.importorskip("if_verifiable")

from rlpost.data.conversation import Conversation
from rlpost.envs.chat import record
from rlpost.errors import DataError, MissingExtraError, RewardError
from rlpost.evaluation.play import summarise
from rlpost.rewards import ifeval
from rlpost.rewards.ifeval import IFEVAL, Judged, replies_to, score, verdicts
from tests.rewards.instruction_data import (
    IFEVAL_REPLIES,
    IFEVAL_ROWS,
    IFEVAL_VERDICTS,
    NLTK_DATA,
    find_nltk_data_in,
    needs_ifeval,
    needs_nltk_data,
    rows_of,
)

ROOT = Path(__file__).parents[2]
PACKAGED_NLTK_DATA = ifeval.packaged_nltk_data  # other tests do without it
Verdicts = dict[int, tuple[list[bool], list[bool]]]

# The original counts a random letter where the row asks for # (key 1122) or ! (key 1129), and detects languages
# without a seed. Of the published verdicts one differs from those on the signs that were asked for; with this seed
# no detected language does.
DIFFERING = {(1122, "keywords:letter_frequency", "loose")}

LONG = "The river runs past the old mill and through the quiet village to the sea."
GERMAN = "Der Fluss fließt an der alten Mühle vorbei und durch das stille Dorf zum Meer."

# kind, arguments, a reply that follows it, one that does not, not even loosely
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["mill", "sea"]}, "A MILL by the seaside", "A mill"),
    ("keywords:frequency", {"keyword": "sea", "frequency": 2, "relation": "at least"}, "sea, Sea", "sea"),
    ("keywords:frequency", {"keyword": "sea", "frequency": 2, "relation": "less than"}, "one sea", "sea sea"),
    ("keywords:forbidden_words", {"forbidden_words": ["sea"]}, "the seaside", "the Sea."),
    ("keywords:letter_frequency", {"letter": "a", "let_frequency": 3, "let_relation": "at least"}, "Aa a", "a a"),
    ("keywords:letter_frequency", {"letter": "a", "let_frequency": 2, "let_relation": "less than"}, "a b", "a A"),
    ("language:response_language", {"language": "de"}, GERMAN, LONG),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 3}, "a\n***\nb\n***\nc", "a\n***\nb"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", "one, two."),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "one two", "one two three"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Mills"},
        "One.\n\n'Mills, too.",
        "Mills.\n\nMill too.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] and [b c]", "[a] and (b)"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Yes.\n\np. s. no", "Yes. PS no"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Yes.\n\nP.P.S. no", "Yes.\n\nP.S. no"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n  - b", "** a **\n- b\n- c\n- d\n- e\n- f"),
    ("detectable_format:constrained_response", {}, "Well: My answer is no.", "My answer is: no."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b c*", "*a* and **"),
    ("detectable_format:multiple_sections", {"section_spliter": "Part", "num_sections": 2}, "Part 1\nPart 2", "Part 1"),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', '{"a": [1}'),
    ("detectable_format:title", {}, "<<A Title>>\nText", "<<>> and < A Title >"),
    ("combination:two_responses", {}, "One.\n******\nTwo.", "Same.****** Same."),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it. "}, "say it.\nIt.", "I say it."),
    ("startend:end_checker", {"end_phrase": " The End"}, '"So. the end"', "The end?"),
    ("startend:quotation", {}, ' "So." ', '"So."?'),
    ("change_case:english_capital", {}, LONG.upper(), LONG),
    ("change_case:english_capital", {}, LONG.upper() + " 12!", GERMAN.upper()),
    ("change_case:english_lowercase", {}, LONG.lower(), GERMAN.lower()),
    ("punctuation:no_comma", {}, "No; none", "Yes, one"),
]
WITH_NLTK = [
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        "Dr. Who came. He sat. He left.",
        "Dr. Who came. He sat.",
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "Mr. X came.", "Hi. You?"),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "A RIVER-BED here",
        "one RIVER-BED",
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        "one WORD",
        "TWO WORDS",
    ),
]


@pytest.fixture(autouse=True)
def nltk_data(monkeypatch: pytest.MonkeyPatch) -> None:
    find_nltk_data_in([str(NLTK_DATA)], monkeypatch)


@pytest.mark.parametrize(("kind", "kwargs", "follows", "breaks"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_kind_is_followed_or_not(kind: str, kwargs: dict[str, Any], follows: str, breaks: str) -> None:
    assert verdicts([kind], [kwargs], "", follows) == ([True], [True])
    assert verdicts([kind], [kwargs], "", breaks) == ([False], [False])


@needs_nltk_data
@pytest.mark.parametrize(("kind", "kwargs", "follows", "breaks"), WITH_NLTK)
def test_a_kind_that_reads_nltk_data_is_followed_or_not(
    kind: str, kwargs: dict[str, Any], follows: str, breaks: str
) -> None:
    test_a_kind_is_followed_or_not(kind, kwargs, follows, breaks)


def test_the_cases_are_all_25_kinds() -> None:
    assert {kind for kind, *_ in CASES + WITH_NLTK} == set(IFEVAL.checkers())
    assert len(IFEVAL.checkers()) == 25


@pytest.mark.parametrize(
    "response",
    [
        "My words\n{}",
        "{}\nMy words",
        "My words\n{}\nMore",
        "*{}*",
        "*Sure*\n*{}*",
        "*{}*\n*Sure*",
        "Sure\n**{}**\nBye",
    ],
)
def test_a_loose_reading_leaves_out_the_first_or_last_line_and_asterisks(response: str) -> None:
    quoted = response.format('"So."')
    assert verdicts(["startend:quotation"], [{}], "", quoted) == ([False], [True])


def test_no_looser_reading_is_tried() -> None:
    for response in ('Sure\nOf course\n"So."', '"So."\nBye\nBye', '_"So."_', 'Sure "So."'):
        assert verdicts(["startend:quotation"], [{}], "", response) == ([False], [False])


@pytest.mark.parametrize("blank", ["", " ", "\n\t \n"])
def test_a_blank_reply_follows_nothing(blank: str) -> None:
    kinds = ["punctuation:no_comma", "keywords:forbidden_words", "language:response_language"]
    kwargs = [{}, {"forbidden_words": ["sea"]}, {"language": "en"}]
    assert verdicts(kinds, kwargs, "", blank) == ([False] * 3, [False] * 3)


def test_a_looser_reading_that_is_blank_follows_nothing() -> None:
    assert verdicts(["punctuation:no_comma"], [{}], "", "Yes, one line") == ([False], [False])
    assert verdicts(["punctuation:no_comma"], [{}], "", "Yes, one\nNone") == ([False], [True])


def test_verdicts_stand_in_the_order_of_the_instructions() -> None:
    kinds = ["punctuation:no_comma", "startend:quotation", "detectable_format:title"]
    assert verdicts(kinds, [{}, {}, {}], "", 'A,\n"<<T>>"') == ([False, False, True], [True, True, True])


def test_a_reply_in_no_language_counts_as_following() -> None:
    for kind, kwargs in (
        ("language:response_language", {"language": "hi"}),
        ("language:response_language", {"language": "en"}),
    ):
        assert verdicts([kind], [kwargs], "", "12 + 30 = 42 !") == ([True], [True])
    assert verdicts(["change_case:english_capital"], [{}], "", "12") == ([False], [False])  # no capital letter either


def test_the_sign_that_was_asked_for_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    hashes = [{"letter": "#", "let_frequency": 3, "let_relation": "at least"}]
    for _ in range(20):
        assert verdicts(["keywords:letter_frequency"], hashes, "", "# ## mmm aaa eee") == ([True], [True])
        assert verdicts(["keywords:letter_frequency"], hashes, "", "## mmmm aaaa eeee") == ([False], [False])
    umlaut = [{"letter": "Ü", "let_frequency": 2, "let_relation": "less than"}]
    assert verdicts(["keywords:letter_frequency"], umlaut, "", "Über üben")[0] == [False]
    verdicts(["language:response_language"], [{"language": "en"}], "", "1234")
    assert capsys.readouterr() == ("", "")  # the original logs the whole reply


def test_arguments_that_are_none_or_empty_are_none() -> None:
    padded = {"num_words": 2, "relation": "at least", "keywords": [], "letter": "", "capital_frequency": None}
    assert verdicts(["length_constraints:number_words"], [padded], "", "one two")[0] == [True]
    assert verdicts(["punctuation:no_comma"], [{"num_words": 0, "first_word": None}], "", "one two")[0] == [True]


def test_a_zero_that_was_asked_for_is_no_missing_argument() -> None:
    nothing = [{"num_placeholders": 0}]
    for _ in range(20):  # dropped, it would be a number from 1 to 4
        assert verdicts(["detectable_content:number_placeholders"], nothing, "", "none")[0] == [True]


@pytest.mark.parametrize(
    ("kinds", "kwargs", "message"),
    [
        (
            ["keyword:existence"],
            [{}],
            "'keyword:existence' is not an instruction of IFEval; did you mean keywords:existence?",
        ),
        (["x"], [{}], "'x' is not an instruction of IFEval; its families are keywords, language, "),
        (["punctuation:no_comma"], [], "there are 0 for 1 instructions: each needs one"),
        (["keywords:existence"], [{}], "keywords:existence needs keywords"),
        (["length_constraints:number_words"], [{"num_words": 3}], "length_constraints:number_words needs relation"),
        (["length_constraints:number_words"], [{"num_word": 3}], "has no argument 'num_word'; did you mean num_words?"),
        (["punctuation:no_comma"], [{"n": 3}], "punctuation:no_comma has no argument 'n'; it takes none"),
        (
            ["detectable_content:number_placeholders"],
            [{"num_placeholders": -1}],
            "cannot be checked with num_placeholders=-1",
        ),
        (
            ["length_constraints:number_words"],
            [{"num_words": 3, "relation": "at most"}],
            "length_constraints:number_words cannot be checked with .*at most",
        ),
        (
            ["keywords:letter_frequency"],
            [{"letter": "a", "let_frequency": 1, "let_relation": "at most"}],
            "let_relation='at most': it must be 'at least' or 'less than'",
        ),
        (["keywords:letter_frequency"], [{"letter": "a"}], "needs let_frequency, let_relation"),
        (["language:response_language"], [{"language": "zz"}], "language='zz', which langdetect does not tell apart"),
    ],
)
def test_an_instruction_that_cannot_be_checked_is_an_error(kinds: list[str], kwargs: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        verdicts(kinds, kwargs, "", "A reply")


def test_a_row_is_tried_before_training() -> None:
    row = {
        "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
        "kwargs": [{}, {"keywords": ["C", "*"]}],
    }
    field, wrong = IFEVAL.complaint(row) or ("", "")
    assert field == "kwargs"
    assert wrong.startswith("keywords:existence cannot be checked with them: nothing to repeat")
    assert IFEVAL.complaint({"kwargs": []}) == ("instruction_id_list", "missing")
    assert IFEVAL.complaint({"instruction_id_list": "a", "kwargs": []}) == (
        "instruction_id_list",
        "must be a list, one entry an instruction",
    )


def test_a_check_that_raises_is_an_error_with_the_name_of_its_instruction() -> None:
    deep = "[" * 100_000
    with pytest.raises(
        RewardError, match=r"detectable_format:json_format cannot be checked on a reply to 'Write it.*Recursion"
    ):
        verdicts(["detectable_format:json_format"], [{}], "Write it as JSON", deep)


def test_the_callers_random_numbers_stay_as_they_are() -> None:
    before = random.getstate()
    for kind, kwargs, follows, _ in CASES:
        verdicts([kind], [kwargs], "", follows)
    assert random.getstate() == before


@pytest.mark.parametrize("kind", ["length_constraints:number_sentences", "change_case:capital_word_frequency"])
def test_missing_nltk_data_is_an_error_where_an_instruction_needs_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_nltk_data_in([str(tmp_path)], monkeypatch)
    kwargs = {c[0]: c[1] for c in WITH_NLTK}[kind]
    command = re.escape("pip install --no-deps llama-index-core==0.14.25")
    with pytest.raises(
        DataError, match=rf"^{kind} needs NLTK's punkt_tab, which is in none of its folders: {command} "
    ):
        verdicts([kind], [kwargs], "", "A reply.")
    with pytest.raises(DataError, match="punkt_tab"):
        IFEVAL.complaint({"instruction_id_list": [kind], "kwargs": [kwargs]})
    for other, arguments, follows, _ in CASES:
        assert verdicts([other], [arguments], "", follows)[0] == [True]


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NLTK's data as the package lays them; a package of that name, with nothing else, is installed meanwhile."""
    site = tmp_path / "site"
    about = site / "llama_index_core-0.14.25.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llama-index-core\nVersion: 0.14.25\n")
    data = site / "llama_index" / "core" / "_static" / "nltk_cache"
    shutil.copytree(NLTK_DATA, data, ignore=shutil.ignore_patterns("*.zip"))
    monkeypatch.syspath_prepend(str(site))
    find_nltk_data_in([], monkeypatch)
    monkeypatch.setattr(ifeval, "packaged_nltk_data", PACKAGED_NLTK_DATA)
    return data


@needs_nltk_data
def test_the_packaged_nltk_data_are_found_where_the_user_has_none(packaged: Path) -> None:
    import nltk

    for kind, kwargs, follows, breaks in WITH_NLTK:
        assert verdicts([kind], [kwargs], "", follows) == ([True], [True])
        assert verdicts([kind], [kwargs], "", breaks) == ([False], [False])
    assert nltk.data.path == [str(packaged)]


@pytest.mark.skipif(not IFEVAL_ROWS.is_file(), reason="the IFEval files are not on this machine")
@pytest.mark.skipif(ifeval.packaged_nltk_data() is None, reason="NLTK's data, which set-up brings, are not installed")
def test_every_row_can_be_checked_with_what_setup_brings_and_nothing_is_downloaded(tmp_path: Path) -> None:
    program = (
        "import json, socket, sys\n"
        "def refused(*_): raise AssertionError('the network was asked for')\n"
        "socket.socket.connect = socket.getaddrinfo = refused\n"
        "from rlpost.rewards.ifeval import IFEVAL\n"
        "print({IFEVAL.complaint(json.loads(line)) for line in open(sys.argv[1])})\n"
    )
    surroundings = {name: value for name, value in os.environ.items() if name != "NLTK_DATA"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(IFEVAL_ROWS)],
        capture_output=True, text=True, cwd=ROOT, env=surroundings | {"HOME": str(tmp_path)},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("{None}\n", "")


@needs_nltk_data
@pytest.mark.filterwarnings("ignore:NLTK will not read")
def test_packaged_nltk_data_that_others_may_write_are_told_apart_from_missing_ones(packaged: Path) -> None:
    packaged.chmod(0o777)
    with pytest.raises(DataError, match=f"punkt_tab, which it does not read .*: chmod -R go-w {packaged} "):
        ifeval.require_nltk_data("punkt_tab", "it")


def test_the_extra_is_named_where_the_checkers_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.imports.is_installed", lambda package: package != "if_verifiable")
    with pytest.raises(MissingExtraError, match=r"IFEval needs if_verifiable, .*: pip install 'rlpost\[ifeval\]'"):
        verdicts(["punctuation:no_comma"], [{}], "", "A reply.")


# The published verdicts


@pytest.fixture(scope="module")
def rows() -> dict[int, dict[str, Any]]:
    return {row["key"]: row for row in rows_of(IFEVAL_ROWS)}


@pytest.fixture(scope="module")
def replies() -> dict[str, str]:
    return {row["prompt"]: row["response"] for row in rows_of(IFEVAL_REPLIES)}


@pytest.fixture(scope="module")
def ours(rows: dict[int, dict[str, Any]], replies: dict[str, str]) -> Iterator[Verdicts]:
    with pytest.MonkeyPatch.context() as patch:
        find_nltk_data_in([str(NLTK_DATA)], patch)
        yield judged(rows, replies)


def judged(rows: dict[int, dict[str, Any]], replies: dict[str, str]) -> Verdicts:
    return {
        key: verdicts(row["instruction_id_list"], row["kwargs"], row["prompt"], replies[row["prompt"]])
        for key, row in rows.items()
    }


@needs_ifeval
def test_verdicts_are_the_published_ones(rows: dict[int, dict[str, Any]], ours: Verdicts) -> None:
    published = {row["key"]: (row["strict"], row["loose"]) for row in rows_of(IFEVAL_VERDICTS)}
    assert set(rows) - set(published) == {2785}
    assert len(published) == 540
    differing = {
        (key, kind, measure)
        for key, both in published.items()
        for measure, theirs, mine in zip(("strict", "loose"), both, ours[key], strict=True)
        for kind, one, other in zip(rows[key]["instruction_id_list"], theirs, mine, strict=True)
        if one != other
    }
    assert differing == DIFFERING


@needs_ifeval
def test_totals_are_those_that_were_measured(ours: Verdicts) -> None:
    strict, loose = [list(both) for both in zip(*ours.values(), strict=True)]
    totals = [
        fmean(map(all, strict)),
        fmean(one for row in strict for one in row),
        fmean(map(all, loose)),
        fmean(one for row in loose for one in row),
    ]
    assert totals == pytest.approx([417 / 541, 698 / 834, 431 / 541, 714 / 834])  # .7708 .8369 .7967 .8561


@needs_ifeval
def test_an_evaluation_reports_the_four_accuracies_of_the_paper(ours: Verdicts) -> None:
    played = [Conversation({}, [], group_id=number, policy_versions=[0]) for number in range(len(ours))]
    for conversation, both in zip(played, ours.values(), strict=True):
        record(conversation, score(Judged(*both, [], []), answer_only=False))
    assert [re.sub(r" *\[.*?\] *", " ", line).split() for line in summarise(played).lines()[1:4]] == [
        ["loose", "strict"],
        ["prompt", "level", "79.7%", "77.1%"],
        ["instruction", "level", "85.6%", "83.7%"],
    ]


@needs_ifeval
def test_verdicts_take_seconds_need_no_network_and_are_the_same_in_another_process(ours: Verdicts) -> None:
    program = (
        "import json, socket, sys, time\n"
        "def refused(*_): raise AssertionError('the network was asked for')\n"
        "socket.socket.connect = socket.getaddrinfo = refused\n"
        "from rlpost.rewards.ifeval import verdicts\n"
        "rows = [json.loads(line) for line in open(sys.argv[1])]\n"
        "replies = {r['prompt']: r['response'] for r in map(json.loads, open(sys.argv[2]))}\n"
        "judged = {r['key']: verdicts(r['instruction_id_list'], r['kwargs'], r['prompt'], replies[r['prompt']])"
        " for r in rows}\n"
        "print(json.dumps([time.process_time(), judged]))\n"
    )
    surroundings = {**os.environ, "NLTK_DATA": str(NLTK_DATA), "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(IFEVAL_ROWS), str(IFEVAL_REPLIES)],
        capture_output=True, text=True, cwd=ROOT, env=surroundings, check=True,
    )  # fmt: skip
    seconds, theirs = json.loads(done.stdout)  # of this process, imports included, whatever else the machine does
    assert {int(key): tuple(both) for key, both in theirs.items()} == ours
    assert done.stderr == ""
    assert seconds < 30


@needs_ifeval
def test_verdicts_are_the_same_in_threads(
    rows: dict[int, dict[str, Any]], replies: dict[str, str], ours: Verdicts
) -> None:
    of_languages = {
        key: row for key, row in rows.items() if any(kind in OF_LANGUAGE for kind in row["instruction_id_list"])
    }
    of_languages = dict(list(of_languages.items())[:12])
    ifeval.language_profiles.cache_clear()  # the first use is the one that could be two threads' at once
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: judged(of_languages, replies), range(8)))
    assert all(run == {key: ours[key] for key in of_languages} for run in runs)


OF_LANGUAGE = ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")


@needs_ifeval
def test_each_row_can_be_checked_and_has_replies_made_for_it(rows: dict[int, dict[str, Any]]) -> None:
    started = time.process_time()
    for row in rows.values():
        assert IFEVAL.complaint(row) is None
        for kind, kwargs in zip(row["instruction_id_list"], row["kwargs"], strict=True):
            made = replies_to(kind, kwargs)
            assert made is not None
            assert verdicts([kind], [kwargs], "", made.following) == ([True], [True])
            if made.breaking is not None:
                assert verdicts([kind], [kwargs], "", made.breaking) == ([False], [False])
    assert time.process_time() - started < 10
