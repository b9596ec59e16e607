"""In which numbers a model computes: as the settings say, or what the machine is fast in."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from rlpost.errors import ConfigError
from rlpost.model.products import product_speeds
from rlpost.settings import Autocast, DType, ModelSettings, PolicySettings

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
