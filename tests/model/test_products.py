"""How fast products are: measured within a bound, and once for each machine and set of kernels."""

from __future__ import annotations

import json
import logging
import platform
import time
from pathlib import Path

import pytest
import torch

from rlpost.model import precision
from rlpost.model.precision import FEW_ROWS, MANY_ROWS, WIDE, WIDTH, measure, product_speeds
from rlpost.settings import DType

SPEEDS = {DType.float32: 164.0, DType.bfloat16: 1.2}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An empty cache, and one entry for each time that something is measured."""
    times: list[int] = []

    def noted() -> dict[DType, float]:
        times.append(torch.get_num_threads())
        return SPEEDS

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(precision, "measure", noted)
    return times


def kept(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "rlpost" / "products").iterdir())


def test_each_format_is_measured_without_touching_threads_or_random_numbers() -> None:
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    speeds = measure()
    assert set(speeds) == {DType.float32, DType.bfloat16}
    assert all(0.01 < speed < 1e5 for speed in speeds.values())
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("speed", "few", "many"),
    [
        (1.2, 2, 0),  # 64 rows take 94 ms: a third product would be past 200
        (20.0, 6, 3),  # 6 x 5.7 ms, and 45 ms for each of 512 rows
        (1000.0, 6, 6),
    ],
)
def test_slow_products_are_measured_on_fewer_of_them(
    monkeypatch: pytest.MonkeyPatch, speed: float, few: int, many: int
) -> None:
    clock = 0.0
    rows: list[int] = []

    def multiply(left: torch.Tensor, right: torch.Tensor) -> None:
        nonlocal clock
        rows.append(len(left))
        clock += 2e-9 * len(left) * WIDTH * WIDE / speed

    monkeypatch.setattr(time, "thread_time", lambda: clock)
    monkeypatch.setattr(torch, "mm", multiply)
    assert measure() == {DType.float32: pytest.approx(speed), DType.bfloat16: pytest.approx(speed)}
    assert rows == ([FEW_ROWS] * few + [MANY_ROWS] * many) * 2


def test_what_was_measured_is_read_while_its_conditions_hold(
    measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in precision.LIMITS:
        monkeypatch.delenv(name, raising=False)
    assert product_speeds() == SPEEDS
    assert product_speeds() == SPEEDS
    assert len(measured) == 1
    for number, (name, value) in enumerate([("ATEN_CPU_CAPABILITY", "avx2"), ("ONEDNN_MAX_CPU_ISA", "AVX2")], start=2):
        monkeypatch.setenv(name, value)
        product_speeds()
        product_speeds()
        assert len(measured) == number, name
    monkeypatch.setattr(platform, "processor", lambda: "another")
    product_speeds()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    product_speeds()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    product_speeds()
    assert len(measured) == 6
    files = [json.loads(file.read_text()) for file in kept(tmp_path)]
    assert len(files) == 6
    assert all(file["gflops"] == {"float32": 164.0, "bfloat16": 1.2} for file in files)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"gflops": {"float32": 1}}', '{"gflops": {"float32": 0, "bfloat16": 1}}']
)
def test_a_broken_cache_is_said_and_mended(
    measured: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    product_speeds()
    [file] = kept(tmp_path)
    file.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert product_speeds() == SPEEDS
    [said] = [record.getMessage() for record in caplog.records if record.name == "rlpost"]
    assert said.startswith(f"{file} cannot be read (")
    product_speeds()
    assert len(measured) == 2


def test_a_cache_that_cannot_be_written_is_said_and_the_products_are_measured(
    measured: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rlpost").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert product_speeds() == SPEEDS
    assert "cannot be written" in caplog.messages[-1]
    assert "the speed of products is measured each time" in caplog.messages[-1]
    assert len(measured) == 1
