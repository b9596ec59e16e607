"""A broken folder is refused for what is wrong with it, from its files alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlpost.catalog import EVAL, TRAIN_GRPO, TRAIN_SFT
from rlpost.config.compose import compose
from rlpost.config.paths import check_model_folder, resolve_model_path, weight_files
from rlpost.errors import ConfigError
from tests.model_folders import write_model, write_weights

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 538090408\n"
INDEX = "model.safetensors.index.json"


def sharded(folder: Path, *present: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "model-1.safetensors", "v": "model-2.safetensors"}}))
    for name in present:
        write_weights(folder / name)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a configuration that is not JSON": (
        lambda f: (f / "config.json").write_text('{"model_type": "llama",'),
        r"config\.json cannot be read as JSON \(.*line 1",
    ),
    "code that the model ships": (
        lambda f: write_model(f, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"}),
        r"loaded with code that it ships \(auto_map\), which rlpost never runs",
    ),
    "code that the tokenizer ships": (
        lambda f: (f / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}'),
        "which rlpost never runs",
    ),
    "weights cut short": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-1]),
        r"model\.safetensors cannot be read .* download it again",
    ),
    "weights that are a git-lfs pointer": (
        lambda f: (f / "model.safetensors").write_text(POINTER),
        r"model\.safetensors cannot be read .*git lfs pull",
    ),
    "a file of the index that is missing": (
        lambda f: sharded(f, "model-1.safetensors"),
        r"model-2\.safetensors cannot be read",
    ),
    "weights under another name": (
        lambda f: (f / "model.safetensors").rename(f / "weights.safetensors"),
        r"weights\.safetensors, which is not the model\.safetensors",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "holds no tokenizer: copy tokenizer.json"),
    "a tokenizer that is not JSON": (
        lambda f: (f / "tokenizer.json").write_text(POINTER),
        r"tokenizer\.json cannot be read as JSON .*git lfs pull",
    ),
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
    breaks, message = BROKEN[what]
    breaks(write_model(tmp_path / "m"))
    with pytest.raises(ConfigError, match=message) as refused:
        compose(EVAL, [f"model={tmp_path}/m"])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("command", [TRAIN_GRPO, TRAIN_SFT], ids=lambda c: c.name)
def test_every_command_looks_at_the_folder(command: object, tmp_path: Path) -> None:
    (write_model(tmp_path) / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be read"):
        compose(command, [f"model.path={tmp_path}"])  # type: ignore[arg-type]


def test_a_mistake_in_a_folder_or_device_is_told_without_torch(tmp_path: Path) -> None:
    (write_model(tmp_path / "m") / "model.safetensors").write_bytes(b"")
    script = (
        "import sys\nfrom rlpost.cli.main import run\n"
        f"codes = [run(['eval', 'model={tmp_path}/m']), run(['chat', '{tmp_path}/m']),\n"
        "         run(['train', 'sft', 'model.chat_template=chatlm'])]\n"
        "assert codes == [2, 2, 2], codes\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("cannot be read") == 2
    assert "did you mean chatml?" in ran.stderr


def test_a_folder_that_holds_something_else_says_what_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("data", "models", "quantized"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{}\n")
    write_model(tmp_path / "models" / "small")
    write_model(tmp_path / "qwen-small")
    for name in ("q4", "q8"):
        (tmp_path / "quantized" / f"{name}.gguf").write_bytes(b"GGUF" + bytes(20))
    for path, message in {
        "./data": r"holds no model.*; it holds train\.jsonl: data is given as env\.path",
        "./models": r"holds no model.*did you mean models/small\?",
        "./quantized": r"holds no model.*; give one of quantized/q4\.gguf, quantized/q8\.gguf",
        "qwen-small/model.safetensors": r"is a file: give the folder that holds it; did you mean qwen-small\?",
        "data/train.jsonl": r"is a file.*data is given as env\.path",
        "qwen-smal": r"is neither a folder here nor OWNER/NAME; did you mean \./qwen-small\?",
    }.items():
        with pytest.raises(ConfigError, match=message):
            resolve_model_path(path)
    assert resolve_model_path("quantized/q4.gguf") == "quantized/q4.gguf"
    (tmp_path / "quantized" / "q8.gguf").unlink()
    assert resolve_model_path("./quantized") == "quantized/q4.gguf"  # the one that the folder holds
    assert resolve_model_path("gpt2") == "gpt2"
    with pytest.raises(ConfigError, match=r"q5\.gguf does not exist; did you mean quantized/q4\.gguf\?"):
        resolve_model_path("quantized/q5.gguf")
