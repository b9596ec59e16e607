"""What a training says of memory before it begins, and that one that cannot fit does not begin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.cli.main import run
from rlpost.errors import ResourceError
from rlpost.estimate.machine import Room
from rlpost.train import grpo
from tests.trainings import metrics, train_in

GB = 10**9
TINY = ["model=tiny", "model.device=cpu", "policy=transformers"]
ONE_STEP = [*TINY, "steps=1", "eval.enabled=false", "prompts_per_step=1", "group_size=2"]


@pytest.fixture
def assembled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the models of which the parts of a training were made."""
    paths: list[str] = []
    original = grpo.assemble_grpo

    def noted(settings: grpo.GRPOSettings, checkpoint: Path | None = None) -> grpo.GRPOParts:
        paths.append(settings.model.path)
        return original(settings, checkpoint)

    monkeypatch.setattr(grpo, "assemble", noted)
    return paths


def with_memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """A machine of `size` bytes of memory, all of them free."""
    monkeypatch.setattr("rlpost.estimate.needs.host_memory", lambda: Room(size, size))


def test_a_training_says_what_it_takes_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], assembled: list[str]
) -> None:
    with_memory(monkeypatch, 64 * GB)
    assert train_in(TRAIN_GRPO, tmp_path / "r", ONE_STEP) == 0
    lines = capsys.readouterr().out.splitlines()
    memory, disk = (line for line in lines if line.startswith(("memory", "disk")))
    said = re.fullmatch(
        r"memory  about (\d+) MB to (\d+) MB of 64 GB free, by estimate \(in GB\): activations 0\.01, program 0\.5",
        memory,
    )
    assert said is not None, memory
    # 0.5 GB of program, 16 bytes for each of 90,624 weights, and the activations of a few hundred tokens
    about, at_most = map(int, said.groups())
    assert 501 < about < 520
    assert at_most == pytest.approx(1.2 * about, abs=1)
    assert disk.startswith("disk    about 1.09 MB for checkpoints at most, by estimate, of ")  # 3 x 4 x 90,624
    assert not any(line.startswith("fits") for line in lines)
    assert assembled == ["builtin:tiny"]
    assert [line["step"] for line in metrics(tmp_path / "r")] == [1]


def test_a_training_that_may_not_fit_says_what_helps_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], assembled: list[str]
) -> None:
    with_memory(monkeypatch, GB // 2)
    assert train_in(TRAIN_GRPO, tmp_path / "r", ONE_STEP) == 0
    _, _, fits, *_ = capsys.readouterr().out.splitlines()
    assert fits == "memory  may not suffice; ways to need less: a smaller model, a GPU"
    assert assembled == ["builtin:tiny"]


@pytest.mark.parametrize(
    ("words", "memory", "why", "helps"),
    [
        (
            TINY,  # 16 bytes for each of 90,624 weights
            10**6,
            "training builtin:tiny cannot work here: weights, gradients, moments take 1.45 MB, and this machine has "
            "1 MB in all; what helps: ",
            ["lora.enabled=true (saves ", "model.dtype=bfloat16 (saves 725 kB)", "a smaller model", "a GPU"],
        ),
        (
            ["model=qwen-7b", *TINY[1:]],  # known without the hub; 16 bytes for each of 7,615,616,512 weights
            8 * GB,
            "training Qwen/Qwen2.5-7B-Instruct cannot work here: weights, gradients, moments take 122 GB, and this "
            "machine has 8 GB in all; what helps: ",
            ["lora.enabled=true (saves ", "model.dtype=bfloat16 (saves 60.9 GB)", "model=smollm2", "a GPU"],
        ),
    ],
    ids=["tiny", "qwen-7b"],
)
def test_a_training_that_cannot_fit_is_refused_before_loading(
    words: list[str],
    memory: int,
    why: str,
    helps: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    assembled: list[str],
) -> None:
    with_memory(monkeypatch, memory)
    words = [*words, "model.dtype=float32"]
    with pytest.raises(ResourceError) as refused:
        train_in(TRAIN_GRPO, tmp_path / "r", words)
    text = str(refused.value)
    assert text.startswith(why)
    places = [text.index(word) for word in helps]
    assert places == sorted(places)
    assert refused.value.exit_code == 3
    capsys.readouterr()
    assert run(["train", "grpo", *words, "--out", str(tmp_path / "s"), "--plain"]) == 3
    captured = capsys.readouterr()
    assert captured.err == f"error: {text}\n"
    # neither an estimate nor the model that would be loaded
    assert captured.out == f"nothing was trained, so {tmp_path / 's'} is removed\n"
    assert assembled == []
    for folder in (tmp_path / "r", tmp_path / "s"):
        assert not (folder / "checkpoints").exists()
        assert not (folder / "metrics.jsonl").exists()
