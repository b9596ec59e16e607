"""Every completion of a step in one Parquet file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tensordict import TensorDict

from rlpost.data.batch import batch_from_conversations
from rlpost.data.conversation import Conversation
from rlpost.errors import DataError
from rlpost.runs.reader import read_run
from rlpost.runs.rollout_table import SCHEMA, write_rollouts
from rlpost.runs.rollouts import (
    Wanted,
    read_rollouts,
    search,
    spread_of,
)
from tests.run_folders import rows_worth


@pytest.fixture
def two(conversation: Callable[..., Conversation]) -> TensorDict:
    """A finished row with every value, and one whose reward failed."""
    good = conversation(
        3,
        1,
        prompt_ids=[5, 6],
        response_ids=[7, 4, 8],
        log_probs=[-0.5, 0.0, -0.25],
        mask=[1, 0, 1],
        text="naïve\n91",
        reward=0.75,
        reward_parts={"format": 0.25, "right": 0.5},
        part_weights={"format": 1.0, "right": 1.0},
        accuracy_strict=0.0,
        accuracy_lenient=1.0,
        policy_versions=[4, 5],
        version_changes=[(2, 5)],
        query="34 + 57?",
        messages=[
            {"role": "system", "content": "Add."},
            {"role": "user", "content": "34 + 57?"},
            {"role": "assistant", "content": "Wait."},
            {"role": "user", "content": "Go on."},
            {"role": "assistant", "content": "naïve\n91"},
        ],
    )
    failed = conversation(
        3, 2, prompt_ids=[5], query="34 + 57?", response_ids=[9], reward=None, valid=False, finish_reason="length"
    )
    return batch_from_conversations([good, failed])


def test_every_value_of_a_completion(tmp_path: Path, two: TensorDict) -> None:
    path = tmp_path / "rollouts" / "step-000012.parquet"
    rows = rows_worth(two, 0.5, 0.0)
    rows[0].trainer_log_probs = torch.tensor([-0.25, 0.0, -0.5])
    write_rollouts(path, 12, two, rows)
    good, failed = pq.read_table(path).to_pylist()
    assert good == {
        "step": 12,
        "group": 3,
        "sample": 1,
        "source": "",
        "prompt": "<user>34 + 57?",
        "completion": "naïve\n91",
        "turns": [
            {"role": "assistant", "content": "Wait."},
            {"role": "user", "content": "Go on."},
            {"role": "assistant", "content": "naïve\n91"},
        ],
        "reward": 0.75,
        "reward_parts": [("format", 0.25), ("right", 0.5)],
        "accuracy_strict": 0.0,
        "accuracy_lenient": 1.0,
        "advantage": 0.5,
        "valid": True,
        "finish_reason": "stop",
        "policy_version_min": "4",
        "policy_version_max": "5",
        "token_ids": [7, 4, 8],
        "log_probs": [-0.5, 0.0, -0.25],
        "mask": [True, False, True],
        "prompt_ids": [5, 6],
        "trainer_log_probs": [-0.25, 0.0, -0.5],
        "token_versions": [4, -1, 5],
        "prompt_messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "34 + 57?"}],
        "part_weights": [("format", 1.0), ("right", 1.0)],
        "restarts": [],
    }
    missing = ("trainer_log_probs", "reward", "accuracy_strict", "accuracy_lenient")
    assert [failed[name] for name in missing] == [None] * 4
    assert (failed["reward_parts"], failed["valid"], failed["finish_reason"]) == ([], False, "length")
    assert failed["mask"] == [True]


def test_a_batch_without_advantages_has_null_ones(tmp_path: Path, batch: Callable[..., TensorDict]) -> None:
    write_rollouts(tmp_path / "a.parquet", 0, batch(version="3f2a"))
    table = pq.read_table(tmp_path / "a.parquet")
    assert table["advantage"].to_pylist() == [None, None]
    assert table["policy_version_min"].to_pylist() == ["3f2a", "3f2a"]


@pytest.fixture
def run(tmp_path: Path, two: TensorDict) -> Path:
    """A run folder with the completions of steps 1, 2 and 4."""
    for step in (1, 2, 4):
        write_rollouts(tmp_path / "run" / "rollouts" / f"step-{step:06d}.parquet", step, two)
    return tmp_path / "run"


def test_what_was_written_is_read_back(run: Path) -> None:
    (run / "rollouts" / "step-000009.incomplete").write_text("")
    assert read_run(run).rollout_steps == [1, 2, 4]
    good, failed = read_rollouts(run, 4)
    assert (good["step"], good["completion"], good["reward"]) == (4, "naïve\n91", 0.75)
    assert good["reward_parts"] == {"format": 0.25, "right": 0.5}
    assert good["token_ids"] == [7, 4, 8]
    assert (failed["reward"], failed["reward_parts"]) == (None, {})


@pytest.mark.parametrize("content", [b"", b"PAR1 and nothing else", None], ids=["empty", "cut", "of something else"])
def test_a_damaged_file_is_named(run: Path, content: bytes | None) -> None:
    file = run / "rollouts" / "step-000002.parquet"
    if content is None:
        pq.write_table(pa.table({"step": [2]}), file)
    else:
        file.write_bytes(content)
    with pytest.raises(DataError, match=r"step-000002\.parquet"):
        read_rollouts(run, 2)


def test_a_file_without_a_row_is_read(run: Path) -> None:
    pq.write_table(SCHEMA.empty_table(), run / "rollouts" / "step-000002.parquet")
    assert read_rollouts(run, 2) == []


@pytest.mark.parametrize(
    ("wanted", "samples"),
    [
        (Wanted(), [1, 2]),
        (Wanted("GO ON"), [1]),  # an earlier turn, in any case
        (Wanted("<USER>34"), [1, 2]),
        (Wanted("5."), []),  # a dot is a dot
        (Wanted(rewards=(0.75, 0.75)), [1]),
        (Wanted(rewards=(float("-inf"), float("inf"))), [1]),  # a failed reward is in no range
        (Wanted(rewards=(0.8, 1.0)), []),
        (Wanted(finish_reason="length"), [2]),
        (Wanted(group=4), []),
        (Wanted("user", (0.0, 1.0), "stop"), [1]),
    ],
)
def test_a_search_looks_at_text_reward_and_end(run: Path, wanted: Wanted, samples: list[int]) -> None:
    rows, counts = search(run, [1], wanted, 10)
    assert [row["sample"] for row in rows] == samples
    assert counts == ({1: len(samples)} if samples else {})


def test_a_search_counts_more_than_it_returns(run: Path) -> None:
    rows, counts = search(run, [2, 1], Wanted("user"), 3)
    assert [(row["step"], row["sample"]) for row in rows] == [(2, 1), (2, 2), (1, 1)]
    assert counts == {2: 2, 1: 2}
    assert "token_ids" not in rows[0]


def test_completions_for_a_tracker_go_evenly_from_best_to_worst(
    tmp_path: Path, conversation: Callable[..., Conversation]
) -> None:
    rewards = [0.3, None, 0.9, 0.1, 0.5]
    made = [conversation(0, i, reward=reward, valid=reward is not None) for i, reward in enumerate(rewards)]
    write_rollouts(tmp_path / "rollouts" / "step-000004.parquet", 4, batch_from_conversations(made))
    chosen = {count: [row["sample"] for row in spread_of(tmp_path, 4, count)] for count in (1, 2, 3, 5, 9)}
    assert chosen == {1: [2], 2: [2, 1], 3: [2, 0, 1], 5: [2, 4, 0, 3, 1], 9: [2, 4, 0, 3, 1]}
    assert spread_of(tmp_path, 5, 2) == []


def test_reading_rollouts_needs_no_torch() -> None:
    program = "import sys, rlpost.runs.rollouts; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
