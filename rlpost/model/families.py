"""The fast ways of reading and sampling that are right for a model: tried once on a small copy of it, and cached.

There is no list of supported families: `rlpost.model.family_probe` finds out which ways give a model's own log-probs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rlpost.imports import installed_version
from rlpost.model.packing import Microbatch

LogProbs = tuple[torch.Tensor, torch.Tensor]  # of the trained tokens, (M,), and the entropies there, (M,)
Reader = Callable[[nn.Module, Microbatch, float], LogProbs]  # called with a model, a microbatch and the temperature

REFUSED = "refused"
# packages whose versions, with the model's config, decide which ways are right
VERSIONS = ("torch", "transformers", "causal_conv1d", "mamba_ssm", "flash-linear-attention", "kernels")
OWN_FILES = ("packing.py", "decoding.py", "families.py", "family_probe.py", "logprobs.py", "attention.py")


@dataclass(frozen=True)
class Verdict:
    """The fastest ways that are right for a model."""

    reading: str  # a name in `rlpost.model.logprobs.READERS`, or "refused"
    sampling: str  # a name in `rlpost.model.decoding.DECODINGS`
    attention: str  # transformers' attention function for all but a packed row
    reason: str = ""  # why it is not read packed, or refused

    @property
    def reads_packed(self) -> bool:
        """Whether completions of one prompt share it."""
        return self.reading.startswith("packed")


def explain(model: nn.Module, verdict: Verdict, completions_a_prompt: int = 1) -> str | None:
    """A line on what is slow for this model, and by how much; None if nothing is."""
    if verdict.reads_packed:
        return None
    cost = "one sequence a row"
    if completions_a_prompt > 1:
        cost += f", a prompt once for each of its completions: up to {completions_a_prompt} times slower"
    return f"{plain_model(model).config.model_type} as it is ({verdict.reason}): {cost}"


@contextlib.contextmanager
def attending(config: Any, attention: str) -> Iterator[None]:
    """A block in which the model of `config` uses transformers' attention function `attention`."""
    before = config._attn_implementation
    config._attn_implementation = attention
    try:
        yield
    finally:
        config._attn_implementation = before


def plain_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a peft wrapper, or `model` itself."""
    inside = getattr(model, "get_base_model", None)
    return inside() if callable(inside) else model  # type: ignore[return-value]


def tried_on(model: PreTrainedModel) -> torch.device:
    """The device to try a small copy of `model` on: its own, or the one its weights will be loaded to."""
    if model.device.type != "meta":
        return model.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def fingerprint(model: nn.Module) -> str:
    """A hash of everything a verdict depends on: configuration, device, versions and the code that reads models."""
    own = plain_model(model)
    config = {key: value for key, value in own.config.to_dict().items() if key not in ("_name_or_path", "dtype")}
    versions = {name: installed_version(name) for name in VERSIONS}
    known: list[Any] = [type(own).__name__, config, own.config._attn_implementation, tried_on(own).type, versions]
    digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=repr).encode())
    for name in OWN_FILES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:24]
