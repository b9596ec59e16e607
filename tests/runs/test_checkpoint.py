"""Checkpoints: whole or not there, and checked before they are read."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost.errors import CheckpointError
from rlpost.model.locate import verify_model
from rlpost.runs.checkpoint import (
    drop_checkpoints_after,
    load_checkpoint,
    mark_best,
    point_best,
    save_checkpoint,
    verify,
)
from rlpost.runs.reader import checkpoints, passed_over, unfinished_saves
from rlpost.runs.removal import bytes_of_state, keep_the_model_alone
from tests.test_files import recorded

TENSORS = {"moment": torch.tensor([[1.5, -2.0], [0.0, 3.25]]), "rng": torch.arange(5, dtype=torch.uint8)}
STATE = {"progress": {"step": 7}, "collector": {"position": 3}, "policy_version": 7}
FILES = ["model/config.json", "model/weights.bin", "state/state.json", "state/tensors.safetensors"]


def write_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "weights.bin").write_bytes(bytes(range(256)))


def save(folder: Path, step: int, **changes: Any) -> Path:
    what: dict[str, Any] = {"write_model": write_model, "tensors": TENSORS, "state": STATE, "keep_last": 2}
    return save_checkpoint(folder, step, **{**what, **changes})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def latest(folder: Path) -> str:
    return os.readlink(folder / "latest")


# Round trip


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 7)
    assert path == tmp_path / "checkpoints" / "step-000007"
    tensors, state = load_checkpoint(path)
    assert state == STATE
    assert set(tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].equal(tensor)
    assert (path / "model" / "weights.bin").read_bytes() == bytes(range(256))


def test_the_manifest_names_every_file_with_its_size(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted(manifest) == FILES
    assert manifest["model/weights.bin"] == {
        "bytes": 256,
        # of the 256 bytes 0x00 to 0xff, as sha256sum gives it
        "sha256": "40aff2e9d2d8922e47afd4648e6967497158785fbd1da870e7110266bf944880",
    }


def test_a_slice_of_a_tensor_is_saved_without_the_rest(tmp_path: Path) -> None:
    columns = torch.arange(6.0).view(2, 3).T  # not contiguous
    tensors, _ = load_checkpoint(save(tmp_path, 1, tensors={"columns": columns}))
    assert tensors["columns"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 4)
    path = save(tmp_path, 4, state={"again": True})
    assert load_checkpoint(path)[1] == {"again": True}
    assert names(tmp_path) == ["latest", "step-000004"]


@pytest.mark.parametrize("other", [1, 3, 5])
def test_the_state_of_another_version_is_refused_in_one_line(tmp_path: Path, other: int) -> None:
    path = save(tmp_path, 1, state={"format": other})
    for read in (verify, load_checkpoint):
        with pytest.raises(CheckpointError, match=rf"format {other}, .* 4\).* model\.path=") as refused:
            read(path)
        assert "\n" not in str(refused.value)


# Which there are


def test_the_best_checkpoint_outlives_newer_ones(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, best=2 if step > 1 else 1)
    assert names(tmp_path) == ["best", "latest", "step-000002", "step-000004", "step-000005"]
    assert os.readlink(tmp_path / "best") == "step-000002"
    save(tmp_path, 6, best=6)
    assert names(tmp_path) == ["best", "latest", "step-000005", "step-000006"]


def test_only_the_newest_are_kept_and_latest_points_to_the_last(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
        assert latest(tmp_path) == f"step-{step:06d}"
    assert names(tmp_path) == ["latest", "step-000020", "step-000030"]


def test_the_one_just_written_is_never_removed(tmp_path: Path) -> None:
    for step in (30, 40, 5):
        save(tmp_path, step, keep_last=1)
        assert (tmp_path / f"step-{step:06d}").is_dir()
        assert latest(tmp_path) == f"step-{step:06d}"


def test_the_one_of_the_step_before_goes_unless_it_is_due(tmp_path: Path) -> None:
    for step in (3, 4, 5, 6):
        save(tmp_path, step, every=5, keep_last=9)
    assert names(tmp_path) == ["latest", "step-000005", "step-000006"]


def test_the_one_that_a_sampler_has_started_from_is_not_removed(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, keep_last=1, in_use=10)
    assert names(tmp_path) == ["latest", "step-000010", "step-000030"]
    mark_best(tmp_path, 30, keep_last=1, every=10)
    assert names(tmp_path) == ["best", "latest", "step-000030"]


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        save(tmp_path, step)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-999999", "step-1000000"]


def test_later_checkpoints_are_dropped_and_latest_follows(tmp_path: Path) -> None:
    (tmp_path / ".step-000002.incomplete" / "model").mkdir(parents=True)  # left by a crash: the next save clears it
    for step in (10, 20, 30):
        save(tmp_path, step, keep_last=5)
    assert [path.name for path in drop_checkpoints_after(tmp_path, 20)] == ["step-000030"]
    assert (names(tmp_path), latest(tmp_path)) == (["latest", "step-000010", "step-000020"], "step-000020")
    assert drop_checkpoints_after(tmp_path, 20) == []
    assert [path.name for path in drop_checkpoints_after(tmp_path, 0)] == ["step-000010", "step-000020"]
    assert names(tmp_path) == []


def test_a_run_copied_with_folders_for_links_has_links_again(tmp_path: Path) -> None:
    save(tmp_path / "there", 1, best=1)
    save(tmp_path / "there", 2, best=1)
    shutil.copytree(tmp_path / "there", tmp_path / "here")  # which follows links, as scp does
    assert not (tmp_path / "here/latest").is_symlink()
    save(tmp_path / "here", 3, best=3)
    assert (latest(tmp_path / "here"), os.readlink(tmp_path / "here/best")) == ("step-000003", "step-000003")
    shutil.copytree(tmp_path / "here", tmp_path / "further")
    assert drop_checkpoints_after(tmp_path / "further", 0) != []
    assert not point_best(tmp_path / "further", None)
    assert names(tmp_path / "further") == []


# The model alone


def test_all_but_the_newest_keep_the_model_alone(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, best=1, write_adapter=write_model)
    assert names(tmp_path) == ["best", "latest", "step-000001", "step-000002", "step-000003"]
    for step in (1, 2):
        older = tmp_path / f"step-{step:06d}"
        assert names(older) == ["adapter", "manifest.json", "model"]
        verify(older)  # as a model
        with pytest.raises(CheckpointError, match=rf"step-{step:06d} .* from latest"):
            load_checkpoint(older)
    assert load_checkpoint(tmp_path / "step-000003")[1] == STATE
    (tmp_path / "step-000001" / "model" / "weights.bin").write_bytes(bytes(256))
    with pytest.raises(CheckpointError, match=r"weights\.bin"):
        verify(tmp_path / "step-000001")


def test_what_is_freed_is_the_state(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    size = sum((path / "state" / name).stat().st_size for name in ("tensors.safetensors", "state.json"))
    assert bytes_of_state(path) == size
    for _ in range(2):
        keep_the_model_alone(path)
        assert bytes_of_state(path) == 0
    with pytest.raises(CheckpointError, match=re.escape(f"model.path={path}")):  # there is no other to resume from
        load_checkpoint(path)


@pytest.mark.parametrize("dies_in", ["os.replace", "shutil.rmtree"])
def test_a_crash_while_state_is_removed_keeps_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_in: str
) -> None:
    older = save(tmp_path, 1)
    real = {"os.replace": os.replace, "shutil.rmtree": shutil.rmtree}[dies_in]

    def dies(path: Any, *rest: Any, **kind: Any) -> Any:
        if ".state.removed" in str([path, *rest]) and Path(path).exists():
            raise KeyboardInterrupt
        return real(path, *rest, **kind)

    monkeypatch.setattr(dies_in, dies)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert latest(tmp_path) == "step-000002"
    assert load_checkpoint(tmp_path / "step-000002")[1] == STATE
    verify(older)
    with pytest.raises(CheckpointError, match="step-000001"):
        load_checkpoint(older)
    save(tmp_path, 3)
    assert names(tmp_path / "step-000002") == ["manifest.json", "model"]
    save(tmp_path, 4, keep_last=9)
    assert bytes_of_state(tmp_path / "step-000003") == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_step_that_is_saved_again_and_fails_is_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    before = save(tmp_path, 1)
    real = os.replace

    def fails(path: Path, to: Path) -> None:
        if Path(path).name == ".step-000001.incomplete":
            raise error
        real(path, to)

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else CheckpointError):
        save(tmp_path, 1)
    monkeypatch.undo()
    verify(before)
    assert names(tmp_path) == ["latest", "step-000001"]
    save(tmp_path, 1)
    assert names(tmp_path) == ["latest", "step-000001"]


# Damage


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [cut, flip_a_bit, Path.unlink], ids=["cut", "a flipped bit", "missing"])
def test_a_damaged_file_is_refused_by_its_name(tmp_path: Path, damage: Callable[[Path], object], name: str) -> None:
    path = save(tmp_path, 1)
    damage(path / name)
    with pytest.raises(CheckpointError, match=re.escape(str(path / name))):
        load_checkpoint(path)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"model/config.json": 3}', b'{"a": {}}', b"\xff\xfe"])
def test_a_manifest_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = save(tmp_path, 1)
    (path / "manifest.json").unlink()
    if content is not None:
        (path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load_checkpoint(path)


def test_a_manifest_that_leaves_the_state_out_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tensors\.safetensors"):
        load_checkpoint(path)


def test_no_changed_byte_of_the_manifest_goes_unnoticed(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    content = (path / "manifest.json").read_bytes()
    for place in range(0, len(content), 3):
        changed = bytearray(content)
        changed[place] ^= 4
        (path / "manifest.json").write_bytes(changed)
        try:
            verify(path)
        except CheckpointError:
            continue
        assert chr(content[place]).isspace() or json.loads(bytes(changed)) == json.loads(content)


def test_a_model_of_a_checkpoint_without_its_manifest_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 1)
    verify_model(path / "model")
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-000001 .*manifest\.json"):
        verify_model(path / "model")


def test_what_is_not_whole_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        save(folder, step, keep_last=9)
    (folder / "step-000001" / "manifest.json").unlink()
    assert passed_over(tmp_path) == []  # older than the newest that is whole
    (folder / "step-000003" / "manifest.json").unlink()
    (folder / "step-000004").mkdir()
    (folder / ".step-000005.incomplete").mkdir()
    assert [path.name for path in passed_over(tmp_path)] == ["step-000003", "step-000004"]
    assert [path.name for path in unfinished_saves(folder)] == [".step-000005.incomplete"]


# A disk that does not take it, and a machine that stops


def test_a_full_disk_leaves_only_the_earlier_checkpoint(tmp_path: Path) -> None:
    """No file may grow beyond 1000 bytes: the tensors of the second checkpoint do not fit."""
    save(tmp_path, 1)
    program = f"""
import resource, sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from rlpost.errors import CheckpointError
from test_checkpoint import save
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    save(Path({str(tmp_path)!r}), 2, tensors={{"big": torch.zeros(1000)}})
except CheckpointError as error:
    print("refused:", error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("refused: ")
    assert f"{tmp_path}/step-000002: " in done.stdout
    assert (names(tmp_path), latest(tmp_path)) == (["latest", "step-000001"], "step-000001")
    assert load_checkpoint(tmp_path / "step-000001")[1] == STATE


def test_a_model_that_cannot_be_written_leaves_no_trace(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        write_model(folder)
        raise ValueError("a bug, not a full disk")

    with pytest.raises(ValueError, match="a bug"):
        save(tmp_path, 1, write_model=broken)
    assert names(tmp_path) == []


def test_a_checkpoint_is_synced_before_its_name_and_its_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = recorded(monkeypatch)
    save(tmp_path / "checkpoints", 3)
    named = steps.index("replaced")
    files = {name.rpartition("/")[2] for name in [*FILES, "manifest.json"]}
    folders = {"model", "state", ".step-000003.incomplete"}
    assert {step.removeprefix("synced ") for step in steps[:named]} == files | folders
    assert steps[named:] == ["replaced", "synced checkpoints"] * 2  # its name, then `latest`
