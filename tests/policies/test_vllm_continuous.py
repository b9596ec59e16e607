"""Requests that are submitted one by one to a real vLLM, and weights that come while they are under way."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlpost.data.conversation import Completion
from rlpost.errors import PolicyError
from rlpost.model.load import load_model
from rlpost.policies import Request, vLLMWrapper
from rlpost.policies.vllm_engine import tokens_in_flight
from rlpost.settings import Engine
from tests.policies.test_vllm import DEAD, build_model, disturb, gap, started
from tests.processes import children, kill_engines_since

pytestmark = pytest.mark.vllm

LIMIT = 60.0
PROMPT = [5 + i % 50 for i in range(140)]  # longer than a block of the cache, which is read again


def long_requests(count: int, first_seed: int = 0) -> list[Request]:
    return [Request(PROMPT, 55, first_seed + i) for i in range(count)]


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model that seldom ends a turn, and other weights for it."""
    folder, other = (tmp_path_factory.mktemp(name) for name in ("model", "other"))
    model = load_model(build_model(folder, tie_word_embeddings=False))
    disturb(model, 0.05)
    model.save_pretrained(other)
    return [folder, other]


@pytest.fixture(scope="module")
def policy(folders: list[Path]) -> Iterator[vLLMWrapper]:
    with closing(started(folders[0], Engine.own_process)) as policy:  # at most 16 at once
        yield policy


def test_weights_that_come_meanwhile_are_told_apart_at_the_token(policy: vLLMWrapper, folders: list[Path]) -> None:
    before = policy.tokens_sampled
    futures = [policy.submit(request) for request in long_requests(40)]  # of which 24 wait inside vLLM
    until(lambda: tokens_in_flight(policy.model) > 60)
    policy.load_folder(folders[1], 3)
    assert (policy.version, list(policy.version_history)[-1][1:]) == (3, (0, 3))
    done = [future.result(LIMIT) for future in futures]
    assert policy.tokens_sampled - before == sum(len(c.token_ids) for c in done)
    mixed = [c for c in done if c.version_changes]
    assert mixed
    assert {c.policy_version for c in mixed} == {0}
    assert all([version for _, version in c.version_changes] == [3] for c in mixed)
    assert all(0 < c.version_changes[0][0] < len(c.token_ids) for c in mixed)
    # the first token after the change, and those before it, exactly: what either model says of the ids
    old, new = map(load_model, folders)
    for completion in mixed:
        [(start, _)] = completion.version_changes
        assert told_by(old, completion)[:start] == pytest.approx(completion.log_probs[:start], abs=1e-3)
        assert told_by(old, completion)[start:] != pytest.approx(completion.log_probs[start:], abs=1e-3)
    whole = [c for c in done if c.policy_version == 3]
    assert len(whole) >= 20  # what waited began anew: no prefix of theirs is of the old weights
    for completion in whole:
        assert told_by(new, completion) == pytest.approx(completion.log_probs, abs=1e-3)
    # begun after it, with the prompt that the old weights have read
    assert gap(policy, new, 1.0, long_requests(8, 100)) < 1e-3  # type: ignore[arg-type]


def told_by(model: torch.nn.Module, completion: Completion) -> list[float]:
    """The model's log-probs of the completion's ids after `PROMPT`."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + completion.token_ids])).logits[0, len(PROMPT) - 1 : -1].float()
    ids = torch.tensor(completion.token_ids)
    return logits.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1).tolist()


def test_a_future_that_is_cancelled_aborts_its_request(policy: vLLMWrapper) -> None:
    futures = [policy.submit(request) for request in long_requests(20)]
    until(lambda: tokens_in_flight(policy.model) > 20)
    assert all(future.cancel() for future in futures)
    until(lambda: policy.model.get_num_unfinished_requests() == 0)
    with pytest.raises(CancelledError):
        futures[0].result(LIMIT)
    assert policy.submit(Request(PROMPT, 3, 1)).result(LIMIT).token_ids


def test_one_impossible_request_ends_alone(policy: vLLMWrapper) -> None:
    kept = policy.submit(Request(PROMPT, 8, 1))
    with pytest.raises(PolicyError, match="a completion"):
        policy.submit(Request([5] * 300, 8, 1)).result(LIMIT)
    assert kept.result(LIMIT).log_probs


def test_a_folder_that_lacks_weights_changes_nothing(policy: vLLMWrapper, tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "model.safetensors")
    under_way, version = policy.submit(Request(PROMPT, 20, 1)), policy.version
    with pytest.raises(PolicyError, match=r"lacks \d+ weights"):
        policy.load_folder(tmp_path, 99)
    assert (policy.version, under_way.result(LIMIT).version_changes) == (version, [])


def test_a_policy_that_has_not_started_travels(tiny_folder: Path) -> None:
    assert pickle.loads(pickle.dumps(vLLMWrapper(tiny_folder, seed=3))).seed == 3


def test_an_engine_that_dies_ends_all_that_was_submitted(folders: list[Path]) -> None:
    others = children()
    policy = started(folders[0], Engine.own_process)
    futures = [policy.submit(request) for request in long_requests(40)]
    kill_engines_since(others)
    for future in futures:
        with pytest.raises(PolicyError, match=rf"its end: .*({DEAD})"):
            future.result(LIMIT)
    until(lambda: policy.model is None)
    with pytest.raises(PolicyError, match="not running"):
        policy.submit(Request(PROMPT, 8, 1))
