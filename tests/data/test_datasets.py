"""Rows by path, split and held-out share; a row that cannot be used is named by file and number."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from rlpost.data.datasets import located_rows
from rlpost.data.rows import Row, text_in
from rlpost.errors import DataError
from tests.says import Says

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}]
LINES = "\n".join(json.dumps(row) for row in ROWS) + "\n"
NUMBERED = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(100)]


def question_and_answer(row: Row) -> str:
    text_in(row, "answer" if isinstance(row, dict) and "question" in row else "question")
    return text_in(row, "question")


def load_rows(dataset: Any, split: str, **options: Any) -> list[Row]:
    return list(located_rows(dataset, split, question_and_answer, **options))


def written(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def jsonl(rows: list[dict[str, str]]) -> str:
    return "\n".join(json.dumps(row) for row in rows)


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    files = [
        written(tmp_path, "a.jsonl", LINES),
        written(tmp_path, "a.json", json.dumps(ROWS)),
        written(tmp_path, "a.csv", "question,answer\n1+1?,2\n2+2?,4\n"),
        tmp_path / "a.parquet",
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), files[-1])
    assert [load_rows(str(path), "train", held_out=0) for path in files] == [ROWS] * 4


def test_only_line_breaks_end_a_line(tmp_path: Path) -> None:
    text = 'question,answer\na\u2028b\x0cc\x85d,1\n"e\nf\u2028g",2\n'
    rows = load_rows(str(written(tmp_path, "a.csv", text)), "train", held_out=0)
    assert [row["question"] for row in rows] == ["a\u2028b\x0cc\x85d", "e\nf\u2028g"]
    row = {"question": "one\u2028two\x0bthree", "answer": "1"}
    assert load_rows(str(written(tmp_path, "a.jsonl", json.dumps(row, ensure_ascii=False))), "train") == [row]


def test_byte_order_marks_carriage_returns_and_blank_lines_do_no_harm(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", "\ufeff" + LINES.replace("\n", "\r\n") + "\r\n")
    assert load_rows(str(path), "train", held_out=0) == ROWS


def test_each_split_of_a_folder_is_its_file_of_that_name(tmp_path: Path) -> None:
    train = written(tmp_path, "train.jsonl", jsonl(NUMBERED))
    for split in ("train", "test"):  # without another file, rows of the train file are held out
        assert load_rows(str(tmp_path), split) == load_rows(str(train), split)
    written(tmp_path, "dev.jsonl", LINES)
    assert load_rows(str(tmp_path), "dev") == ROWS
    assert load_rows(str(tmp_path), "train") == NUMBERED
    written(tmp_path, "test.csv", "question,answer\n3+3?,6\n")
    assert load_rows(str(tmp_path), "test") == [{"question": "3+3?", "answer": "6"}]
    assert load_rows(str(tmp_path), "train", limit=1) == NUMBERED[:1]


def test_a_path_without_the_split_says_what_to_give(tmp_path: Path, says: Says) -> None:
    def refused(path: Path, split: str) -> None:
        with says.refused("data", DataError, f"env.path={path}"):
            load_rows(str(path), split)

    refused(tmp_path, "train")
    refused(written(tmp_path, "a.jsonl", LINES), "dev")
    refused(tmp_path, "test")
    (tmp_path / "a.jsonl").rename(tmp_path / "dev.jsonl")
    refused(tmp_path, "train")
    refused(tmp_path / "nothing", "train")
    for missing in ("./nothing", "data/deep/nothing", "nothing.jsonl"):  # no id of the hub looks like this
        with pytest.raises(DataError, match=rf"env\.path={missing}"):
            load_rows(missing, "train")


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_two_prompts_are_enough_for_two_sides(share: float, tmp_path: Path) -> None:
    path = str(written(tmp_path, "a.jsonl", LINES))
    assert sorted(len(load_rows(path, split, held_out=share)) for split in ("train", "test")) == [1, 1]


def test_copies_of_a_prompt_are_on_one_side_of_the_split(tmp_path: Path) -> None:
    rows = [{"question": text} for n in range(60) for text in (f"What is {n}?", f"WHAT  is {n}?\n", f"what is\t{n}?")]
    file = str(written(tmp_path, "rows.jsonl", jsonl(rows)))
    sides = [
        [row["question"] for row in located_rows(file, split, lambda row: row["question"], held_out=0.3)]
        for split in ("train", "test")
    ]
    train, test = ({" ".join(text.split()).lower() for text in side} for side in sides)
    assert len(train) > len(test) > 0
    assert not train & test
    assert sum(map(len, sides)) == len(rows)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_limit_ends_reading_with_the_rows_of_the_whole_file(split: str, tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(300)]
    path = str(written(tmp_path, "rows.jsonl", jsonl(rows)))
    expected = load_rows(path, split)
    read = 0

    def count(row: Row) -> str:
        nonlocal read
        read += 1
        return row["question"]

    for limit in (1, 3, 9):
        read = 0
        assert list(located_rows(path, split, count, limit)) == expected[:limit]
        assert read < 250, limit
    assert load_rows(path, split, limit=1000) == expected


def test_a_test_path_leaves_all_other_rows_to_train(tmp_path: Path) -> None:
    path = str(written(tmp_path, "a.jsonl", jsonl(NUMBERED)))
    test_path = str(written(tmp_path, "b.jsonl", LINES))
    assert load_rows(path, "train", test_path=test_path) == NUMBERED
    assert load_rows(path, "test", test_path=test_path) == ROWS
    with pytest.raises(DataError, match=r"env.test_path=.*nothing.jsonl"):
        load_rows(path, "test", test_path=str(tmp_path / "nothing.jsonl"))


def test_rows_that_are_given_are_checked_and_serve_either_split() -> None:
    [(where, row)] = located_rows(ROWS, "test", question_and_answer, 1).located()
    assert (where.rpartition(", ")[2], row) == ("row 1", ROWS[0])
    with pytest.raises(DataError, match="row 2, field 'answer'"):
        load_rows([ROWS[0], {"question": "And?"}], "train")


# Datasets of the hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, Any]], None]:
    """Let each id of the hub be a dataset with the given splits."""

    def gives(splits: Mapping[str, Any]) -> None:
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
        monkeypatch.setattr("datasets.load_dataset", lambda hub_id, config: splits)

    return gives


def test_a_dataset_of_the_hub_without_test_holds_out_of_train(hub: Callable[..., None]) -> None:
    splits = {"train": NUMBERED, "extra": ROWS}
    hub(splits)
    test = load_rows("some/rows", "test")
    assert load_rows("some/rows", "train") == [row for row in NUMBERED if row not in test]
    splits["test"] = ROWS
    assert load_rows("some/rows", "test") == ROWS
    assert load_rows("some/rows", "train") == NUMBERED
    del splits["train"]
    with pytest.raises(DataError, match=r"some/rows .* extra, test"):
        load_rows("some/rows", "train")


def test_a_malformed_row_of_the_hub_is_named_by_split_and_field(hub: Callable[..., None]) -> None:
    hub({"train": [ROWS[0], {"question": "q", "answer": 7}], "test": [{"question": " "}]})
    for split, place in (("train", "row 2, field 'answer'"), ("test", "row 1, field 'answer'")):
        with pytest.raises(DataError, match=rf"some/rows \({split}\) .*, {place}"):
            load_rows("some/rows", split)


def test_a_hub_that_is_not_reached_is_an_error_with_its_reason() -> None:
    # tests are offline: the request to the hub fails first, and its reason is shown
    with pytest.raises(DataError, match=r"nobody/nothing.*/api/datasets/nobody.*env\.path="):
        load_rows("nobody/nothing", "train")


# Rows and files that cannot be used


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ('{"question": "q"}', "row 3, field 'answer'"),
        ('{"question": "q", "anser": "a"}', "row 3, field 'answer'"),
        ('{"question": 7, "answer": "a"}', "row 3, field 'question'"),
        ('{"question": " ", "answer": "a"}', "row 3, field 'question'"),
        ("[1]", "row 3, field 'question'"),
        ('{"question": ', "row 3 "),
    ],
    ids=["missing", "misspelt", "number", "blank", "list", "no JSON"],
)
def test_a_malformed_row_is_named_by_file_line_and_field(tmp_path: Path, line: str, place: str, says: Says) -> None:
    path = written(tmp_path, "bad.jsonl", LINES + line)
    with says.refused("data", DataError, f"bad.jsonl, {place}"):
        load_rows(str(path), "train")


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        ("a.jsonl", "", "holds no rows"),
        ("a.jsonl", b'{"question": "caf\xe9"}', "row 1 is not UTF-8 (byte 17"),
        ("a.json", "[", "is not a JSON list"),
        ("a.json", json.dumps([*ROWS, {"question": "q"}], indent=2), "row 3, field 'answer'"),
        ("a.csv", "question,answer\n1,2,3\n", "row 2 has more cells"),
        ("a.csv", "question,answer\n1\n", "row 2, field 'answer'"),
        ("a.csv", "question,answer,answer\n1 + 1,2,3\n", "two columns called 'answer'"),
        ("a.parquet", "no parquet", "as Parquet"),
        ("a.txt", LINES, ".jsonl"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_fault(
    tmp_path: Path, name: str, text: str | bytes, wrong: str
) -> None:
    with pytest.raises(DataError, match=f"{name}.*{re.escape(wrong)}"):
        load_rows(str(written(tmp_path, name, text)), "train")
