"""`env.path=[a.jsonl,b.jsonl]` as one word of a command line: all rows of all the files, each named by its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import CommandLine

OWN = ["train", "grpo", "model=tiny", "policy=scripted", "env=dataset", "env.reward=exact"]


@pytest.fixture(autouse=True)
def rows(here: Path) -> None:
    """Three files of 4, 3 and 2 rows."""
    for name, count in (("a.jsonl", 4), ("b.jsonl", 3), ("my rows, old.jsonl", 2)):
        rows = [{"prompt": f"Say {number} of {name}.", "answer": "1"} for number in range(count)]
        Path(name).write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize(
    ("paths", "count"), [("[a.jsonl,b.jsonl]", 7), ('["my rows, old.jsonl",b.jsonl]', 5), ("['a.jsonl']", 4)]
)
def test_the_rows_of_all_files_are_planned_for_counted_and_trained_on(
    paths: str, count: int, rlpost: CommandLine
) -> None:
    path = f"env.path={paths}"
    assert f"data    dataset from {paths}, " in rlpost([*OWN, path, "--dry-run"])
    report = rlpost.json(["data", "report", paths, "model=tiny", "env.held_out=0"])
    assert report["splits"]["train"]["rows"] == count
    learnt = ["env.completion_column=answer", "env.held_out=0", "epochs=1", "minibatch_size=4", "eval.enabled=false"]
    assert f", {count} samples\n" in rlpost(["train", "sft", "model=tiny", "env=dataset", path, *learnt, "--plain"])
