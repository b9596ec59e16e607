"""Which folder `model.path` means."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlpost.config.paths import cache_folder, check_data_path, resolve_adapter_path, resolve_model_path
from rlpost.errors import ConfigError, DataError
from tests.model_folders import write_model
from tests.says import Says


def make_adapter(folder: Path, base: str | None) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    (folder / "adapter_model.safetensors").write_text("")
    return folder


@pytest.mark.parametrize("name", ["builtin:tiny", "packaged:smollm2", "Qwen/Qwen2.5-0.5B-Instruct", "gpt2"])
def test_a_name_that_is_not_local_stays_as_it_is(name: str) -> None:
    assert resolve_model_path(name) == name


def test_a_model_folder_is_itself_and_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = write_model(tmp_path / "m")
    assert [resolve_model_path(path) for path in (str(folder), "~/m")] == [str(folder)] * 2


def test_what_is_not_a_model_is_refused(here: Path, says: Says) -> None:
    write_model(here / "runs" / "sums")
    (here / "empty").mkdir()
    (here / "begun" / "checkpoints").mkdir(parents=True)
    (here / "model.onnx").write_text("")
    (here / "link").symlink_to("gone")
    missing = ["./nope", "/nope/at/all", "runs/nope", "runs/smus", "a/b/c", "nope/", "", "./link"]
    others = ["./empty", "./begun", "./model.onnx", "builtin:tny", "[a,b]"]
    says.refusals("config", ConfigError, resolve_model_path, [*missing, *others])


@pytest.mark.parametrize("name", ["pytorch_model.bin", "notes.txt"])
def test_a_model_without_safetensors_is_refused(name: str, here: Path, says: Says) -> None:
    write_model(here / "m")
    (here / "m" / "model.safetensors").rename(here / "m" / name)
    says.refusals("config", ConfigError, resolve_model_path, ["./m"])


def test_missing_rows_are_found_early_and_a_hub_id_passes(here: Path, says: Says) -> None:
    check_data_path("openai/gsm8k")
    check_data_path(str(here))
    missing = ["./no-data", "nope.jsonl", "https://host/rows.jsonl", "s3://bucket/rows"]
    says.refusals("config", DataError, check_data_path, missing)


@pytest.mark.parametrize("path", ["./a\0b/c.jsonl", "./a\ud800b/c.jsonl"])
@pytest.mark.parametrize("find", [resolve_model_path, resolve_adapter_path, check_data_path])
def test_what_no_file_can_be_called_is_missing(find: Callable[[str], object], path: str) -> None:
    with pytest.raises((ConfigError, DataError), match=r"path=\./a.b/c\.jsonl"):
        find(path)


def test_the_cache_follows_xdg_cache_home() -> None:
    assert cache_folder() == Path(os.environ["XDG_CACHE_HOME"]) / "rlpost"


def test_an_adapter_stands_for_itself_where_its_model_is_found(here: Path, says: Says) -> None:
    base = write_model(here / "base")
    for name in (str(base), "builtin:tiny", "Qwen/Qwen2.5-0.5B-Instruct"):
        adapter = make_adapter(here / name.replace("/", "_"), name)
        assert resolve_model_path(str(adapter)) == str(adapter)
    make_adapter(here / "gone", "./bose")
    make_adapter(here / "silent", None)
    says.refusals("config", ConfigError, resolve_model_path, ["./gone", "./silent"])


def test_the_adapter_of_a_run_is_that_of_its_latest_checkpoint(here: Path, says: Says) -> None:
    checkpoints = here / "run" / "checkpoints"
    adapter = make_adapter(checkpoints / "step-000060" / "adapter", "builtin:tiny")
    (checkpoints / "latest").symlink_to("step-000060")
    assert resolve_adapter_path("run").resolve() == adapter.resolve()
    assert resolve_adapter_path(str(checkpoints / "step-000060")) == adapter
    assert resolve_adapter_path(str(adapter)) == adapter
    says.refusals("config", ConfigError, resolve_adapter_path, ["ran", "run/checkpoints"])
