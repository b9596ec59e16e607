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


def test_the_table_of_lengths_is_the_estimates(scale: Any) -> None:
    page = SCRIPT.parents[1] / "docs" / "scale.md"
    assert "\n".join(scale.length_rows()) in page.read_text()


def test_the_table_of_gpus_is_the_estimates(scale: Any) -> None:
    page = SCRIPT.parents[1] / "docs" / "gpu.md"
    assert "\n".join(scale.gpu_rows()) in page.read_text()
