"""Adapters: what they change, what they leave alone, and what is written of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlpost.errors import CheckpointError, ConfigError
from rlpost.imports import is_installed
from rlpost.model.load import load_model
from rlpost.model.locate import locate_merged, locate_model
from rlpost.model.logprobs import token_log_probs
from rlpost.model.lora import (
    MergedWeights,
    adapter_off,
    add_adapter,
    describe_adapter,
    load_adapter,
    merged_with,
    save_adapter,
)
from rlpost.model.packing import Row, pack
from rlpost.model.tokenizer import load_tokenizer
from rlpost.settings import LoRAInit, LoRASettings, ModelSettings
from tests.model_families import tiny_model
from tests.says import Says

pytestmark = pytest.mark.skipif(not is_installed("peft"), reason="peft is not installed")

IDS = torch.tensor([[5, 9, 80, 33, 7, 64]])
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(folder: Path, changed: bool = True, **settings: Any) -> PreTrainedModel:
    """The tiny model with an adapter; `changed` as if it had been trained."""
    torch.manual_seed(0)
    model = load_model(folder, ModelSettings(path=""))
    add_adapter(model, LoRASettings(enabled=True, **{"rank": 4, "alpha": 8, **settings}), str(folder))
    if changed:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.1)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


def contents(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: tensor.contiguous().numpy().tobytes() for name, tensor in model.state_dict().items()}


def trained_by(model: torch.nn.Module) -> dict[str, int]:
    """The parameters that take a gradient, and their sizes."""
    return {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}


def test_only_the_adapter_takes_gradients(tiny_folder: Path) -> None:
    model = adapted(tiny_folder)
    trained = trained_by(model)
    assert len(trained) == 2 * 2 * len(LAYERS)  # A and B, in two blocks
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    # rank 4 on 64 -> 64 (q, o), 64 -> 32 (k, v), 64 -> 128 (gate, up) and 128 -> 64 (down), twice
    assert sum(trained.values()) == 2 * 4 * (2 * 128 + 2 * 96 + 3 * 192)
    rows = [Row(IDS[0, :2], IDS[0, 2:], torch.ones(4, dtype=torch.bool), torch.zeros(4), 1.0)]
    [microbatch] = pack(rows, 100, model.device)
    token_log_probs(model, microbatch, 1.0)[0].sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(trained)
    assert all(p.grad.abs().sum() > 0 for p in model.parameters() if p.grad is not None)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 12 / 4), (True, 12 / 2)])
def test_the_forward_is_that_of_the_formula(tiny_folder: Path, use_rslora: bool, scale: float) -> None:
    """A rank-stabilised adapter is scaled by the root of its rank, 4."""
    model: Any = adapted(tiny_folder, rank=4, alpha=12, use_rslora=use_rslora)
    layer = model.model.layers[1].mlp.down_proj
    x = torch.randn(3, 128)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert (a.shape, b.shape) == ((4, 128), (64, 4))
    expected = x @ layer.base_layer.weight.T + scale * (x @ a.T) @ b.T
    assert torch.allclose(layer(x), expected, atol=1e-5)


VARIANTS = [{}, {"use_rslora": True}, {"use_dora": True}]
VARIANTS += [{"init_lora_weights": init} for init in (LoRAInit.gaussian, LoRAInit.orthogonal)]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_an_adapter_begins_as_nothing_and_is_merged_and_saved(
    tiny_folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    plain = load_model(tiny_folder, ModelSettings(path=""))
    assert torch.allclose(logits(adapted(tiny_folder, changed=False, **settings)), logits(plain), atol=1e-5)
    model = adapted(tiny_folder, **settings)
    before, on, trained = contents(model), logits(model), trained_by(model)
    assert not torch.allclose(on, logits(plain))
    with adapter_off(model) as reference:
        assert torch.equal(logits(reference), logits(plain))
    with pytest.raises(ZeroDivisionError), adapter_off(model):
        raise ZeroDivisionError
    assert torch.equal(logits(model), on)
    assert trained_by(model) == trained
    save_adapter(model, tmp_path)
    other = adapted(tiny_folder, changed=False, **settings)
    assert contents(other) != contents(model)
    load_adapter(other, tmp_path)
    assert contents(other) == contents(model)
    with_peft = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_folder), str(tmp_path))
    assert torch.allclose(logits(with_peft), logits(model), atol=1e-5)
    plain.load_state_dict(dict(MergedWeights(model)))
    assert contents(model) == before
    assert torch.allclose(logits(plain), logits(model), atol=1e-4)


def test_peft_finds_the_model_of_what_is_saved(tiny_folder: Path, tmp_path: Path) -> None:
    model = adapted(tiny_folder)
    save_adapter(model, tmp_path)
    with_peft = peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path))
    assert torch.allclose(logits(with_peft), logits(model), atol=1e-6)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, sorted(LAYERS))


def test_an_adapter_of_another_rank_or_alpha_or_of_other_layers_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    save_adapter(adapted(tiny_folder), tmp_path)
    others: dict[str, dict[str, Any]] = {
        "lora.rank": {"rank": 8},
        "lora.target_modules": {"target_modules": ["q_proj"]},
        "lora.use_rslora=False": {"use_rslora": True},
        "lora.alpha=8": {"alpha": 64},
    }
    for key, settings in others.items():
        model = adapted(tiny_folder, **settings)
        before = contents(model)
        with pytest.raises(CheckpointError, match=re.escape(key)):
            load_adapter(model, tmp_path)
        assert contents(model) == before
    with pytest.raises(CheckpointError, match=r"lora\.enabled"):
        load_adapter(adapted(tiny_folder), tmp_path / "nothing")


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_an_adapter_leaves_experts_and_names_alone(kind: str) -> None:
    model = tiny_model(kind)
    own = set(model.state_dict())
    add_adapter(model, LoRASettings(enabled=True, rank=4, alpha=8), "base")
    assert set(MergedWeights(model)) == own
    assert not any(".experts." in name for name, tensor in model.named_parameters() if tensor.requires_grad)


@pytest.mark.parametrize(
    ("kind", "targets", "named"),
    [
        ("qwen3_next", ["down_proj"], r"down_proj, .*Qwen3NextForCausalLM"),  # peft takes it for the routed experts
        ("falcon_h1", None, r"out_proj.*lora\.target_modules"),  # which peft does not adapt
        ("llama", ["qproj"], r"qproj.* q_proj"),
        ("llama", ["lm_head"], r"lm_head.* down_proj"),
    ],
)
def test_a_layer_that_cannot_be_adapted_is_named(kind: str, targets: list[str] | None, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        add_adapter(tiny_model(kind), LoRASettings(enabled=True, target_modules=targets), "base")


def test_target_modules_are_looked_up_in_the_model(tiny_folder: Path) -> None:
    model = adapted(tiny_folder, target_modules=["self_attn.q_proj", "down_proj"])
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained_by(model)} == {"q_proj", "down_proj"}


def test_an_adapters_folder_stands_for_its_merged_model(tiny_folder: Path, tmp_path: Path) -> None:
    model = adapted(tiny_folder)
    save_adapter(model, tmp_path / "adapter")
    found = locate_model(str(tmp_path / "adapter"))
    assert found == locate_merged(tiny_folder, tmp_path / "adapter")  # made once
    assert torch.allclose(logits(load_model(found, ModelSettings(path=""))), logits(model), atol=1e-5)
    assert load_tokenizer(found).chat_template == load_tokenizer(tiny_folder).chat_template
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).add_(1.0)
    save_adapter(model, tmp_path / "adapter")
    assert locate_model(str(tmp_path / "adapter")) != found  # another adapter under the same name


@pytest.mark.parametrize(
    "chosen",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]},
    ],
    ids=str,
)
def test_adapter_on_one_of_two_tied_weights_leaves_the_other(
    chosen: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    config = peft.LoraConfig(r=4, lora_alpha=64, init_lora_weights=False, task_type="CAUSAL_LM", **chosen)
    config.base_model_name_or_path = str(tiny_folder)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_folder), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(str(tmp_path / "adapter"))
    expected = logits(model)
    merged = AutoModelForCausalLM.from_pretrained(locate_model(str(tmp_path / "adapter")))
    assert torch.allclose(logits(merged), expected, atol=1e-4)
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(tiny_folder)), expected, atol=0.1)


def test_merge_that_changes_the_model_is_refused(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_adapter(adapted(tiny_folder), tmp_path)
    monkeypatch.setattr("peft.LoraModel.merge_and_unload", lambda tuner, **_: tuner.unload())  # drops the adapter
    with pytest.raises(ConfigError, match=r"[\d.]+ off"):
        merged_with(load_model(tiny_folder, ModelSettings(path="")), tmp_path)


def test_an_adapter_for_another_model_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    save_adapter(adapted(tiny_folder), tmp_path)
    plain = load_model(tiny_folder, ModelSettings(path=""))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for change in ({"target_modules": ["query"]}, {"peft_type": "IA3"}, {"r": 8}):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
            merged_with(plain, tmp_path)


def test_an_adapter_is_described_by_what_it_costs(tiny_folder: Path, says: Says) -> None:
    """8,192 parameters beside the model's 90,624."""
    says("model", describe_adapter(adapted(tiny_folder)))


def test_settings_of_lora_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lora\.rank .*lora\.enabled=false"):
        LoRASettings(rank=8)
    assert LoRASettings(enabled=True, rank=1024).rank == 1024
