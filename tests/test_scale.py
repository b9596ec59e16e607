"""The formulas of scripts/scale.py, with figures worked out by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "scale.py"


@pytest.fixture(scope="module")
def scale() -> Any:
    spec = importlib.util.spec_from_file_location("scale", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scale"] = module  # where its dataclass looks for its annotations
    spec.loader.exec_module(module)
    return module


def test_sampling_takes_whole_waves_of_conversations(scale: Any) -> None:
    figures = scale.Figures(20, 3, 15, turns=2, tickets=10, samples=8, at_once=16, overhead=0.5)
    # 80 conversations, 16 at a time: 5 waves of 30 s, and 10 x 0.5 s; two workers 3 waves
    assert scale.sampling_seconds(figures, 1) == 155
    assert scale.sampling_seconds(figures, 2) == 95
    figures.straggler = 1.5
    assert scale.sampling_seconds(figures, 2) == 140


def test_a_step_is_as_slow_as_its_parts_together_or_as_the_slower_of_them(scale: Any) -> None:
    figures = scale.Figures(20, 3, 15, tickets=8, samples=8, at_once=64, overhead=0.0)
    assert scale.step_seconds(figures, 1, beside=False) == (38, "the trainer")  # 15 + 20 + 3
    assert scale.step_seconds(figures, 1, beside=True) == (23, "the trainer")
    figures.turn_seconds = 40
    assert scale.step_seconds(figures, 1, beside=True) == (40, "sampling")
    figures.turn_seconds, figures.push_seconds = 15, 30
    assert scale.step_seconds(figures, 1, beside=True) == (50, "the push")


def test_the_table_of_lengths_is_the_estimates(scale: Any) -> None:
    page = SCRIPT.parents[1] / "docs" / "scale.md"
    assert "\n".join(scale.length_rows()) in page.read_text()


def test_the_table_of_gpus_is_the_estimates(scale: Any) -> None:
    page = SCRIPT.parents[1] / "docs" / "gpu.md"
    assert "\n".join(scale.gpu_rows()) in page.read_text()
