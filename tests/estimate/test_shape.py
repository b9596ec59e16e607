"""How large a model is, from its configuration and the headers of its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlpost.estimate.shape import HUB_MODELS, TINY, Shape, shape_of_config, shape_of_folder, tensors_of


def known(shape: Shape | None) -> Shape:
    assert shape is not None
    return shape


@pytest.mark.parametrize(
    ("hub_id", "parameters"),  # as their model cards and safetensors headers count them
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
    ],
)
def test_a_configuration_gives_the_published_parameters(hub_id: str, parameters: int) -> None:
    model = HUB_MODELS[hub_id]
    assert known(shape_of_config(model.config)).parameters == parameters
    # two bytes a weight, and a tokenizer of 2 to 12 MB
    assert model.download_bytes == pytest.approx(2 * parameters, rel=0.02, abs=12e6)


def test_the_tiny_model_is_as_its_folder_says(tiny_folder: Path) -> None:
    found = known(shape_of_folder(tiny_folder))
    assert (found.parameters, found.hidden, found.layers, found.vocab) == (90_624, 64, 2, 259)
    assert found == shape_of_config(TINY)


def test_an_adapter_is_counted_layer_by_layer(tiny_folder: Path) -> None:
    found = known(shape_of_folder(tiny_folder))
    # q 64+64, k and v 64+32, o 64+64, gate and up 64+128, down 128+64; two layers, rank 4
    assert found.adapter_parameters(4, None) == 4 * 2 * (128 + 96 + 96 + 128 + 192 + 192 + 192)
    assert found.adapter_parameters(4, ["q_proj", "v_proj"]) == 4 * 2 * (128 + 96)
    assert found.adapter_parameters(4, ["self_attn.k_proj"]) == 4 * 2 * 96


def test_tensors_are_read_from_headers_and_a_tied_head_once(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.zeros(10, 8), "lm_head.weight": torch.zeros(10, 8)}
    save_file(tensors, tmp_path / "model-1.safetensors")
    save_file({"model.layers.0.mlp.up_proj.weight": torch.zeros(16, 8)}, tmp_path / "model-2.safetensors")
    config = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 10}
    assert tensors_of(tmp_path) == {
        "lm_head.weight": (10, 8),
        "model.embed_tokens.weight": (10, 8),
        "model.layers.0.mlp.up_proj.weight": (16, 8),
    }
    for tied, parameters in ((True, 80 + 128), (False, 160 + 128)):
        (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
        found = known(shape_of_folder(tmp_path))
        assert (found.parameters, dict(found.linear)) == (parameters, {"up_proj": 24})


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"hidden_size": 8}', '{"hidden_size": "many"}'])
def test_a_configuration_that_says_no_size_gives_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert shape_of_folder(tmp_path) is None
    assert shape_of_folder(tmp_path / "nowhere") is None


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]"])
def test_weights_without_a_header_leave_it_to_the_configuration(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "model.safetensors").write_bytes(content)
    assert shape_of_folder(tmp_path) == known(shape_of_config(TINY))
