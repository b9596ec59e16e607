import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from rlpost.data.datasets import located_rows
from rlpost.data.faults import FormatError
from rlpost.data.rows import Row, text_in
from rlpost.errors import DataError

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}]
LINES = "\n".join(json.dumps(row) for row in ROWS) + "\n"


def question_and_answer(row: Row) -> str:
    text_in(row, "answer" if isinstance(row, dict) and "question" in row else "question")
    return text_in(row, "question")


def load_rows(dataset: Any, split: str, **options: Any) -> list[Row]:
    return list(located_rows(dataset, split, question_and_answer, **options))


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
    assert [load_rows(str(path), "train", held_out=0) for path in files] == [ROWS] * 4


def test_a_cell_of_csv_may_hold_any_sign_that_ends_no_line(tmp_path: Path) -> None:
    text = 'question,answer\na\u2028b\x0cc\x85d,1\n"e\nf\u2028g",2\n'
    rows = load_rows(str(written(tmp_path, "a.csv", text)), "train", held_out=0)
    assert [row["question"] for row in rows] == ["a\u2028b\x0cc\x85d", "e\nf\u2028g"]


def test_a_folder_is_read_by_split(tmp_path: Path) -> None:
    written(tmp_path, "train.jsonl", LINES)
    written(tmp_path, "test.csv", "question,answer\n3+3?,6\n")
    assert load_rows(str(tmp_path), "train", limit=1) == ROWS[:1]
    assert load_rows(str(tmp_path), "test") == [{"question": "3+3?", "answer": "6"}]


def test_byte_order_marks_carriage_returns_and_blank_lines_do_no_harm(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", "\ufeff" + LINES.replace("\n", "\r\n") + "\r\n")
    assert load_rows(str(path), "train", held_out=0) == ROWS


def numbered(count: int) -> list[dict[str, str]]:
    return [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(count)]


def jsonl(rows: list[dict[str, str]]) -> str:
    return "\n".join(json.dumps(row) for row in rows)


def test_a_prompt_is_never_on_both_sides(tmp_path: Path) -> None:
    rows = [{**row, "answer": answer} for row in numbered(50) for answer in ("a", "b", "c")]
    path = str(written(tmp_path, "a.jsonl", jsonl(rows)))
    sides = [{row["question"] for row in load_rows(path, split, held_out=0.5)} for split in ("train", "test")]
    assert sides[0] & sides[1] == set()
    assert sides[0] | sides[1] == {row["question"] for row in rows}


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_two_prompts_are_enough_for_two_sides(share: float, tmp_path: Path) -> None:
    path = str(written(tmp_path, "a.jsonl", LINES))
    assert sorted(len(load_rows(path, split, held_out=share)) for split in ("train", "test")) == [1, 1]


def test_a_folder_without_a_test_file_holds_out_of_its_train_file(tmp_path: Path) -> None:
    path = written(tmp_path, "train.jsonl", jsonl(numbered(100)))
    for split in ("train", "test"):
        assert load_rows(str(tmp_path), split) == load_rows(str(path), split)


def test_another_split_of_a_folder_is_its_file_of_that_name(tmp_path: Path) -> None:
    written(tmp_path, "train.jsonl", jsonl(numbered(20)))
    written(tmp_path, "dev.jsonl", LINES)
    assert load_rows(str(tmp_path), "dev") == ROWS
    assert load_rows(str(tmp_path), "train") == numbered(20)


def test_a_folder_without_the_split_names_those_that_it_has(tmp_path: Path) -> None:
    written(tmp_path, "dev.jsonl", LINES)
    with pytest.raises(DataError) as caught:
        load_rows(str(tmp_path), "train")
    assert str(caught.value) == (
        f"env.path={tmp_path} has no train.jsonl (nor .json, .csv, .parquet): give env.path={tmp_path}/dev.jsonl, or a "
        "split that it has with env.split=dev"
    )


def test_one_file_has_no_other_split_than_train_and_test(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", LINES)
    with pytest.raises(DataError) as caught:
        load_rows(str(path), "dev")
    assert str(caught.value) == f"env.path={path} is one file, which has train and test: env.split=dev needs a folder"


def test_a_test_path_leaves_all_other_rows_to_train(tmp_path: Path) -> None:
    path = str(written(tmp_path, "a.jsonl", jsonl(numbered(100))))
    test_path = str(written(tmp_path, "b.jsonl", LINES))
    assert load_rows(path, "train", test_path=test_path) == numbered(100)
    assert load_rows(path, "test", test_path=test_path) == ROWS
    with pytest.raises(DataError, match=r"env.test_path=.*nothing.jsonl does not exist"):
        load_rows(path, "test", test_path=str(tmp_path / "nothing.jsonl"))


def hub_gives(monkeypatch: pytest.MonkeyPatch, splits: Mapping[str, Any]) -> None:
    """Every id of the hub is a dataset with these splits."""
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr("datasets.load_dataset", lambda hub_id, config: splits)


def test_a_dataset_of_the_hub_without_test_holds_out_of_train(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {"train": numbered(100), "extra": ROWS}
    hub_gives(monkeypatch, splits)
    test = load_rows("some/rows", "test")
    assert load_rows("some/rows", "train") == [row for row in numbered(100) if row not in test]
    splits["test"] = ROWS
    assert load_rows("some/rows", "test") == ROWS
    assert load_rows("some/rows", "train") == numbered(100)
    del splits["train"]
    with pytest.raises(DataError, match="some/rows on the hub has no split train: it has extra, test"):
        load_rows("some/rows", "train")


def test_line_separators_inside_a_text_do_not_end_its_line(tmp_path: Path) -> None:
    row = {"question": "one\u2028two\x0bthree", "answer": "1"}
    path = written(tmp_path, "a.jsonl", json.dumps(row, ensure_ascii=False))
    assert load_rows(str(path), "train") == [row]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": "q"}', "row 3, field 'answer': missing; the row has question"),
        ('{"question": "q", "anser": "a"}', "missing; did you mean anser? the row has question, anser"),
        ('{"question": 7, "answer": "a"}', "row 3, field 'question': must be text, and is int"),
        ('{"question": " ", "answer": "a"}', "row 3, field 'question': is empty"),
        ("[1]", "row 3, field 'question': the row is not an object of named fields but a list"),
        ('{"question": ', "row 3 is not JSON"),
    ],
)
def test_a_malformed_row_is_named_by_file_line_and_field(tmp_path: Path, line: str, said: str) -> None:
    path = written(tmp_path, "bad.jsonl", LINES + line)
    with pytest.raises(DataError, match=r"bad\.jsonl") as caught:
        load_rows(str(path), "train")
    assert said in str(caught.value)


def test_a_malformed_element_of_a_list_is_named_by_its_number_and_field(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json", json.dumps([*ROWS, {"question": "q"}], indent=2))
    with pytest.raises(DataError) as caught:
        load_rows(str(path), "train")
    assert str(caught.value) == f"{tmp_path}/a.json, row 3, field 'answer': missing; the row has question"


def test_a_malformed_row_of_the_hub_is_named_by_dataset_split_and_field(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_gives(monkeypatch, {"train": [ROWS[0], {"question": "q", "answer": 7}], "test": [{"question": " "}]})
    for split, wrong in (("train", "row 2, field 'answer': must be text, and is int"), ("test", "row 1, ")):
        with pytest.raises(DataError) as caught:
            load_rows("some/rows", split)
        assert str(caught.value).startswith(f"some/rows ({split}) on the hub, {wrong}")


def test_a_check_names_the_field_it_rejects(tmp_path: Path) -> None:
    def odd(row: Row) -> str:
        if row["answer"] == "4":
            raise FormatError("answer", "is even")
        return row["question"]

    path = written(tmp_path, "a.jsonl", "\n" + LINES)
    with pytest.raises(DataError, match="row 3, field 'answer': is even"):
        list(located_rows(str(path), "train", odd))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", "", "holds no rows"),
        ("a.json", "[", "is not a JSON list"),
        ("a.csv", "question,answer\n1,2,3\n", "row 2 has more cells"),
        ("a.csv", "question,answer\n1\n", "row 2, field 'answer': must be text, and is null"),
        ("a.parquet", "no parquet", "cannot be read as Parquet"),
        ("a.txt", LINES, "is not a .jsonl"),
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
    with pytest.raises(
        DataError, match=r"a.jsonl, row 1 is not UTF-8 \(byte 17, likely Windows-1252 or Latin-1\): save"
    ):
        load_rows(str(path), "train")


def test_missing_paths_and_splits_say_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no train.jsonl .*: add it, or give env.path=<folder"):
        load_rows(str(tmp_path), "train")
    written(tmp_path, "rows.jsonl", LINES)
    with pytest.raises(DataError, match=r"has no test.jsonl .*: give env.path=.*rows.jsonl"):
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
    assert time.perf_counter() - started < 60


def test_rows_that_are_given_are_checked_and_serve_either_split() -> None:
    assert list(located_rows(ROWS, "test", question_and_answer, 1).located()) == [("the dataset, row 1", ROWS[0])]
    with pytest.raises(DataError, match="the dataset, row 2, field 'answer': missing; the row has question"):
        load_rows([ROWS[0], {"question": "And?"}], "train")


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_limit_ends_reading_with_the_rows_of_the_whole_file(split: str, tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(300)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = list(located_rows(str(path), split, question_and_answer))
    read = 0

    def count(row: Row) -> str:
        nonlocal read
        read += 1
        return row["question"]

    for limit in (1, 3, 9):
        read = 0
        assert list(located_rows(str(path), split, count, limit)) == expected[:limit]
        assert read < 250, limit
    assert list(located_rows(str(path), split, question_and_answer, 1000)) == expected


def test_copies_of_a_prompt_in_other_case_and_spacing_are_on_one_side_of_the_split(tmp_path: Path) -> None:
    rows = [{"question": text} for n in range(60) for text in (f"What is {n}?", f"WHAT  is {n}?\n", f"what is\t{n}?")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = str(tmp_path / "rows.jsonl")
    sides = {
        split: [row["question"] for row in located_rows(file, split, lambda row: row["question"], held_out=0.3)]
        for split in ("train", "test")
    }
    train, test = ({" ".join(text.split()).lower() for text in side} for side in sides.values())
    assert train
    assert test
    assert not train & test
    assert len(sides["train"]) + len(sides["test"]) == len(rows)
