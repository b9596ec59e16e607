"""Load a model from a local folder, and save it as one that other programs load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as hf_logging

from rlpost.data.chat import stop_ids
from rlpost.errors import ConfigError
from rlpost.model.device import pick_device
from rlpost.model.tokenizer import save_tokenizer
from rlpost.model.weights import is_adapted, is_sharded
from rlpost.settings import ModelSettings
from rlpost.text import first_line

hf_logging.disable_progress_bar()  # rlpost has its own screen


def load_model(folder: Path, settings: ModelSettings | None = None) -> PreTrainedModel:
    """The model of a local folder, from safetensors only, on `settings.device`, in eval mode.

    Eval mode turns dropout off: with it the trainer's log-probs would never match the sampler's.
    Raises ConfigError if the weights do not fit the configuration.
    """
    settings = settings or ModelSettings()
    device = pick_device(settings.device)
    try:
        model, found = from_pretrained(
            folder,
            dtype=getattr(torch, settings.dtype.value),
            use_safetensors=True,
            trust_remote_code=False,
        )
    except Exception as error:
        raise ConfigError(f"the model in {folder} cannot be loaded: {first_line(error)}") from error
    check_complete(folder, found["missing_keys"])
    return model.to(device).eval()


def from_pretrained(*arguments: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The model, and the names of missing weights: transformers initializes those at random."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(*arguments, output_loading_info=True, **options)
    return loaded


def check_complete(source: Path, missing: Any) -> None:
    """Raise ConfigError if transformers has found weights `missing` in `source`."""
    if names := sorted(missing):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ConfigError(f"{source} lacks the weights {names[0]}{more}, which its model has: take a whole copy of it")


def save_model(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Write `model` as a plain HF folder; an adapter is merged into the written weights, not into `model`.

    The folder's generation_config.json and config.json name every id at which rlpost stops, the end of turn first, so
    that other programs stop there too.
    """
    ends = list(dict.fromkeys([*stop_ids(tokenizer), *ends_of(model.generation_config)]))
    for config in (model.generation_config, model.config, model.config.get_text_config()):
        if config is not None and ends:
            config.eos_token_id = ends if len(ends) > 1 else ends[0]
    if is_sharded(model):
        from rlpost.model.sharding import export

        export(model, folder)
    elif is_adapted(model):
        from rlpost.model.lora import MergedWeights

        model.save_pretrained(folder, state_dict=dict(MergedWeights(model)))
    else:
        model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def ends_of(generation: Any) -> list[int]:
    """The ids at which a model's generation config, if it has one, ends a text."""
    ends = getattr(generation, "eos_token_id", None)
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def context_length(folder: Path) -> int | None:
    """The context length of the model in a local folder, in tokens; None if its config has none."""
    config = AutoConfig.from_pretrained(folder).get_text_config()
    return getattr(config, "max_position_embeddings", None)


def describe(folder: Path) -> str:
    """Architecture and size in one phrase, from config.json and the weights' headers."""
    config = json.loads((folder / "config.json").read_text())
    name = (config.get("architectures") or ["unknown architecture"])[0]
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    return f"{name}, {size / 1e6:.0f} MB of weights" if size >= 1e6 else f"{name}, {size / 1e3:.0f} kB of weights"
