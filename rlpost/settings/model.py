"""The model that is trained, the variables of its chat template, and its LoRA adapter."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from rlpost.errors import ConfigError
from rlpost.settings.base import MISSING, Settings, limited
from rlpost.text import shortened

_LARGEST_PUSHED_RANK = 512  # of an adapter that vLLM applies beside a model
_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d+)?")
# names that a template always gets, that rendering takes itself, or that jinja reserves
_TAKEN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
    | {"conversation", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "bos_token", "eos_token"}
    | {"true", "false", "none", "null", "True", "False", "None", "not", "and", "or", "in", "is", "if", "else", "loop"}
)
_MOST_SHOWN = 60  # columns of a user's text in a message
_MOST_LEVELS = 100  # of nested lists and mappings: JSON readers and writers recurse once for each
_NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)
_QUOTED_OR_WORD = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'|(?<![\w.])[A-Za-z_][\w.-]*""")  # not the e of 1e3
_JSON_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


class DType(Enum):
    """Floating-point format of weights; `auto` is the precision of the trainer's matrix products."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Autocast(Enum):
    """Precision of the trainer's matrix products.

    `none` is the dtype of the weights; `auto` is bfloat16 where that is clearly faster on the device, else `none`.
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
    dtype: DType = DType.float32  # float32, bfloat16 or float16: weights and optimizer state
    autocast: Autocast = Autocast.auto  # precision of matrix products in training; auto: the fastest here
    activation_checkpointing: bool | None = None  # recompute activations: slower, less memory; None: where needed
    device: str = "auto"  # auto: cuda if there is a GPU, else cpu
    chat_template: str | None = None  # plain, chatml, qwen, llama3, ... or FILE.jinja; None: the model's own
    chat_template_kwargs: str | None = None  # variables for the template, as {enable_thinking: false}

    def __post_init__(self) -> None:
        if self.dtype is DType.auto:
            raise ConfigError(
                "model.dtype=auto: the trainer's weights have one format, float32 unless you say bfloat16 or float16; "
                "what is measured is model.autocast=auto"
            )
        if not _DEVICE.fullmatch(self.device):
            hint = "; did you mean cuda?" if self.device.lower() in ("gpu", "nvidia", "cuda") else ""
            raise ConfigError(f"model.device={self.device} is unknown: it is auto, cpu, cuda, cuda:N, mps or xpu{hint}")
        template_variables("model.chat_template_kwargs", self.chat_template_kwargs)


class Push(Enum):
    """What a weight push sends to vLLM: the merged weights, or the adapter alone."""

    merged = "merged"
    adapter = "adapter"


@dataclass
class LoRASettings(Settings, group="lora"):
    """LoRA (arXiv:2106.09685): each adapted layer computes W x + (alpha / rank) B A x; A and B are trained.

    There is no dropout: with it the trainer's log-probs would never match the sampler's. A and B need about ten
    times the learning rate of full training.
    """

    enabled: bool = False  # train an adapter instead of the weights
    rank: int = limited(16, at_least=1)  # LoRA rank
    alpha: int = limited(32, at_least=1)  # LoRA scale is alpha / rank
    target_modules: list[str] | None = None  # names of layers; None: every linear layer but the output head
    path: str | None = None  # peft adapter to start from; merged into the model first
    push: Push = Push.merged  # what a weight push sends to vLLM: the merged weights, or the adapter alone

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enabled:
            return
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                raise ConfigError(f"lora.{field.name} means nothing while lora.enabled=false: add lora.enabled=true")


def template_variables(key: str, text: str | None) -> dict[str, Any]:
    """Parse `text`, the value of `key`, as a mapping in JSON, with or without quotes: `{enable_thinking: false}`.

    Raises ConfigError unless it maps names to plain values.
    """
    if text is None or not text.strip():
        return {}
    try:
        read = json.loads(_QUOTED_OR_WORD.sub(_as_json, text))
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise ConfigError(
            f"{key}={shortened(text, _MOST_SHOWN)} is no mapping: write names and values, as in "
            f"{key}={{enable_thinking: false}}"
        )
    for name, value in read.items():
        if not _NAME.fullmatch(name) or name in _TAKEN:
            shown = shortened(repr(name), _MOST_SHOWN)
            raise ConfigError(f"{key}: {shown} cannot be told to a chat template: leave it out")
        if (wrong := _wrong_with(value)) is not None:
            raise ConfigError(f"{key}: {shortened(name, _MOST_SHOWN)} {wrong}")
    return read


def _wrong_with(value: Any) -> str | None:
    """Why a template cannot take a value, at any depth of it; None if it can."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        for each in level:
            if isinstance(each, float) and not math.isfinite(each):
                return f"holds {each}: every number in it must be finite"
        holding = [each for each in level if isinstance(each, list | dict)]
        if not holding:
            return None
        level = [inner for each in holding for inner in (each.values() if isinstance(each, dict) else each)]
    return f"is nested too deep ({_MOST_LEVELS} levels at most): flatten it"


def _as_json(found: re.Match[str]) -> str:
    word = found[0]
    if word.startswith("'"):
        return json.dumps(word[1:-1])
    return word if word.startswith('"') else _JSON_WORDS.get(word.lower()) or json.dumps(word)
