"""Settings that hold: what a command leaves open is chosen once, with a reason, and kept by a run that is resumed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlpost.catalog import EVAL, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.cli.main import run
from rlpost.config.compose import compose
from rlpost.estimate.machine import Device, Room
from rlpost.estimate.needs import share_beside
from rlpost.estimate.shape import HUB_MODELS, PACKAGED_CONFIGS, Shape, shape_of_config
from rlpost.settings import Engine, SamplerCorrection
from rlpost.train.resolve import CORRECTION, DAY, LAG, in_yaml, resolve

pytestmark = pytest.mark.thorough

GB = 10**9
H100 = Room(84 * GB, 85 * GB)
ALWAYS = {"policy", DAY, LAG, CORRECTION}  # changes that depend on neither device nor size


def shape(option: str) -> Shape:
    path = compose(TRAIN_GRPO, [f"model={option}"]).settings.model.path
    found = shape_of_config(PACKAGED_CONFIGS.get(path) or HUB_MODELS[path].config)
    assert found is not None
    return found


def chosen(
    option: str, *words: str, gpu: Room | None = None, kept: dict[str, Any] | None = None, command: Any = TRAIN_GRPO
) -> tuple[Any, dict[str, Any]]:
    settings = compose(command, [f"model={option}", *words]).settings
    settings, changes = resolve(settings, Device(gpu), shape(option), kept)
    return settings, {each.key: each.value for each in changes}


@pytest.mark.parametrize(
    ("option", "word", "command", "rate"),
    [
        *[("smollm2", "", TRAIN_GRPO, 2e-5), ("qwen", "", TRAIN_GRPO, 2e-6), ("qwen-1.5b", "", TRAIN_GRPO, 1e-6)],
        *[("qwen-7b", "lora.enabled=true", TRAIN_GRPO, 1e-5), ("qwen-7b", "optim.lr=3e-6", TRAIN_GRPO, 3e-6)],
        *[("qwen", "", TRAIN_SFT, 2e-5), ("qwen-7b", "", TRAIN_SFT, 1e-5)],
    ],
)
def test_learning_rate_follows_from_the_size(option: str, word: str, command: Command[Any], rate: float) -> None:
    settings, choices = chosen(option, *word.split(), command=command)
    assert settings.optim.lr == rate
    assert ("optim.lr" in choices) == ("lr" not in word)
    assert set(choices) <= {"optim.lr", *ALWAYS}  # on a CPU nothing else


def test_settings_that_follow_from_an_unknown_size_stay_open() -> None:
    settings, changes = resolve(compose(TRAIN_GRPO, ["policy=vllm"]).settings, Device(H100), None)
    assert settings.optim.lr is None
    assert settings.tokens_per_microbatch is None
    assert {each.key for each in changes} == {DAY, LAG, CORRECTION}


@pytest.mark.parametrize(
    ("words", "lag", "correction"),
    [
        *[([], 0, "none"), (["collector=async"], 1, "tis_token"), (["collector=async", "max_policy_lag=0"], 0, "none")],
        (["collector=async", "loss.ratio_to=sampler"], 1, "none"),
        (["max_policy_lag=2", "loss.sampler_correction=icepop"], 2, "icepop"),
    ],
)
def test_stale_completions_are_bounded_and_corrected(words: list[str], lag: int, correction: str) -> None:
    settings, _ = chosen("smollm2", *words)
    assert (settings.max_policy_lag, settings.loss.sampler_correction.name) == (lag, correction)


def test_with_several_ranks_an_engine_has_its_own_process() -> None:
    settings, changes = chosen("smollm2", "policy=vllm", "cluster.trainer_ranks=2")
    assert (settings.policy.engine, changes["policy.engine"]) == (Engine.own_process, Engine.own_process)


def test_resumed_run_keeps_its_own() -> None:
    kept = {"optim.lr": 2e-5, "policy.max_num_seqs": 128, "tokens_per_microbatch": None}
    settings, choices = chosen("qwen-1.5b", "policy=vllm", gpu=H100, kept=kept)
    assert (settings.optim.lr, settings.policy.max_num_seqs) == (2e-5, 128)
    assert settings.loss.sampler_correction is SamplerCorrection.none  # as it began
    assert settings.tokens_per_microbatch == choices["tokens_per_microbatch"]  # which changes no result
    assert chosen("qwen-1.5b", "optim.lr=3e-6", kept=kept)[0].optim.lr == 3e-6


def test_engine_without_a_trainer_has_its_gpu() -> None:
    words = ("policy=vllm", "collector=async", "collector.gpus=[1]")
    assert chosen("qwen", *words, gpu=H100)[1]["policy.gpu_memory_utilization"] == 0.9
    evaluated, choices = chosen("qwen", "env=gsm8k", "policy=vllm", gpu=H100, command=EVAL)
    assert (choices["policy.gpu_memory_utilization"], evaluated.policy.max_num_seqs) == (0.9, 1024)


def test_share_of_engines_in_other_processes_is_left_to_them() -> None:
    def share(*words: str) -> float:
        settings = compose(TRAIN_GRPO, ["policy=vllm", "policy.gpu_memory_utilization=0.3", *words]).settings
        return share_beside(settings)

    assert share() == 0  # in this process one allocator serves both
    assert share("policy.engine=own_process") == 0.3
    assert share("collector=async", "collector.players=2") == 0.6
    assert share("collector=async", "collector.gpus=[1]") == 0
    assert share("policy.engine=own_process", "policy.sleep=true") == 0


def test_chosen_values_stand_in_the_configuration() -> None:
    composed = compose(TRAIN_GRPO, ["policy=vllm"])
    settings, choices = resolve(composed.settings, Device(H100), shape("qwen"))
    content = yaml.safe_load(in_yaml(composed.yaml, choices))
    assert content["optim"]["lr"] == 2e-6
    assert content["loss"]["sampler_correction"] == "tis_token"
    policy: Any = settings.policy
    assert content["policy"]["max_num_seqs"] == policy.max_num_seqs == 500  # an evaluation's
    assert "kv_cache_gb" not in yaml.safe_load(in_yaml(compose(TRAIN_GRPO, ["policy=auto"]).yaml, choices))["policy"]


# The plans of documented commands on GPUs of three sizes

MODELS = ["smollm2", "qwen", "qwen-1.5b", "qwen-3b", "qwen-7b"]
RECIPES = ["gsm8k-qwen0.5b-gpu", "gsm8k-sft-qwen0.5b-gpu"]
CPU_RECIPES = [p.stem for p in sorted(Path("recipes").glob("*-cpu.yaml")) if "\nenv.path" not in p.read_text()]
SIZES = {24: 24564, 40: 40960, 80: 81559}  # GB as sold, and MiB as nvidia-smi gives them


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Returns a function from a GPU's size in GB and a command's words to the plan; 2% of the GPU are in use."""

    room = Room(1000 * GB, 1000 * GB)
    monkeypatch.setattr("rlpost.estimate.needs.host_memory", lambda: room)
    monkeypatch.setattr("rlpost.estimate.needs.disk", lambda folder: room)

    def planned(gb: int, words: Sequence[str]) -> dict[str, Any]:
        stub = tmp_path / "nvidia-smi"
        stub.write_text(f"#!/bin/sh\necho '{SIZES[gb] * 98 // 100}, {SIZES[gb]}'\n")
        stub.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        assert run([*words, "--dry-run", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return planned


@pytest.mark.parametrize("gb", SIZES)
@pytest.mark.parametrize("words", [[f"model={m}"] for m in MODELS] + [[f"recipe={r}"] for r in RECIPES + CPU_RECIPES])
def test_every_default_fits_a_gpu_or_is_refused_with_what_helps(plan: Any, gb: int, words: list[str]) -> None:
    recipe = Path("recipes", f"{words[0].removeprefix('recipe=')}.yaml")
    verb = recipe.read_text().split("command: ")[1].split("\n")[0] if recipe.exists() else "train grpo"
    more = [] if recipe.exists() else ["env=gsm8k", "policy=vllm"]
    estimate = plan(gb, [*verb.split(), *words, *more])["estimate"]
    if estimate["fits"] == "yes":
        gpu = estimate["memory"]["gpu"]
        assert gpu["estimated"] * 1.2 <= gpu["free"]
    else:
        assert "what helps: " in (estimate["reason"] or ""), estimate
    small_enough = not any(name in words[0] for name in ("1.5b", "3b", "7b"))
    assert (estimate["fits"] == "yes") or not small_enough
