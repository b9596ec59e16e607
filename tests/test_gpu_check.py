"""scripts/gpu_check: that its checks find what they look for. All of them together are marked slow."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import gpu_check
import gpu_parts
import pytest
import torch

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "gpu_check.py"


def report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: Path, *names: str
) -> tuple[int, dict]:
    only = [word for name in names for word in ("--only", name)]
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--quick", *only, "--out", str(out)])
    code = gpu_check.main()
    said = capsys.readouterr().out
    assert out.read_text() == said
    return code, json.loads(said)


def test_packed_rows_equal_plain_ones_and_a_wrong_mask_would_show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, said = report(monkeypatch, capsys, tmp_path / "r.json", "packed equals plain")
    assert (code, said["ok"], said["device"]) == (0, True, "cpu")
    assert said["versions"]["torch"] == importlib.metadata.version("torch")
    found = said["checks"]["packed equals plain"]
    assert found["float32"]["largest_difference"] < 1e-5 < 1e-2 < found["float32"]["mean_if_rows_saw_each_other"]


def test_a_check_that_fails_or_breaks_makes_the_exit_code_1_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fails(bench: object) -> dict:
        raise gpu_check.Failed("no gradient")

    def left_out(bench: object) -> dict:
        raise gpu_check.Left("not installed")

    monkeypatch.setattr(
        gpu_check,
        "CHECKS",
        {"fails": fails, "breaks": lambda bench: 1 / 0, "left": left_out, "holds": lambda bench: {"figure": 3}},
    )
    code, said = report(monkeypatch, capsys, tmp_path / "r.json")
    assert (code, said["ok"]) == (1, False)
    assert {name: found["verdict"] for name, found in said["checks"].items()} == {
        "fails": "failed",
        "breaks": "failed",
        "left": "left out",
        "holds": "ok",
    }
    assert "ZeroDivisionError" in said["checks"]["breaks"]["why"]
    assert said["checks"]["holds"]["figure"] == 3


def test_the_parts_measure_a_small_model_on_a_cpu(tiny_folder: Path) -> None:
    found = gpu_parts.kernels(tiny_folder)
    assert found["in padded blocks"]["shapes"] == 3
    assert "cpu" in found["in sequences"]
    [of_rows] = [value for value in gpu_parts.speed(tiny_folder).values() if isinstance(value, dict)]
    assert of_rows["tokens_per_second"] > 0
    assert 0 < of_rows["head_share"] < 1
    assert set(gpu_parts.head(tiny_folder)) == {"64 at once", "128 at once"}
    assert gpu_parts.push(tiny_folder)["bfloat16"] >= 0
    with pytest.raises(gpu_parts.Left, match="GPU"):
        gpu_parts.allocator(tiny_folder)


@pytest.mark.slow
def test_every_check_of_the_quick_form_passes_on_the_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick", "--out", str(tmp_path / "r.json")],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    verdicts = {name: found["verdict"] for name, found in json.loads(done.stdout)["checks"].items()}
    assert set(verdicts.values()) <= {"ok", "left out"}
