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
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rlpost.data.chat import stop_ids
from rlpost.export.export import Readings, compared, export
from rlpost.model.load import load_model
from rlpost.model.locate import verify_model
from rlpost.model.lora import add_adapter, whole_adapter
from rlpost.model.tokenizer import load_tokenizer
from rlpost.runs.checkpoint import verify
from rlpost.settings import LoRASettings
from tests.command_line import CommandLine
from tests.export.checkpoints import QWEN2_WORDS, add_checkpoint, byte_level, pieces, run_with_a_checkpoint
from tests.run_folders import make_run
from tests.says import Says


@pytest.fixture
def run(here: Path) -> Path:
    """A run of a small llama in runs/my-run of the current folder."""
    return run_with_a_checkpoint(Path("runs/my-run"))


def checkpoint_model(run: Path) -> Path:
    return run / "checkpoints" / "step-000002" / "model"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def scaled(run: Path, factor: float) -> None:
    """Add a checkpoint whose last norm is `factor` times as large."""
    model: Any = load_model(checkpoint_model(run))
    model.model.norm.weight.data *= factor
    add_checkpoint(run, model, byte_level(), step=3)


def test_float32_folder_holds_the_weights_for_everyone(run: Path, rlpost: CommandLine) -> None:
    before = os.umask(0o027)
    try:
        told = rlpost.json("export my-run --dtype float32")
    finally:
        os.umask(before)
    folder = Path("exports/my-run-hf-float32")
    assert (told["folder"], told["to"], told["dtype"], told["hub"]) == (str(folder), "hf", "float32", None)
    assert (told["agreement"]["prompts"], told["agreement"]["equal_replies"]) == (16, 16)
    written, own = (load_file(each / "model.safetensors") for each in (folder, checkpoint_model(run)))
    assert written.keys() == own.keys()
    assert all(torch.equal(written[name], own[name]) for name in own)
    assert {mode(file) for file in folder.iterdir()} == {0o640}
    assert mode(folder) == 0o750
    assert AutoTokenizer.from_pretrained(folder).chat_template == byte_level().chat_template
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    assert {*stop_ids(byte_level())} <= {*(ends if isinstance(ends, list) else [ends])}


def test_bfloat16_is_the_default_of_a_folder(run: Path, rlpost: CommandLine) -> None:
    told = rlpost("export runs/my-run/checkpoints/latest --out given")
    assert "agrees " in told
    assert {tensor.dtype for tensor in load_file("given/model.safetensors").values()} == {torch.bfloat16}


def test_export_that_does_not_agree_leaves_nothing(run: Path, rlpost: CommandLine) -> None:
    scaled(run, 1e6)  # more than float16 can hold
    rlpost("export my-run --dtype float16", 3)
    assert "exports/my-run-hf-float16" in rlpost.err
    assert "96 tokens nan" in rlpost.err
    assert list(Path("exports").iterdir()) == []


def test_default_takes_more_digits_where_bfloat16_is_too_coarse(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rlpost = CommandLine(capfd)
    scaled(run, 40)  # so that small differences of the weights become large ones of the logits
    rlpost("export my-run")
    [folder] = Path("exports").iterdir()
    assert folder.name in ("my-run-hf-float16", "my-run-hf-float32")
    assert "bfloat16" in rlpost.err


LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("family", "tokenizer", "config"),
    [
        ("llama", byte_level, {"tie_word_embeddings": False}),
        ("llama", byte_level, {"rope_parameters": LLAMA3}),
        ("mistral", byte_level, {"sliding_window": None}),
        ("qwen2", lambda: byte_level(QWEN2_WORDS), {"use_sliding_window": False, "tie_word_embeddings": True}),
        ("qwen3", lambda: byte_level(QWEN2_WORDS), {"head_dim": 128}),
        ("gemma2", pieces, {"head_dim": 256, "query_pre_attn_scalar": 256}),
        ("gemma3_text", pieces, {"head_dim": 256, "query_pre_attn_scalar": 256}),
    ],
)
def test_gguf_of_a_family_answers_as_the_checkpoint(
    family: str, tokenizer: Any, config: dict[str, Any], here: Path, rlpost: CommandLine
) -> None:
    run_with_a_checkpoint(Path("runs/mistral"), family, tokenizer(), **config)
    rlpost("export mistral --to gguf --dtype float32")
    assert (here / "exports" / "mistral-gguf-float32" / "mistral-F32.gguf").is_file()


def test_gguf_has_what_llama_cpp_reads(run: Path, rlpost: CommandLine) -> None:
    rlpost("export my-run --to gguf")
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


def test_q8_0_keeps_weights_that_are_whole_eighths_of_a_byte(run: Path, rlpost: CommandLine) -> None:
    model: Any = load_model(checkpoint_model(run))
    for parameter in model.parameters():
        if parameter.ndim == 2:  # whole numbers of 1/128, and 127 of them in each block of 32
            parameter.data = (parameter.data * 128).round().clamp(-127, 127)
            parameter.data[:, ::32] = 127
            parameter.data /= 128
    add_checkpoint(run, model, byte_level(), step=3)
    agreement = rlpost.json("export my-run --to gguf --dtype q8_0")["agreement"]
    assert (agreement["same_top"], agreement["equal_replies"]) == (1.0, 16)
    assert agreement["log_prob_gap"] < 1e-5
    reader = gguf.GGUFReader("exports/my-run-gguf-q8_0/my-run-Q8_0.gguf")
    assert {t.tensor_type.name for t in reader.tensors if len(t.shape) == 2} == {"Q8_0"}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("olmo", {}),
        ("mistral", {"sliding_window": 6}),
        ("gemma2", {"head_dim": 32}),
    ],
)
def test_gguf_of_other_models_is_refused(
    family: str, config: dict[str, Any], here: Path, rlpost: CommandLine, says: Says
) -> None:
    run_with_a_checkpoint(here / "run", family, **config)
    says("export", rlpost.refused("export ./run --to gguf --out out"))
    assert not (here / "out").exists()


def test_gguf_needs_merges(here: Path, tiny_tokenizer: Any, rlpost: CommandLine, says: Says) -> None:
    run_with_a_checkpoint(here / "run", tokenizer=tiny_tokenizer)
    says("export", rlpost.refused("export ./run --to gguf --out out"))
    assert not (here / "out").exists()


def test_adapter_loads_into_its_base_with_peft(here: Path, tiny_folder: Path, rlpost: CommandLine) -> None:
    import peft

    model: Any = load_model(tiny_folder)
    add_adapter(model, LoRASettings(enabled=True, rank=4), "builtin:tiny")
    for tensor in whole_adapter(model).values():
        tensor += 0.1
    run = make_run(Path("runs/lora"))
    (run / "config.yaml").write_text("model:\n  path: me/base\n")
    add_checkpoint(run, model, load_tokenizer(tiny_folder))
    rlpost("export lora --to adapter")
    folder = here / "exports" / "lora-adapter"
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "me/base"
    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    before = base.model.layers[0].mlp.up_proj.weight.clone()
    merged: Any = peft.PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    assert not torch.equal(merged.model.layers[0].mlp.up_proj.weight, before)
    own = load_file(checkpoint_model(run) / "model.safetensors")
    for name, tensor in merged.state_dict().items():
        if name in own:
            torch.testing.assert_close(tensor, own[name])


def test_readme_of_a_checkpoint_may_be_edited(run: Path, says: Says) -> None:
    readme = checkpoint_model(run) / "README.md"
    says("export", readme.read_text())
    readme.write_text("mine")
    verify_model(readme.parent)
    verify(readme.parents[1])


MISTAKES = """
    export my-run --to adapter
    export my-run --to adapter --dtype float32
    export my-run --dtype q8_0
    export my-run --checkpoint step-9
    export my-run --checkpoint best
    export my-run --out runs
    export my-rum
    export runs/my-run/checkpoints/latest --checkpoint best
"""


def test_mistakes_are_answered_before_anything_is_loaded(run: Path, rlpost: CommandLine, says: Says) -> None:
    says("export", rlpost.refusals(MISTAKES))


def readings(*log_probs: float, top: list[int]) -> Readings:
    """Of one reply."""
    return Readings([torch.tensor(log_probs)], [torch.tensor(top)])


def test_limits_of_the_comparison() -> None:
    same = readings(-1.0, -2.0, top=[5, 6])
    assert compared(same, same, criterion="float32").agrees
    assert not compared(same, readings(-1.0, -2.0, top=[5, 7]), criterion="float32").agrees
    near, far = readings(-1.01, -1.97, top=[5, 7]), readings(-1.01, -2.05, top=[5, 6])
    assert compared(same, near, criterion="bfloat16").log_prob_gap == pytest.approx(0.02)
    assert not compared(same, far, criterion="bfloat16").agrees
    assert not compared(same, readings(float("nan"), -2.0, top=[5, 6]), criterion="float16").agrees
    replies = [0.0] * 100
    found = compared(readings(*replies, top=[1] * 100), readings(*replies, top=[1] * 97 + [2] * 3), criterion="q8_0")
    assert (found.same_top, found.agrees) == (pytest.approx(0.97), True)
    other = readings(*replies, top=[1] * 96 + [2] * 4)
    assert not compared(readings(*replies, top=[1] * 100), other, criterion="q8_0").agrees
