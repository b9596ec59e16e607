"""Pairs from a run's own completions: the pairs, the completions left out, and the ids, trained unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlpost.data.batch import batch_from_conversations
from rlpost.data.conversation import Conversation
from rlpost.data.encoding import PairEncoder
from rlpost.data.formats import RowReader, Wanted
from rlpost.evaluation.saved import sample_rows, write_rows
from rlpost.runs.rollout_table import write_rollouts
from rlpost.settings import DatasetSettings
from tests.command_line import CommandLine
from tests.run_folders import make_run
from tests.says import Says

# group, sample, reply, reward, right, why it ended
SAMPLES = [
    (0, 0, "91", 1.0, 1.0, "stop"),
    (0, 1, "90", 0.1, 0.0, "stop"),
    (0, 2, "91", 1.0, 1.0, "stop"),  # as sample 0
    (0, 3, "91.", 0.9, 1.0, "stop"),
    (0, 4, "92", 0.0, 0.0, "stop"),
    (0, 5, "9", 0.0, 0.0, "length"),
    (1, 0, "12", 1.0, 1.0, "stop"),
    (1, 1, "12.", 0.8, 1.0, "stop"),
    (2, 0, "8", None, None, "stop"),
    (2, 1, "7", 0.0, 0.0, "stop"),
]


@pytest.fixture
def made(conversation: Callable[..., Conversation], tiny_tokenizer: Any) -> list[Conversation]:
    """The completions of `SAMPLES`, as the tiny model's tokenizer has them."""
    conversations = []
    for group, sample, text, reward, right, reason in SAMPLES:
        query = f"What is {group}?"
        messages = [{"role": "user", "content": query}]
        rendered = tiny_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt_ids = tiny_tokenizer(rendered, add_special_tokens=False)["input_ids"]
        ids = {"prompt_ids": prompt_ids, "response_ids": [*tiny_tokenizer.encode(text), tiny_tokenizer.eos_token_id]}
        outcome = {"reward": reward, "valid": reward is not None, "accuracy_lenient": right, "finish_reason": reason}
        asked = {"query": query, "prompt_text": rendered, "task": {"number": group}}
        conversations.append(conversation(group, sample, text=text, **asked, **ids, **outcome))
    return conversations


@pytest.fixture
def folder(tmp_path: Path, made: list[Conversation], monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/a with these completions in steps 1 and 2, and as its held-out ones."""
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs" / "a")
    for step in (1, 2):
        write_rollouts(run / "rollouts" / f"step-{step:06d}.parquet", step, batch_from_conversations(made))
    write_rows(run / "held-out" / "step-000002.parquet", sample_rows(made))
    return run


@pytest.fixture
def rlpost(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


def written(file: str = "pairs.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def texts(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(row["chosen"][-1]["content"], row["rejected"][-1]["content"]) for row in rows]


def test_right_and_wrong_are_paired_and_the_rest_is_counted(folder: Path, rlpost: CommandLine) -> None:
    counted = rlpost.json("data pairs a -o pairs.jsonl --step 2")
    assert counted == {
        "file": "pairs.jsonl",
        "pairs": 2,
        "prompts_with_pairs": 1,
        "prompts": 3,
        "completions": 10,
        "completions_left_out": {"repeated": 1, "truncated": 1, "reward failed": 1},
        "prompts_without_pairs": {"all right": 1, "all wrong": 1},
    }
    assert texts(written()) == [("91", "92"), ("91.", "90")]
    assert written()[0]["prompt"] == [{"role": "user", "content": "What is 0?"}]
    assert [written()[0][name] for name in ("score_chosen", "score_rejected", "step", "group")] == [1.0, 0.0, 2, 0]


def test_the_best_and_the_worst_are_paired_by_a_margin(folder: Path, rlpost: CommandLine, says: Says) -> None:
    words = "data pairs runs/a/rollouts/step-000001.parquet --margin 0.15 -o"
    says("data", rlpost(f"{words} pairs.jsonl"))
    assert texts(written()) == [("91", "92"), ("91.", "90"), ("12", "12.")]
    says("data", rlpost(f"{words} one.jsonl --per-prompt 1"))
    assert texts(written("one.jsonl")) == [("91", "92"), ("12", "12.")]
    rlpost(f"{words} none.jsonl --margin 5", 3)
    says("data", rlpost.err)
    assert not Path("none.jsonl").exists()


def test_partial_rewards_say_how_far_apart_they_are(
    folder: Path, made: list[Conversation], rlpost: CommandLine, says: Says
) -> None:
    """Nothing is quite right, so nothing is paired; the rewards of prompt 0 are 1, 0.9, 0.1, 0, of prompt 1 1, 0.8."""
    for each in made:
        each.accuracy_lenient = None if each.reward is None else 0.5
    write_rows(folder / "held-out" / "step-000002.parquet", sample_rows(made))
    line = "data pairs runs/a/held-out/step-000002.parquet -o pairs.jsonl"
    rlpost(line, 3)
    assert " 1: a smaller --margin " in rlpost.err
    says("data", rlpost.err)
    rlpost(f"{line} --margin 0.8")
    assert len(written()) == 2


def test_a_prompt_has_at_most_so_many_pairs_over_all_steps(folder: Path, rlpost: CommandLine) -> None:
    shown = rlpost("data pairs a -o pairs.jsonl --per-prompt 2")
    assert "1 enough" in shown
    assert [row["step"] for row in written()] == [1, 1]


@pytest.mark.parametrize("source", ["a", "runs/a/held-out/step-000002.parquet", "old"])
def test_the_sampled_ids_are_trained_unchanged(
    folder: Path, made: list[Conversation], tiny_tokenizer: Any, source: str, rlpost: CommandLine
) -> None:
    if source == "old":  # before the messages of prompts were recorded
        table = pq.read_table(folder / "rollouts/step-000001.parquet").drop_columns(["prompt_messages"])
        pq.write_table(pa.table(table), "old.parquet")
        source = "old.parquet"
    rlpost(f"data pairs {source} -o pairs.jsonl")
    rows = RowReader(DatasetSettings(path="x", reward=[]), Wanted.pair)
    encoder = PairEncoder(tiny_tokenizer, 200)
    sampled = {(*c.prompt_ids, *c.response_ids) for c in made}
    for row in written():
        assert ("prompt" in row) == (source != "old.parquet")
        pair = encoder.encode(rows.read("", row))
        assert pair.fault is None
        assert {tuple(each.ids) for each in pair.samples} <= sampled
        assert [sum(each.mask) for each in pair.samples] == [len(row["chosen_ids"]), len(row["rejected_ids"])]
