"""The formats that runs, evaluations and conversations compute in, on a machine that is fast in one or the other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

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
from rlpost.record import AS_BEGUN
from rlpost.settings import Autocast, DType, ModelSettings, SamplingSettings, VLLMSettings
from rlpost.train import resolve, update
from tests.says import Says
from tests.trainings import ends_alike, printed, train_in

SMALL = ["model=tiny", "policy=transformers", "env.max_completion_tokens=2", "eval.enabled=false", "checkpoint.every=0"]
SAMPLED = [*SMALL, "prompts_per_step=2", "group_size=2", "deterministic=true"]
LOOPS: dict[Command[Any], list[str]] = {
    TRAIN_GRPO: [*SAMPLED, "loss.kl_coef=0.1", "passes=2"],
    TRAIN_SFT: [*SMALL, "env.limit=4", "minibatch_size=2"],
    TRAIN_EXPERT_ITERATION: [*SAMPLED, "topk_size=1", "min_reward=0.0"],
}
FASTER = {True: Autocast.bfloat16, False: Autocast.none}
SPEEDS = pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
Used = list[Autocast]
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """`machine(fast=True)`: bfloat16 is five times faster here than float32, or slower; vLLM is installed."""

    monkeypatch.setattr("rlpost.estimate.machine.is_installed", lambda package: True)

    def measured(*, fast: bool) -> None:
        speeds = {DType.float32: 100.0, DType.bfloat16: 500.0 if fast else 20.0}
        monkeypatch.setattr(precision, "product_speeds", lambda: speeds)

    return measured


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
    assert train_in(command, folder, [*LOOPS[command], *words], resume) == 0


def recorded(folder: Path) -> list[dict[str, str]]:
    """The formats in the run's own record and in its last checkpoint's."""
    files = (folder / "environment.json", folder / "checkpoints/latest/state/state.json")
    return [json.loads(file.read_text())["numbers"] for file in files]


@pytest.mark.parametrize("command", LOOPS, ids=lambda command: command.name)
@SPEEDS
def test_run_keeps_its_format_unless_another_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], machine: Machine, used: Used, command: Command[Any], fast: bool
) -> None:
    name, other = ("bfloat16", "none") if fast else ("float32", "bfloat16")
    machine(fast=fast)
    train(command, tmp_path, "steps=1")
    assert set(used) == {FASTER[fast]}
    assert re.search(rf"{name} products.*bfloat16 {500 if fast else 20}", printed(capsys, "precision"))
    formats = {"model.autocast": FASTER[fast].value, "policy.dtype": name, "model.day": date.today().isoformat()}
    assert [each | {"why": ""} for each in recorded(tmp_path)] == [formats | {"why": ""}] * 2

    used.clear()
    machine(fast=not fast)
    train(command, tmp_path, "steps=2", resume="latest")
    assert set(used) == {FASTER[fast]}
    assert printed(capsys, f"model.autocast={other}").count("\n") == 0  # the advice that changes it, once
    assert recorded(tmp_path) == [formats | {"why": AS_BEGUN}] * 2

    used.clear()
    train(command, tmp_path, "steps=3", f"model.autocast={other}", resume="latest")
    assert set(used) == {FASTER[not fast]}
    assert recorded(tmp_path)[1]["policy.dtype"] == ("float32" if fast else "bfloat16")


def test_run_resumed_on_another_machine_ends_alike(tmp_path: Path, machine: Machine) -> None:
    machine(fast=True)
    words = ["env.max_completion_tokens=4"]
    train(TRAIN_SFT, tmp_path / "whole", "steps=2", *words)
    train(TRAIN_SFT, tmp_path / "parts", "steps=1", *words)
    machine(fast=False)
    train(TRAIN_SFT, tmp_path / "parts", "steps=2", *words, resume="auto")
    train(TRAIN_SFT, tmp_path / "other", "steps=2", *words)
    assert ends_alike(tmp_path / "whole", tmp_path / "parts")
    assert not ends_alike(tmp_path / "whole", tmp_path / "other")  # a format that was not kept would show


@SPEEDS
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
    tiny_folder: Path, machine: Machine, command: Command[Any], words: list[str], fast: bool
) -> None:
    machine(fast=fast)
    given = compose(command, ["model=tiny", *words]).settings
    settings, _ = resolve.resolve(given, this_device("cpu"), None)
    policy: Any = settings.policy
    assert policy.dtype is (DType.bfloat16 if fast else DType.float32)
    assert settings.model.autocast is FASTER[fast]
    assert engine_arguments(tiny_folder, policy, max_model_len=64, seed=0)["dtype"] == policy.dtype.value


@SPEEDS
def test_policies_that_a_program_makes_resolve_auto(
    machine: Machine, tiny_folder: Path, tiny_tokenizer: Any, fast: bool
) -> None:
    machine(fast=fast)
    expected = DType.bfloat16 if fast else DType.float32
    assert engine_arguments(tiny_folder, VLLMSettings(), max_model_len=64, seed=0)["dtype"] == expected.value
    model = load_model(tiny_folder, ModelSettings(path=""))
    policy = TransformersWrapper(model, tiny_tokenizer, sampling=SamplingSettings(), autocast=Autocast.auto)
    assert policy.autocast is FASTER[fast]
    of_chat, _ = load_policy(ModelSettings(path=str(tiny_folder)))  # holds the model itself in the format
    assert (of_chat.model.dtype, of_chat.autocast) == (getattr(torch, expected.value), Autocast.none)


def test_eval_says_on_stderr_what_it_computes_in(
    tmp_path: Path, machine: Machine, capfd: pytest.CaptureFixture[str], says: Says
) -> None:
    machine(fast=False)
    words = ["model=tiny", "policy=transformers", "env.limit=1", "env.max_completion_tokens=2"]
    assert rlpost(["eval", *words, "--out", str(tmp_path / "e"), "--json"]) == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out)["environment"]["numbers"]["model.autocast"] == "none"
    assert rlpost(["eval", *words, "--out", str(tmp_path / "f"), "model.autocast=bfloat16"]) == 0
    lines = (shown.err + capfd.readouterr().err).splitlines()
    says("eval", "\n".join(line for line in lines if "GFLOP/s" in line))
