"""`rlpost info`."""

from __future__ import annotations

import json
import re

import pytest

from rlpost.cli import info
from rlpost.cli.main import run


def test_info_names_versions_devices_and_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(rows) == [
        "rlpost", "python", "torch", "transformers", "tensordict", "vllm", "devices",
        "precision", "cores", "memory", "shared", "cache"
    ]  # fmt: skip
    assert rows["devices"].startswith("cpu")
    assert re.fullmatch(r"(bfloat16|float32) \(.+\)", rows["precision"])
    assert int(rows["cores"]) >= 1
    assert rows["cache"].endswith("rlpost")


def test_info_as_json_has_null_for_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(info, "installed_version", lambda package: None if "vllm" in package else "1.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(["info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["torch"], told["vllm"], told["devices"]) == ("1.0", None, ["cpu"])


def test_info_says_which_format_auto_stands_for_and_how_that_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlpost.model import precision
    from rlpost.settings import DType

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(precision, "product_speeds", lambda: {DType.float32: 82.0, DType.bfloat16: 1.2})
    why = "measured here: float32 82, bfloat16 1.2 GFLOP/s a core"
    assert run(["info"]) == 0
    assert f"precision     float32 ({why})\n" in capsys.readouterr().out
    assert run(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["precision"] == {"device": "cpu", "format": "float32", "why": why}
