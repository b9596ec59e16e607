"""Files that are long, broken or made to break their reader."""

from __future__ import annotations

import datetime
import decimal
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlpost.data import rows as row_files
from rlpost.data.datasets import located_rows
from rlpost.data.rows import PackedRows, Unreadable, read_csv, read_json, read_jsonl, read_parquet
from rlpost.errors import DataError

GOOD = {"question": "1 + 1?", "answer": "2"}
LONG_NUMBER = "9" * 5000


def written(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def said(rows: Any) -> dict[int, str]:
    """What is wrong with the rows that could not be read, by number."""
    return {number: row.wrong for number, row in rows if isinstance(row, Unreadable)}


def test_a_line_that_cannot_be_read_is_a_bad_row_and_those_behind_it_are_read(tmp_path: Path) -> None:
    good = json.dumps(GOOD).encode()
    deep = b"[" * 200_000 + b"]" * 200_000
    lines = [good, b'{"question": ', b'{"question": %s}' % LONG_NUMBER.encode(), b'{"q": "\xe9"}', deep, good]
    path = written(tmp_path, "a.jsonl", b"\n".join(lines))
    rows = list(read_jsonl(path))
    assert [number for number, row in rows if row == GOOD] == [1, 6]
    assert said(rows) == {
        2: "is not JSON (Expecting value, character 13)",
        3: "holds a number of more digits than can be read: write it as text, or remove it",
        4: "is not UTF-8 (byte 7, likely Windows-1252 or Latin-1): save the file as UTF-8",
        5: "is nested too deeply (100 levels at most): flatten or remove it",
    }


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "MOST_ROW_BYTES", 100)
    lines = [json.dumps(GOOD), json.dumps({"question": "x" * 1000}), json.dumps(GOOD)]
    rows = list(read_jsonl(written(tmp_path, "a.jsonl", "\n".join(lines))))
    assert [number for number, row in rows if row == GOOD] == [1, 3]
    assert list(said(rows)) == [2]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_list_is_read_piece_by_piece(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "_CHUNK", chunk)
    values = [GOOD, {"a": [1, {"b": "],["}]}, 12, "text, with ] and [", None, {"ü": "\n"}]
    for text in (json.dumps(values), json.dumps(values, indent=2, ensure_ascii=False)):
        assert [row for _, row in read_json(written(tmp_path, "a.json", text))] == json.loads(text)
    assert list(read_json(written(tmp_path, "a.json", " [\n] "))) == []


def test_a_list_on_one_line_may_be_longer_than_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "MOST_ROW_BYTES", 100)
    monkeypatch.setattr(row_files, "_CHUNK", 64)
    path = written(tmp_path, "a.json", json.dumps([GOOD] * 50))
    assert [row for _, row in read_json(path)] == [GOOD] * 50


def test_a_list_that_is_no_utf8_says_so(tmp_path: Path) -> None:
    for encoding, likely in (("utf-16", "UTF-16"), ("latin-1", "Windows-1252 or Latin-1")):
        path = written(tmp_path, "a.json", '["é"]'.encode(encoding))
        with pytest.raises(DataError, match=rf"a.json is not UTF-8 \(byte \d, likely {likely}\): save the file"):
            list(read_json(path))


def test_the_first_line_of_a_list_tells_what_such_a_file_is_called(tmp_path: Path) -> None:
    rows = list(read_jsonl(written(tmp_path, "a.jsonl", '[\n{"a": 1}\n]')))
    assert rows[0] == (
        1,
        Unreadable("is not JSON (Expecting value, character 2); if the file is one list, name it .json"),
    )
    assert rows[1] == (2, {"a": 1})


@pytest.mark.parametrize("read", [read_jsonl, read_json])
def test_a_byte_0_in_the_midst_of_text_is_no_utf16(read: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds a byte 0"):
        list(read(written(tmp_path, "a", b'[{"prompt": "so far and no\0 further"}]'[read is read_jsonl :])))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds no list at its top"),
        ('{"a": 1}', "holds no list at its top"),
        ("[1", "row 1: the list has no end"),
        ("[1,]", "row 2: Expecting value"),
        ("[1 2]", "row 2: a comma is missing before it"),
        ("[1] 2", "row 2: there is more behind the list"),
        ("[1]" + " " * (1 << 21) + "2", "row 2: there is more behind the list"),
        ('[{"a": 1}, {"a" 2}]', "row 2: Expecting ':' delimiter"),
        ("[" * 200_000, "row 1: it is nested too deeply"),
    ],
)
def test_a_list_that_is_broken_says_where(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        list(read_json(written(tmp_path, "a.json", text)))
    assert why in str(raised.value)


def test_a_number_of_any_size_spoils_its_element_alone(tmp_path: Path) -> None:
    rows = list(read_json(written(tmp_path, "a.json", f'[{{"a": {LONG_NUMBER}}}, {json.dumps(GOOD)}]')))
    assert list(said(rows)) == [1]
    assert rows[1] == (2, GOOD)


@pytest.mark.parametrize("sign", [",", ";", "\t"])
def test_a_spreadsheet_s_separator_is_told_from_the_header(sign: str, tmp_path: Path) -> None:
    text = f'question{sign}answer\r\n"1; 1, 1\t?"{sign}2\r\n'
    assert [row for _, row in read_csv(written(tmp_path, "a.csv", "\ufeff" + text))] == [
        {"question": "1; 1, 1\t?", "answer": "2"}
    ]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.csv has two columns called 'answer'"):
        list(read_csv(written(tmp_path, "a.csv", "question,answer,answer\n1 + 1,2,3\n")))
    unnamed = written(tmp_path, "b.csv", "question,answer,,\n1 + 1,2,,\n")  # as a spreadsheet leaves them
    assert [row["answer"] for _, row in read_csv(unnamed) if isinstance(row, dict)] == ["2"]


def test_a_cell_longer_than_python_s_own_limit_is_read(tmp_path: Path) -> None:
    [(_, row)] = read_csv(written(tmp_path, "a.csv", "question,answer\n" + "x" * 200_000 + ",2\n"))
    assert len(row["question"]) == 200_000


def test_text_in_parquet_that_is_no_utf8_is_a_bad_row(tmp_path: Path) -> None:
    texts = pyarrow.array([b"fine", b"caf\xe9", b"fine"], pyarrow.binary()).view(pyarrow.string())
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": texts, "answer": ["1", "2", "3"]}), path)
    rows = list(read_parquet(path))
    assert said(rows) == {2: "has text in 'question' that is not UTF-8: write the file again with valid text"}
    assert rows[2] == (3, {"question": "fine", "answer": "3"})


def test_a_text_repeated_many_times_in_parquet_takes_the_memory_of_one(tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    text = "x" * 1_000_000
    repeated = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 20_000, pyarrow.int32()), pyarrow.array([text]))
    pyarrow.parquet.write_table(pyarrow.table({"question": repeated}), path)
    assert path.stat().st_size < 2_000_000  # 20 GB as text
    before = pyarrow.total_allocated_bytes()
    rows = read_parquet(path)
    assert next(rows) == (1, {"question": text})
    assert pyarrow.total_allocated_bytes() - before < 200_000_000


def test_a_parquet_file_that_promises_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["x" * 10_000] * 50}), path, use_dictionary=False)
    monkeypatch.setattr(row_files, "MOST_GROUP_BYTES", 1000)
    with pytest.raises(DataError, match=r"its row group 1 takes 0 GB .*: write it again with smaller row groups"):
        list(read_parquet(path))
    monkeypatch.setattr(row_files, "MOST_ROWS", 49)
    with pytest.raises(DataError, match=r"has 50 rows, more than 49: give a part of it"):
        list(read_parquet(path))


# How much memory that takes

READ_ALL = """
import sys
from rlpost.data import rows
from rlpost.data.datasets import located_rows

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))

rows.IN_MEMORY_BYTES = 4 << 20
next(iter(located_rows(sys.argv[2], "train", held_out=0.0)))  # what reading imports is there
before = peak()
rows = located_rows(sys.argv[1], "train", held_out=0.0)
print(len(rows), rows.where(len(rows) - 1), peak() - before, sep="\\n")
"""


def long_rows(path: Path, count: int) -> Path:
    """A file of rows of 10 KB, each another, as its suffix says."""
    answers = (f"{number}".ljust(10_000, "x") for number in range(count))
    if path.suffix == ".parquet":
        table = pyarrow.table({"question": [str(number) for number in range(count)], "answer": list(answers)})
        pyarrow.parquet.write_table(table, path, row_group_size=500, compression="NONE")
        return path
    before, row, between, behind = {
        ".jsonl": ("", '{{"question": "{0}", "answer": "{1}"}}', "\n", ""),
        ".json": ("[", '{{"question": "{0}", "answer": "{1}"}}', ", ", "]"),
        ".csv": ("question,answer\n", "{0},{1}", "\n", ""),
    }[path.suffix]
    rows = between.join(row.format(number, answer) for number, answer in enumerate(answers))
    return written(path.parent, path.name, f"{before}{rows}{behind}")


@pytest.mark.parametrize(
    ("suffix", "last", "share"),  # of Parquet a row group is held, several times over
    [(".jsonl", 10_000, 0.2), (".json", 10_000, 0.2), (".csv", 10_001, 0.2), (".parquet", 10_000, 0.8)],
)
def test_reading_a_large_file_takes_the_memory_of_a_part_of_it(
    suffix: str, last: int, share: float, tmp_path: Path
) -> None:
    small, large = long_rows(tmp_path / f"small{suffix}", 10), long_rows(tmp_path / f"large{suffix}", 10_000)
    size = large.stat().st_size
    assert size > 100_000_000
    command = [sys.executable, "-c", READ_ALL, str(large), str(small)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    count, where, grown = done.stdout.splitlines()
    assert (int(count), where) == (10_000, f"{large}, row {last}")
    assert int(grown) < share * size


# What is kept


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"question": "\ud800"}, "holds half of a character"),
        ({"question": {1, 2}}, None),
        ({"question": "x" * 2000}, "has more than"),
    ],
)
def test_what_cannot_be_kept_is_told(row: Any, wrong: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "MOST_ROW_BYTES", 1000)
    found = PackedRows().add(row)
    assert (found is None) if wrong is None else (found is not None and wrong in found)


def test_a_lone_surrogate_is_a_bad_row_before_training(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", json.dumps(GOOD) + '\n{"question": "\\ud800", "answer": "1"}\n')
    with pytest.raises(DataError, match=r"a.jsonl, row 2 holds half of a character \(a lone surrogate\): remove it"):
        located_rows(str(path), "train", held_out=0)


@pytest.mark.parametrize("in_memory", [10, 10_000_000])
def test_rows_come_back_as_they_were_wherever_they_are_kept(in_memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "IN_MEMORY_BYTES", in_memory)
    rows = [{"a": [1, 2.5, None, True, "ü\u2028"], "n": number, "big": 10**30} for number in range(50)]
    kept = PackedRows()
    for row in [*rows, {}]:
        assert kept.add(row) is None
    kept.finish()
    assert list(kept) == [*rows, {}]
    assert kept[-1] == {}
    assert kept[10:12] == rows[10:12]
    assert len(set(kept.digests.tolist())) == 51


def test_no_room_for_many_rows_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_files, "IN_MEMORY_BYTES", 10)
    monkeypatch.setattr(row_files.tempfile, "TemporaryFile", full)
    with pytest.raises(DataError, match=r"cannot be kept in .* \(No space left on device\): make room there, or name"):
        PackedRows().add({"question": "a long one"})


def test_what_json_has_no_word_for_is_kept_as_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    row = {
        "question": "?",
        "answer": "1",
        "day": datetime.date(2026, 1, 2),
        "price": decimal.Decimal("1.50"),
        "raw": b"ab",
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    [read] = located_rows(str(path), "train", held_out=0)
    assert (read["day"], read["price"], read["raw"]) == ("2026-01-02", "1.50", "YWI=")


# All of them told at once


def test_bad_rows_of_one_cause_are_one_line_with_a_count(tmp_path: Path) -> None:
    lines = [json.dumps(GOOD)] * 5 + ['{"question": "?", "answer": " "}'] * 12 + ['{"question": "?"'] * 11
    path = written(tmp_path, "a.jsonl", "\n".join(lines))
    with pytest.raises(DataError) as raised:
        located_rows(str(path), "train")
    told = str(raised.value).split("\n")
    assert told[0] == f"{path}: 23 of 28 rows are bad: correct or remove them"
    assert told[1:] == [
        f"  12 rows: field 'answer': is empty ({path}, rows 6, 7, 8, ...)",
        f"  11 rows are not JSON (Expecting ',' delimiter, character 17) ({path}, rows 18, 19, 20, ...)",
    ]


def test_several_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    paths = [str(written(tmp_path, f"{name}.jsonl", json.dumps({**GOOD, "question": name}))) for name in "ab"]
    rows = located_rows(paths, "train", held_out=0)
    assert [(where.rpartition("/")[2], row["question"]) for where, row in rows.located()] == [
        ("a.jsonl, row 1", "a"),
        ("b.jsonl, row 1", "b"),
    ]
    written(tmp_path, "b.jsonl", "\n{}")
    with pytest.raises(DataError, match=r"b.jsonl, row 2, field 'question': missing; the row has no fields"):
        located_rows(paths, "train")


def test_a_split_in_parts_as_the_hub_stores_it_is_one_split(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(2):
        table = pyarrow.Table.from_pylist([{**GOOD, "question": str(number)}])
        pyarrow.parquet.write_table(table, tmp_path / "data" / f"validation-0000{number}-of-00002.parquet")
    assert [row["question"] for row in located_rows(str(tmp_path), "validation")] == ["0", "1"]
