"""In which numbers a model computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from rlpost.settings import Autocast


def autocast(kind: Autocast, device: torch.device) -> AbstractContextManager[Any]:
    """torch's autocast to `kind` on `device`; with `none` the weights' own format stays."""
    if kind is Autocast.none:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, kind.value))
