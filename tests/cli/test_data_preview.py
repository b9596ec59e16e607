"""`rlpost data preview`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpost.cli.data import preview_lines
from rlpost.cli.main import run as rlpost
from rlpost.data.demonstrations import Demonstration
from rlpost.data.encoding import Encoder

WORDS = ["data", "preview", "model=tiny", "env=dataset", "env.path=rows.jsonl", "env.held_out=0"]
GOOD = [{"role": "user", "content": "Hi \x1b[2J"}, {"role": "assistant", "content": "Ho\n[red]"}]
ROWS = [{"messages": GOOD}, {"messages": GOOD[:1]}, {"messages": [GOOD[1]]}]


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert rlpost([*WORDS, *words]) == code
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    return captured.out if code == 0 else captured.err


def test_a_row_is_shown_with_its_mask_and_the_first_rows_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    # a token a byte and a marker: "<|im_start|>user\nHi \x1b[2J<|im_end|>\n" has 1 + 12 + 1 + 1 = 15, which is all of
    # row 2; "<|im_start|>assistant\n" has 11, the answer "Ho\n[red]<|im_end|>" 9, the line break behind it 1
    assert told(capsys).splitlines() == [
        "rows.jsonl, row 1: 36 tokens, 9 trained",
        "",
        "<|im_start|>user",
        "Hi \\x1b[2J<|im_end|>",
        "<|im_start|>assistant",
        "»Ho↵",
        "[red]<|im_end|>«",
        "",
        "»trained«  ↵ a line break that is trained",
        "",
        "first 3 rows: 17.6% of 51 tokens trained, longest 36, 2 bad",
        "  nothing to train on: rows.jsonl, row 2: no message of the assistant is trained; it ends with the",
        "user's: a prompt, for rlpost train grpo",
        "  refused by the chat template: rows.jsonl, row 3: message 1 is the assistant's: begin with what it",
        "answers",
        "--row 2 shows the first of them",
        "more than max_bad_share=0.1 are bad: rlpost train sft would refuse them",
    ]


def test_a_bad_row_is_shown_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "--row", "3", "--rows", "1").splitlines()
    assert lines[:5] == [
        "rows.jsonl, row 3: 0 tokens, 0 trained",
        "bad, refused by the chat template: message 1 is the assistant's: begin with what it answers",
        "",
        "assistant: Ho",
        "[red]",
    ]
    assert lines[-1].startswith("first 1 row: ")
    assert lines[-1].endswith(", none bad")


def test_the_same_is_told_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(told(capsys, "--json"))
    row = record["row"]
    assert [piece["text"] for piece in row["pieces"] if piece["trained"]] == ["Ho\n[red]", "<|im_end|>"]
    assert "".join(piece["text"] for piece in row["pieces"]).startswith("<|im_start|>user\nHi \x1b[2J<|im_end|>\n")
    assert (row["trained"], sum(row["mask"]), len(row["ids"])) == (9, 9, row["tokens"])
    assert record["rows"] == 3
    assert {name: bad["rows"] for name, bad in record["bad"].items()} == {"empty": 1, "template": 1}


def test_what_cannot_be_shown_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "--row", "9", code=2) == (
        "error: --row 9: the split train has no such row; it may be held out: add env.split=test eval.enabled=false\n"
    )
    assert "did you mean max_tokens?" in told(capsys, "max_token=3", code=2)


def test_rows_are_numbered_as_their_file_counts_with_blank_lines_and_held_out_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def line(question: str) -> str:
        return json.dumps({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "Ho"}]})

    Path("rows.jsonl").write_text("\n".join(["", line("a"), "", line("b"), line("e"), "  ", line("d"), line("c")]))
    held_out = "env.held_out=0.4"  # a hash of the prompt chooses: "e" alone
    lines = told(capsys, held_out, "--row", "7").splitlines()
    assert lines[0].startswith("rows.jsonl, row 7: ")
    assert lines[3] == "d<|im_end|>"
    for number in ("3", "5", "9"):  # blank, held out, behind the last
        assert told(capsys, held_out, "--row", number, code=2) == (
            f"error: --row {number}: the split train has no such row; it may be held out: add env.split=test "
            "eval.enabled=false\n"
        )
    test = [held_out, "env.split=test", "eval.enabled=false", "--row"]
    lines = told(capsys, *test, "5").splitlines()
    assert lines[0].startswith("rows.jsonl, row 5: ")
    assert lines[3] == "e<|im_end|>"
    assert told(capsys, *test, "6", code=2) == "error: --row 6: the split test has no such row\n"


def test_malformed_rows_are_shown_with_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    said = " ".join(told(capsys, "env.completion_column=completion").split())
    assert "(the same in all 3 rows)" in said
    assert "rows.jsonl, row 1, field 'prompt': missing" in said


def test_each_of_several_malformed_rows_is_told_with_its_place_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps(ROWS[0]), '{"messages": 3}', "", '{"messages": [', json.dumps(ROWS[0]), "[]"]
    Path("rows.jsonl").write_text("\n".join(lines))
    reasons = {
        2: "field 'messages': must be a list of messages, and is int",
        4: "is not JSON (Expecting value, character 15)",
        6: "field 'messages': the row is not an object of named fields but a list",
    }
    said = " ".join(told(capsys, "max_bad_share=0.6").split())
    for number, reason in reasons.items():
        assert f"rows.jsonl, row {number} {reason}" in said.replace(", field", " field")
    assert said.endswith("--row 2 shows the first of them")
    record = json.loads(told(capsys, "--json"))
    assert record["row"]["where"] == "rows.jsonl, row 1"
    assert record["bad"] == {
        "malformed": {
            "rows": 3,
            "first": [{"row": f"rows.jsonl, row {number}", "reason": reason} for number, reason in reasons.items()],
        }
    }


def test_in_colours_what_is_trained_is_green_and_the_rest_dim(tiny_tokenizer: Any) -> None:
    shown = Demonstration("row 1", [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}])
    lines = preview_lines([shown], shown, Encoder(tiny_tokenizer), 0.1, coloured=True)
    assert "\x1b[32mHo\x1b[0m\x1b[32m\x1b[1m<|im_end|>\x1b[0m" in lines
    assert "\x1b[2mHi\x1b[0m\x1b[2m<|im_end|>\x1b[0m" in lines
