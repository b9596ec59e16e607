"""GRPO that trains an adapter: the loop, its checkpoints, going on, and what evaluation reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.errors import CheckpointError, ConfigError
from rlpost.imports import is_installed
from rlpost.model.load import load_model
from rlpost.model.locate import locate_model
from rlpost.model.lora import MergedWeights
from rlpost.settings import ModelSettings
from rlpost.train.assemble import assemble_grpo
from tests.asynchronous import write_rows
from tests.trainings import ends_alike, train_in, train_in_parts, untimed

pytestmark = pytest.mark.thorough

MORE = ["eval.enabled=false", "optim.lr=1e-2", "checkpoint.every=0", "deterministic=true"]
LORA = ["lora.enabled=true", "lora.rank=64"]  # of 64 columns: 4096 numbers, from which on the 8-bit form is used
PACKAGES = {"lora.enabled=true": "peft", "optim=adamw_8bit": "bitsandbytes"}
Run = Callable[..., None]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A training whose reward differs between the replies of a random model."""
    return [*write_rows(tmp_path_factory.mktemp("rows")), *MORE]


@pytest.fixture(scope="module")
def run(words: list[str]) -> Run:
    def run(folder: Path, *more: str, resume: str | None = None) -> None:
        assert train_in(TRAIN_GRPO, folder, [*words, *more], resume) == 0

    return run


def saved(folder: Path, part: str) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / "latest" / part)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@pytest.mark.parametrize("more", [LORA, ["optim=adamw_8bit"]], ids=" ".join)
def test_resumed_run_is_bitwise_the_unbroken_one(words: list[str], tmp_path: Path, more: list[str]) -> None:
    for word in more:
        if word in PACKAGES and not is_installed(PACKAGES[word]):
            pytest.skip(f"{PACKAGES[word]} is not installed")
    whole, parted = train_in_parts(TRAIN_GRPO, tmp_path, [*words, *more, "optim.schedule=constant"])
    assert ends_alike(whole, parted)
    assert all(line["grad_norm"] > 0 for line in untimed(whole))
    state = saved(whole, "state/tensors.safetensors")
    assert same(saved(parted, "state/tensors.safetensors"), state)
    moments = {name.split("/")[1]: tensor.dtype for name, tensor in state.items() if name.startswith("optimizer/")}
    if "optim=adamw_8bit" in more:
        assert torch.uint8 in {t.dtype for name, t in state.items() if "/state1/" in name}
        assert {"state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2", "step"} == moments.keys()
    else:
        assert moments.keys() == {"step", "exp_avg", "exp_avg_sq"}
    if LORA[0] in more:
        assert same(
            saved(parted, "adapter/adapter_model.safetensors"), saved(whole, "adapter/adapter_model.safetensors")
        )
        assert all(".lora_" in name for name in state if name.startswith("optimizer/"))


@pytest.fixture(scope="module")
def peft_is_there() -> None:
    pytest.importorskip("peft")


@pytest.mark.usefixtures("peft_is_there")
def test_run_stands_for_its_merged_model_and_its_adapter(run: Run, words: list[str], tmp_path: Path) -> None:
    first = tmp_path / "first"
    run(first, *LORA, "steps=2")
    merged = load_model(locate_model(str(first)), ModelSettings(path=""))
    of_adapter = load_model(locate_model(str(first / "checkpoints/latest/adapter")), ModelSettings(path=""))
    start = load_model(locate_model("builtin:tiny"), ModelSettings(path=""))
    for name, tensor in merged.state_dict().items():
        assert torch.allclose(tensor, of_adapter.state_dict()[name], atol=1e-6), name
    assert not torch.allclose(
        merged.state_dict()["model.layers.0.mlp.up_proj.weight"],
        start.state_dict()["model.layers.0.mlp.up_proj.weight"],
        atol=1e-4,
    )

    more = [*LORA, f"lora.path={first}", "loss.kl_coef=0.1"]
    parts = assemble_grpo(compose(TRAIN_GRPO, [*words, *more]).settings)
    for name, tensor in MergedWeights(parts.model).items():
        assert torch.allclose(tensor, merged.state_dict()[name], atol=1e-6), name
    run(tmp_path / "second", *more, "steps=2")
    lines = untimed(tmp_path / "second")
    assert lines[0]["kl/ref"] == pytest.approx(0.0, abs=1e-6)  # the reference is the policy it starts from
    assert lines[1]["kl/ref"] > 1e-6


@pytest.mark.usefixtures("peft_is_there")
def test_run_resumes_only_as_what_it_was(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "adapter", *LORA, "steps=1")
    run(tmp_path / "whole", "steps=1")
    with pytest.raises(CheckpointError, match=r"lora\.enabled=true"):
        run(tmp_path / "whole", *LORA, "steps=2", resume="latest")
    with pytest.raises(CheckpointError, match="model"):
        run(tmp_path / "adapter", "steps=2", resume="latest")
    with pytest.raises(CheckpointError, match=r"lora\.rank"):
        run(tmp_path / "adapter", "lora.enabled=true", "lora.rank=8", "steps=2", resume="latest")
    if is_installed("bitsandbytes"):
        with pytest.raises(ConfigError, match="AdamW8bit"):
            run(tmp_path / "whole", "optim=adamw_8bit", "steps=2", resume="latest")


@pytest.mark.usefixtures("peft_is_there")
def test_sampler_draws_from_the_adapted_model(run: Run, tmp_path: Path) -> None:
    """policy=transformers shares the trainer's modules, so their log-probs agree while the adapter moves."""
    run(tmp_path, *LORA, "steps=3")
    gaps = [line["sampler/logprob_gap"] for line in untimed(tmp_path)]
    assert max(gaps) < 1e-5
    assert [line["policy/version"] for line in untimed(tmp_path)] == [0, 1, 2]
