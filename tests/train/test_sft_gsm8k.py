"""Fine-tuning SmolLM2 on GSM8K's own solutions: the proof on a real model, minutes long."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import EVAL, TRAIN_SFT
from rlpost.config.compose import compose
from rlpost.envs.build import build_env
from rlpost.evaluation.play import play
from rlpost.model.locate import locate_model
from rlpost.model.tokenizer import load_tokenizer
from rlpost.policies.build import build_policy
from rlpost.settings import SamplingSettings
from rlpost.settings.commands import RunRequest

DATA = Path(os.environ.get("RLPOST_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "gsm8k"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not DATA.is_dir(), reason="the GSM8K files are not on this machine"),
]


def run(folder: Path, *words: str) -> list[dict[str, Any]]:
    composed = compose(TRAIN_SFT, ["recipe=gsm8k-sft-smollm2-cpu", f"env.path={DATA}", *words])
    request = RunRequest(folder, None, composed.overrides, ["rlpost", "train", "sft"], composed.yaml)
    assert TRAIN_SFT.train(composed.settings, request) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


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

    settings = compose(EVAL, [f"model={tmp_path}/r/", "env=gsm8k", f"env.path={DATA}", "policy=transformers"]).settings
    greedy = SamplingSettings(temperature=0.0)
    folder = locate_model(settings.model.path)
    policy = build_policy(
        settings.policy,
        folder,
        load_tokenizer(folder),
        model=None,
        model_settings=settings.model,
        env_settings=settings.env,
        sampling=greedy,
        seed=0,
    )
    env = build_env(settings.env, num_prompts=1, group_size=1, seed=0)
    policy.start()
    played = play(env, policy, num_prompts=8, samples=1, sampling=greedy)
    assert any(conversation.finish_reason == "stop" for conversation in played)
