"""`env.path=[a.jsonl,b.jsonl]` as one word of a command line: all rows of all the files, each named by its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlpost.cli.main import run

OWN = ["train", "grpo", "model=tiny", "policy=scripted", "env=dataset", "env.reward=exact"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with three files of 4, 3 and 2 rows."""
    monkeypatch.chdir(tmp_path)
    for name, count in (("a.jsonl", 4), ("b.jsonl", 3), ("my rows, old.jsonl", 2)):
        write(name, [json.dumps({"prompt": f"Say {number} of {name}.", "answer": "1"}) for number in range(count)])


def write(name: str, lines: Sequence[str]) -> None:
    Path(name).write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("paths", "count"), [("[a.jsonl,b.jsonl]", 7), ('["my rows, old.jsonl",b.jsonl]', 5), ("['a.jsonl']", 4)]
)
def test_the_rows_of_all_files_are_planned_for_counted_and_trained_on(
    paths: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"env.path={paths}"
    assert run([*OWN, path, "--dry-run"]) == 0
    assert f"data    dataset from {paths}, train split, reward exact, " in capsys.readouterr().out
    assert run(["data", "report", paths, "model=tiny", "env.held_out=0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["splits"]["train"]["rows"] == count
    learnt = ["env.completion_column=answer", "env.held_out=0", "epochs=1", "minibatch_size=4", "eval.enabled=false"]
    assert run(["train", "sft", "model=tiny", "env=dataset", path, *learnt, "--plain"]) == 0
    assert f", {count} samples\n" in capsys.readouterr().out
