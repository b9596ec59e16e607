"""In which numbers a model computes: as the settings say, or what the machine is fast in.

How fast this CPU multiplies matrices in each format: measured once, then read from the cache.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlpost.config.paths import cache_folder
from rlpost.errors import ConfigError
from rlpost.files import remembered
from rlpost.settings import Autocast, DType, ModelSettings, PolicySettings

MEASURED = (DType.float32, DType.bfloat16)
FEW_ROWS, MANY_ROWS, WIDTH, WIDE = 64, 512, 576, 1536  # a layer of a small model, sampling and training
ROUNDS = 6  # products of each size, the best of which counts
SECONDS = 0.2  # for one format: slow products are measured on fewer
LIMITS = (  # variables that say which kernels torch takes, and on how many cores
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "KMP_AFFINITY",
    "GOMP_CPU_AFFINITY",
)

Speeds = dict[DType, float]  # GFLOP/s of matrix products


def product_speeds() -> Speeds:
    """GFLOP/s of this machine's products in float32 and bfloat16, on one core.

    Kept in the cache under what they depend on. A cache that cannot be read or written is no error:
    the log says so, and the products are measured.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(threads)  # measuring does so too: a run computes alike whether it measures or reads the cache
    asked = conditions(threads)
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    file = cache_folder() / "products" / f"{digest}.json"

    def measured() -> dict[str, Any]:
        return {**asked, "gflops": {dtype.value: round(speed, 3) for dtype, speed in measure().items()}}

    return remembered(file, measured, _speeds, "the speed of products is measured")


def measure() -> Speeds:
    """GFLOP/s in each format, the best of a few products: at most about half a second, however slow they are.

    One core and its own time, so that what else the machine does changes nothing.
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
        left = torch.ones(rows, WIDTH, dtype=dtype)  # nothing random: the run's random numbers stay as they are
        right = torch.ones(WIDTH, WIDE, dtype=dtype)
        began = time.thread_time()
        torch.mm(left, right)
        seconds = max(time.thread_time() - began, 1e-9)
        spent += seconds
        best = max(best, work / seconds)
    return best


def conditions(threads: int) -> dict[str, Any]:
    """What the speed of products depends on."""
    return {
        "cpu": _cpu(),
        "threads": threads,
        "torch": torch.__version__,
        "variables": {name: os.environ[name] for name in LIMITS if name in os.environ},
    }


def _cpu() -> list[str]:
    """Name and instruction sets of the CPU."""
    try:
        listed = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        listed = ""
    found = (re.search(rf"^{name}\s*:\s*(.*)$", listed, re.M) for name in ("model name", "flags", "Features"))
    return [platform.machine(), platform.processor(), *(line[1] for line in found if line)]


def _speeds(content: Any) -> Speeds:
    """What is kept of them. Raises ValueError or LookupError for anything else."""
    kept = content["gflops"]
    speeds = {dtype: float(kept[dtype.value]) for dtype in MEASURED}
    if not all(math.isfinite(speed) and speed > 0 for speed in speeds.values()):
        raise ValueError(f"these are no speeds: {kept}")
    return speeds


CLEARLY_FASTER = 1.2  # times float32's speed from which bfloat16 is worth its lost digits
MUCH_SLOWER = 4.0  # times below the fastest format: somebody is told
AUTOCAST, SAMPLER = "model.autocast", "policy.dtype"  # keys of settings, and of a run's record


@dataclass(frozen=True)
class Numbers:
    """The formats that one command computes in, and why.

    `autocast` and `sampler` are the values of model.autocast and policy.dtype with nothing left open.
    `used` says what is computed in them; `warning`, where a format that was named or kept is much
    slower here than another one.
    """

    autocast: Autocast
    sampler: DType
    used: str
    why: str
    warning: str | None = None

    @property
    def line(self) -> str:
        """What a command says of them at its beginning."""
        return f"numbers {self.used} ({self.why})"

    def record(self) -> dict[str, str]:
        """What a run keeps of them: `choose_numbers` takes it where the run goes on."""
        return {AUTOCAST: self.autocast.value, SAMPLER: self.sampler.value, "why": self.why}


def autocast(kind: Autocast, device: torch.device) -> AbstractContextManager[Any]:
    """torch's autocast to `kind` on `device`; with `none` the weights' own format stays.

    Raises ConfigError for `auto`, which is a question and no format.
    """
    if kind is Autocast.auto:
        raise ConfigError("model.autocast=auto has not been resolved: take what choose_numbers finds for this device")
    if kind is Autocast.none:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, kind.value))


def choose_numbers(
    model: ModelSettings,
    policy: PolicySettings,
    device: torch.device,
    *,
    kept: Mapping[str, str] | None = None,
    trains: bool = True,
    samples: bool = True,
) -> Numbers:
    """The formats of `model` and of what samples from it, where `auto` leaves them open.

    What is given stands, and the other of the two follows it. Where neither says anything, a run that
    goes on has what it `kept`, else `device` decides.
    """
    given = getattr(policy, "dtype", DType.auto)
    said = _said(model, given)
    chosen = _given_autocast(model, given)
    reasons = [f"as {' and '.join(said)} {'says' if len(said) == 1 else 'say'}"] if said else []
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
    warning = _warning(set(uses.values()), device, said, going_on=kept is not None)
    return Numbers(chosen, sampler, used, "; ".join(reasons), warning)


def bfloat16_is_fast(device: torch.device) -> tuple[bool, str]:
    """Whether products on `device` run clearly faster in bfloat16 than in float32, and how that is known.

    A CPU is measured. A GPU is asked whether bfloat16 is its own or emulated. On Apple's it is float32.
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


def _given_autocast(model: ModelSettings, sampler: DType) -> Autocast | None:
    """What the settings say of the trainer's products, if anything: of itself, by its weights or by the sampler."""
    if model.autocast is not Autocast.auto:
        return model.autocast
    follows = {DType.float32: Autocast.none, DType.bfloat16: Autocast.bfloat16}
    if model.dtype is not DType.float32:
        return follows.get(model.dtype, Autocast.none)
    return follows.get(sampler)


def _said(model: ModelSettings, sampler: DType) -> list[str]:
    """The keys that name a format."""
    keys = {AUTOCAST: model.autocast is not Autocast.auto, SAMPLER: sampler is not DType.auto}
    keys["model.dtype"] = model.dtype is not DType.float32
    return [key for key, named in keys.items() if named]


def _warning(used: set[DType], device: torch.device, said: list[str], *, going_on: bool) -> str | None:
    """What to say where `device` is much faster in another format than in one that was named, or kept."""
    if not said and not going_on:
        return None
    if device.type != "cpu":
        fast, reason = bfloat16_is_fast(device)
        return None if fast or DType.bfloat16 not in used else f"{reason}: {_advice(DType.float32, said, going_on)}"
    speeds = product_speeds()
    fastest = max(speeds, key=lambda dtype: speeds[dtype])
    slow = next((dtype for dtype in speeds if dtype in used and speeds[fastest] > MUCH_SLOWER * speeds[dtype]), None)
    if slow is None:
        return None
    return (
        f"{slow.value} products run at {_rate(speeds[slow])} GFLOP/s a core here, {fastest.value} ones at "
        f"{_rate(speeds[fastest])}: {_advice(fastest, said, going_on)}"
    )


def _advice(better: DType, said: list[str], going_on: bool) -> str:
    """How to compute in the format `better`: a run that goes on keeps its own unless another is named."""
    if not going_on:
        return f"leave {' and '.join(said)} out"
    autocast = Autocast.bfloat16 if better is DType.bfloat16 else Autocast.none
    words = [f"{key}={autocast.value if key == AUTOCAST else better.value}" for key in said or [AUTOCAST]]
    return f"the run began so; {' '.join(words)} changes it"


def _rate(speed: float) -> str:
    return f"{speed:.1f}" if speed < 10 else f"{speed:.0f}"
