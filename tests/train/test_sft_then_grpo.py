"""From random weights to sums: fine-tuning begins what reinforcement finishes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Nothing is held out: the task is to know all hundred sums, and the figures are those of trained problems.
ALL_PAIRS = [
    *["model.autocast=none", "policy=transformers", "env=arithmetic", "env.digits=1", "env.held_out=0"],
    *["env.prompt_template={question}=", "env.max_completion_tokens=4", "env.eval_limit=100", "checkpoint.every=0"],
]
SFT = [
    *["model=tiny", "minibatch_size=25", "optim.lr=1.5e-3", "steps=400", "eval.accuracy=true"],
    *["eval.every=1", "eval.stop_at_accuracy=0.6"],  # a step can add ten points: less often, it would stop too late
]
GRPO = [
    "prompts_per_step=100",  # every sum in every step: what is learned of one is not undone by the others
    *["group_size=8", "minibatch_size=400", "sampling.temperature=0.7", "optim.lr=1e-3", "optim.schedule=linear"],
    "optim.warmup_steps=40",  # the first steps of a fresh optimizer undo what was tuned, if they are whole ones
    "steps=120",
]


def train(verb: str, folder: Path, seed: int, *words: str) -> dict[str, Any]:
    """`rlpost train VERB` in a process of its own; what `--json` says of the run."""
    command = [sys.executable, "-m", "rlpost", "train", verb, *ALL_PAIRS, *words, f"seed={seed}"]
    done = subprocess.run([*command, "--out", str(folder), "--json"], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sft_then_grpo_knows_nine_in_ten_of_its_sums(tmp_path: Path, seed: int) -> None:
    """All 100 one-digit sums are trained on and measured; no problem is held out."""
    tuned = train("sft", tmp_path / "sft", seed, *SFT)
    assert tuned["evaluation_before"]["eval/accuracy_lenient"] <= 0.05
    assert 0.4 <= tuned["evaluation_after"]["eval/accuracy_lenient"] <= 0.8  # of the 50 sums that do not decide
    finished = train("grpo", tmp_path / "grpo", seed, f"model={tmp_path}/sft/", *GRPO)
    after = finished["evaluation_after"]
    assert after["eval/prompts"] == 100
    assert after["eval/accuracy_lenient"] >= 0.9
    assert tuned["seconds"] + finished["seconds"] < 180
