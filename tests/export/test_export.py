"""Exports: what is written, what llama.cpp reads in it, and what is refused."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpost.cli.main import run as rlpost
from rlpost.config.paths import verify_model
from rlpost.export.export import Readings, compared, export
from rlpost.model.load import load_model
from rlpost.model.lora import add_adapter, whole_adapter
from rlpost.model.tokenizer import load_tokenizer
from rlpost.runs.checkpoint import verify
from rlpost.settings import LoRASettings
from tests.export.checkpoints import QWEN2_WORDS, add_checkpoint, byte_level, pieces, run_with_a_checkpoint
from tests.run_folders import make_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of a small llama in runs/my-run of the current folder."""
    monkeypatch.chdir(tmp_path)
    return run_with_a_checkpoint(Path("runs/my-run"))


def checkpoint_model(run: Path) -> Path:
    return run / "checkpoints" / "step-000002" / "model"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_float32_folder_holds_the_weights_of_the_checkpoint_for_everyone(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.umask(0o027)
    try:
        assert rlpost(["export", "my-run", "--dtype", "float32", "--json"]) == 0
    finally:
        os.umask(before)
    told = json.loads(capsys.readouterr().out)
    folder = Path("exports/my-run-hf-float32")
    assert (told["folder"], told["to"], told["dtype"], told["hub"]) == (str(folder), "hf", "float32", None)
    assert (told["agreement"]["prompts"], told["agreement"]["equal_replies"]) == (16, 16)
    written, own = (load_file(each / "model.safetensors") for each in (folder, checkpoint_model(run)))
    assert written.keys() == own.keys()
    assert all(torch.equal(written[name], own[name]) for name in own)
    assert {mode(file) for file in folder.iterdir()} == {0o640}
    assert mode(folder) == 0o750
    assert AutoTokenizer.from_pretrained(folder).chat_template == byte_level().chat_template
    assert (folder / "generation_config.json").is_file()


def test_bfloat16_is_the_default_of_a_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rlpost(["export", "runs/my-run/checkpoints/latest", "--out", "given"]) == 0
    assert "agrees " in capsys.readouterr().out
    assert {tensor.dtype for tensor in load_file("given/model.safetensors").values()} == {torch.bfloat16}


def test_export_that_does_not_agree_is_refused_and_leaves_nothing(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model: Any = load_model(checkpoint_model(run))
    model.model.norm.weight.data *= 1e6  # more than float16 can hold
    add_checkpoint(run, model, byte_level(), step=3)
    assert rlpost(["export", "my-run", "--dtype", "float16"]) == 3
    assert "exports/my-run-hf-float16 was not written" in (told := capsys.readouterr().err)
    assert "log-probs of 96 tokens nan apart" in told
    assert not Path("exports").exists()


def test_default_goes_on_to_more_digits_where_bfloat16_is_too_coarse(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model: Any = load_model(checkpoint_model(run))
    model.model.norm.weight.data *= 40  # so that small differences of the weights become large ones of the logits
    add_checkpoint(run, model, byte_level(), step=3)
    assert rlpost(["export", "my-run"]) == 0
    [folder] = Path("exports").iterdir()
    assert folder.name in ("my-run-hf-float16", "my-run-hf-float32")
    assert "bfloat16 keeps too few digits" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("family", "tokenizer", "config"),
    [
        ("llama", byte_level, {"tie_word_embeddings": False}),
        (
            "llama",
            byte_level,
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
        ("mistral", byte_level, {"sliding_window": None}),
        ("qwen2", lambda: byte_level(QWEN2_WORDS), {"use_sliding_window": False, "tie_word_embeddings": True}),
        ("qwen3", lambda: byte_level(QWEN2_WORDS), {"head_dim": 128}),
        ("gemma2", pieces, {"head_dim": 256, "query_pre_attn_scalar": 256}),
        ("gemma3_text", pieces, {"head_dim": 256, "query_pre_attn_scalar": 256}),
    ],
)
def test_gguf_of_a_family_answers_as_the_checkpoint(
    family: str, tokenizer: Any, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_with_a_checkpoint(Path("runs/mistral"), family, tokenizer(), **config)
    assert rlpost(["export", "mistral", "--to", "gguf", "--dtype", "float32"]) == 0
    assert (tmp_path / "exports" / "mistral-gguf-float32" / "mistral-F32.gguf").is_file()


def test_gguf_has_what_llama_cpp_reads(run: Path) -> None:
    assert rlpost(["export", "my-run", "--to", "gguf"]) == 0
    reader = gguf.GGUFReader("exports/my-run-gguf-float16/my-run-F16.gguf")
    told = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF")}
    tokenizer = byte_level()
    size = len(tokenizer) + 5
    assert told["general.architecture"] == "llama"
    assert (told["llama.attention.head_count"], told["llama.attention.head_count_kv"]) == (6, 2)
    assert told["llama.rope.dimension_count"] == 32
    assert (told["tokenizer.ggml.model"], told["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert told["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert told["tokenizer.chat_template"] == tokenizer.chat_template
    kinds = dict(zip(told["tokenizer.ggml.tokens"], told["tokenizer.ggml.token_type"], strict=True))
    assert len(kinds) == size
    assert (kinds["<|im_end|>"], kinds["<think>"], kinds["a"], kinds[f"[PAD{size - 1}]"]) == (3, 4, 1, 5)
    [query] = [tensor for tensor in reader.tensors if tensor.name == "blk.0.attn_q.weight"]
    own = load_file(checkpoint_model(run) / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    rows = [head * 32 + half * 16 + place for head in range(6) for place in range(16) for half in (0, 1)]
    assert torch.equal(torch.tensor(query.data), own[rows].half())


def test_a_gguf_export_shows_how_much_of_it_is_done(run: Path) -> None:
    shown: list[tuple[Any, ...]] = []
    export(run, run / "checkpoints/step-000002", "gguf", "float16", Path("made"), lambda *doing: shown.append(doing))
    count = len(load_file(checkpoint_model(run) / "model.safetensors"))
    assert [doing[1:] for doing in shown if doing[0] == "converting tensors"] == [(i, count) for i in range(count)]
    assert ("greedy replies", 16, 16) in shown
    assert [doing[1:] for doing in shown if doing[0] == "reading replies"] == [(i, 16) for i in range(16)] * 2


def test_q8_0_keeps_weights_that_are_whole_eighths_of_a_byte(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = load_model(checkpoint_model(run))
    for parameter in model.parameters():
        if parameter.ndim == 2:  # whole numbers of 1/128, and 127 of them in each block of 32
            parameter.data = (parameter.data * 128).round().clamp(-127, 127)
            parameter.data[:, ::32] = 127
            parameter.data /= 128
    add_checkpoint(run, model, byte_level(), step=3)
    assert rlpost(["export", "my-run", "--to", "gguf", "--dtype", "q8_0", "--json"]) == 0
    agreement = json.loads(capsys.readouterr().out)["agreement"]
    assert (agreement["same_top"], agreement["equal_replies"]) == (1.0, 16)
    assert agreement["log_prob_gap"] < 1e-5
    reader = gguf.GGUFReader("exports/my-run-gguf-q8_0/my-run-Q8_0.gguf")
    assert {t.tensor_type.name for t in reader.tensors if len(t.shape) == 2} == {"Q8_0"}


@pytest.mark.parametrize(
    ("family", "config", "told"),
    [
        ("olmo", {}, "--to gguf does not cover olmo: it writes llama, mistral, qwen2, qwen3, gemma2, gemma3_text"),
        ("mistral", {"sliding_window": 6}, "--to gguf does not cover the sliding window of this mistral"),
        ("gemma2", {"head_dim": 32}, "--to gguf does not cover query_pre_attn_scalar=256"),
        (
            "gemma2",
            {"head_dim": 256, "final_logit_softcapping": 5.0},
            "--to gguf does not cover final_logit_softcapping=5.0 of this gemma2",
        ),
        (
            "gemma3_text",
            {"head_dim": 256, "layer_types": ["sliding_attention", "full_attention"]},
            "--to gguf does not cover layer_types=['sliding_attention', 'full_attention'] of this gemma3_text",
        ),
        (
            "gemma3_text",
            {"head_dim": 64, "query_pre_attn_scalar": 64},
            "--to gguf does not cover query_pre_attn_scalar=64 of this gemma3_text",
        ),
        ("qwen3", {"head_dim": 64}, "--to gguf does not cover head_dim=64 of this qwen3: use --to hf"),
    ],
)
def test_gguf_of_other_models_is_refused(
    family: str, config: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with_a_checkpoint(tmp_path / "run", family, **config)
    assert rlpost(["export", str(tmp_path / "run"), "--to", "gguf", "--out", str(tmp_path / "out")]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_gguf_needs_merges(tmp_path: Path, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run_with_a_checkpoint(tmp_path / "run", tokenizer=tiny_tokenizer)
    assert rlpost(["export", str(tmp_path / "run"), "--to", "gguf", "--out", str(tmp_path / "out")]) == 2
    assert "--to gguf needs a tokenizer with merges" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_adapter_loads_into_its_base_with_peft(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft

    monkeypatch.chdir(tmp_path)
    model: Any = load_model(tiny_folder)
    add_adapter(model, LoRASettings(enabled=True, rank=4), "builtin:tiny")
    for tensor in whole_adapter(model).values():
        tensor += 0.1
    run = make_run(Path("runs/lora"))
    (run / "config.yaml").write_text("model:\n  path: me/base\n")
    add_checkpoint(run, model, load_tokenizer(tiny_folder))
    assert rlpost(["export", "lora", "--to", "adapter"]) == 0
    folder = tmp_path / "exports" / "lora-adapter"
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "me/base"
    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    before = base.model.layers[0].mlp.up_proj.weight.clone()
    merged: Any = peft.PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    assert not torch.equal(merged.model.layers[0].mlp.up_proj.weight, before)
    own = load_file(checkpoint_model(run) / "model.safetensors")
    for name, tensor in merged.state_dict().items():
        if name in own:
            torch.testing.assert_close(tensor, own[name])


def test_readme_of_a_checkpoint_says_how_it_was_made_and_may_be_edited(run: Path) -> None:
    readme = checkpoint_model(run) / "README.md"
    assert readme.read_text().startswith("# `my-run`, step 2\n")
    assert "- base model: `builtin:tiny`\n- command: `rlpost train grpo model=tiny`\n" in readme.read_text()
    readme.write_text("mine")
    verify_model(readme.parent)
    verify(readme.parents[1])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("my-run --to adapter", "runs/my-run has no adapter, since it was trained without lora.enabled=true"),
        ("my-run --to adapter --dtype float32", "--to adapter keeps the numbers that were trained"),
        ("my-run --dtype q8_0", "--dtype q8_0 is not for --to hf: it is one of bfloat16, float16, float32"),
        ("my-run --checkpoint step-9", "runs/my-run has no checkpoint step-9; it has step-000002"),
        ("my-run --checkpoint best", "runs/my-run has no best checkpoint"),
        ("my-run --out runs", "runs exists already"),
        ("my-rum", "there is no run my-rum; did you mean my-run?"),
        ("runs/my-run/checkpoints/latest --checkpoint best", "is a checkpoint already: leave --checkpoint out"),
    ],
)
def test_mistakes_are_answered_before_anything_is_loaded(
    words: str, told: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rlpost(["export", *words.split()]) == 2
    assert told in capsys.readouterr().err


def readings(*log_probs: float, top: list[int]) -> Readings:
    """Of one reply."""
    return Readings([torch.tensor(log_probs)], [torch.tensor(top)])


def test_limits_of_the_comparison() -> None:
    same = readings(-1.0, -2.0, top=[5, 6])
    assert compared(same, same, criterion="float32").agrees
    assert not compared(same, readings(-1.0, -2.0, top=[5, 7]), criterion="float32").agrees
    near, far = readings(-1.01, -2.03, top=[5, 7]), readings(-1.01, -2.05, top=[5, 6])
    assert compared(same, near, criterion="bfloat16").log_prob_gap == pytest.approx(0.02)
    assert not compared(same, far, criterion="bfloat16").agrees
    assert not compared(same, readings(float("nan"), -2.0, top=[5, 6]), criterion="float16").agrees
    replies = [0.0] * 100
    found = compared(readings(*replies, top=[1] * 100), readings(*replies, top=[1] * 97 + [2] * 3), criterion="q8_0")
    assert (found.same_top, found.agrees) == (pytest.approx(0.97), True)
    other = readings(*replies, top=[1] * 96 + [2] * 4)
    assert not compared(readings(*replies, top=[1] * 100), other, criterion="q8_0").agrees
