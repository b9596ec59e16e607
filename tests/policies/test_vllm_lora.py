"""Real vLLM under a trainer with an adapter: merged weights arrive, and so does the adapter itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlpost.imports import is_installed
from rlpost.model.load import load_model
from rlpost.model.lora import add_adapter, save_adapter
from rlpost.model.tokenizer import load_tokenizer
from rlpost.policies import vLLMWrapper
from rlpost.settings import DType, Engine, LoRASettings, ModelSettings, SamplingSettings, VLLMSettings
from rlpost.weight_sync.vllm import vLLMAdapterUpdater, vLLMUpdater
from tests.policies.test_vllm import REQUESTS, build_qwen2, gap

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not (is_installed("vllm") and is_installed("peft")), reason="vLLM or peft is not installed"),
    pytest.mark.timeout(240),
]

RANK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_qwen2(tmp_path_factory.mktemp("lora") / "qwen2", tied=True)


def adapted(folder: Path) -> PreTrainedModel:
    torch.manual_seed(1)
    model = load_model(folder, ModelSettings(path=""))
    add_adapter(model, LoRASettings(enabled=True, rank=RANK), str(folder))
    move(model)
    return model


def move(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))


def started(folder: Path, engine: Engine, adapter_rank: int | None = None, adapter: Path | None = None) -> vLLMWrapper:
    settings = VLLMSettings(engine=engine, dtype=DType.float32, max_num_seqs=16, timeout_seconds=120)
    policy = vLLMWrapper(
        folder,
        load_tokenizer(folder),
        settings=settings,
        sampling=SamplingSettings(),
        max_model_len=128,
        adapter_rank=adapter_rank,
        adapter=adapter,
    )
    policy.start()
    return policy


@pytest.mark.parametrize(
    "engine",
    # how weights cross to another process does not depend on what they were merged of: test_vllm.py
    [Engine.in_process, pytest.param(Engine.own_process, marks=pytest.mark.slow)],
    ids=lambda engine: engine.value,
)
def test_merged_weights_agree_with_the_trainer(folder: Path, engine: Engine) -> None:
    model, policy = adapted(folder), started(folder, engine)
    try:
        assert gap(policy, model, 1.0) > 0.05  # the engine has the model without its adapter
        assert vLLMUpdater(policy).push(model) == 1
        assert gap(policy, model, 1.0) < 1e-3
        assert gap(policy, model, 0.7) < 1e-3
    finally:
        policy.close()


@pytest.mark.parametrize("engine", list(Engine), ids=lambda engine: engine.value)
def test_the_adapter_itself_agrees_with_the_trainer(folder: Path, engine: Engine, tmp_path: Path) -> None:
    model = adapted(folder)
    save_adapter(model, tmp_path)
    policy = started(folder, engine, RANK, tmp_path)
    try:
        assert policy.version == 0
        assert gap(policy, model, 1.0) < 1e-3  # the adapter of a checkpoint, from the start
        updater = vLLMAdapterUpdater(policy)
        for version in (1, 2):  # the second replaces the first under the same name
            before = [completion.token_ids for completion in policy.generate(REQUESTS, SamplingSettings())]
            move(model)
            assert gap(policy, model, 1.0) > 0.05
            assert updater.push(model) == version
            assert gap(policy, model, 1.0) < 1e-3
            assert gap(policy, model, 0.7) < 1e-3
            assert [c.token_ids for c in policy.generate(REQUESTS, SamplingSettings())] != before
    finally:
        policy.close()
