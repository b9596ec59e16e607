"""Activation checkpointing: the same gradient from less memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlpost.errors import ConfigError
from rlpost.model.load import load_model
from rlpost.model.logprobs import token_log_probs
from rlpost.model.lora import add_adapter
from rlpost.model.packing import pack
from rlpost.model.precision import autocast
from rlpost.model.trainable import recompute_activations
from rlpost.settings import Autocast, LoRASettings, ModelSettings
from tests.model.test_logprobs import DIFFERENT, random_rows

[MICROBATCH] = pack(random_rows(DIFFERENT), 1000, torch.device("cpu"))


def gradient(model: PreTrainedModel, computed_in: Autocast = Autocast.none) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with autocast(computed_in, model.device):
        log_probs, _ = token_log_probs(model, MICROBATCH, 0.7)
    log_probs.sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("computed_in", [Autocast.none, Autocast.bfloat16])
@pytest.mark.parametrize("lora", [False, True])
def test_the_gradient_is_bitwise_the_same(tiny_folder: Path, lora: bool, computed_in: Autocast) -> None:
    model = load_model(tiny_folder, ModelSettings(path=""))
    if lora:
        pytest.importorskip("peft")
        torch.manual_seed(0)
        add_adapter(model, LoRASettings(enabled=True, rank=4), "")
    whole = gradient(model, computed_in)
    recompute_activations(model)
    again = gradient(model, computed_in)
    assert set(again) == set(whole)
    assert all(torch.equal(again[name], grad) for name, grad in whole.items())
    assert not any(module.training for module in model.modules())  # dropout stays off


def test_layers_run_twice_with_gradients_and_once_without(tiny_folder: Path) -> None:
    model = load_model(tiny_folder, ModelSettings(path=""))
    recompute_activations(model)
    runs = []
    mlp = model.get_submodule("model.layers.0.mlp")
    mlp.register_forward_pre_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    with torch.no_grad():
        token_log_probs(model, MICROBATCH, 1.0)
    assert runs == [False]
    runs.clear()
    gradient(model)
    assert runs == [True, True]


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear"):
        recompute_activations(torch.nn.Linear(2, 2))
