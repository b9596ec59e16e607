"""Activation checkpointing: the same gradient from less memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from rlpost.errors import ConfigError
from rlpost.model.load import load_model
from rlpost.model.logprobs import token_log_probs
from rlpost.model.lora import add_adapter
from rlpost.model.packing import Microbatch, Row, pack
from rlpost.model.precision import autocast
from rlpost.model.trainable import recompute_activations
from rlpost.settings import Autocast, LoRASettings, ModelSettings


def microbatch(model: PreTrainedModel) -> Microbatch:
    """Two groups of three completions each, which share their group's prompt."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in (9, 14):
        prompt = torch.randint(0, 200, (length,), generator=generator)
        for size in (5, 8, 3):
            response = torch.randint(0, 200, (size,), generator=generator)
            rows.append(Row(prompt, response, torch.ones(size, dtype=torch.bool), torch.zeros(size), 1.0))
    [whole] = pack(rows, 1000, model.device)
    return whole


def gradient(model: PreTrainedModel, computed_in: Autocast = Autocast.none) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with autocast(computed_in, model.device):
        log_probs, _ = token_log_probs(model, microbatch(model), 0.7)
    log_probs.sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def saved_bytes(model: PreTrainedModel) -> int:
    """Bytes that one forward pass keeps for the backward pass, each storage once, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    held: list[torch.Tensor] = []  # so that no storage is freed and its address given away again

    def pack_hook(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        token_log_probs(model, microbatch(model), 1.0)
    return sum(kept.values())


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


def test_less_is_kept_for_the_backward_pass(tiny_folder: Path) -> None:
    model = load_model(tiny_folder, ModelSettings(path=""))
    before = saved_bytes(model)
    recompute_activations(model)
    assert saved_bytes(model) < 0.5 * before


def test_layers_run_twice_with_gradients_and_once_without(tiny_folder: Path) -> None:
    model = load_model(tiny_folder, ModelSettings(path=""))
    recompute_activations(model)
    runs = []
    mlp = model.get_submodule("model.layers.0.mlp")
    mlp.register_forward_pre_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    with torch.no_grad():
        token_log_probs(model, microbatch(model), 1.0)
    assert runs == [False]
    runs.clear()
    gradient(model)
    assert runs == [True, True]


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Linear names no layers that could be computed again"):
        recompute_activations(nn.Linear(2, 2))
