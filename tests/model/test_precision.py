"""The precision that a model computes in, and how fast products are measured to choose it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from rlpost.estimate.machine import Precision
from rlpost.model import precision
from rlpost.model.precision import (
    FEW_ROWS,
    MANY_ROWS,
    WIDE,
    WIDTH,
    bfloat16_is_fast,
    choose_precision,
    product_speeds,
)
from rlpost.settings import Autocast, AutoPolicySettings, DType, ModelSettings, TransformersSettings, VLLMSettings
from tests.says import Says

CPU = torch.device("cpu")
KEPT_BFLOAT16 = {"model.autocast": "bfloat16", "policy.dtype": "bfloat16", "why": "measured here: ..."}
BOTH = {"autocast": Autocast.bfloat16, "dtype": DType.float32}
Machine = Callable[[float], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Called with the speed of bfloat16 that the machine is to have measured; that of float32 is 160."""

    def measure(bfloat16: float) -> None:
        monkeypatch.setattr(precision, "product_speeds", lambda: {DType.float32: 160.0, DType.bfloat16: bfloat16})

    return measure


def chosen(*, kept: dict[str, str] | None = None, dtype: DType = DType.auto, **model: Any) -> Precision:
    return choose_precision(ModelSettings(path="", **model), VLLMSettings(dtype=dtype), CPU, kept=kept)


def line(found: Precision) -> str:
    return f"precision {found.used} ({found.why})"


@pytest.mark.parametrize(
    ("bfloat16", "dtype", "autocast"),
    [
        (410.0, DType.bfloat16, Autocast.bfloat16),
        (192.0, DType.bfloat16, Autocast.bfloat16),  # 1.2 times
        (191.9, DType.float32, Autocast.none),
        (1.2, DType.float32, Autocast.none),
    ],
)
def test_bfloat16_is_taken_where_it_is_clearly_faster(
    machine: Machine, says: Says, bfloat16: float, dtype: DType, autocast: Autocast
) -> None:
    machine(bfloat16)
    numbers = chosen()
    assert (numbers.autocast, numbers.sampler, numbers.warning) == (autocast, dtype, None)
    says("train", line(numbers))


@pytest.mark.parametrize("bfloat16", [410.0, 100.0], ids=["fast", "slow"])
@pytest.mark.parametrize(
    ("given", "autocast", "sampler", "why"),
    [
        ({"autocast": Autocast.none}, "none", "float32", "as model.autocast says"),
        ({"autocast": Autocast.bfloat16}, "bfloat16", "bfloat16", "as model.autocast says"),
        ({"dtype": DType.float32}, "none", "float32", "as policy.dtype says"),
        ({"dtype": DType.bfloat16}, "bfloat16", "bfloat16", "as policy.dtype says"),
        (BOTH, "bfloat16", "float32", "as model.autocast and policy.dtype say"),
    ],
)
def test_what_is_given_stands_and_the_other_follows_it(
    machine: Machine, bfloat16: float, given: dict[str, Any], autocast: str, sampler: str, why: str
) -> None:
    machine(bfloat16)
    numbers = chosen(**given)
    assert (numbers.autocast, numbers.sampler, numbers.why) == (Autocast(autocast), DType(sampler), why)
    assert numbers.warning is None


def test_a_float16_sampler_says_nothing_of_the_trainer(machine: Machine, says: Says) -> None:
    machine(410.0)
    says("train", line(chosen(dtype=DType.float16)))


@pytest.mark.parametrize(("weights", "autocast"), [(DType.bfloat16, Autocast.bfloat16), (DType.float16, Autocast.none)])
def test_products_are_in_the_format_that_the_weights_were_given(
    machine: Machine, weights: DType, autocast: Autocast
) -> None:
    machine(100.0)
    numbers = choose_precision(ModelSettings(path="", dtype=weights), TransformersSettings(), CPU)
    assert (numbers.autocast, numbers.sampler) == (autocast, weights)
    assert "model.dtype" in numbers.why


def test_one_warning_where_what_was_given_is_four_times_slower(machine: Machine, says: Says) -> None:
    machine(1.2)
    assert chosen(autocast=Autocast.none).warning is None
    says("train", chosen(autocast=Autocast.bfloat16).warning)
    says("train", chosen(autocast=Autocast.bfloat16, dtype=DType.bfloat16).warning)
    machine(40.0)  # exactly four times
    assert chosen(autocast=Autocast.bfloat16).warning is None
    machine(641.0)
    says("train", chosen(dtype=DType.float32).warning)


def test_a_sampler_that_is_not_used_is_no_reason_to_warn(machine: Machine) -> None:
    machine(1.2)
    model, policy = ModelSettings(path="", autocast=Autocast.none), VLLMSettings(dtype=DType.bfloat16)
    assert choose_precision(model, policy, CPU).warning is not None
    numbers = choose_precision(model, policy, CPU, samples=False)
    assert numbers.warning is None
    assert numbers.used == "float32 products"
    assert choose_precision(model, policy, CPU, trains=False).used == "bfloat16 sampling"


def test_a_run_that_goes_on_keeps_its_format_until_another_is_named(machine: Machine, says: Says) -> None:
    machine(100.0)
    numbers = chosen(kept=KEPT_BFLOAT16)
    says("train", line(numbers))
    assert numbers.warning is None  # slower, not four times
    assert chosen(kept=KEPT_BFLOAT16, autocast=Autocast.none).sampler is DType.float32
    machine(1.2)
    says("train", chosen(kept=KEPT_BFLOAT16).warning)
    says("train", chosen(kept=KEPT_BFLOAT16, dtype=DType.bfloat16).warning)


@pytest.mark.parametrize("has", [True, False])
def test_a_gpu_is_asked_whether_bfloat16_is_its_own(monkeypatch: pytest.MonkeyPatch, says: Says, has: bool) -> None:
    def supported(including_emulation: bool = True) -> bool:
        return has or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    device = torch.device("cuda")
    numbers, given = (
        choose_precision(ModelSettings(path="", autocast=autocast), AutoPolicySettings(), device)
        for autocast in (Autocast.auto, Autocast.bfloat16)
    )
    assert numbers.autocast is (Autocast.bfloat16 if has else Autocast.none)
    assert (given.warning is None) == has
    says("train", f"{line(numbers)}\n{given.warning}")


def test_bfloat16_is_not_relied_on_by_apples_gpus() -> None:
    assert not bfloat16_is_fast(torch.device("mps"))[0]


def test_measuring_leaves_threads_and_random_numbers_alone() -> None:
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    speeds = product_speeds.__wrapped__()
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

    monkeypatch.setattr(precision.time, "thread_time", lambda: clock)
    monkeypatch.setattr(torch, "mm", multiply)
    assert product_speeds.__wrapped__() == {DType.float32: pytest.approx(speed), DType.bfloat16: pytest.approx(speed)}
    assert rows == ([FEW_ROWS] * few + [MANY_ROWS] * many) * 2
