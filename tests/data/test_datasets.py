import json
import time
from pathlib import Path

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from rlpost.data.datasets import load_rows
from rlpost.errors import DataError

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}]
LINES = "\n".join(json.dumps(row) for row in ROWS) + "\n"


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    files = [
        written(tmp_path, "a.jsonl", LINES),
        written(tmp_path, "a.json", json.dumps(ROWS)),
        written(tmp_path, "a.csv", "question,answer\n1+1?,2\n2+2?,4\n"),
        tmp_path / "a.parquet",
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), files[-1])
    assert [load_rows(str(path), "train") for path in files] == [ROWS] * 4


def test_a_folder_is_read_by_split(tmp_path: Path) -> None:
    written(tmp_path, "train.jsonl", LINES)
    written(tmp_path, "test.csv", "question,answer\n3+3?,6\n")
    assert load_rows(str(tmp_path), "train", limit=1) == ROWS[:1]
    assert load_rows(str(tmp_path), "test") == [{"question": "3+3?", "answer": "6"}]


def test_byte_order_marks_carriage_returns_and_blank_lines_do_no_harm(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", "\ufeff" + LINES.replace("\n", "\r\n") + "\r\n")
    assert load_rows(str(path), "train") == ROWS


def test_line_separators_inside_a_text_do_not_end_its_line(tmp_path: Path) -> None:
    row = {"question": "one\u2028two\x0bthree", "answer": "1"}
    path = written(tmp_path, "a.jsonl", json.dumps(row, ensure_ascii=False))
    assert load_rows(str(path), "train") == [row]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": "q"}', "row 3, field 'answer': missing; the row has question"),
        ('{"question": 7, "answer": "a"}', "row 3, field 'question': must be text, and is int"),
        ('{"question": " ", "answer": "a"}', "row 3, field 'question': is empty"),
        ("[1]", "row 3, field 'question': the row is no object of named fields but list"),
        ('{"question": ', "line 3 is not JSON"),
    ],
)
def test_a_malformed_row_is_named_by_file_line_and_field(tmp_path: Path, line: str, said: str) -> None:
    path = written(tmp_path, "bad.jsonl", LINES + line)
    with pytest.raises(DataError, match=r"bad\.jsonl") as caught:
        load_rows(str(path), "train")
    assert said in str(caught.value)


def test_a_check_names_the_field_it_rejects(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", "\n" + LINES)
    with pytest.raises(DataError, match="row 3, field 'answer': is even"):
        load_rows(str(path), "train", check=lambda row: ("answer", "is even") if row["answer"] == "4" else None)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", "", "holds no rows"),
        ("a.json", "{}", "holds a dict at its top"),
        ("a.json", "[", "is not JSON"),
        ("a.csv", "question,answer\n1,2,3\n", "row 2 has more cells"),
        ("a.csv", "question,answer\n1\n", "row 2, field 'answer': must be text, and is NoneType"),
        ("a.parquet", "no parquet", "cannot be read as Parquet"),
        ("a.txt", LINES, "is no .jsonl"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        load_rows(str(written(tmp_path, name, text)), "train")
    assert said in str(caught.value)
    assert name in str(caught.value)


def test_a_file_that_is_not_utf8_says_where(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"question": "caf\xe9"}')
    with pytest.raises(DataError, match=r"is not UTF-8 \(byte 17\)"):
        load_rows(str(path), "train")


def test_missing_paths_and_splits_say_what_to_give(tmp_path: Path) -> None:
    written(tmp_path, "train.jsonl", LINES)
    with pytest.raises(DataError, match=r"has no test.jsonl"):
        load_rows(str(tmp_path), "test")
    for missing in (str(tmp_path / "nothing"), "./nothing", "data/deep/nothing", "nothing.jsonl"):
        with pytest.raises(DataError, match=r"does not exist: give env.path=<folder with train.jsonl"):
            load_rows(missing, "train")


def test_an_unreachable_hub_is_an_error_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no route to the hub")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    started = time.perf_counter()
    with pytest.raises(DataError, match=r"nobody/nothing.*no route to the hub.*give env.path=<folder"):
        load_rows("nobody/nothing", "train")
    assert time.perf_counter() - started < 10
