"""What a file of rows shows before anything heavy is loaded; the mistakes themselves: tests/cli/test_mistakes.py."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlpost.envs import row_checks
from rlpost.envs.build import build_env
from rlpost.envs.row_checks import look_at_rows
from rlpost.errors import DataError
from rlpost.settings import DatasetSettings, GSM8KSettings, MathSettings

GOOD = {"question": "What is 1 + 1?", "answer": "#### 2"}
BAD = {"question": "What is 1 + 1?", "reply": "2"}


def written(folder: Path, *rows: dict[str, str], name: str = "rows.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def test_the_columns_of_all_rows_are_told(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, GOOD | {"level": "easy"})
    assert look_at_rows(GSM8KSettings(path=path), ["train"], demonstrated=False).columns == [
        "question",
        "answer",
        "level",
    ]


def test_rows_that_will_not_be_read_are_not_looked_at(tmp_path: Path) -> None:
    written(tmp_path, GOOD, BAD, name="train.jsonl")
    written(tmp_path, BAD, name="test.jsonl")
    settings = GSM8KSettings(path=str(tmp_path), limit=1)
    assert look_at_rows(settings, ["train"], demonstrated=False).columns == ["question", "answer"]
    with pytest.raises(DataError, match=r"test.jsonl, row 1, field 'answer': missing"):
        look_at_rows(settings, ["train", "test"], demonstrated=False)
    (tmp_path / "test.jsonl").unlink()  # a share of train is held out, so that all rows are read
    with pytest.raises(DataError, match=r"train.jsonl, row 2, field 'answer': missing"):
        look_at_rows(settings, ["train"], demonstrated=False)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_of_a_large_file_the_first_row_is_looked_at(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_checks, "MOST_BYTES", 100)

    def large(first: dict[str, str]) -> str:
        path = tmp_path / f"rows.{ending}"
        if ending == "jsonl":
            return written(tmp_path, first, *[BAD] * 9)
        if ending == "csv":
            path.write_text("\n".join([",".join(first), *[",".join(first.values())] * 9]))
        else:
            pyarrow.parquet.write_table(pyarrow.table({name: [value] * 9 for name, value in first.items()}), path)
        return str(path)

    assert look_at_rows(GSM8KSettings(path=large(GOOD)), ["train"], demonstrated=False).columns is None
    with pytest.raises(DataError, match=rf"rows.{ending}, row [12], field 'answer': missing"):
        look_at_rows(GSM8KSettings(path=large(BAD)), ["train"], demonstrated=False)


def test_a_large_file_of_another_encoding_is_told_from_its_first_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    monkeypatch.setattr(row_checks, "MOST_BYTES", 27)
    path.write_bytes((json.dumps(GOOD) + "\n").encode("utf-16"))
    with pytest.raises(DataError, match=r"rows.jsonl, row 1 is not UTF-8 \(byte 0, likely UTF-16\): save the file"):
        look_at_rows(GSM8KSettings(path=str(path)), ["train"], demonstrated=False)


def test_what_a_hub_has_is_not_fetched() -> None:
    assert look_at_rows(GSM8KSettings(), ["train", "test"], demonstrated=False).columns is None


def test_prompts_that_a_template_writes_need_no_column_of_their_own(tmp_path: Path) -> None:
    settings = DatasetSettings(path=written(tmp_path, {"a": "1", "b": "2"}), reward=["contains"])
    with pytest.raises(
        DataError, match=r"field 'prompt': missing; the row has a, b; name one of them with env.prompt_c"
    ):
        look_at_rows(settings, ["train"], demonstrated=False)
    settings.prompt_template, settings.answer_column = "{a} + 1?", "b"
    assert look_at_rows(settings, ["train"], demonstrated=False).columns == ["a", "b"]


@pytest.mark.parametrize(
    ("settings", "good", "bad"),
    [
        (GSM8KSettings, GOOD, GOOD | {"answer": "two"}),
        (MathSettings, {"problem": "?", "answer": "2"}, {"problem": "?", "solution": "two"}),
        (DatasetSettings, {"prompt": "?", "answer": "2"}, {"prompt": "?", "answer": "two"}),
    ],
)
def test_a_row_is_refused_in_the_same_words_when_it_is_read(settings: Any, good: Any, bad: Any, tmp_path: Path) -> None:
    own: dict[str, Any] = {"reward": ["number"]} if settings is DatasetSettings else {}
    made = settings(path=written(tmp_path, good, bad), held_out=0.0, **own)
    with pytest.raises(DataError, match="row 2") as looked:
        look_at_rows(made, ["train"], demonstrated=False)
    env = build_env(made, num_prompts=1, group_size=1, seed=0)
    with pytest.raises(DataError) as read:
        env.load("train")
    env.close()
    assert str(read.value) == str(looked.value)


def test_as_many_malformed_demonstrations_as_are_allowed_pass(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "Hi", "completion": "Ho"}, {"prompt": "Hi"})
    settings = DatasetSettings(path=path)
    columns = look_at_rows(settings, ["train"], demonstrated=True, max_bad_share=0.5).columns
    assert columns == ["prompt", "completion"]
    with pytest.raises(DataError) as raised:
        look_at_rows(settings, ["train"], demonstrated=True, max_bad_share=0.49)
    assert str(raised.value).splitlines()[:2] == [
        f"{path}: 1 of 2 rows are bad (more than the 49% allowed): correct or remove them, or raise max_bad_share",
        f"  {path}, row 2, field 'completion': missing; the row has prompt",
    ]


class Evil:
    """Unpickling it leaves the file `ran`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("ran", "w")


def with_a_pickled_type(path: Path) -> None:
    metadata = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(Evil())}
    schema = pyarrow.schema([pyarrow.field(name, pyarrow.string(), metadata=metadata) for name in GOOD])
    pyarrow.parquet.write_table(pyarrow.table({name: [value] for name, value in GOOD.items()}, schema=schema), path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rows.jsonl", "is not UTF-8"),  # a pickle
        ("rows.json", "is not a JSON list"),
        ("rows.csv", "is not UTF-8"),
        ("rows.parquet", "cannot be read as Parquet"),
        ("rows.pkl", "is not a .jsonl, .json, .csv, .parquet file"),
        ("rows.pt", "is not a .jsonl, .json, .csv, .parquet file"),
        ("rows.npy", "is not a .jsonl, .json, .csv, .parquet file"),
        ("folder/folder.py", "has no train.jsonl"),  # as datasets once loaded folders
    ],
)
def test_rows_make_nothing_run(name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path(name)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"open('ran', 'w')" if file.suffix == ".py" else pickle.dumps(Evil()))
    with pytest.raises(DataError, match=said):
        look_at_rows(GSM8KSettings(path=f"./{file.parts[0]}"), ["train"], demonstrated=False)
    assert not Path("ran").exists()


def test_a_pickled_type_of_parquet_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with_a_pickled_type(Path("rows.parquet"))
    look_at_rows(GSM8KSettings(path="./rows.parquet"), ["train"], demonstrated=False)
    assert not Path("ran").exists()
