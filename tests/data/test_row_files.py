"""Files of rows, whole and broken."""

from __future__ import annotations

import datetime
import decimal
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rlpost.data.datasets import located_rows
from rlpost.data.faults import FormatError
from rlpost.data.rows import PackedRows, Row, read_csv, read_jsonl, read_parquet, text_in
from rlpost.errors import DataError

GOOD = {"question": "1 + 1?", "answer": "2"}


def written(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def question(row: Row) -> str:
    return text_in(row, "question")


def test_a_line_that_cannot_be_read_is_a_bad_row(tmp_path: Path) -> None:
    good = json.dumps(GOOD).encode()
    path = written(tmp_path, "a.jsonl", b"\n".join([good, b'{"question": ', b'{"q": "\xe9"}', good]))
    rows = dict(read_jsonl(path))
    assert (rows[1], rows[4], len(rows)) == (GOOD, GOOD, 4)
    bad = {number: row.wrong for number, row in rows.items() if isinstance(row, FormatError)}
    assert {number: re.findall(r"(?:character|byte) \d+", wrong) for number, wrong in bad.items()} == {
        2: ["character 13"],
        3: ["byte 7"],
    }


@pytest.mark.parametrize("sign", [",", ";", "\t"])
def test_a_spreadsheet_s_separator_is_told_from_the_header(sign: str, tmp_path: Path) -> None:
    text = f'\ufeffquestion{sign}answer{sign}{sign}\r\n"1; 1, 1\t?"{sign}2{sign}{sign}\r\n'  # unnamed columns are left
    [(number, row)] = read_csv(written(tmp_path, "a.csv", text))
    assert (number, row["question"], row["answer"]) == (2, "1; 1, 1\t?", "2")


def test_a_cell_longer_than_python_s_own_limit_is_read(tmp_path: Path) -> None:
    [(_, row)] = read_csv(written(tmp_path, "a.csv", "question,answer\n" + "x" * 200_000 + ",2\n"))
    assert len(row["question"]) == 200_000


def test_rows_come_back_as_they_were() -> None:
    rows = [{"a": [1, 2.5, None, True, "ü\u2028"], "n": number, "big": 10**30} for number in range(50)]
    kept = PackedRows()
    for row in [*rows, {}]:
        kept.append(row)
    assert list(kept) == [*rows, {}]
    assert kept[-1] == {}
    assert len(set(kept.digests.tolist())) == 51


def test_a_lone_surrogate_is_a_bad_row_before_training(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", json.dumps(GOOD) + '\n{"question": "\\ud800", "answer": "1"}\n')
    with pytest.raises(DataError, match=r"a.jsonl, row 2 .*surrogate"):
        located_rows(str(path), "train", question, held_out=0)


def test_what_json_has_no_word_for_is_kept_as_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    values = {"day": datetime.date(2026, 1, 2), "price": decimal.Decimal("1.50"), "raw": b"ab"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([GOOD | values]), path)
    [read] = located_rows(str(path), "train", question, held_out=0)
    assert read == GOOD | {"day": "2026-01-02", "price": "1.50", "raw": "YWI="}


def test_calls_in_a_parquet_file_of_datasets_are_those_of_the_rows(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def row(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"function": {"name": name, "arguments": arguments}}
        return {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]}

    rows = [row("sky", {"city": "Oslo", "day": None}), row("add", {"a": 1})]
    lines = written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)))
    made = datasets.load_dataset("json", data_files=str(lines), split="train", cache_dir=str(tmp_path / "cache"))
    made.to_parquet(tmp_path / "json.parquet")  # columns of JSON, whose nulls are the rows' own
    assert [row for _, row in read_parquet(tmp_path / "json.parquet")] == rows
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "typed.parquet")  # fills in nulls
    assert [row for _, row in read_parquet(tmp_path / "typed.parquet")] == [row("sky", {"city": "Oslo"}), rows[1]]


def test_several_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    paths = [str(written(tmp_path, f"{name}.jsonl", json.dumps({**GOOD, "question": name}))) for name in "ab"]
    rows = located_rows(paths, "train", question, held_out=0)
    assert [(where.rpartition("/")[2], row["question"]) for where, row in rows.located()] == [
        ("a.jsonl, row 1", "a"),
        ("b.jsonl, row 1", "b"),
    ]
    written(tmp_path, "b.jsonl", "\n{}")
    with pytest.raises(DataError, match=r"b.jsonl, row 2, field 'question'"):
        located_rows(paths, "train", question)


def test_a_split_in_parts_as_the_hub_stores_it_is_one_split(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(2):
        table = pyarrow.Table.from_pylist([{**GOOD, "question": str(number)}])
        pyarrow.parquet.write_table(table, tmp_path / "data" / f"validation-0000{number}-of-00002.parquet")
    assert [row["question"] for row in located_rows(str(tmp_path), "validation", question)] == ["0", "1"]
