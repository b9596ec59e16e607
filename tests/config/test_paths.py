"""Which folder `model.path` means."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlpost.config.paths import cache_folder, check_data_path, resolve_adapter_path, resolve_model_path
from rlpost.errors import ConfigError, DataError


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    return folder


@pytest.mark.parametrize("name", ["builtin:tiny", "packaged:smollm2", "Qwen/Qwen2.5-0.5B-Instruct", "gpt2"])
def test_a_name_that_is_not_local_stays_as_it_is(name: str) -> None:
    assert resolve_model_path(name) == name


def test_a_model_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model_path(str(make_model(tmp_path / "m"))) == str(tmp_path / "m")


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_model(tmp_path / "m")
    assert resolve_model_path("~/m") == str(tmp_path / "m")


@pytest.mark.parametrize("path", ["./nope", "/nope/at/all", "~nobody/x", "runs/nope", "a/b/c", "nope/", ""])
def test_a_local_path_that_is_missing_is_refused(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path="):
        resolve_model_path(path)


def test_a_missing_folder_suggests_its_neighbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "runs" / "sums")
    with pytest.raises(ConfigError, match=r"model\.path=runs/smus does not exist; did you mean runs/sums\?"):
        resolve_model_path("runs/smus")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model_path(str(tmp_path))


@pytest.mark.parametrize(("name", "held"), [("pytorch_model.bin", "a pickle"), ("notes.txt", "no weights")])
def test_a_model_without_safetensors_is_refused(name: str, held: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ConfigError, match=f"{held}.*safetensors files only"):
        resolve_model_path(str(folder))


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="without a finished checkpoint"):
        resolve_model_path(str(tmp_path))


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model_path(str(tmp_path / "model.onnx"))


def test_a_misspelt_builtin_name_gets_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean builtin:tiny\?"):
        resolve_model_path("builtin:tny")


def test_what_is_neither_path_nor_hub_id_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither a folder nor a hub id"):
        resolve_model_path("[a,b]")


@pytest.mark.parametrize("path", ["https://host/rows.jsonl", "s3://bucket/rows"])
def test_an_address_is_to_be_downloaded(path: str) -> None:
    with pytest.raises(DataError, match="is an address: download it, and give the file"):
        check_data_path(path)


def test_a_missing_data_path_is_found_early_and_a_hub_id_passes(tmp_path: Path) -> None:
    check_data_path("openai/gsm8k")
    check_data_path(str(tmp_path))
    with pytest.raises(DataError, match=r"env\.path=\./no-data does not exist"):
        check_data_path("./no-data")
    with pytest.raises(DataError, match=r"env\.path=nope\.jsonl does not exist"):
        check_data_path("nope.jsonl")


@pytest.mark.parametrize("path", ["./a\0b/c.jsonl", "./a\ud800b/c.jsonl"])
@pytest.mark.parametrize("find", [resolve_model_path, resolve_adapter_path, check_data_path])
def test_what_no_file_can_be_called_is_missing(find: Callable[[str], object], path: str) -> None:
    with pytest.raises((ConfigError, DataError), match=r"path=\./a.b/c\.jsonl (does not exist|is not a folder)"):
        find(path)


def test_the_cache_follows_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "rlpost"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    with pytest.raises(DataError, match=r"~/\.cache begins with a home folder that is not known here: set HOME"):
        cache_folder()
    with pytest.raises(DataError, match=r"~/model begins with"):
        resolve_model_path("~/model")


def make_adapter(folder: Path, base: str | None) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    (folder / "adapter_model.safetensors").write_text("")
    return folder


def test_a_link_that_leads_nowhere_is_told_with_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(ConfigError, match=r"link does not exist; it is a link to gone, which does not exist$"):
        resolve_model_path(str(tmp_path / "link"))


def test_an_adapter_stands_for_itself_where_the_model_it_names_is_found(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    for name in (str(base), "builtin:tiny", "Qwen/Qwen2.5-0.5B-Instruct"):
        adapter = make_adapter(tmp_path / name.replace("/", "_"), name)
        assert resolve_model_path(str(adapter)) == str(adapter)
    gone = make_adapter(tmp_path / "gone", str(tmp_path / "bose"))
    with pytest.raises(ConfigError, match=r"is an adapter for .*bose, and that is not to be had here.*lora\.path"):
        resolve_model_path(str(gone))
    with pytest.raises(ConfigError, match="does not say which model it is for"):
        resolve_model_path(str(make_adapter(tmp_path / "silent", None)))


@pytest.mark.parametrize("base", ["./a\0b/c", "./\ud800/m", "loop"])
def test_an_adapter_whose_model_is_no_path_is_told(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=r"is not a path .*: correct base_model_name_or_path|not to be had here"):
        resolve_model_path(str(make_adapter(tmp_path / "adapter", base)))


def test_the_adapter_of_a_run_is_that_of_its_latest_checkpoint(tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    adapter = make_adapter(checkpoints / "step-000060" / "adapter", "builtin:tiny")
    (checkpoints / "latest").symlink_to("step-000060")
    assert resolve_adapter_path(str(tmp_path / "run")).resolve() == adapter.resolve()
    assert resolve_adapter_path(str(checkpoints / "step-000060")) == adapter
    assert resolve_adapter_path(str(adapter)) == adapter
    with pytest.raises(ConfigError, match=r"lora\.path=.* is not a folder; did you mean"):
        resolve_adapter_path(str(tmp_path / "ran"))
    with pytest.raises(ConfigError, match=r"lora\.path=.* holds no peft adapter"):
        resolve_adapter_path(str(checkpoints))
