"""Fine-tuning SmolLM2 on GSM8K's own solutions: the proof on a real model, minutes long."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import EVAL, TRAIN_SFT
from rlpost.config.compose import compose
from rlpost.train.assemble import evaluate_command
from tests.trainings import metrics, train_in

DATA = Path(os.environ.get("RLPOST_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "gsm8k"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not DATA.is_dir(), reason="the GSM8K files are not on this machine"),
]


def run(folder: Path, *words: str) -> list[dict[str, Any]]:
    assert train_in(TRAIN_SFT, folder, ["recipe=gsm8k-sft-smollm2-cpu", f"env.path={DATA}", *words]) == 0
    return metrics(folder)


def test_packed_or_not_the_first_step_has_the_same_loss(tmp_path: Path) -> None:
    words = ["model.autocast=none", "epochs=null", "steps=1", "minibatch_size=8", "env.limit=8", "eval.limit=8"]
    packed = run(tmp_path / "packed", *words)
    alone = run(tmp_path / "alone", *words, "packing=false")
    assert packed[0]["eval/loss"] == pytest.approx(alone[0]["eval/loss"], abs=1e-4)
    assert packed[1]["loss/sft"] == pytest.approx(alone[1]["loss/sft"], abs=1e-4)


def test_the_held_out_loss_falls_and_a_reply_ends_by_itself(tmp_path: Path) -> None:
    lines = run(tmp_path / "r")
    losses = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert losses[-1] < losses[0] - 0.05
    assert losses[-1] <= min(losses[:-1]) + 0.02  # it has not turned around

    words = [f"model={tmp_path}/r/", "env=gsm8k", f"env.path={DATA}", "env.limit=8", "policy=transformers"]
    played = evaluate_command(compose(EVAL, words).settings).played
    assert any(conversation.finish_reason == "stop" for conversation in played)
