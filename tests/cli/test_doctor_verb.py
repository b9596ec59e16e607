"""`rlpost doctor --machine`."""

from __future__ import annotations

import re

import pytest

from rlpost.doctor import machine
from tests.command_line import CommandLine


def test_machine_has_versions_devices_and_the_cache(rlpost: CommandLine) -> None:
    rows = dict(line.split(maxsplit=1) for line in rlpost.lines("doctor --machine"))
    assert list(rows) == [
        *("rlpost", "python", "torch", "transformers", "tensordict", "vllm"),
        *("devices", "precision", "cores", "memory_gib", "shared_free_gib", "cache"),
    ]
    assert rows["devices"].startswith("cpu")
    assert re.fullmatch(r"(bfloat16|float32) \(.+\)", rows["precision"])
    assert int(rows["cores"]) >= 1
    assert rows["cache"].endswith("rlpost")


def test_machine_as_json_has_null_for_what_is_missing(monkeypatch: pytest.MonkeyPatch, rlpost: CommandLine) -> None:
    from rlpost.model import precision
    from rlpost.settings import DType

    monkeypatch.setattr(machine, "installed_version", lambda package: None if "vllm" in package else "1.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(precision, "product_speeds", lambda: {DType.float32: 82.0, DType.bfloat16: 1.2})
    told = rlpost.json("doctor --machine")
    assert (told["torch"], told["vllm"], told["devices"]) == ("1.0", None, ["cpu"])
    assert (told["precision"]["device"], told["precision"]["format"]) == ("cpu", "float32")
    assert "float32 82, bfloat16 1.2 " in told["precision"]["why"]
    assert f"precision        float32 ({told['precision']['why']})\n" in rlpost("doctor --machine")
