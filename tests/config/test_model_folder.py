"""A broken folder is refused for what is wrong with it, from its files alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlpost.catalog import EVAL
from rlpost.config.compose import compose
from rlpost.config.paths import check_model_folder, resolve_model_path, weight_files
from rlpost.errors import ConfigError
from tests.model_folders import write_model, write_weights
from tests.says import Says

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 538090408\n"
INDEX = "model.safetensors.index.json"


def sharded(folder: Path, *present: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "model-1.safetensors", "v": "model-2.safetensors"}}))
    for name in present:
        write_weights(folder / name)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


CODE = '{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}'
# what is wrong -> how it came to that, and what the message names
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a configuration that is not JSON": (lambda f: (f / "config.json").write_text('{"model_type"'), "config.json"),
    "code that the model ships": (lambda f: write_model(f, auto_map={"AutoModelForCausalLM": "evil.E"}), "auto_map"),
    "code that the tokenizer ships": (lambda f: (f / "tokenizer_config.json").write_text(CODE), "auto_map"),
    "weights cut short": (lambda f: cut(f / "model.safetensors"), "model.safetensors"),
    "weights that are a git-lfs pointer": (lambda f: (f / "model.safetensors").write_text(POINTER), "git lfs pull"),
    "a file of the index that is missing": (lambda f: sharded(f, "model-1.safetensors"), "model-2.safetensors"),
    "weights under another name": (
        lambda f: (f / "model.safetensors").rename(f / "weights.safetensors"),
        "weights.safetensors",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
    "a tokenizer that is not JSON": (lambda f: (f / "tokenizer.json").write_text(POINTER), "tokenizer.json"),
}


def test_a_whole_folder_passes_in_one_file_and_in_several(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    check_model_folder(folder)
    assert (folder / "model.safetensors").stat().st_size == 73  # 8 for the length, 61 of header, 4 of data
    sharded(folder, "model-1.safetensors", "model-2.safetensors")
    check_model_folder(folder)
    assert [file.name for file in weight_files(folder)] == ["model-1.safetensors", "model-2.safetensors"]


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    breaks, named = BROKEN[what]
    breaks(write_model(tmp_path / "m"))
    with pytest.raises(ConfigError, match=re.escape(named)) as refused:
        compose(EVAL, [f"model={tmp_path}/m"])
    assert "\n" not in str(refused.value)


def test_every_verb_refuses_a_broken_folder_without_torch(tmp_path: Path) -> None:
    cut(write_model(tmp_path / "m") / "model.safetensors")
    script = (
        "import sys\nfrom rlpost.cli.main import run\n"
        "for words in ('eval model=./m', 'train grpo model=./m', 'train sft model=./m', 'chat ./m'):\n"
        "    assert run(words.split()) == 2, words\n"
        "assert run(['train', 'sft', 'model.chat_template=chatlm']) == 2\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("model.safetensors") == 4
    assert "chatml?" in ran.stderr


def test_a_folder_that_holds_something_else_says_what_was_meant(here: Path, says: Says) -> None:
    for name in ("data", "models", "quantized"):
        (here / name).mkdir()
    (here / "data" / "train.jsonl").write_text("{}\n")
    write_model(here / "models" / "small")
    write_model(here / "qwen-small")
    for name in ("q4", "q8"):
        (here / "quantized" / f"{name}.gguf").write_bytes(b"GGUF" + bytes(20))
    models = ["./data", "./models", "./quantized", "qwen-small/model.safetensors", "data/train.jsonl", "./qwen-smal"]
    says.refusals("config", ConfigError, resolve_model_path, [*models, "quantized/q5.gguf"])
    assert resolve_model_path("quantized/q4.gguf") == "quantized/q4.gguf"
    (here / "quantized" / "q8.gguf").unlink()
    assert resolve_model_path("./quantized") == "quantized/q4.gguf"  # the one that the folder holds
