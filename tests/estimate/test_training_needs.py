"""The memory that a training announces before it begins, and that one that cannot fit does not begin."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.cli.main import run
from rlpost.errors import ResourceError
from rlpost.estimate.machine import Room
from tests.says import Says
from tests.trainings import metrics, train_in

GB = 10**9
TINY = ["model=tiny", "model.device=cpu", "policy=transformers"]
ONE_STEP = [*TINY, "steps=1", "eval.enabled=false", "prompts_per_step=1", "group_size=2"]


@pytest.fixture
def memory_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Gives the machine so many bytes of memory, all of them free."""
    return lambda size: monkeypatch.setattr("rlpost.estimate.needs.host_memory", lambda: Room(size, size))


def test_a_training_says_what_it_takes_and_trains(
    tmp_path: Path, memory_of: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    memory_of(64 * GB)
    assert train_in(TRAIN_GRPO, tmp_path / "r", ONE_STEP) == 0
    lines = capsys.readouterr().out.splitlines()
    memory, disk = (line for line in lines if line.startswith(("memory", "disk")))
    said = re.search(r" (\d+) MB to (\d+) MB of 64 GB .*: activations 0\.01, program 0\.5$", memory)
    assert said is not None, memory
    # 0.5 GB of program, 16 bytes for each of 90,624 weights, and the activations of a few hundred tokens
    about, at_most = map(int, said.groups())
    assert 501 < about < 520
    assert at_most == pytest.approx(1.2 * about, abs=1)
    assert " 1.09 MB " in disk  # 3 x 4 x 90,624
    assert not any(line.startswith("fits") for line in lines)
    assert [line["step"] for line in metrics(tmp_path / "r")] == [1]


def test_a_training_that_may_not_fit_says_what_helps_and_goes_on(
    tmp_path: Path,
    memory_of: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
    says: Says,
) -> None:
    memory_of(GB // 2)
    assert train_in(TRAIN_GRPO, tmp_path / "r", ONE_STEP) == 0
    says("train", capsys.readouterr().out.splitlines()[2])


@pytest.mark.parametrize(
    ("model", "memory", "weights"),
    [
        ("tiny", 10**6, "1.45 MB"),  # 16 bytes for each of 90,624 weights
        ("qwen-7b", 8 * GB, "122 GB"),  # known without the hub; 16 bytes for each of 7,615,616,512 weights
    ],
)
def test_a_training_that_cannot_fit_is_refused_before_loading(
    model: str,
    memory: int,
    weights: str,
    tmp_path: Path,
    memory_of: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
    says: Says,
) -> None:
    memory_of(memory)
    words = [f"model={model}", *TINY[1:], "model.dtype=float32"]
    with pytest.raises(ResourceError, match=re.escape(weights)) as refused:
        train_in(TRAIN_GRPO, tmp_path / "r", words)
    capsys.readouterr()
    assert run(["train", "grpo", *words, "--out", str(tmp_path / "s"), "--plain"]) == 3
    captured = capsys.readouterr()
    assert captured.err == f"error: {refused.value}\n"
    says("train", captured.err + captured.out)  # neither an estimate nor the model that would be loaded
    for folder in (tmp_path / "r", tmp_path / "s"):
        assert not (folder / "checkpoints").exists()
        assert not (folder / "metrics.jsonl").exists()
