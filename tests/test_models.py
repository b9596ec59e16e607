"""Models that are built, converted, found, or refused by name."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpost.errors import ConfigError, DataError
from rlpost.models import describe, load_model, load_tokenizer, locate_model, pick_device, tiny_tokenizer
from rlpost.settings import DType, ModelSettings
from rlpost.weight_sync.base import named_weights


def test_the_tiny_model_is_a_plain_folder_built_once_and_always_alike(tiny_folder: Path, tmp_path: Path) -> None:
    from rlpost.models import build_tiny

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
    with pytest.raises(ConfigError, match="does not unpickle"):
        load_model(tmp_path, ModelSettings(path=""))


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no chat template"):
        load_tokenizer(tmp_path)


def test_an_unreachable_hub_is_named_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    started = time.monotonic()
    with pytest.raises(DataError, match=r"model\.path=nobody/nothing is neither a local folder nor to be had"):
        locate_model("nobody/nothing")
    assert time.monotonic() - started < 20


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.device=abacus"):
        pick_device("abacus")


def test_a_tied_head_is_pushed_under_its_own_name(tiny_folder: Path) -> None:
    model = load_model(tiny_folder, ModelSettings(path=""))
    weights = dict(named_weights(model))
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert set(weights) == set(model.state_dict())


def test_only_what_holds_weights_can_be_pushed() -> None:
    with pytest.raises(TypeError, match="not from int"):
        list(named_weights(cast("Any", 3)))
