"""Every completion of a step in one Parquet file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from tensordict import TensorDict

from rlpost.data.batch import batch_from_conversations
from rlpost.data.conversation import Conversation
from rlpost.rollouts import write_rollouts

COLUMNS = [
    "step",
    "group",
    "sample",
    "prompt",
    "completion",
    "reward",
    "reward_parts",
    "accuracy_strict",
    "accuracy_lenient",
    "advantage",
    "valid",
    "finish_reason",
    "policy_version_min",
    "policy_version_max",
    "token_ids",
    "log_probs",
    "mask",
]


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
        accuracy_strict=0.0,
        accuracy_lenient=1.0,
        policy_versions=[4, 5],
    )
    failed = conversation(3, 2, prompt_ids=[5], response_ids=[9], reward=None, valid=False, finish_reason="length")
    batch = batch_from_conversations([good, failed])
    return batch.set("advantage", torch.tensor([0.5, 0.0]))


def test_the_columns_are_those_of_the_run_folder(tmp_path: Path, two: TensorDict) -> None:
    write_rollouts(tmp_path / "step.parquet", 12, two)
    assert pq.read_schema(tmp_path / "step.parquet").names == COLUMNS


def test_every_value_of_a_completion(tmp_path: Path, two: TensorDict) -> None:
    path = tmp_path / "rollouts" / "step-000012.parquet"
    write_rollouts(path, 12, two)
    good, failed = pq.read_table(path).to_pylist()
    assert good == {
        "step": 12,
        "group": 3,
        "sample": 1,
        "prompt": "<user>What is 34 + 57?",
        "completion": "naïve\n91",
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
    }
    missing = {"reward": None, "reward_parts": [], "accuracy_strict": None, "accuracy_lenient": None}
    assert {name: failed[name] for name in missing} == missing
    assert (failed["valid"], failed["finish_reason"], failed["mask"]) == (False, "length", [True])


def test_a_batch_without_advantages_has_null_ones(tmp_path: Path, batch: Callable[..., TensorDict]) -> None:
    write_rollouts(tmp_path / "a.parquet", 0, batch(version="3f2a"))
    table = pq.read_table(tmp_path / "a.parquet")
    assert table["advantage"].to_pylist() == [None, None]
    assert table["policy_version_min"].to_pylist() == ["3f2a", "3f2a"]


def test_a_file_that_cannot_be_written_leaves_none(tmp_path: Path, two: TensorDict) -> None:
    (tmp_path / "step.parquet").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_rollouts(tmp_path / "step.parquet", 1, two)
    assert [path.name for path in tmp_path.iterdir()] == ["step.parquet"]
