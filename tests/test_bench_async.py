"""scripts/dev/bench_async.py: that it runs, and what it asserts. The times themselves are no test."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import cloudpickle

from rlpost.objectives.advantage import has_spread

SCRIPT = Path(__file__).parents[1] / "scripts" / "dev" / "bench_async.py"


def test_a_lag_is_measured_with_a_player_in_its_own_process() -> None:
    spec = importlib.util.spec_from_file_location("bench_async", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    bench: Any = importlib.util.module_from_spec(spec)
    sys.modules["bench_async"] = bench
    spec.loader.exec_module(bench)
    cloudpickle.register_pickle_by_value(bench)  # the player's process does not know the script
    told = bench.steps_of(1, per_step=2, group=2, count=3, accept=has_spread)
    assert told.startswith("lag 1, 2 x 2, with dynamic sampling: 0.")
    assert "0 dropped by age" in told
