"""The precision that a model computes in: as the settings say, or the fastest on this machine.

A CPU is measured: how fast it multiplies matrices in float32 and in bfloat16.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch

from rlpost.estimate.machine import Device, Precision, Room
from rlpost.model.device import pick_device
from rlpost.settings import Autocast, DType, ModelSettings, PolicySettings

AUTOCAST, SAMPLER = "model.autocast", "policy.dtype"  # keys of settings and of a run's record
CLEARLY_FASTER = 1.2  # bfloat16 is worth its lost digits from this many times the speed of float32
MUCH_SLOWER = 4.0  # warn about a precision this many times slower than the fastest

Speeds = dict[DType, float]  # GFLOP/s of matrix products


def this_device(name: str) -> Device:
    """The device called `name`, ready, with its memory if it is a GPU; see `pick_device`."""
    device = pick_device(name)
    room = Room(*torch.cuda.mem_get_info(device)) if device.type == "cuda" else None
    return Device(room, partial(choose_precision, device=device))


def choose_precision(
    model: ModelSettings,
    policy: PolicySettings,
    device: torch.device,
    *,
    kept: Mapping[str, str] | None = None,
    trains: bool = True,
    samples: bool = True,
) -> Precision:
    """Resolve `auto` in the dtypes of `model` and of the policy that samples from it.

    If one of the two is set, the other follows it. If neither is, a resumed run takes what it `kept`, and otherwise
    `device` decides.
    """
    given = getattr(policy, "dtype", DType.auto)
    named = _named_keys(model, given)
    chosen = _given_autocast(model, given)
    reasons = [f"as {' and '.join(named)} {'says' if len(named) == 1 else 'say'}"] if named else []
    if chosen is None and kept is not None:
        chosen = Autocast(kept[AUTOCAST])
        reasons.append("as the run began")
    if chosen is None:
        fast, reason = bfloat16_is_fast(device)
        chosen = Autocast.bfloat16 if fast else Autocast.none
        reasons.append(reason)
    products = DType.bfloat16 if chosen is Autocast.bfloat16 else model.dtype
    sampler = products if given is DType.auto else given
    uses = {"products": products} if trains else {}
    uses |= {"sampling": sampler} if samples else {}
    used = ", ".join(
        f"{dtype.value} {' and '.join(n for n in uses if uses[n] is dtype)}" for dtype in dict.fromkeys(uses.values())
    )
    warning = _warning(set(uses.values()), device, named, going_on=kept is not None)
    return Precision(chosen, sampler, used, "; ".join(reasons), warning)


def bfloat16_is_fast(device: torch.device) -> tuple[bool, str]:
    """Whether products on `device` run clearly faster in bfloat16 than in float32, and how that is known.

    Measures a CPU, and asks a GPU whether it has bfloat16 or emulates it. Other devices compute in float32.
    """
    if device.type == "cpu":
        speeds = product_speeds()
        fast = speeds[DType.bfloat16] >= CLEARLY_FASTER * speeds[DType.float32]
        first, second = (DType.bfloat16, DType.float32) if fast else (DType.float32, DType.bfloat16)
        rates = ", ".join(f"{dtype.value} {_rate(speeds[dtype])}" for dtype in (first, second))
        return fast, f"measured here: {rates} GFLOP/s a core"
    if device.type in ("cuda", "xpu"):
        backend = getattr(torch, device.type)
        with backend.device(device):
            fast = backend.is_bf16_supported(including_emulation=False)
        name = backend.get_device_name(device)
        return fast, f"{name} has bfloat16" if fast else f"{name} has no bfloat16 of its own"
    return False, f"on {device.type} bfloat16 is not relied on"


def autocast(kind: Autocast, device: torch.device) -> AbstractContextManager[Any]:
    """torch's autocast to `kind`, which is resolved, on `device`; `none` keeps the dtype of the weights."""
    if kind is Autocast.none:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, kind.value))


def _given_autocast(model: ModelSettings, sampler: DType) -> Autocast | None:
    """The trainer's autocast if the settings imply one: by itself, by the weights' dtype or by the sampler's."""
    if model.autocast is not Autocast.auto:
        return model.autocast
    follows = {DType.float32: Autocast.none, DType.bfloat16: Autocast.bfloat16}
    if model.dtype is not DType.float32:
        return follows.get(model.dtype, Autocast.none)
    return follows.get(sampler)


def _named_keys(model: ModelSettings, sampler: DType) -> list[str]:
    """The keys that name a dtype."""
    keys = {AUTOCAST: model.autocast is not Autocast.auto, SAMPLER: sampler is not DType.auto}
    keys["model.dtype"] = model.dtype is not DType.float32
    return [key for key, named in keys.items() if named]


def _warning(used: set[DType], device: torch.device, named: list[str], *, going_on: bool) -> str | None:
    """A warning if `device` is much faster in another dtype than in one that was named or kept."""
    if not named and not going_on:
        return None
    if device.type != "cpu":
        fast, reason = bfloat16_is_fast(device)
        return None if fast or DType.bfloat16 not in used else f"{reason}: {_advice(DType.float32, named, going_on)}"
    speeds = product_speeds()
    fastest = max(speeds, key=lambda dtype: speeds[dtype])
    slow = next((dtype for dtype in speeds if dtype in used and speeds[fastest] > MUCH_SLOWER * speeds[dtype]), None)
    if slow is None:
        return None
    return (
        f"{slow.value} products run at {_rate(speeds[slow])} GFLOP/s a core here, {fastest.value} ones at "
        f"{_rate(speeds[fastest])}: {_advice(fastest, named, going_on)}"
    )


def _advice(better: DType, named: list[str], going_on: bool) -> str:
    """How to compute in the dtype `better`: a resumed run keeps its own unless another is named."""
    if not going_on:
        return f"leave {' and '.join(named)} out"
    autocast = Autocast.bfloat16 if better is DType.bfloat16 else Autocast.none
    words = [f"{key}={autocast.value if key == AUTOCAST else better.value}" for key in named or [AUTOCAST]]
    return f"the run began so; {' '.join(words)} changes it"


def _rate(speed: float) -> str:
    return f"{speed:.1f}" if speed < 10 else f"{speed:.0f}"


# How fast this CPU multiplies matrices

MEASURED = (DType.float32, DType.bfloat16)
FEW_ROWS, MANY_ROWS, WIDTH, WIDE = 64, 512, 576, 1536  # a layer of a small model, sampling and training
ROUNDS = 6  # products of each size; the fastest counts
SECONDS = 0.2  # for one dtype: slow products get fewer rounds


@cache
def product_speeds() -> Speeds:
    """GFLOP/s of this machine's products in float32 and bfloat16, the best of a few; takes half a second at most.

    Uses one core and counts its own time, so that other work on the machine changes nothing.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {dtype: _speed(getattr(torch, dtype.value)) for dtype in MEASURED}
    finally:
        torch.set_num_threads(threads)


def _speed(dtype: torch.dtype) -> float:
    best = spent = 0.0
    for rows in [FEW_ROWS] * ROUNDS + [MANY_ROWS] * ROUNDS:
        work = 2e-9 * rows * WIDTH * WIDE
        if best and spent + work / best > SECONDS:
            break
        left = torch.ones(rows, WIDTH, dtype=dtype)  # not random: the run's random state stays as it is
        right = torch.ones(WIDTH, WIDE, dtype=dtype)
        began = time.thread_time()
        torch.mm(left, right)
        seconds = max(time.thread_time() - began, 1e-9)
        spent += seconds
        best = max(best, work / seconds)
    return best
