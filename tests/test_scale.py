"""The formulas of scripts/scale.py, with figures worked out by hand."""

from __future__ import annotations

from pathlib import Path

import scale

DOCS = Path(__file__).parents[1] / "docs"


def test_the_table_of_lengths_is_the_estimates() -> None:
    assert "\n".join(scale.length_rows()) in (DOCS / "scale.md").read_text()


def test_the_table_of_gpus_is_the_estimates() -> None:
    assert "\n".join(scale.gpu_rows()) in (DOCS / "gpu.md").read_text()
