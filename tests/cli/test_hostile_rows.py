"""Rows made to break what reads them: every command names file and row, and none shows a traceback."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rlpost.cli.main import run

CHAT = '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]'
TOO_DEEP = "is nested too deeply (100 levels at most): flatten or remove it"
TOO_LONG = "holds a number of more digits than can be read: write it as text, or remove it"
HALF = "holds half of a character (a lone surrogate): remove it"


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


def calling(arguments: str) -> str:
    """Messages with a call of a function."""
    call = f'{{"function": {{"name": "f", "arguments": {arguments}}}}}'
    return f'{CHAT[:-1]}, {{"role": "assistant", "tool_calls": [{call}]}}]'


# kind -> (cells of the bad row as JSON, the field at fault, what is wrong, whether a file of JSON names the field too)
HOSTILE: dict[str, tuple[dict[str, str], str, str, bool]] = {
    "5,000 digits": ({"messages": CHAT.replace('"Ho"', "9" * 5000)}, "messages", TOO_LONG, False),
    "half a character": ({"messages": CHAT.replace("Ho", "\\ud800")}, "messages", HALF, False),
    "400 levels of tools": ({"messages": CHAT, "tools": deep(400)}, "tools", TOO_DEEP, True),
    "900 levels of tools": ({"messages": CHAT, "tools": deep(900)}, "tools", TOO_DEEP, True),
    "50,000 levels of tools": ({"messages": CHAT, "tools": deep(50_000)}, "tools", TOO_DEEP, False),
    "600 levels of arguments": ({"messages": calling(f'{{"x": {deep(600)}}}')}, "messages", TOO_DEEP, True),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def answers(capsys: pytest.CaptureFixture[str], file: str, commands: Sequence[str]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each of the commands on a file, each as one line."""
    found = []
    for command in commands:
        code = run(f"{command} model=tiny env.held_out=0".replace("FILE", file).split())
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        found.append((code, " ".join(captured.out.split()), " ".join(captured.err.split())))
    return found


def check_told(capsys: pytest.CaptureFixture[str], file: str, wrong: str) -> None:
    """Row 12 of `file`, the only bad one of 12, is told by each command; the training alone refuses it."""
    of_rows = "env=dataset env.path=FILE"
    commands = [f"train sft {of_rows} max_bad_share=0 --dry-run", f"data preview {of_rows}", "data report FILE"]
    (training, preview, report) = answers(capsys, file, commands)
    assert training[:2] == (3, "")
    assert training[2].startswith(f"error: {file}: 1 of 12 rows are bad (more than the 0% allowed): ")
    reason = wrong.removeprefix(",").strip()
    assert training[2].endswith(f" {file}, row 12: {reason}")
    assert preview[0] == report[0] == 0
    assert f"malformed: {file}, row 12: {reason} " in preview[1]
    assert report[1].endswith(f"bad rows 1 of 12 {file}, row 12: {reason}")


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_line_of_json_is_named(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    cells, field, wrong, names_field = HOSTILE[kind]
    rows = [{"messages": CHAT}] * 11 + [cells]
    written = ["{" + ", ".join(f'"{name}": {cell}' for name, cell in row.items()) + "}" for row in rows]
    Path("rows.jsonl").write_text("\n".join(written))
    check_told(capsys, "rows.jsonl", f", field {field!r}: {wrong}" if names_field else f" {wrong}")


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_json_in_a_cell_of_csv_is_named(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    cells, field, wrong, _ = HOSTILE[kind]
    with Path("rows.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, ["messages", "tools"])
        rows.writeheader()
        rows.writerows([*[{"messages": CHAT}] * 10, cells, {"messages": CHAT}])
    check_told(capsys, "rows.csv", f", field {field!r}: {cells[field][:40]!r} {wrong}")


def test_text_of_parquet_that_is_no_utf8_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    texts = pyarrow.array([*[b"fine"] * 11, b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), "rows.parquet")
    check_told(capsys, "rows.parquet", " has text in 'text' that is not UTF-8: write the file again with valid text")


@pytest.mark.parametrize("levels", [400, 900])
def test_a_deep_column_of_ones_own_is_named_before_a_reward_is_given_it(
    levels: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"prompt": f"Say {number}.", "more": []}) for number in range(11)]
    Path("rows.jsonl").write_text("\n".join([*rows, f'{{"prompt": "Say it.", "more": {deep(levels)}}}']))
    Path("r.py").write_text("def score(completions, more):\n    return [1.0 for _ in completions]\n")
    training = "train grpo env=dataset env.path=FILE env.reward=./r.py:score policy=scripted steps=1"
    for told in answers(capsys, "rows.jsonl", [f"{training} --dry-run", training]):
        assert told == (3, "", f"error: rows.jsonl, row 12, field 'more': {TOO_DEEP}")
    assert not Path("runs").exists()
