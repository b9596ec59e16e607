"""Models that are built, converted, found, or refused by name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpost.catalog import EVAL, TRAIN_GRPO, TRAIN_SFT
from rlpost.chat import load_policy
from rlpost.config.compose import compose
from rlpost.errors import CheckpointError, ConfigError, DataError
from rlpost.model import locate
from rlpost.model.conversion import build_tiny, tiny_tokenizer
from rlpost.model.device import pick_device
from rlpost.model.load import describe, load_model
from rlpost.model.locate import locate_model
from rlpost.model.tokenizer import load_tokenizer
from rlpost.runs.checkpoint import save_checkpoint
from rlpost.settings import DType, ModelSettings
from rlpost.train.assemble import assemble_grpo, evaluate_command
from rlpost.train.sft import assemble as assemble_sft
from rlpost.weight_sync.base import named_weights


def test_the_tiny_model_is_a_plain_folder_built_once_and_always_alike(tiny_folder: Path, tmp_path: Path) -> None:
    assert locate_model("builtin:tiny") == tiny_folder
    build_tiny(tmp_path)
    here, there = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny_folder, tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(here.parameters(), there.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(tiny_folder)("é")["input_ids"] == tiny_tokenizer()("é")["input_ids"]
    assert "LlamaForCausalLM" in describe(tiny_folder)


def test_the_tiny_tokenizer_gives_back_every_text() -> None:
    tokenizer = tiny_tokenizer()
    for text in ("2 + 2 = 4", "naïve — 漢字\n\t🙂", "<tool>{}</tool>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_weights_are_loaded_in_the_asked_format_and_without_dropout(tiny_folder: Path) -> None:
    model = load_model(tiny_folder, ModelSettings(path="", dtype=DType.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.training


def test_pickled_weights_are_refused(tmp_path: Path, tiny_folder: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_folder / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(ConfigError, match="safetensors"):
        load_model(tmp_path, ModelSettings(path=""))


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.device=abacus"):
        pick_device("abacus")


def test_a_tied_head_is_pushed_under_its_own_name(tiny_folder: Path) -> None:
    model = load_model(tiny_folder, ModelSettings(path=""))
    weights = dict(named_weights(model))
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert set(weights) == set(model.state_dict())


def with_weights(source: Path, folder: Path, change: Any) -> Path:
    """A copy of a model's folder whose tensors `change` has changed."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_that_is_not_finite_is_refused_by_name(
    value: float, dtype: torch.dtype, tmp_path: Path, tiny_folder: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[name] = weights[name].to(dtype)
        weights[name][3, 5] = value

    folder = with_weights(tiny_folder, tmp_path / "m", change)
    with pytest.raises(DataError, match=name):
        locate_model(str(folder))


def test_weights_that_lack_a_tensor_are_refused_rather_than_drawn(tmp_path: Path, tiny_folder: Path) -> None:
    folder = with_weights(tiny_folder, tmp_path / "m", lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        load_model(locate_model(str(folder)), ModelSettings(path=""))


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"hidden_size": 32}, "mismatched_sizes"), ({"model_type": "no_such_model"}, "no_such_model")],
)
def test_a_configuration_that_does_not_fit_is_named_in_one_line(
    changed: dict[str, Any], named: str, tmp_path: Path, tiny_folder: Path
) -> None:
    shutil.copytree(tiny_folder, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ConfigError, match=named) as refused:
        load_model(tmp_path / "m", ModelSettings(path=""))
    assert "\n" not in str(refused.value)


def test_a_flipped_byte_is_refused_by_eval_chat_and_train(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = save_checkpoint(
        Path("runs/a/checkpoints"),
        2,
        write_model=lambda folder: shutil.copytree(tiny_folder, folder) and None,
        tensors={"a": torch.ones(2)},
        state={},
        keep_last=1,
    )
    (checkpoint / "state" / "tensors.safetensors").unlink()  # a model is read without it
    assert locate_model("runs/a").samefile(checkpoint / "model")
    file = checkpoint / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)
    words = ["policy=scripted", "env.limit=2"]
    refusing = [
        lambda path: evaluate_command(compose(EVAL, [*words, f"model={path}"]).settings),
        lambda path: assemble_grpo(compose(TRAIN_GRPO, [*words, f"model={path}"]).settings),
        lambda path: assemble_sft(compose(TRAIN_SFT, ["env.limit=2", f"model={path}"]).settings),
        lambda path: load_policy(ModelSettings(path=path)),
    ]
    folders = [Path("runs/a/checkpoints/step-000002"), Path("runs/a/checkpoints/latest/model")]
    for refuses, path in [*((each, "runs/a") for each in refusing), *((locate_model, str(each)) for each in folders)]:
        with pytest.raises(CheckpointError, match=r"model/model\.safetensors"):
            refuses(path)


def write_gguf(file: Path, architecture: str = "llama") -> dict[str, np.ndarray]:
    """A random Llama of one layer, and the tokens of the tiny tokenizer with one merge; returns its tensors."""
    gguf = pytest.importorskip("gguf")
    tokens = tiny_tokenizer().convert_ids_to_tokens(range(259))
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(260)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens, "ab"])
    writer.add_token_types([3, 3, 3, *[1] * 257])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    rows = {"token_embd": (260, 32), "output": (260, 32), "output_norm": (32,)}
    rows |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32)}
    rows |= {"blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (48, 32)}
    rows |= {"blk.0.ffn_up": (48, 32), "blk.0.ffn_down": (32, 48)}
    draw = np.random.default_rng(0)
    tensors = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in rows.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_gguf_file_is_a_model_and_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tensors = write_gguf(tmp_path / "x.gguf")
    settings = compose(EVAL, ["model=x.gguf", "model.chat_template=chatml"]).settings.model
    assert settings.path == "x.gguf"
    folder = locate_model(settings.path)
    assert locate_model(str(tmp_path / "x.gguf")) == folder
    weights = load_model(folder, settings).state_dict()
    for ours, theirs in {"embed_tokens": "token_embd", "layers.0.mlp.gate_proj": "blk.0.ffn_gate"}.items():
        assert np.array_equal(weights[f"model.{ours}.weight"].numpy(), tensors[f"{theirs}.weight"[:-7]])
    tokenizer = load_tokenizer(folder, settings)
    assert tokenizer("cab")["input_ids"] == [tokenizer.convert_tokens_to_ids("c"), 259]
    write_gguf(tmp_path / "x.gguf", "no_such_architecture")  # the same name, another file
    with pytest.raises(ConfigError, match=r"x\.gguf .*no_such_architecture"):
        locate_model("x.gguf")


def test_a_large_file_is_read_for_nan_once(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_weights(tiny_folder, tmp_path / "m", lambda weights: None)
    read: list[Path] = []
    monkeypatch.setattr(locate, "LARGE_FILE", 0)
    monkeypatch.setattr(locate, "_read_for_nan", read.append)
    for _ in range(2):
        locate_model(str(folder))
    assert read == [folder / "model.safetensors"]
    os.utime(folder / "model.safetensors", ns=(1, 1))
    locate_model(str(folder))
    assert len(read) == 2
