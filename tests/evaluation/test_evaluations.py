"""What an evaluation leaves on disk, and how it is found again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlpost.errors import CheckpointError, ConfigError, DataError
from rlpost.evaluation.saved import SCHEMA, find_evaluation, prompt_id, read_evaluation, write_evaluation
from tests.evaluation_folders import answered, keep_held_out, write


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_prompt_is_known_by_its_task_whatever_the_order_of_its_fields() -> None:
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


def test_a_result_that_cannot_be_written_leaves_no_half_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(CheckpointError, match=r"cannot write to evals/a: .*No space left.*; give another --out"):
        write_evaluation(Path("evals/a"), {}, answered("q", "r"))
    assert list(Path("evals/a").iterdir()) == []


def test_an_evaluation_is_found_by_name_by_folder_and_by_its_table() -> None:
    made = write(Path("evals/a"), ["r"])
    elsewhere = write(Path("kept/b"), ["r"])
    assert find_evaluation("a") == made / "samples.parquet"
    assert find_evaluation("evals/a") == made / "samples.parquet"
    assert find_evaluation("kept/b/samples.parquet") == elsewhere / "samples.parquet"
    assert find_evaluation("./kept/b") == elsewhere / "samples.parquet"


def test_a_table_alone_has_no_record() -> None:
    write(Path("evals/a"), ["r"])
    Path("alone.parquet").write_bytes(Path("evals/a/samples.parquet").read_bytes())
    saved = read_evaluation(find_evaluation("alone.parquet"))
    assert (saved.name, saved.record, len(saved.samples)) == ("alone.parquet", {}, 1)


def test_a_run_gives_its_last_held_out_completions() -> None:
    Path("runs/mine/checkpoints").mkdir(parents=True)
    for step in (0, 20, 3):
        keep_held_out(Path("runs/mine"), step, ["r"])
    assert find_evaluation("mine") == find_evaluation("runs/mine") == Path("runs/mine/held-out/step-000020.parquet")


def a_run() -> None:
    Path("runs/mine/checkpoints").mkdir(parents=True)


def a_sweep() -> None:
    write(Path("runs/s/job"), ["r"])
    Path("runs/s/sweep.json").write_text("{}")


def a_folder() -> None:
    Path("evals/half").mkdir(parents=True)
    (Path("evals/half") / "samples.parquet").write_bytes(b"")


def two_evaluations() -> None:
    write(Path("evals/before"), ["r"])
    write(Path("evals/other"), ["r"])


@pytest.mark.parametrize(
    ("make", "name", "said"),
    [
        (a_run, "mine", "runs/mine holds no held-out completions: make some with rlpost eval model=runs/mine"),
        (a_run, "runs/mine", "runs/mine holds no held-out completions: make some with rlpost eval model=runs/mine"),
        (
            a_sweep,
            "runs/s",
            "runs/s is not an evaluation, with result.json and samples.parquet: name two of runs/s/job",
        ),
        (
            a_folder,
            "evals/half",
            "evals/half is not an evaluation, with result.json and samples.parquet: rlpost eval makes one",
        ),
        (two_evaluations, "befor", "there is no evaluation befor; did you mean before?"),
        (two_evaluations, "evals/othr", "there is no evaluation evals/othr; did you mean evals/other?"),
        (two_evaluations, "xyz", "there is no evaluation xyz; there are before, other"),
        (lambda: None, "x", "there is no evaluation x; rlpost eval makes one"),
    ],
)
def test_a_missing_evaluation_gets_a_hint(make: Callable[[], None], name: str, said: str) -> None:
    make()
    with pytest.raises(ConfigError) as error:
        find_evaluation(name)
    assert str(error.value).startswith(said)


def test_a_damaged_table_and_one_of_other_columns_are_refused_by_name() -> None:
    made = write(Path("evals/a"), ["r"])
    table = pq.read_table(made / "samples.parquet").drop_columns(["prompt_id"])
    pq.write_table(table, "evals/a/samples.parquet")
    with pytest.raises(DataError, match="has no column prompt_id: it is not a table that rlpost eval wrote"):
        read_evaluation(made / "samples.parquet")
    (made / "samples.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"evals/a/samples.parquet cannot be read"):
        read_evaluation(made / "samples.parquet")
    (made / "result.json").write_text(json.dumps({})[:1])
    with pytest.raises(DataError, match="cannot be read"):
        read_evaluation(made / "samples.parquet")
