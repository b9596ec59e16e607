"""kill -9, of a training and of a save."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

from rlpost.catalog import TRAIN_GRPO
from rlpost.runs.reader import newest_checkpoint, unfinished_saves
from tests.asynchronous import started, wait_for
from tests.trainings import ends_alike, metrics, train_in

WORDS = [
    *["model=tiny", "policy=transformers", "deterministic=true", "env.digits=1", "env.max_completion_tokens=8"],
    *["prompts_per_step=2", "group_size=4", "optim.lr=1e-3", "optim.schedule=constant", "steps=12"],
    *["checkpoint.every=2", "eval.limit=4"],
]


def steps_of(run: Path) -> int:
    return len(metrics(run)) if (run / "metrics.jsonl").is_file() else 0


def test_killed_training_resumes_as_the_unbroken_one(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train_in(TRAIN_GRPO, whole, WORDS) == 0
    with started(broken, [*WORDS, "steps=100000"]) as running:
        wait_for(lambda: steps_of(broken) >= 6)
        running.kill()
        assert running.wait() == -signal.SIGKILL
    assert train_in(TRAIN_GRPO, broken, WORDS, resume="auto") == 0
    assert ends_alike(broken, whole)
    for file in sorted((whole / "rollouts").iterdir()):
        assert pq.read_table(file).equals(pq.read_table(broken / "rollouts" / file.name)), file.name


def test_killed_save_leaves_the_one_before(tmp_path: Path) -> None:
    program = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[1] / "runs")!r})
from pathlib import Path
from test_checkpoint import save, write_model

def endless(folder):
    write_model(folder)
    print("writing", flush=True)
    time.sleep(600)

save(Path({str(tmp_path)!r}) / "checkpoints", 1)
save(Path({str(tmp_path)!r}) / "checkpoints", 2, write_model=endless)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as saving:
        assert saving.stdout is not None
        assert saving.stdout.readline() == b"writing\n"
        saving.kill()
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoints/step-000001"
    assert [path.name for path in unfinished_saves(tmp_path / "checkpoints")] == [".step-000002.incomplete"]
