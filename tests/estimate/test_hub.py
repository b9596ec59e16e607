"""The downloads that a plan announces, without asking the hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from rlpost.config.packaged import Packaged
from rlpost.config.schema import conf_file, options, read_yaml
from rlpost.envs import gsm8k, ifeval
from rlpost.estimate import shape
from rlpost.estimate.shape import HUB_DATASETS, HUB_MODELS, shape_of_model
from rlpost.settings import MathSettings
from tests.command_line import CommandLine
from tests.says import Says

QWEN = "Qwen/Qwen2.5-0.5B-Instruct"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hf"


@pytest.fixture
def rlpost(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


def fetched(rlpost: CommandLine, words: str) -> str:
    """The lines of a plan about models and datasets, and about memory if it is unknown."""
    about = ("cached", "downloads", "memory  unknown")
    return "\n".join(line for line in rlpost.lines(f"train {words} --dry-run") if line.startswith(about))


def cache_model(home: Path, hub_id: str, tiny_folder: Path, *, revision: str = "main", commit: str = "abc") -> Path:
    folder = home / "hub" / f"models--{hub_id.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    shutil.copytree(tiny_folder, folder / "snapshots" / commit)
    return folder / "snapshots" / commit


@pytest.mark.parametrize("verb", ["grpo", "sft"])
def test_what_would_be_fetched_is_said_with_its_size(verb: str, rlpost: CommandLine, says: Says) -> None:
    words = f"{verb} model=qwen env=gsm8k"
    says("train", fetched(rlpost, words))
    assert "weights 1.98, gradients 1.98, moments 3.95" in rlpost(f"train {words} --dry-run")


@pytest.mark.parametrize(("words", "offline"), [("grpo model=qwen", True), ("grpo model.path=Some/Model", False)])
def test_what_cannot_be_fetched_or_sized_is_said(
    words: str, offline: bool, rlpost: CommandLine, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    says("train", fetched(rlpost, words))


def test_what_is_in_the_cache_is_not_fetched(own_cache: Path, tiny_folder: Path, rlpost: CommandLine) -> None:
    snapshot = cache_model(own_cache, "Some/Model", tiny_folder)
    rows = own_cache / "datasets" / "openai___gsm8k"
    rows.mkdir(parents=True)
    lines = fetched(rlpost, "grpo model.path=Some/Model env=gsm8k")
    assert lines == f"cached  Some/Model, in {snapshot}\ncached  openai/gsm8k, in {rows}"
    assert shape_of_model("Some/Model") == shape_of_model("builtin:tiny")


def test_a_revision_is_looked_for_by_its_name(own_cache: Path, tiny_folder: Path) -> None:
    cache_model(own_cache, "Some/Model", tiny_folder, revision="v2")
    assert shape.cached_snapshot("models", "Some/Model") is None
    assert shape.cached_snapshot("models", "Some/Model", "v2") == shape.cached_snapshot("models", "Some/Model", "abc")


def test_a_download_that_stopped_half_way_is_fetched(own_cache: Path, tiny_folder: Path, rlpost: CommandLine) -> None:
    snapshot = cache_model(own_cache, QWEN, tiny_folder)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    line = fetched(rlpost, "grpo model=qwen")
    assert line.startswith("downloads")


def test_the_packaged_model_is_fetched_only_without_its_package(
    rlpost: CommandLine, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    monkeypatch.setattr(Packaged, "parts", lambda _: [])
    says("train", fetched(rlpost, "grpo"))
    monkeypatch.setattr(Packaged, "parts", lambda _: [Path("a.gguf")])
    shown = rlpost("train grpo --dry-run")
    assert "downloads" not in shown


def test_as_json_it_is_bytes(rlpost: CommandLine) -> None:
    planned = rlpost.json("train grpo model=qwen env=gsm8k --dry-run")
    assert planned["fetches"][1] == {"id": "openai/gsm8k", "bytes": 2_726_000, "cached": None}
    parts = planned["estimate"]["memory"]["host"]["parts"]
    assert parts["weights"] == 4 * 494_032_768
    assert planned["estimate"]["memory"]["host"]["free"] > 0


def test_every_hub_id_of_an_option_is_known() -> None:
    named = {str(read_yaml(conf_file(f"model/{name}")).get("path", "")) for name in options("model")}
    assert {path for path in named if "/" in path} <= set(HUB_MODELS)
    assert {gsm8k.HUB_ID, ifeval.IFEVAL_HUB_ID, ifeval.IFBENCH_HUB_ID, MathSettings.path} == set(HUB_DATASETS)
