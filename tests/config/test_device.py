"""A device that is not there is refused without torch."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from rlpost.errors import ConfigError
from rlpost.estimate import machine
from rlpost.estimate.machine import check_device


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_torch_build", lambda: {"__version__": "2.13.0+cpu", "cuda": "", "xpu": ""})
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
    said: str, asked: str, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_torch_build", lambda: {"__version__": "2.13.0", "cuda": "13.0"})
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: SimpleNamespace(stdout=f"{said}\n"))
    monkeypatch.setattr(machine.sys, "platform", "linux")
    if message is None:
        check_device(asked)
        return
    with pytest.raises(ConfigError, match=rf"model\.device={asked} cannot be used here: {message}"):
        check_device(asked)


def test_what_torch_was_built_for_is_what_torch_says() -> None:
    import torch

    built = machine._torch_build()
    assert built["__version__"] == torch.__version__
    assert (built["cuda"] or None, built["hip"] or None) == (torch.version.cuda, torch.version.hip)
