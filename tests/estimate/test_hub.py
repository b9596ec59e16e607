"""What a plan says of the hub, without asking it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from rlpost.cli.main import run
from rlpost.config.packaged import PACKAGED, Packaged
from rlpost.config.schema import conf_file, options, read_yaml
from rlpost.envs import gsm8k, ifeval
from rlpost.estimate import shape
from rlpost.estimate.shape import HUB_DATASETS, HUB_MODELS, shape_of_model
from rlpost.settings import MathSettings

QWEN = "Qwen/Qwen2.5-0.5B-Instruct"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hf"


def plan(capsys: pytest.CaptureFixture[str], line: str) -> list[str]:
    assert run(["train", *line.split(), "--dry-run"]) == 0
    return capsys.readouterr().out.splitlines()


def cache_model(home: Path, hub_id: str, tiny_folder: Path, *, revision: str = "main", commit: str = "abc") -> Path:
    folder = home / "hub" / f"models--{hub_id.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    shutil.copytree(tiny_folder, folder / "snapshots" / commit)
    return folder / "snapshots" / commit


@pytest.mark.parametrize("verb", ["grpo", "sft"])
def test_what_would_be_fetched_is_said_with_its_size(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = plan(capsys, f"{verb} model=qwen env=gsm8k")
    assert f"downloads {QWEN} (about 1 GB)" in lines
    assert "downloads openai/gsm8k (about 2.73 MB)" in lines
    assert any(
        line.startswith("memory  about ") and "weights 1.98, gradients 1.98, moments 3.95" in line for line in lines
    )


def test_without_a_hub_it_is_said_that_nothing_can_be_fetched(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline = ", which HF_HUB_OFFLINE forbids: unset it, or give a folder"
    assert f"downloads {QWEN} (about 1 GB){offline}" in plan(capsys, "grpo model=qwen")


def test_the_size_of_an_unknown_model_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    lines = plan(capsys, "grpo model.path=Some/Model")
    assert "downloads Some/Model (size unknown while offline)" in lines
    assert "memory  unknown until the configuration of Some/Model is downloaded" in lines


def test_what_is_in_the_cache_is_not_fetched(
    own_cache: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = cache_model(own_cache, "Some/Model", tiny_folder)
    rows = own_cache / "datasets" / "openai___gsm8k"
    rows.mkdir(parents=True)
    lines = plan(capsys, "grpo model.path=Some/Model env=gsm8k")
    assert [line for line in lines if line.startswith(("cached", "downloads"))] == [
        f"cached  Some/Model, in {snapshot}",
        f"cached  openai/gsm8k, in {rows}",
    ]
    assert shape_of_model("Some/Model") == shape_of_model("builtin:tiny")


def test_a_revision_is_looked_for_by_its_name(own_cache: Path, tiny_folder: Path) -> None:
    cache_model(own_cache, "Some/Model", tiny_folder, revision="v2")
    assert shape.cached_snapshot("models", "Some/Model") is None
    assert shape.cached_snapshot("models", "Some/Model", "v2") == shape.cached_snapshot("models", "Some/Model", "abc")


def test_a_download_that_stopped_half_way_is_fetched(
    own_cache: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = cache_model(own_cache, QWEN, tiny_folder)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"downloads {QWEN} (about 1 GB)" in plan(capsys, "grpo model=qwen")


def test_the_packaged_model_is_fetched_only_without_its_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Packaged, "parts", lambda _: [])
    smollm2 = PACKAGED["packaged:smollm2"].hub_id
    assert f"downloads {smollm2} (about 272 MB)" in plan(capsys, "grpo")
    monkeypatch.setattr(Packaged, "parts", lambda _: [Path("a.gguf")])
    assert not any(line.startswith("downloads") for line in plan(capsys, "grpo"))


def test_as_json_it_is_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "grpo", "model=qwen", "env=gsm8k", "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["fetches"][1] == {"id": "openai/gsm8k", "bytes": 2_726_000, "cached": None}
    parts = planned["estimate"]["memory"]["host"]["parts"]
    assert parts["weights"] == 4 * 494_032_768
    assert planned["estimate"]["memory"]["host"]["free"] > 0


def test_every_hub_id_of_an_option_is_known() -> None:
    named = {str(read_yaml(conf_file(f"model/{name}")).get("path", "")) for name in options("model")}
    assert {path for path in named if "/" in path} <= set(HUB_MODELS)
    assert {model.option for model in HUB_MODELS.values()} <= set(options("model"))
    assert {gsm8k.HUB_ID, ifeval.IFEVAL_HUB_ID, ifeval.IFBENCH_HUB_ID, MathSettings.path} == set(HUB_DATASETS)
