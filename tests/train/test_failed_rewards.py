"""Rewards that fail in a training: the group stays complete, its baseline leaves them out, the log names them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.errors import RewardError
from tests.says import Says
from tests.trainings import metrics, printed, train_in

REWARD = """
import os, time

def score(completions, **columns):
    if "hang" in completions:
        time.sleep(60)
    if "leave" in completions:
        os._exit(1)
    return [float(len(text)) for text in completions]
"""
WORDS = [
    *["env=dataset", "env.held_out=0", "env.reward_timeout_seconds=3", "model=tiny", "model.autocast=none"],
    *["policy=scripted", "prompts_per_step=2", "group_size=4", "steps=1", "eval.enabled=false", "checkpoint.every=0"],
]


def run(folder: Path, *words: str) -> int:
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"row {n}"}) + "\n" for n in range(4)))
    (folder / "fails.py").write_text(REWARD)
    own = [f"env.path={folder}/rows.jsonl", f"env.reward={folder}/fails.py:score"]
    return train_in(TRAIN_GRPO, folder / "run", [*WORDS, *own, *words])


def rows(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "run" / "rollouts" / "step-000001.parquet").to_pylist()


def test_failed_rewards_are_left_out_of_the_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of rewards 1, hang, 3, 5 and 2, 4, leave, 6: means 3 and 4 of the three that count."""
    monkeypatch.setattr("rlpost.rewards.workers.STACK_SECONDS", 3.0)
    replies = ["a", "hang", "aaa", "aaaaa", "aa", "aaaa", "leave", "aaaaaa"]
    assert run(tmp_path, f"policy.replies=[{','.join(replies)}]", "advantage.estimator=dr_grpo") == 0
    told = rows(tmp_path)
    assert [row["completion"] for row in told] == replies
    assert [row["reward"] for row in told] == [1.0, None, 3.0, 5.0, 2.0, 4.0, None, 6.0]
    assert [row["advantage"] for row in told] == [-2.0, 0.0, 0.0, 2.0, -2.0, 0.0, 0.0, 2.0]
    [step] = metrics(tmp_path / "run")
    assert (step["reward/failed"], step["reward/mean"]) == (2.0, 3.5)  # 21 / 6: a failed one is no 0
    assert step["reward/std"] == pytest.approx(math.sqrt(17.5 / 5))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "2 of 8" in log
    assert "line 6" in log


def test_minibatch_of_failed_rewards_changes_no_weight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    """The second group of four fails; with a term that needs no reward it would be trained on otherwise."""
    words = ["policy.replies=[a,aa,aaa,aaaa,leave,leave,leave,leave]", "minibatch_size=4", "loss.entropy_coef=0.1"]
    assert run(tmp_path, *words) == 0
    [step] = metrics(tmp_path / "run")
    assert step["tokens/trained"] == sum(len(row["token_ids"]) for row in rows(tmp_path)[:4])
    says("train", printed(capsys, "minibatch failed"))


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["policy.replies=[leave,leave,a,aa]", "max_failed_share=0.25"], "4 of 8"),
        (["policy.replies=[leave]"], "any of 8"),
    ],
    ids=["most", "all"],
)
def test_too_many_failed_rewards_stop_the_run(words: list[str], count: str, tmp_path: Path, says: Says) -> None:
    with says.refused("train", RewardError, count):
        run(tmp_path, *words)
