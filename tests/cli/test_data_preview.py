"""`rlpost data preview`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlpost.cli.data import preview_lines
from rlpost.data.demonstrations import Demonstration
from rlpost.data.encoding import Encoder
from rlpost.envs.row_report import preview_of
from tests.command_line import CommandLine
from tests.says import Says

Told = Callable[..., str]

WORDS = ["data", "preview", "model=tiny", "env=dataset", "env.path=rows.jsonl", "env.held_out=0"]
GOOD = [{"role": "user", "content": "Hi \x1b[2J"}, {"role": "assistant", "content": "Ho\n[red]"}]
ROWS = [{"messages": GOOD}, {"messages": GOOD[:1]}, {"messages": [GOOD[1]]}]


@pytest.fixture(autouse=True)
def rows(here: Path) -> None:
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))


@pytest.fixture
def told(rlpost: CommandLine) -> Told:
    """What a preview prints: to stdout, or to stderr if it is refused."""

    def tell(*words: str, code: int = 0) -> str:
        out = rlpost([*WORDS, *words], code)
        assert "\x1b" not in out + rlpost.err
        return rlpost.err if code else out

    return tell


def test_a_row_is_shown_with_its_mask_and_the_first_rows_summed_up(told: Told, says: Says) -> None:
    # a token a byte and a marker: "<|im_start|>user\nHi \x1b[2J<|im_end|>\n" has 1 + 12 + 1 + 1 = 15, which is all of
    # row 2; "<|im_start|>assistant\n" has 11, the answer "Ho\n[red]<|im_end|>" 9, the line break behind it 1
    shown = told()
    assert shown.startswith("rows.jsonl, row 1: 36 tokens, 9 ")
    assert " 17.6% of 51 tokens " in shown
    says("data", shown)


def test_a_bad_row_is_shown_with_its_reason(told: Told, says: Says) -> None:
    says("data", told("--row", "3", "--rows", "1"))


def test_the_same_is_told_as_json(told: Told) -> None:
    record = json.loads(told("--json"))
    row = record["row"]
    assert [piece["text"] for piece in row["pieces"] if piece["trained"]] == ["Ho\n[red]", "<|im_end|>"]
    assert "".join(piece["text"] for piece in row["pieces"]).startswith("<|im_start|>user\nHi \x1b[2J<|im_end|>\n")
    assert (row["trained"], sum(row["mask"]), len(row["ids"])) == (9, 9, row["tokens"])
    assert record["rows"] == 3
    assert {name: bad["rows"] for name, bad in record["bad"].items()} == {"empty": 1, "template": 1}


def test_a_misspelt_setting_is_refused(told: Told) -> None:
    assert "max_tokens?" in told("max_token=3", code=2)


def test_rows_are_numbered_as_their_file_counts(told: Told, says: Says) -> None:
    def line(question: str) -> str:
        return json.dumps({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "Ho"}]})

    Path("rows.jsonl").write_text("\n".join(["", line("a"), "", line("b"), line("e"), "  ", line("d"), line("c")]))
    train = ["env.held_out=0.4"]  # a hash of the prompt chooses: "e" alone
    test = [*train, "env.split=test", "eval.enabled=false"]
    for words, number, question in ((train, 7, "d"), (test, 5, "e")):
        lines = told(*words, "--row", str(number)).splitlines()
        assert lines[0].startswith(f"rows.jsonl, row {number}: ")
        assert lines[3] == f"{question}<|im_end|>"
    # blank, held out, behind the last; of the other split
    refused = [told(*train, "--row", number, code=2) for number in ("3", "5", "9")]
    says("data", "".join([*refused, told(*test, "--row", "6", code=2)]))


def test_malformed_rows_are_shown_with_what_is_wrong(told: Told, says: Says) -> None:
    says("data", told("env.completion_column=completion"))


def test_each_of_several_malformed_rows_is_told(told: Told, says: Says) -> None:
    lines = [json.dumps(ROWS[0]), '{"messages": 3}', "", '{"messages": [', json.dumps(ROWS[0]), "[]"]
    Path("rows.jsonl").write_text("\n".join(lines))
    said = told("max_bad_share=0.6")
    says("data", said)
    record = json.loads(told("--json"))
    assert record["row"]["where"] == "rows.jsonl, row 1"
    bad = record["bad"]["malformed"]
    assert [bad["rows"], *(each["row"] for each in bad["first"])] == [3, *(f"rows.jsonl, row {n}" for n in (2, 4, 6))]
    for each in bad["first"]:
        assert each["reason"] in " ".join(said.split())


def test_in_colours_what_is_trained_is_green_and_the_rest_dim(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlpost.cli.terminal.takes_colour", lambda stream: True)
    monkeypatch.setattr("rlpost.cli.data.takes_colour", lambda stream: True)
    shown = Demonstration("row 1", [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}])
    lines = preview_lines(preview_of([shown], shown, Encoder(tiny_tokenizer)), 0.1)
    assert "\x1b[32mHo\x1b[0m\x1b[32m\x1b[1m<|im_end|>\x1b[0m" in lines
    assert "\x1b[2mHi\x1b[0m\x1b[2m<|im_end|>\x1b[0m" in lines
