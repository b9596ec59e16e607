"""What a file of rows shows before anything heavy is loaded; the mistakes themselves: tests/cli/test_mistakes.py."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlpost.envs.build import build_env
from rlpost.envs.row_checks import MOST_BYTES, look_at_rows
from rlpost.errors import DataError
from rlpost.settings import DatasetSettings, EnvSettings, GSM8KSettings, MathSettings
from tests.envs.own_rows import write_rows
from tests.says import Says

GOOD = {"question": "What is 1 + 1?", "answer": "#### 2"}
BAD = {"question": "What is 1 + 1?", "reply": "2"}
LARGE = "x" * MOST_BYTES


def columns(settings: EnvSettings, *splits: str) -> list[str] | None:
    return look_at_rows(settings, splits or ["train"], demonstrated=False).columns


def test_the_columns_of_all_rows_are_told(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [GOOD, GOOD | {"level": "easy"}])
    assert columns(GSM8KSettings(path=str(path))) == ["question", "answer", "level"]


def test_rows_that_will_not_be_read_are_not_looked_at(tmp_path: Path) -> None:
    write_rows(tmp_path, [GOOD, BAD], "train.jsonl")
    write_rows(tmp_path, [BAD], "test.jsonl")
    settings = GSM8KSettings(path=str(tmp_path), limit=1)
    assert columns(settings) == ["question", "answer"]
    with pytest.raises(DataError, match=r"test\.jsonl, row 1, field 'answer'"):
        columns(settings, "train", "test")
    (tmp_path / "test.jsonl").unlink()  # a share of train is held out, so that all rows are read
    with pytest.raises(DataError, match=r"train\.jsonl, row 2, field 'answer'"):
        columns(settings)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_of_a_large_file_the_first_row_is_looked_at(ending: str, tmp_path: Path) -> None:
    def large(first: dict[str, str]) -> GSM8KSettings:
        path = tmp_path / f"rows.{ending}"
        second = dict.fromkeys(first, LARGE)
        if ending == "jsonl":
            write_rows(tmp_path, [first, second])
        elif ending == "csv":
            path.write_text("\n".join(",".join(each) for each in (first, first.values(), second.values())))
        else:
            table = pyarrow.table({name: [value, LARGE] for name, value in first.items()})
            pyarrow.parquet.write_table(table, path, compression="none")
        return GSM8KSettings(path=str(path))

    assert columns(large(GOOD)) is None
    with pytest.raises(DataError, match=rf"rows\.{ending}, row [12], field 'answer'"):
        columns(large(BAD))


def test_the_encoding_of_a_large_file_is_told_from_its_first_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + LARGE, encoding="utf-16")
    with pytest.raises(DataError, match=r"rows\.jsonl, row 1 .* UTF-16"):
        columns(GSM8KSettings(path=str(path)))


def test_what_a_hub_has_is_not_fetched() -> None:
    assert columns(GSM8KSettings(), "train", "test") is None


def test_prompts_that_a_template_writes_need_no_column(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [{"a": "1", "b": "2"}])
    settings = DatasetSettings(path=str(path), reward=["contains"])
    with pytest.raises(DataError, match=r"field 'prompt': .*env\.prompt_column"):
        columns(settings)
    settings.prompt_template, settings.answer_column = "{a} + 1?", "b"
    assert columns(settings) == ["a", "b"]


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
    made = settings(path=str(write_rows(tmp_path, [good, bad])), held_out=0.0, **own)
    with pytest.raises(DataError, match="row 2") as looked:
        columns(made)
    env = build_env(made)
    with pytest.raises(DataError) as read:
        env.load("train")
    env.close()
    assert str(read.value) == str(looked.value)


def test_as_many_malformed_demonstrations_as_allowed_pass(tmp_path: Path, says: Says) -> None:
    path = write_rows(tmp_path, [{"prompt": "Hi", "completion": "Ho"}, {"prompt": "Hi"}])
    settings = DatasetSettings(path=str(path))
    look = look_at_rows(settings, ["train"], demonstrated=True, max_bad_share=0.5)
    assert (look.columns, look.bad) == (["prompt", "completion"], 1)
    with says.refused("data", DataError, "max_bad_share"):
        look_at_rows(settings, ["train"], demonstrated=True, max_bad_share=0.49)


class Evil:
    """Unpickling it writes the file `ran`."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.ran), "w")


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.pkl", "rows.pt", "rows.npy", "rows/rows.py"]
)
def test_rows_make_nothing_run(name: str, tmp_path: Path) -> None:
    """Neither a pickle, whatever its name is, nor a folder with a script, as `datasets` once loaded them."""
    file, ran = tmp_path / name, tmp_path / "ran"
    file.parent.mkdir(exist_ok=True)
    script = f"open({str(ran)!r}, 'w')".encode()
    file.write_bytes(script if file.suffix == ".py" else pickle.dumps(Evil(ran)))
    with pytest.raises(DataError, match="rows"):
        columns(GSM8KSettings(path=str(tmp_path / Path(name).parts[0])))
    assert not ran.exists()


def test_a_pickled_type_of_parquet_is_not_unpickled(tmp_path: Path) -> None:
    file, ran = tmp_path / "rows.parquet", tmp_path / "ran"
    pickled = pickle.dumps(Evil(ran))
    metadata = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickled}
    schema = pyarrow.schema([pyarrow.field(name, pyarrow.string(), metadata=metadata) for name in GOOD])
    pyarrow.parquet.write_table(pyarrow.table({name: [value] for name, value in GOOD.items()}, schema=schema), file)
    assert columns(GSM8KSettings(path=str(file))) == [*GOOD]
    assert not ran.exists()
