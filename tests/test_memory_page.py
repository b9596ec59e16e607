"""docs/memory.md: the figures that follow from the settings are those that `rlpost.estimate` computes now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.estimate.needs import (
    FEWEST_ON_CPU,
    LOGITS_TOGETHER,
    PROGRAM,
    VLLM_PROGRAM,
    Work,
    parts_of,
    work_of,
)
from rlpost.estimate.shape import HUB_MODELS, Shape, shape_of_config

PAGE = (Path(__file__).parents[1] / "docs" / "memory.md").read_text()
FORMATS = {"bfloat16": "bfloat16", "float32": "none"}  # a column of the page -> model.autocast

# a row of the page -> the part of the estimate
COMPUTED = {
    "the trainer's weights, float32": "weights",
    "vLLM's weights, and its packed copy of the output head": "sampler",
    "AdamW's two running means, float32": "moments",
    "gradients, float32": "gradients",
    "bfloat16 copies of the weights for autocast": "cast weights",
    "used part of the KV cache": "its KV cache",
}
MEASURED = {
    "libraries: files of torch, vLLM and others": "vLLM's program",
    "Python and its imports": "program",
    f"activations of {FEWEST_ON_CPU} tokens, logits of {LOGITS_TOGETHER}": "activations",
}


def smollm2() -> Shape:
    shape = shape_of_config(HUB_MODELS["HuggingFaceTB/SmolLM2-135M-Instruct"].config)
    assert shape is not None
    return shape


def work(column: str) -> Work:
    """`rlpost train grpo` as it is, with vLLM on a CPU."""
    settings = compose(TRAIN_GRPO, ["policy=vllm", f"model.autocast={FORMATS[column]}"]).settings
    return work_of(settings, smollm2(), gpu_bytes=None)


def estimated(column: str) -> dict[str, int]:
    """Bytes of each part; what the page has in two rows is in two parts here too."""
    asked = work(column)
    found = {part.name: part.bytes for part in parts_of(asked)}
    assert found["program"] == PROGRAM + VLLM_PROGRAM
    return {"cast weights": 0, **found, "program": PROGRAM, "vLLM's program": VLLM_PROGRAM}


def table() -> dict[str, tuple[str, dict[str, str]]]:
    """What a run consists of: a row's name -> when it is there, and its figure by column."""
    [head] = re.findall(r"^\| part \| when \| (\w+) \| (\w+) \|\n\|---", PAGE, re.MULTILINE)
    rows = re.findall(r"^\| ([^|`]+) \| ([^|`]+) \| ([^|`]+) \| ([^|`]+) \|$", PAGE, re.MULTILINE)
    return {
        name: (when, dict(zip(head, figures, strict=True)))
        for name, when, *figures in rows
        if (name, when) != ("part", "when")
    }


def test_every_row_of_the_table_is_computed_or_marked_as_measured() -> None:
    rows = table()
    assert set(rows) == {*COMPUTED, *MEASURED}
    for name, (_, figures) in rows.items():
        assert list(figures) == list(FORMATS)
        assert all(figure.startswith("~") == (name in MEASURED) for figure in figures.values()), name


@pytest.mark.parametrize("column", FORMATS)
def test_the_computed_rows_are_what_is_estimated_now(column: str) -> None:
    rows, parts = table(), estimated(column)
    for name, part in COMPUTED.items():
        size = parts[part] / 1e9
        assert rows[name][1][column].removeprefix("up to ") == (f"{size:.2f}" if size else "0"), name
