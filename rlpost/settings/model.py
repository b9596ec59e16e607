"""The model that is trained, the variables of its chat template, and its LoRA adapter."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from datetime import date
from enum import Enum
from typing import Any

from rlpost.errors import ConfigError
from rlpost.settings.base import MISSING, Settings, doc

_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d+)?")
# names that a template always gets, or that rendering takes itself
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
    | {"conversation", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "bos_token", "eos_token"}
)


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
    of rlpost, a .gguf file, or one of the names `builtin:tiny` (random weights, built on the spot),
    `packaged:smollm2` (SmolLM2-135M-Instruct from the packaged weights, else from the hub) and
    `packaged:gemma3-270m` (the base model Gemma 3 270M from packages that the user installs).
    """

    path: str = doc(MISSING, "hub id, HF folder, run or checkpoint, .gguf file")
    revision: str | None = doc(None, "branch, tag or commit of a hub id")
    dtype: DType = doc(DType.float32, "float32, bfloat16 or float16: weights and optimizer state")
    autocast: Autocast = doc(Autocast.auto, "precision of matrix products in training; auto: the fastest here")
    activation_checkpointing: bool | None = doc(None, "recompute activations: slower, less memory; null: where needed")
    device: str = doc("auto", "auto: cuda if there is a GPU, else cpu")
    chat_template: str | None = doc(None, "plain, chatml, qwen, llama3, ... or FILE.jinja; null: the model's own")
    chat_template_kwargs: str | None = doc(None, "variables for the template, as {enable_thinking: false}")
    day: str | None = doc(None, "the day that a template writes as today, as 2026-11-28; null: the day the run starts")

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
        try:
            date.fromisoformat(self.day or "2000-01-01")
        except ValueError:
            raise ConfigError(f"model.day={self.day} is not a day: write it as 2026-11-28") from None


class Push(Enum):
    """The content of a weight push to vLLM: the merged weights, or the adapter alone."""

    merged = "merged"
    adapter = "adapter"


class LoRAInit(Enum):
    """How A and B begin, under peft's names; each way leaves the model as it is at first."""

    default = "default"  # A uniform (Kaiming), B zero
    gaussian = "gaussian"  # A Gaussian, B zero
    orthogonal = "orthogonal"  # A and B random, and B A zero since their rows are orthogonal; needs an even rank


@dataclass
class LoRASettings(Settings, group="lora"):
    """LoRA (arXiv:2106.09685): each adapted layer computes W x + (alpha / rank) B A x; A and B are trained.

    There is no dropout: with it the trainer's log-probs would never match the sampler's. A and B need about ten
    times the learning rate of full training.
    """

    enabled: bool = doc(False, "train an adapter instead of the weights")
    rank: int = doc(16, "LoRA rank", at_least=1)
    alpha: int = doc(32, "LoRA scale is alpha / rank", at_least=1)
    target_modules: list[str] | None = doc(None, "names of layers; null or all-linear: every one but the output head")
    use_rslora: bool = doc(False, "scale by alpha / sqrt(rank), which suits large ranks (arXiv:2312.03732)")
    use_dora: bool = doc(False, "train the size of each row of the weights too (DoRA, arXiv:2402.09353); slower")
    init_lora_weights: LoRAInit = doc(LoRAInit.default, "how A and B begin")
    path: str | None = doc(None, "peft adapter to start from; merged into the model first")
    push: Push = doc(Push.merged, "what a weight push sends to vLLM: the merged weights, or the adapter alone")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_dora and self.push is Push.adapter:
            raise ConfigError("lora.push=adapter: vLLM takes no DoRA adapter; leave it out, or lora.use_dora=true")
        if self.target_modules == ["all-linear"]:  # peft's word for the default
            self.target_modules = None
        if self.enabled:
            return
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                raise ConfigError(f"lora.{field.name} means nothing while lora.enabled=false: add lora.enabled=true")


def template_variables(key: str, text: str | None) -> dict[str, Any]:
    """Parse `text`, the value of `key`, as `mapping_in` does.

    Raises ConfigError if it is not a mapping, and for a name that every template gets.
    """
    read = mapping_in(key, text, "{enable_thinking: false}")
    if reserved := sorted(_RESERVED & read.keys()):
        raise ConfigError(f"{key}: {reserved[0]} is set for every chat template: leave it out")
    return read


def mapping_in(key: str, text: str | None, example: str) -> dict[str, Any]:
    """Parse `text`, the value of `key`, as a mapping, with quotes as JSON or without: `{enable_thinking: false}`.

    Raises ConfigError, which shows the `example`, if it is not a mapping.
    """
    if text is None or not text.strip():
        return {}
    import yaml

    try:
        read = yaml.safe_load(re.sub(r"(?<=[\w\"']):(?=[^\s/])", ": ", text))  # YAML wants a space behind a colon
    except yaml.YAMLError:
        read = None
    if not isinstance(read, dict):
        raise ConfigError(f"{key}={text:.60} is not a mapping: write {key}={example}")
    return read
