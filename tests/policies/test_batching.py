"""Requests that are submitted one by one, and weights that come from a folder; no engine is started."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlpost.data.conversation import Completion
from rlpost.errors import PolicyError
from rlpost.model.load import load_model
from rlpost.policies import Request, ScriptedPolicy, TransformersWrapper
from rlpost.settings import SamplingSettings
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


def test_requests_during_a_batch_make_the_next_one_by_settings(tiny_tokenizer: Any) -> None:
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


def test_a_batch_that_fails_ends_its_futures_alone(tiny_tokenizer: Any) -> None:
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
    with pytest.raises(PolicyError, match="closed before"):
        waiting.result(LIMIT)
    with pytest.raises(PolicyError, match="closed"):
        policy.submit(request(3))
    assert policy.batches == [[1]]


def test_a_policy_travels_without_what_is_submitted(tiny_tokenizer: Any) -> None:
    policy = ScriptedPolicy(["ab"], tiny_tokenizer)
    policy.submit(request()).result(LIMIT)
    assert pickle.loads(pickle.dumps(policy)).submit(request()).result(LIMIT).text == "ab"


def test_the_version_changes_between_batches_alone(tiny_tokenizer: Any, tmp_path: Path) -> None:
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
    with pytest.raises(PolicyError, match="Gated"):
        policy.load_adapter_folder(tmp_path, 8)


def test_transformers_samples_from_the_weights_of_a_folder(tiny_folder: Path, tmp_path: Path) -> None:
    policy, other = TransformersWrapper(load_model(tiny_folder)), load_model(tiny_folder)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    other.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    before = policy.submit(request()).result(LIMIT)
    policy.load_folder(tmp_path, 3)
    after = policy.submit(request()).result(LIMIT)
    assert (before.policy_version, after.policy_version) == (0, 3)
    [afresh] = TransformersWrapper(other).generate([request()], SamplingSettings())
    assert (after.token_ids, after.log_probs) == (afresh.token_ids, afresh.log_probs)
    assert after.log_probs != before.log_probs


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"model.norm.weight": None}, r"model\.norm\.weight"),
        ({"model.norm.weight": torch.zeros(3)}, r"model\.norm\.weight .*\(3,\)"),
        ({"model.norm.scale": torch.zeros(3)}, r"model\.norm\.scale"),
        (None, r"\*\.safetensors"),
    ],
    ids=["missing", "shape", "strange", "empty"],
)
def test_a_folder_that_does_not_fit_changes_nothing(
    tiny_folder: Path, tmp_path: Path, wrong: dict[str, torch.Tensor | None] | None, named: str
) -> None:
    policy = TransformersWrapper(load_model(tiny_folder))
    before = policy.generate([request()], SamplingSettings())
    if wrong is not None:
        weights = {name: tensor + 1 for name, tensor in load_model(tiny_folder).state_dict().items()} | wrong
        kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
        save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(PolicyError, match=named):
        policy.load_folder(tmp_path, 1)
    assert (policy.version, policy.generate([request()], SamplingSettings())) == (0, before)
