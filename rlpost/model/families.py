"""Which of the fast ways are right for a model: tried once on a small copy of its architecture, and kept.

Whether a family is read rightly is not written down anywhere: `rlpost.model.family_probe` finds it out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rlpost.config.paths import cache_folder
from rlpost.files import remembered
from rlpost.imports import installed_version
from rlpost.model.packing import Microbatch

Reader = Callable[[nn.Module, Microbatch, float], tuple[torch.Tensor, torch.Tensor]]

REFUSED = "refused"
# whose versions decide, with the model's configuration, what is right
VERSIONS = ("torch", "transformers", "causal_conv1d", "mamba_ssm", "flash-linear-attention", "kernels")
OWN_FILES = ("packing.py", "families.py", "family_probe.py", "logprobs.py")


@dataclass(frozen=True)
class Verdict:
    """The fastest ways that are right for a model."""

    reading: str  # a name in `rlpost.model.logprobs.READERS`, or "refused"
    sampling: str  # a name in `rlpost.model.packing.DECODINGS`
    attention: str  # transformers' attention function for all but a packed row
    reason: str = ""  # why it is not read packed, or refused

    @property
    def reads_packed(self) -> bool:
        """Whether completions of one prompt share it."""
        return self.reading.startswith("packed")


def examine(model: nn.Module, readers: Mapping[str, Reader]) -> Verdict:
    """What is right for `model`: its architecture's verdict from the cache, else found out and kept there."""
    file = cache_folder() / "families" / f"{_fingerprint(model)}.json"

    def found_out() -> dict[str, Any]:
        from rlpost.model.family_probe import tried_on_a_small_copy

        return dataclasses.asdict(tried_on_a_small_copy(model, readers))

    return remembered(file, found_out, lambda kept: Verdict(**kept), "what is right for the model is found out")


def explain(model: nn.Module, verdict: Verdict, completions_a_prompt: int = 1) -> str | None:
    """A line on what is slower than it could be, and by how much at most; None where nothing is."""
    if verdict.reads_packed:
        return None
    cost = "one sequence a row"
    if completions_a_prompt > 1:
        cost += f", a prompt once for each of its completions: up to {completions_a_prompt} times slower"
    return f"{plain_model(model).config.model_type} as it is ({verdict.reason}): {cost}"


@contextlib.contextmanager
def attending(config: Any, attention: str) -> Iterator[None]:
    """Let the model of `config` attend with the function that transformers knows as `attention`, and no other code."""
    before = config._attn_implementation
    config._attn_implementation = attention
    try:
        yield
    finally:
        config._attn_implementation = before


def plain_model(model: nn.Module) -> PreTrainedModel:
    """The model of transformers inside what may be peft's wrapper around it."""
    inside = getattr(model, "get_base_model", None)
    return inside() if callable(inside) else model  # type: ignore[return-value]


def tried_on(model: PreTrainedModel) -> torch.device:
    """Where a small copy of `model` is tried: on its device, or where it will be once its weights have come."""
    if model.device.type != "meta":
        return model.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _fingerprint(model: nn.Module) -> str:
    """What a verdict depends on: the configuration, the device, and the versions and files that read it."""
    own = plain_model(model)
    config = {key: value for key, value in own.config.to_dict().items() if key not in ("_name_or_path", "dtype")}
    versions = {name: installed_version(name) for name in VERSIONS}
    known: list[Any] = [type(own).__name__, config, own.config._attn_implementation, tried_on(own).type, versions]
    digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=repr).encode())
    for name in OWN_FILES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:24]
