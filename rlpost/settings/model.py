"""What is trained, and in which numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from rlpost.errors import ConfigError
from rlpost.settings.chat_template import template_variables
from rlpost.settings.checks import MISSING

DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d+)?")


class DType(Enum):
    """Floating-point format of weights; `auto` is that of the trainer's products."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Autocast(Enum):
    """Format in which the trainer's matrix products run.

    `none` keeps that of the weights; `auto` is bfloat16 where that is clearly faster on the device, else none.
    """

    auto = "auto"
    none = "none"
    bfloat16 = "bfloat16"


@dataclass
class ModelSettings:
    """A model and how the trainer holds it.

    `path` is a hub id (`Qwen/Qwen2.5-0.5B-Instruct`), a local HF folder, a run folder or checkpoint
    of rlpost, a .gguf file, or one of the two names `builtin:tiny` (random weights, built on the spot)
    and `packaged:smollm2` (SmolLM2-135M-Instruct from the packaged weights, else from the hub).
    """

    path: str = MISSING  # hub id, HF folder, run or checkpoint, .gguf file
    revision: str | None = None  # branch, tag or commit of a hub id
    dtype: DType = DType.float32  # the trainer's weights and the optimizer's state; it cannot be auto
    autocast: Autocast = Autocast.auto  # format of the trainer's matrix products; auto: what is fast here
    activation_checkpointing: bool = False  # compute each layer's activations again backward: slower, less memory
    device: str = "auto"  # auto: cuda where there is one, else cpu
    chat_template: str | None = None  # plain, chatml, qwen, llama3, ... or FILE.jinja; None: the model's own
    chat_template_kwargs: str | None = None  # what the template is told, as {enable_thinking: false}

    def __post_init__(self) -> None:
        if self.dtype is DType.auto:
            raise ConfigError(
                "model.dtype=auto: the trainer's weights have one format, float32 unless you say bfloat16 or float16; "
                "what is measured is model.autocast=auto"
            )
        if not DEVICE.fullmatch(self.device):
            hint = "; did you mean cuda?" if self.device.lower() in ("gpu", "nvidia", "cuda") else ""
            raise ConfigError(f"model.device={self.device} is unknown: it is auto, cpu, cuda, cuda:N, mps or xpu{hint}")
        template_variables("model.chat_template_kwargs", self.chat_template_kwargs)
