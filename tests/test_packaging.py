"""What is shipped: a wheel that works anywhere, an sdist that makes it again, and what checks both."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hatchling import build

import rlpost

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSIDE = f"rlpost-{rlpost.__version__}.dist-info"
PYTHONS = ["3.11", "3.12", "3.13"]


def built_wheel(source: Path, into: Path) -> zipfile.ZipFile:
    """The wheel that the sources in `source` make, without a network."""
    before = Path.cwd()
    os.chdir(source)  # where a build backend looks, by its specification
    try:
        return zipfile.ZipFile(into / build.build_wheel(str(into)))
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return built_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


def files(folder: Path, under: str) -> set[str]:
    """What lies in a folder of the repository, as it is to be named in the wheel."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {f"{under}/{path}" for path in found if "__pycache__" not in path.parts}


def test_the_wheel_holds_the_package_conf_and_recipes_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if not name.startswith(f"{INSIDE}/")}
    assert inside == (
        files(ROOT / "rlpost", "rlpost")
        | files(ROOT / "conf", "rlpost/_builtin/conf")
        | files(ROOT / "recipes", "rlpost/_builtin/recipes")
    )
    assert {"rlpost/starters/env.py", "rlpost/starters/reward.py", "rlpost/py.typed"} <= inside
    assert "rlpost/data/templates/chatml.jinja" in inside
    about = {name.removeprefix(f"{INSIDE}/") for name in wheel.namelist()} - inside
    assert about == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    assert wheel.read(f"{INSIDE}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_an_unpacked_wheel_runs_outside_the_repository(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    (tmp_path / "elsewhere").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}

    def rlpost_says(*words: str) -> str:
        command = [sys.executable, "-m", "rlpost", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "elsewhere", env=environment)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert rlpost_says("--version") == f"rlpost {rlpost.__version__}\n"
    listed = rlpost_says("config", "list")
    assert "tracking=" in listed
    assert "gsm8k-smollm2-cpu" in listed
    shown = rlpost_says("config", "show", "train", "grpo", "recipe=gsm8k-smollm2-cpu")
    assert yaml.safe_load(shown)["tracking"] == {}


def test_the_source_distribution_makes_the_same_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        source = tmp_path / build.build_sdist(str(tmp_path))
    finally:
        os.chdir(before)
    safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from 3.11.4 on
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, **safely)
    unpacked = tmp_path / source.name.removesuffix(".tar.gz")
    again = built_wheel(unpacked, tmp_path)
    assert {(f.filename, f.CRC) for f in again.infolist()} == {(f.filename, f.CRC) for f in wheel.infolist()}
    assert (unpacked / "tests" / "test_packaging.py").is_file()
    assert not (unpacked / "runs").exists()


def test_the_program_is_the_command_line() -> None:
    module, _, name = PROJECT["scripts"]["rlpost"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


# What checks a change


def test_the_workflow_runs_make_check_on_every_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())
    triggers = workflow[True]  # YAML reads the key `on` as true
    assert set(triggers) == {"push", "pull_request"}
    job = workflow["jobs"]["check"]
    assert job["strategy"]["matrix"]["python"] == PYTHONS
    tools, command = [step for step in job["steps"] if "run" in step]
    assert {"bubblewrap", "chromium-browser"} <= set(tools["run"].split())  # what the tools' tests need
    assert command["run"] == "make check"
    assert command["env"] == {"PYTHON": "python", "RLPOST_ENGINE": "cpu"}
    [python] = [step["with"] for step in job["steps"] if step.get("uses", "").startswith("actions/setup-python@")]
    assert (python["python-version"], python["cache"]) == ("${{ matrix.python }}", "pip")
