"""An engine that leaves the GPU while the model learns, and in which order it comes back; vLLM is a recorder here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlpost.data.conversation import Completion
from rlpost.errors import PolicyError
from rlpost.model.conversion import tiny_tokenizer
from rlpost.model.weights import SavedWeights
from rlpost.policies import vLLMWrapper
from rlpost.policies.base import Request
from rlpost.policies.vllm_engine import InProcessEngine
from rlpost.settings import DType, SamplingSettings, VLLMSettings

SLEEP = ["sleep 2"]
PUSH = ["wake weights", "reload", "wake kv_cache", "reset"]


class Recorder:
    """Stands for `vllm.LLM`: notes what is called, and refuses what a sleeping engine cannot do."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.memory = True
        self.off: set[str] = set()
        core = SimpleNamespace(shutdown=lambda: None)
        self.llm_engine = SimpleNamespace(engine_core=core, model_config=SimpleNamespace(dtype=torch.float32))

    def sleep(self, level: int) -> None:
        self.called.append(f"sleep {level}")
        self.off = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str]) -> None:
        if not self.memory:
            raise RuntimeError("full")
        self.called.append(f"wake {' '.join(tags)}")
        self.off -= set(tags)

    def collective_rpc(self, method: str, kwargs: Any = None, args: Any = ()) -> list[None]:
        assert "weights" not in self.off, f"{method} while the weights are off the GPU"
        list(kwargs["weights_iterator"])
        self.called.append("reload")
        return [None]

    def reset_prefix_cache(self) -> bool:
        self.called.append("reset")
        return True

    def generate(self, inputs: list[Any], *args: Any, **named: Any) -> list[Any]:
        assert not self.off, f"sampling without {self.off}"
        self.called.append("generate")
        sample = SimpleNamespace(token_ids=[], logprobs=[], finish_reason="stop", weight_versions=None)
        return [SimpleNamespace(outputs=[sample]) for _ in inputs]


@pytest.fixture
def case(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[vLLMWrapper, Recorder]]:
    llm = Recorder()
    monkeypatch.setattr("rlpost.policies.vllm.require_vllm", lambda: None)
    monkeypatch.setattr("rlpost.policies.vllm.start_engine", lambda *args: InProcessEngine(llm))
    monkeypatch.setattr("rlpost.policies.vllm.sampling_params", lambda requests, *args: [None] * len(requests))
    policy = vLLMWrapper(tiny_folder, tiny_tokenizer(), settings=VLLMSettings(dtype=DType.float32, sleep=True))
    with monkeypatch.context() as cpu:
        cpu.setattr("rlpost.policies.vllm_engine.VLLMEngine.rest", lambda *args, **named: None)
        policy.start()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield policy, llm
    policy.close()


def sampled(policy: vLLMWrapper) -> list[Completion]:
    return policy.generate([Request([1, 2], max_tokens=2, seed=0)], SamplingSettings())


def test_weights_come_back_before_a_push_and_the_cache_behind_it(
    case: tuple[vLLMWrapper, Recorder], tiny_folder: Path
) -> None:
    policy, llm = case
    weights = dict(SavedWeights(tiny_folder))
    policy.reload = lambda: policy.load_weights(weights)
    policy.settings.sleep = False
    policy.rest()
    assert llm.called == []
    policy.settings.sleep = True
    for pushes in (True, True, False):
        policy.rest()
        policy.rest()  # once is enough
        if pushes:
            policy.load_weights(weights)
        sampled(policy)  # without a push the weights come all the same
    assert llm.called == ["reset", *SLEEP, *PUSH, "generate"] * 3


def test_weights_that_no_push_brings_are_kept(case: tuple[vLLMWrapper, Recorder]) -> None:
    policy, llm = case
    policy.rest()  # nobody can push again: rlpost eval, or a policy of somebody else's
    sampled(policy)
    expected = ["reset", "sleep 1", "wake weights kv_cache", "generate"]
    assert llm.called == expected
    policy.rest()
    llm.memory = False
    with pytest.raises(PolicyError, match=r"full.*policy\.gpu_mem"):
        sampled(policy)
