"""What a push brings, when it counts, and what it leaves alone; no engine is started."""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlpost.errors import PolicyError
from rlpost.model.conversion import tiny_tokenizer
from rlpost.model.load import load_model
from rlpost.model.lora import add_adapter
from rlpost.policies import TransformersWrapper, vLLMWrapper
from rlpost.settings import LoRASettings, ModelSettings, SamplingSettings
from rlpost.weight_sync.base import SharedWeights
from rlpost.weight_sync.vllm import vLLMAdapterUpdater, vLLMUpdater

PACKAGE = Path(__file__).parents[2] / "rlpost"


class NotingEngine:
    """Stands for vLLM: notes what is pushed, or fails."""

    def __init__(self, folder: Path, fails: bool = False) -> None:
        self.model_config = SimpleNamespace(model=str(folder), max_model_len=64, logprobs_mode="processed_logprobs")
        self.fails = fails
        self.weights: dict[str, torch.Tensor] = {}
        self.adapter: dict[str, int] = {}  # file -> size, while the push lasts

    changing = contextlib.nullcontext
    continuous = False
    asleep = ()

    def load_weights(self, weights: Any) -> None:
        if self.fails:
            raise RuntimeError("no room")
        self.weights = {name: tensor.clone() for name, tensor in weights}

    def load_adapter(self, adapter: Any) -> None:
        assert adapter.load_inplace
        if self.fails:
            raise RuntimeError("no room")
        self.adapter = {file.name: file.stat().st_size for file in Path(adapter.lora_path).iterdir()}

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        raise AssertionError("it has no workers")

    def rest(self, **asked: bool) -> None: ...

    def close(self) -> None:
        """Nothing was started."""


@pytest.fixture
def adapted(tiny_folder: Path) -> torch.nn.Module:
    pytest.importorskip("peft")
    torch.manual_seed(0)
    model = load_model(tiny_folder, ModelSettings(path=""))
    add_adapter(model, LoRASettings(enabled=True, rank=4), str(tiny_folder))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    return model


def hashes(model: torch.nn.Module) -> dict[str, str]:
    tensors = model.state_dict().items()
    return {name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for name, tensor in tensors}


def test_a_merged_push_brings_every_weight_and_changes_none(adapted: torch.nn.Module, tiny_folder: Path) -> None:
    before, engine = hashes(adapted), NotingEngine(tiny_folder)
    policy = vLLMWrapper(engine)
    assert vLLMUpdater(policy).push(adapted) == 1
    assert hashes(adapted) == before
    plain = load_model(tiny_folder, ModelSettings(path="")).state_dict()
    assert {n: t.shape for n, t in engine.weights.items()} == {n: t.shape for n, t in plain.items()}
    changed = {name for name, tensor in plain.items() if not torch.equal(tensor, engine.weights[name])}
    assert len(changed) == 14  # seven layers in each of two blocks; norms, embedding and head as they were


def test_an_adapter_push_brings_the_adapter_alone(adapted: torch.nn.Module, tiny_folder: Path) -> None:
    pytest.importorskip("vllm")
    before, engine = hashes(adapted), NotingEngine(tiny_folder)
    policy = vLLMWrapper(engine)
    assert vLLMAdapterUpdater(policy).push(adapted) == 1
    assert hashes(adapted) == before
    assert engine.weights == {}
    assert set(engine.adapter) == {"adapter_model.safetensors", "adapter_config.json"}
    assert 8192 * 4 < engine.adapter["adapter_model.safetensors"] < 8192 * 4 + 8192  # float32 and a header


@pytest.mark.parametrize("updater", [vLLMUpdater, vLLMAdapterUpdater])
def test_a_push_that_fails_counts_for_nothing_and_closes_the_engine(
    updater: type[vLLMUpdater] | type[vLLMAdapterUpdater],
    adapted: torch.nn.Module,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr("rlpost.policies.vllm.start_engine", lambda *given: NotingEngine(tiny_folder, fails=True))
    policy = vLLMWrapper(tiny_folder)
    policy.start()
    with pytest.raises(PolicyError, match="no room"):
        updater(policy).push(adapted)
    assert policy.version == 0
    with pytest.raises(PolicyError, match="running"):
        policy.generate([], SamplingSettings())


def test_a_failed_push_leaves_an_engine_to_its_owner(adapted: torch.nn.Module, tiny_folder: Path) -> None:
    pytest.importorskip("vllm")
    policy = vLLMWrapper(NotingEngine(tiny_folder, fails=True))
    with pytest.raises(PolicyError, match="no room"):
        vLLMUpdater(policy).push(adapted)
    assert policy.model is None


@pytest.fixture
def policy(tiny_folder: Path) -> TransformersWrapper:
    """Samples from the trainer's weights."""
    model = load_model(tiny_folder, ModelSettings(path=""))
    return TransformersWrapper(model, None, sampling=SamplingSettings())


def test_own_weights_change_nothing_and_others_are_copied(policy: TransformersWrapper) -> None:
    before = hashes(policy.model)
    model = policy.model
    sources = (model, model.state_dict(), dict(model.named_parameters()), TensorDict.from_module(model))
    for number, source in enumerate(sources, start=1):
        assert SharedWeights(policy).push(source) == policy.version == number
    assert hashes(policy.model) == before
    zeros = {name: torch.zeros_like(weight, dtype=torch.bfloat16) for name, weight in model.state_dict().items()}
    SharedWeights(policy).push(zeros)  # which are copied into them
    assert not any(parameter.any() for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_weights_of_another_model_are_refused_and_count_nothing(policy: TransformersWrapper) -> None:
    updater, before, own = SharedWeights(policy), hashes(policy.model), policy.model.state_dict()
    zeros = {name: torch.zeros_like(weight) for name, weight in own.items()}
    norm = "model.norm.weight"
    for wrong, named in [
        ({name: weight for name, weight in zeros.items() if name != norm}, norm),
        (zeros | {norm: torch.zeros(3)}, rf"{norm} .*\(3,\)"),
        (zeros | {"bias": torch.zeros(1)}, "weight bias"),
        (torch.nn.Linear(1, 1), "weight bias"),
    ]:
        with pytest.raises(PolicyError, match=named):
            updater.push(wrong)
    with pytest.raises(TypeError, match="int"):
        updater.push(3)  # type: ignore[arg-type]
    assert (policy.version, hashes(policy.model)) == (0, before)


def test_a_head_that_is_tied_here_cannot_be_another_there(tmp_path: Path) -> None:
    config = Qwen2Config(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    config.tie_word_embeddings = True
    model: Any = Qwen2ForCausalLM(config)
    policy = TransformersWrapper(model, tiny_tokenizer(), sampling=SamplingSettings())
    zeros = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}
    with pytest.raises(PolicyError, match="lm_head"):
        SharedWeights(policy).push(zeros | {"lm_head.weight": torch.ones(16, 8)})
    assert SharedWeights(policy).push({n: w for n, w in zeros.items() if n != "lm_head.weight"}) == 1
    assert not model.lm_head.weight.any()


def test_updaters_and_what_loads_for_them_alone_write_a_version() -> None:
    assigned = r"\.version *(: (?!Policy)[^=]+)?=[^=]|setattr\([^)]*[\"']version[\"']"
    becoming = r"\.become\("

    def files_with(sought: str) -> list[str]:
        files = {str(file.relative_to(PACKAGE)): file.read_text() for file in PACKAGE.rglob("*.py")}
        return sorted(name for name, text in files.items() if re.search(sought, text))

    # `become`, and how a run or a collector begins and goes on
    starts = ["policies/base.py", "policies/remote.py", "torchrl/remote_collector.py", "weight_sync/base.py"]
    assert files_with(assigned) == starts
    torchrl = ["torchrl/remote_collector.py"]
    loading = ["policies/scripted.py", "policies/transformers.py", "policies/vllm.py"]  # in `load_folder`
    # of a policy in another process: what the trainer's updater says there, and here
    assert files_with(becoming) == ["collectors/player.py", *loading, *torchrl, "weight_sync/base.py"]
