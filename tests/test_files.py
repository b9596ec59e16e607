"""A file is there whole or not at all, whoever writes it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rlpost.files import replaced


def test_a_file_appears_when_the_block_has_ended_with_the_permissions_of_any_other(tmp_path: Path) -> None:
    file, ordinary = tmp_path / "cached.json", tmp_path / "ordinary"
    ordinary.write_text("")
    with replaced(file) as making:
        making.write_text("whole")
        assert not file.exists()
    assert file.read_text() == "whole"
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["cached.json", "ordinary"]


def test_a_block_that_raises_leaves_what_was_there_and_nothing_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text("before")

    def fail_half_way() -> None:
        with replaced(file) as making:
            making.write_text("half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail_half_way()
    assert file.read_text() == "before"
    assert os.listdir(tmp_path) == ["result.json"]


def test_what_takes_a_files_place_is_on_the_disk_before_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = recorded(monkeypatch)
    with replaced(tmp_path / "a.json") as making:
        making.write_text("x")
    assert steps == [f"synced {making.name}", "replaced", f"synced {tmp_path.name}"]


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that are synced and when one replaces another, from now on, in their order."""
    steps: list[str] = []
    sync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        steps.append(f"synced {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        sync(descriptor)

    def taken(source: Path, target: Path) -> None:
        steps.append("replaced")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", taken)
    return steps
