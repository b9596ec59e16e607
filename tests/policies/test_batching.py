"""Requests that are submitted one by one, and weights that come from a folder; no engine is started."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlpost.data.conversation import Completion
from rlpost.errors import PolicyError
from rlpost.model.load import load_model
from rlpost.policies import Request, ScriptedPolicy, TransformersWrapper
from rlpost.settings import ModelSettings, SamplingSettings
from tests.collectors.here import wait_until

LIMIT = 20.0


class Gated(ScriptedPolicy):
    """Notes each batch, and begins none before it is let."""

    def __init__(self, tokenizer: Any, replies: Sequence[str] = ("ab",)) -> None:
        super().__init__(replies, tokenizer, sampling=SamplingSettings())
        self.gate, self.begun = threading.Event(), threading.Event()
        self.batches: list[list[int]] = []  # the seeds in each
        self.fails = ""

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        self.batches.append([request.seed for request in requests])
        self.begun.set()
        assert self.gate.wait(LIMIT)
        if self.fails:
            raise PolicyError(self.fails)
        return super().generate(requests, sampling)


def request(seed: int = 0) -> Request:
    return Request([5, 6], 8, seed)


def test_what_is_submitted_during_a_batch_is_the_next_one_each_settings_apart(tiny_tokenizer: Any) -> None:
    policy = Gated(tiny_tokenizer)
    first = policy.submit(request(100))
    assert policy.begun.wait(LIMIT)
    warm = SamplingSettings(temperature=0.5)
    with ThreadPoolExecutor(8) as threads:
        plain = list(threads.map(lambda seed: policy.submit(request(seed)), range(20)))
    other = [policy.submit(request(seed), warm) for seed in (50, 51)]
    policy.gate.set()
    assert {future.result(LIMIT).text for future in [first, *plain, *other]} == {"ab"}
    assert [sorted(batch) for batch in policy.batches] == [[100], list(range(20)), [50, 51]]
    assert policy.submit(request(7)).result(LIMIT).text == "ab"  # the thread had ended


def test_a_cancelled_request_is_left_out_of_its_batch(tiny_tokenizer: Any) -> None:
    policy = Gated(tiny_tokenizer)
    first = policy.submit(request(1))
    assert policy.begun.wait(LIMIT)
    left_out, kept = policy.submit(request(2)), policy.submit(request(3))
    assert left_out.cancel()
    assert not first.cancel()
    policy.gate.set()
    assert kept.result(LIMIT).text == "ab"
    with pytest.raises(CancelledError):
        left_out.result(LIMIT)
    assert policy.batches == [[1], [3]]


def test_a_batch_that_fails_ends_its_futures_and_not_the_next_ones(tiny_tokenizer: Any) -> None:
    policy = Gated(tiny_tokenizer)
    policy.gate.set()
    policy.fails = "no room"
    with pytest.raises(PolicyError, match="no room"):
        policy.submit(request()).result(LIMIT)
    policy.fails = ""
    assert policy.submit(request()).result(LIMIT).text == "ab"


def test_a_closed_policy_ends_what_waits_and_takes_no_more(tiny_tokenizer: Any) -> None:
    policy = Gated(tiny_tokenizer)
    under_way = policy.submit(request(1))
    assert policy.begun.wait(LIMIT)
    waiting = policy.submit(request(2))
    with ThreadPoolExecutor(1) as thread:
        closing = thread.submit(policy.close)
        wait_until(waiting.running)  # it is to be ended, and is in no batch
        policy.gate.set()
        closing.result(LIMIT)
    assert under_way.result(LIMIT).text == "ab"
    with pytest.raises(PolicyError, match="closed before this completion was sampled"):
        waiting.result(LIMIT)
    with pytest.raises(PolicyError, match="closed and samples no more"):
        policy.submit(request(3))
    assert policy.batches == [[1]]


def test_a_policy_travels_without_what_is_submitted(tiny_tokenizer: Any) -> None:
    policy = ScriptedPolicy(["ab"], tiny_tokenizer)
    policy.submit(request()).result(LIMIT)
    assert pickle.loads(pickle.dumps(policy)).submit(request()).result(LIMIT).text == "ab"


def test_the_version_changes_between_batches_and_never_inside_one(tiny_tokenizer: Any, tmp_path: Path) -> None:
    policy = Gated(tiny_tokenizer)
    first = policy.submit(request())
    assert policy.begun.wait(LIMIT)
    policy.gate.set()
    first.result(LIMIT)
    held = policy.batching.lock
    with held, ThreadPoolExecutor(1) as thread:
        loading = thread.submit(policy.load_folder, tmp_path, 7)
        assert (loading.done(), policy.version) == (False, 0)  # a batch would hold the lock as this test does
        held.release()
        loading.result(LIMIT)
        held.acquire()
    assert policy.submit(request()).result(LIMIT).policy_version == 7
    assert [(old, new) for _, old, new in policy.version_history] == [(0, 7)]
    with pytest.raises(PolicyError, match="Gated applies no adapter"):
        policy.load_adapter_folder(tmp_path, 8)


def changed_copy(folder: Path, into: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    weights = load_model(folder, ModelSettings(path=str(folder))).state_dict()
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    change(weights)
    into.mkdir()
    for number, names in enumerate((sorted(weights)[::2], sorted(weights)[1::2])):
        save_file({name: weights[name] for name in names}, into / f"{number}.safetensors")
    return into


def test_transformers_samples_from_the_weights_of_a_folder(tiny_folder: Path, tmp_path: Path) -> None:
    def noise(weights: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        for name in sorted(weights):
            weights[name] += 0.1 * torch.randn(weights[name].shape, generator=generator)
        if "lm_head.weight" in weights:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()  # they are one tensor

    folder = changed_copy(tiny_folder, tmp_path / "new", noise)
    model = load_model(tiny_folder, ModelSettings(path=str(tiny_folder)))
    policy = TransformersWrapper(model)
    before = policy.submit(request()).result(LIMIT)
    policy.load_folder(folder, 3)
    after = policy.submit(request()).result(LIMIT)
    assert (before.policy_version, after.policy_version) == (0, 3)
    expected = load_model(tiny_folder, ModelSettings(path=str(tiny_folder)))
    written = {name: tensor for file in folder.iterdir() for name, tensor in load_file(file).items()}
    expected.load_state_dict(written)
    afresh = TransformersWrapper(expected).generate([request()], SamplingSettings())[0]
    assert (after.token_ids, after.log_probs) == (afresh.token_ids, afresh.log_probs)
    assert after.log_probs != before.log_probs


@pytest.mark.parametrize("wrong", ["missing", "shape", "strange", "empty"])
def test_a_folder_that_does_not_fit_changes_nothing(tiny_folder: Path, tmp_path: Path, wrong: str) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        for tensor in weights.values():
            tensor += 1
        if wrong == "missing":
            del weights["model.norm.weight"]
        elif wrong == "shape":
            weights["model.norm.weight"] = torch.zeros(3)
        elif wrong == "strange":
            weights["model.norm.scale"] = torch.zeros(3)

    folder = changed_copy(tiny_folder, tmp_path / "new", spoil)
    if wrong == "empty":
        for file in folder.iterdir():
            file.unlink()
    policy = TransformersWrapper(load_model(tiny_folder, ModelSettings(path=str(tiny_folder))))
    before = policy.generate([request()], SamplingSettings())
    said = {
        "missing": r"lacks model\.norm\.weight",
        "shape": r"model\.norm\.weight is \(3,\) in this push",
        "strange": r"no weight model\.norm\.scale",
        "empty": r"holds no \*\.safetensors",
    }
    with pytest.raises(PolicyError, match=said[wrong]):
        policy.load_folder(folder, 1)
    assert (policy.version, policy.generate([request()], SamplingSettings())) == (0, before)
