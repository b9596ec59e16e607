"""A long training with everything in it: what it holds of the machine stays what it was."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.train.run import Run
from rlpost.train.step import Step
from tests.train.test_alarms import LETTERS, rewarded
from tests.trainings import train_in

STEPS = int(os.environ.get("RLPOST_SOAK_STEPS", "300"))
SETTLED = 100  # steps after which nothing may grow any more


def held(folder: Path) -> dict[str, int]:
    """What the process holds now."""
    own = psutil.Process()
    return {
        "memory": own.memory_info().rss,
        "descriptors": own.num_fds(),
        "threads": threading.active_count(),
        "children": len(own.children(recursive=True)),
        "temporary": sum(len(files) for _, _, files in os.walk(folder)),
    }


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_long_run_takes_no_more_and_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    seen: dict[int, dict[str, int]] = {}
    end_step = Run._end_step

    def noting(self: Run[Any, Any], step: Step) -> None:
        end_step(self, step)
        if step.number % 20 == 0:
            seen[step.number] = held(temporary)

    monkeypatch.setattr(Run, "_end_step", noting)
    small = ["policy=transformers", "env.max_completion_tokens=8", "prompts_per_step=2", "env.held_out=0.5"]
    often = ["eval.enabled=true", "eval.every=25", "checkpoint.every=25", "gate.every=10"]
    words = rewarded(tmp_path, LETTERS, *small, *often, f"steps={STEPS}")
    assert train_in(TRAIN_GRPO, tmp_path / "run", words) == 0
    settled, last = seen[SETTLED], seen[max(seen)]
    for name in ("descriptors", "threads", "children", "temporary"):
        assert last[name] <= settled[name], (name, seen)
    assert last["memory"] < 1.1 * settled["memory"], {step: each["memory"] for step, each in seen.items()}
