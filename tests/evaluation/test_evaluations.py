"""The files of an evaluation, and how they are found again."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlpost.errors import CheckpointError, ConfigError, DataError
from rlpost.evaluation.saved import SCHEMA, find_evaluation, prompt_id, read_evaluation, write_evaluation
from tests.evaluation_folders import answered, keep_held_out, write
from tests.says import Says


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_prompt_is_known_by_its_task_in_any_order_of_fields() -> None:
    assert prompt_id({"question": "q", "answer": "3"}) == prompt_id({"answer": "3", "question": "q"})
    assert prompt_id({"question": "q", "answer": "3"}) != prompt_id({"question": "q", "answer": "4"})
    assert len(prompt_id({"question": "q"})) == 16


def test_what_is_written_is_read_back() -> None:
    write(Path("evals/a"), ["rw", "rr"])
    saved = read_evaluation(find_evaluation("a"))
    assert saved.name == "a"
    assert saved.record["result"]["accuracy_lenient"]["value"] == 0.75
    assert [row["accuracy_lenient"] for row in saved.samples] == [1.0, 0.0, 1.0, 1.0]
    table = pq.read_table("evals/a/samples.parquet")
    assert table.schema.names == SCHEMA.names
    assert sorted(path.name for path in Path("evals/a").iterdir()) == ["result.json", "samples.parquet"]


def test_a_result_that_cannot_be_written_leaves_no_half_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(CheckpointError, match=r"evals/a: .*--out"):
        write_evaluation(Path("evals/a"), {}, answered("q", "r"))
    assert list(Path("evals/a").iterdir()) == []


def test_an_evaluation_is_found_by_name_by_folder_and_by_table() -> None:
    made = write(Path("evals/a"), ["r"])
    elsewhere = write(Path("kept/b"), ["r"])
    assert find_evaluation("a") == made / "samples.parquet"
    assert find_evaluation("evals/a") == made / "samples.parquet"
    assert find_evaluation("kept/b/samples.parquet") == elsewhere / "samples.parquet"
    assert find_evaluation("./kept/b") == elsewhere / "samples.parquet"


def test_a_table_alone_has_no_record() -> None:
    Path("alone.parquet").write_bytes((write(Path("evals/a"), ["r"]) / "samples.parquet").read_bytes())
    saved = read_evaluation(find_evaluation("alone.parquet"))
    assert (saved.name, saved.record, len(saved.samples)) == ("alone.parquet", {}, 1)


def test_a_run_gives_its_last_held_out_completions() -> None:
    Path("runs/mine/checkpoints").mkdir(parents=True)
    for step in (0, 20, 3):
        keep_held_out(Path("runs/mine"), step, ["r"])
    assert find_evaluation("mine") == find_evaluation("runs/mine") == Path("runs/mine/held-out/step-000020.parquet")


def test_a_missing_evaluation_gets_a_hint(says: Says) -> None:
    def hint(name: str) -> str:
        with pytest.raises(ConfigError) as refused:
            find_evaluation(name)
        return f"{name}: {refused.value}"

    hints = [hint("x")]
    Path("runs/mine/checkpoints").mkdir(parents=True)
    write(Path("runs/s/job"), ["r"])
    Path("runs/s/sweep.json").write_text("{}")
    Path("evals/half").mkdir(parents=True)
    Path("evals/half/samples.parquet").write_bytes(b"")
    hints += map(hint, ["mine", "runs/mine", "runs/s", "evals/half"])
    write(Path("evals/before"), ["r"])
    write(Path("evals/other"), ["r"])
    hints += map(hint, ["befor", "evals/othr", "xyz"])
    says("eval", "\n".join(hints))


def test_a_damaged_table_and_one_of_other_columns_are_refused() -> None:
    made = write(Path("evals/a"), ["r"])
    table = made / "samples.parquet"
    pq.write_table(pq.read_table(table).drop_columns(["prompt_id"]), table)
    with pytest.raises(DataError, match="prompt_id"):
        read_evaluation(table)
    table.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"samples\.parquet"):
        read_evaluation(table)
    (made / "result.json").write_text("{")
    with pytest.raises(DataError, match=r"samples\.parquet"):
        read_evaluation(table)
