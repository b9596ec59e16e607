"""A device that is not there is refused without torch."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlpost.errors import ConfigError
from rlpost.estimate import machine
from rlpost.estimate.machine import check_device


@pytest.fixture
def torch_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Installs a torch whose version.py holds this text."""
    package = tmp_path / "torch"
    package.mkdir()

    def install(text: str) -> None:
        (package / "version.py").write_text(text)
        origin = str(package / "__init__.py")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=origin))

    return install


def test_a_torch_without_cuda_is_named(torch_built: Callable[[str], None]) -> None:
    torch_built("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nxpu: Optional[str] = None\n")
    for asked in ("cuda", "cuda:7"):
        with pytest.raises(ConfigError, match=rf"model\.device={asked} .*torch 2\.13\.0\+cpu is built without CUDA"):
            check_device(asked)
    with pytest.raises(ConfigError, match="built without XPU"):
        check_device("xpu")
    check_device("cpu")
    check_device("auto")


@pytest.mark.parametrize(
    ("said", "asked", "message"),
    [
        ("no driver", "cuda", "there is no CUDA driver"),
        ("0", "cuda", "CUDA shows no GPU"),
        ("error 100", "cuda:1", "CUDA shows no GPU"),
        ("2", "cuda:2", "CUDA shows 2 of them, cuda:0 to cuda:1"),
        ("2", "cuda:1", None),
        ("1", "cuda", None),
        ("error 3", "cuda", None),  # whatever that is, torch will say it
        ("", "cuda", None),
    ],
)
def test_a_gpu_is_looked_for_with_the_driver(
    said: str,
    asked: str,
    message: str | None,
    torch_built: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch_built("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: SimpleNamespace(stdout=f"{said}\n"))
    monkeypatch.setattr(machine.sys, "platform", "linux")
    if message is None:
        check_device(asked)
        return
    with pytest.raises(ConfigError, match=rf"model\.device={asked} cannot be used here: {message}"):
        check_device(asked)


def test_the_installed_torch_is_read_as_torch_reads_itself() -> None:
    import torch

    lacks_cuda = torch.version.cuda is None and torch.version.hip is None
    try:
        check_device("cuda")
        message = ""
    except ConfigError as error:
        message = str(error)
    assert (f"torch {torch.__version__} is built without CUDA" in message) == lacks_cuda
