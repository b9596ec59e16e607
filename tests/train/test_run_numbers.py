"""The formats that runs, evaluations and conversations compute in, on a machine that is fast in one or the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlpost.catalog import EVAL, TRAIN_EXPERT_ITERATION, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.chat import load_policy
from rlpost.cli.main import run as rlpost
from rlpost.config.compose import compose
from rlpost.model import precision
from rlpost.model.load import load_model
from rlpost.model.precision import this_device
from rlpost.policies import transformers as sampling
from rlpost.policies.transformers import TransformersWrapper
from rlpost.policies.vllm import engine_arguments
from rlpost.settings import Autocast, DType, ModelSettings, SamplingSettings, VLLMSettings
from rlpost.settings.commands import RunRequest
from rlpost.train import resolve, update

SMALL = ["model=tiny", "policy=transformers", "env.max_completion_tokens=2", "eval.enabled=false", "checkpoint.every=0"]
SAMPLED = [*SMALL, "prompts_per_step=2", "group_size=2", "deterministic=true"]
LOOPS: dict[Command[Any], list[str]] = {
    TRAIN_GRPO: [*SAMPLED, "loss.kl_coef=0.1", "passes=2"],
    TRAIN_SFT: [*SMALL, "env.limit=4", "minibatch_size=2"],
    TRAIN_EXPERT_ITERATION: [*SAMPLED, "topk_size=1", "min_reward=0.0"],
}
FASTER = {True: Autocast.bfloat16, False: Autocast.none}
Used = list[Autocast]


def machine(monkeypatch: pytest.MonkeyPatch, *, fast: bool) -> None:
    """A machine that is five times faster, or slower, in bfloat16."""
    speeds = {DType.float32: 100.0, DType.bfloat16: 500.0 if fast else 20.0}
    monkeypatch.setattr(precision, "product_speeds", lambda: speeds)


@pytest.fixture(autouse=True)
def determinism_is_left_as_it_was() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Used:
    """Every format that a learner or a sampling model has computed in."""
    noted: Used = []

    def noting(kind: Autocast, device: torch.device) -> Any:
        noted.append(kind)
        return precision.autocast(kind, device)

    monkeypatch.setattr(update, "autocast", noting)
    monkeypatch.setattr(sampling, "autocast", noting)
    return noted


def train(command: Command[Any], folder: Path, *words: str, resume: str | None = None) -> None:
    small = LOOPS[command]
    composed = compose(command, [*small, *words])
    typed = ["rlpost", *command.verb.split()]
    assert command.train(composed.settings, RunRequest(folder, resume, composed.overrides, typed, composed.yaml)) == 0


def recorded(folder: Path) -> list[dict[str, str]]:
    """The formats in the run's own record and in its last checkpoint's."""
    files = (folder / "environment.json", folder / "checkpoints/latest/state/state.json")
    return [json.loads(file.read_text())["numbers"] for file in files]


@pytest.mark.parametrize("command", LOOPS, ids=lambda command: command.name)
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
def test_a_run_keeps_the_format_of_the_machine_it_began_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    used: Used,
    command: Command[Any],
    fast: bool,
) -> None:
    name = {Autocast.bfloat16: "bfloat16", Autocast.none: "float32"}[FASTER[fast]]
    machine(monkeypatch, fast=fast)
    train(command, tmp_path, "steps=1")
    assert set(used) == {FASTER[fast]}
    what = f"{name} products" + ("" if command is TRAIN_SFT else " and sampling")
    rates = "bfloat16 500, float32 100" if fast else "float32 100, bfloat16 20"
    said = capsys.readouterr().out
    assert f"\nprecision {what} (measured here: {rates} GFLOP/s a core)\n" in said
    assert "changes it" not in said
    formats = {"model.autocast": FASTER[fast].value, "policy.dtype": name}
    formats["model.day"] = date.today().isoformat()
    assert [each | {"why": ""} for each in recorded(tmp_path)] == [formats | {"why": ""}] * 2

    used.clear()
    machine(monkeypatch, fast=not fast)
    train(command, tmp_path, "steps=2", resume="latest")
    assert set(used) == {FASTER[fast]}
    said = capsys.readouterr().out
    assert f"\nprecision {what} (as the run began)\n" in said
    other = FASTER[not fast].value
    assert said.count(f"the run began so; model.autocast={other} changes it") == 1
    assert recorded(tmp_path) == [formats | {"why": "as the run began"}] * 2


def test_a_run_that_went_on_where_the_measurement_differs_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, fast=True)
    words = ["env.max_completion_tokens=4"]
    train(TRAIN_SFT, tmp_path / "whole", "steps=2", *words)
    train(TRAIN_SFT, tmp_path / "parts", "steps=1", *words)
    machine(monkeypatch, fast=False)
    train(TRAIN_SFT, tmp_path / "parts", "steps=2", *words, resume="auto")
    train(TRAIN_SFT, tmp_path / "other", "steps=2", *words)
    whole, parts, other = (
        load_file(tmp_path / name / "checkpoints/latest/model/model.safetensors")
        for name in ("whole", "parts", "other")
    )
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    assert not all(torch.equal(whole[key], other[key]) for key in whole)  # a format that was not kept would show


def test_another_format_can_be_named_when_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: Used
) -> None:
    machine(monkeypatch, fast=True)
    train(TRAIN_SFT, tmp_path, "steps=1")
    used.clear()
    train(TRAIN_SFT, tmp_path, "steps=2", "model.autocast=none", resume="latest")
    assert set(used) == {Autocast.none}
    assert recorded(tmp_path)[1]["policy.dtype"] == "float32"


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (TRAIN_GRPO, ["policy=vllm"]),
        (TRAIN_GRPO, ["policy=auto"]),
        (TRAIN_SFT, ["policy=vllm", "eval.accuracy=true"]),
        (TRAIN_EXPERT_ITERATION, ["policy=auto"]),
        (EVAL, ["policy=auto"]),
    ],
    ids=lambda value: value.name if isinstance(value, Command) else value[0],
)
def test_vllm_samples_in_the_format_of_the_products(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, command: Command[Any], words: list[str], fast: bool
) -> None:
    monkeypatch.setattr("rlpost.estimate.machine.is_installed", lambda package: True)
    machine(monkeypatch, fast=fast)
    given = compose(command, ["model=tiny", *words]).settings
    settings, _ = resolve.resolve(given, this_device("cpu"), None)
    policy: Any = settings.policy
    assert policy.dtype is (DType.bfloat16 if fast else DType.float32)
    assert settings.model.autocast is FASTER[fast]
    arguments = engine_arguments(tiny_folder, policy, max_model_len=64, seed=0)
    assert arguments["dtype"] == policy.dtype.value


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
def test_policies_that_a_program_makes_by_itself_resolve_auto(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, tiny_tokenizer: Any, fast: bool
) -> None:
    machine(monkeypatch, fast=fast)
    expected = "bfloat16" if fast else "float32"
    assert engine_arguments(tiny_folder, VLLMSettings(), max_model_len=64, seed=0)["dtype"] == expected
    model = load_model(tiny_folder, ModelSettings(path=""))
    policy = TransformersWrapper(model, tiny_tokenizer, sampling=SamplingSettings(), autocast=Autocast.auto)
    assert policy.autocast is FASTER[fast]


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
def test_a_conversation_holds_the_model_in_the_format_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, fast: bool
) -> None:
    machine(monkeypatch, fast=fast)
    policy, _ = load_policy(ModelSettings(path=str(tiny_folder)))
    assert policy.model.dtype is (torch.bfloat16 if fast else torch.float32)
    assert policy.autocast is Autocast.none


def test_eval_and_chat_say_on_stderr_what_they_compute_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tiny_folder: Path
) -> None:
    machine(monkeypatch, fast=False)
    words = ["model=tiny", "policy=transformers", "env.limit=1", "env.max_completion_tokens=2"]
    assert rlpost(["eval", *words, "--out", str(tmp_path / "e"), "--json"]) == 0
    told = capfd.readouterr()
    line = "precision float32 sampling (measured here: float32 100, bfloat16 20 GFLOP/s a core)\n"
    assert told.err.count(line) == 1
    kept = json.loads(told.out)["environment"]["numbers"]
    assert kept["model.autocast"] == "none"
    assert rlpost(["eval", *words, "--out", str(tmp_path / "f"), "model.autocast=bfloat16"]) == 0
    assert "note: bfloat16 products run at 20 GFLOP/s a core here" in capfd.readouterr().err
