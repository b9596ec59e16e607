"""LLMCollector's life: the background thread, pauses, ends, and weights from different hands."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from talk import ONE_TURN, make, next_of, scripted, talk, tokenizer, told
from tensordict import TensorDict

from rlpost.collectors import LLMCollector, SharedWeights, WeightUpdaterBase
from rlpost.data import ReplayBuffer
from rlpost.errors import MissingExtraError, PolicyError
from rlpost.policies import Request, ScriptedPolicy
from rlpost.settings import SamplingSettings
from rlpost.train.sampling import SamplingParts
from tests.collectors.here import wait_until
from tests.says import Says


def started(total: int = -1, buffer: ReplayBuffer | None = None, **options: Any) -> tuple[LLMCollector, ReplayBuffer]:
    buffer = ReplayBuffer() if buffer is None else buffer  # an empty one is false
    options = {"policy": scripted("a", "b"), "total_dialog_turns": total, **options}
    collector = LLMCollector(talk(rows=ONE_TURN), dialog_turns_per_batch=2, replay_buffer=buffer, **options)
    collector.start()
    return collector, buffer


class Gate(ScriptedPolicy):
    """Samples only while `open` is set, and says when it is asked."""

    def __init__(self) -> None:
        super().__init__(["x"], tokenizer())
        self.open, self.asked = threading.Event(), threading.Event()

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Any]:
        self.asked.set()
        assert self.open.wait(60)
        return super().generate(requests, sampling)


def test_the_background_fills_the_buffer_up_to_the_total() -> None:
    collector, buffer = started(total=6, batches_ahead=None)
    wait_until(lambda: buffer.write_count == 6)
    assert told(buffer.take(6)) == [(f"q{i}", 1) for i in range(6)]
    collector.shutdown()


def test_a_buffer_is_filled_by_the_background_once_it_runs() -> None:
    policy = Gate()
    collector, buffer = started(policy=policy)
    assert policy.asked.wait(60)
    threading.Timer(0.1, policy.open.set).start()
    collector.fill(2)
    assert told(buffer.take(2)) == [("q0", 1), ("q1", 1)]
    collector.shutdown()


def test_nothing_is_collected_while_it_is_paused_and_after_shutdown() -> None:
    collector, buffer = started(batches_ahead=None)
    wait_until(lambda: buffer.write_count > 0)
    with collector.pause():
        before = buffer.write_count
        time.sleep(0.1)
        assert buffer.write_count == before
    wait_until(lambda: buffer.write_count > before)
    assert collector.is_initialized()
    collector.async_shutdown()
    after = buffer.write_count
    time.sleep(0.05)
    assert buffer.write_count == after
    assert not collector.is_initialized()
    with pytest.raises(RuntimeError, match="shut down"):
        collector.rollout()


def test_the_background_rests_while_nobody_takes() -> None:
    collector, buffer = started(batches_ahead=3)  # of 2 rows
    wait_until(lambda: buffer.write_count == 6)
    time.sleep(0.1)
    assert buffer.write_count == 6
    assert told(buffer.take(2)) == [("q0", 1), ("q1", 1)]
    wait_until(lambda: buffer.write_count == 8)
    collector.fill(20)
    assert buffer.take(20).batch_size[0] == 20  # more than fits: whoever waits is served
    collector.shutdown(timeout=60)


def test_a_resting_background_ends_at_once() -> None:
    collector, buffer = started()
    wait_until(lambda: buffer.write_count == 4)
    collector.shutdown(timeout=60)
    assert buffer.write_count == 4


def test_a_push_waits_for_the_batch_under_way() -> None:
    policy = Gate()
    collector, buffer = started(policy=policy, weight_updater=SharedWeights)
    assert policy.asked.wait(60)
    threading.Timer(0.1, policy.open.set).start()
    collector.update_policy_weights_(torch.nn.Linear(1, 1))
    assert buffer.write_count >= 2  # what was under way was delivered first
    assert buffer.take(2)["policy_version"].tolist() == [0, 0]
    assert collector.policy_version == 1
    collector.shutdown()


def test_what_is_saved_in_the_background_is_of_one_moment() -> None:
    class Slow(ReplayBuffer):
        def state_dict(self) -> dict[str, Any]:
            end = time.monotonic() + 0.2
            while self.write_count == written and time.monotonic() < end:
                time.sleep(0.005)
            return super().state_dict()

    collector, buffer = started(buffer=Slow(), batches_ahead=None)
    wait_until(lambda: buffer.write_count > 0)
    written = buffer.write_count
    parts: Any = SimpleNamespace(collector=collector, buffer=buffer, policy=collector.policy)
    state = SamplingParts.state(parts)
    collector.shutdown()
    drawn = state["collector"]["env_state_dict"]["primer"]["position"]
    assert len(state["buffer"]["groups"]) == drawn  # every draw of a prompt is a group: none is drawn again


@pytest.mark.parametrize("call", [("fill", 3), ("shutdown",), ("state_dict",)], ids=lambda call: call[0])
def test_what_goes_wrong_in_the_background_is_raised_by_the_next_call(call: tuple[Any, ...]) -> None:
    threads: list[threading.Thread] = []

    class Broken(ScriptedPolicy):
        def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Any]:
            threads.append(threading.current_thread())
            raise PolicyError("the engine burns")

    collector, _ = started(policy=Broken(["x"], tokenizer()))
    wait_until(lambda: bool(threads))  # a round that has not begun raises nothing
    threads[0].join(60)
    with pytest.raises(PolicyError, match="burns"):
        getattr(collector, call[0])(*call[1:])


@pytest.mark.parametrize("raises", [True, False])
def test_a_batch_that_does_not_end_is_named_at_the_deadline(raises: bool, caplog: pytest.LogCaptureFixture) -> None:
    policy = Gate()
    collector, _ = started(policy=policy, wait_seconds=0.1)
    assert policy.asked.wait(60)
    said = ""
    try:
        collector.shutdown(raise_on_error=raises)
    except PolicyError as error:
        said = str(error)
    assert re.search(r"waited \d+ s", said if raises else caplog.text)
    policy.open.set()


def test_the_thread_ends_with_the_collector_and_with_its_block() -> None:
    def threads() -> int:
        return sum(thread.name == "rlpost-collector" for thread in threading.enumerate())

    gc.collect()
    wait_until(lambda: threads() == 0)
    collector, buffer = started()
    wait_until(lambda: buffer.write_count > 0)
    del collector
    gc.collect()
    wait_until(lambda: threads() == 0)
    with started()[0]:
        assert threads() == 1
    wait_until(lambda: threads() == 0)


def test_a_collector_in_the_background_is_not_used_in_the_foreground() -> None:
    collector, _ = started()
    for call in (collector.start, collector.rollout, lambda: next(collector.iterator())):
        with pytest.raises(RuntimeError, match="background"):
            call()
    collector.shutdown()


def test_what_fills_a_buffer_needs_one(says: Says) -> None:
    collector = make(talk(), dialog_turns_per_batch=2)
    for call in (collector.start, collector.collect, lambda: collector.fill(1)):
        with says.refused("tensordict", RuntimeError, "buffer"):
            call()


# Weights


class Told(WeightUpdaterBase):
    """An updater as a user writes one."""

    def send_weights(self, policy: Any, source: Any) -> None:
        self.sent = source


def test_weights_come_under_any_of_their_names() -> None:
    weights = torch.nn.Linear(1, 1)
    collector = make(talk(), dialog_turns_per_batch=2, weight_updater=Told)
    assert collector.get_policy_model() is None
    collector.policy.model = weights  # type: ignore[attr-defined]
    assert collector.get_policy_model() is weights
    named: list[dict[str, Any]] = [
        {},  # the policy's own
        {"weights": weights, "worker_ids": [0]},
        {"policy": weights},
        {"state_dict": weights},
        {"weights_dict": {"policy": weights}},
        {"policy_or_weights": weights, "model_id": "policy"},
    ]
    for number, given in enumerate(named, 1):
        collector.update_policy_weights_(**given)
        assert collector.weight_updater.sent is weights  # type: ignore[attr-defined]
        assert collector.get_policy_version() == number
        del collector.weight_updater.sent  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="and policy"):
        collector.update_policy_weights_(weights=weights, policy=weights)
    assert collector.get_policy_version() == len(named)


def test_an_updater_may_be_told_what_a_push_has_to_bring() -> None:
    collector = make(talk(), dialog_turns_per_batch=2, weight_updater=SharedWeights)
    collector.weight_updater.init(model_metadata={"weight": (torch.float32, (1, 1)), "bias": (torch.float32, (1,))})
    collector.update_policy_weights_(torch.nn.Linear(1, 1))
    with pytest.raises(PolicyError, match="bias"):
        collector.update_policy_weights_(torch.nn.Linear(1, 1, bias=False))
    with pytest.raises(PolicyError, match=r"weight .*\(2, 1\) .*\(1, 1\)"):
        collector.update_policy_weights_(state_dict={"weight": torch.zeros(2, 1), "bias": torch.zeros(1)})
    assert collector.get_policy_version() == 1
    collector.init_updater(scripted("other"))
    assert collector.weight_updater.policy is not collector.policy


@pytest.mark.parametrize("empty", [{}, TensorDict(), torch.nn.Identity(), 3], ids=lambda source: type(source).__name__)
@pytest.mark.parametrize("updater", [None, Told], ids=["the policy's own", "the user's"])
def test_a_source_without_weights_is_refused_and_raises_no_version(empty: Any, updater: Any) -> None:
    collector = make(talk(), dialog_turns_per_batch=2, weight_updater=updater)
    with pytest.raises(TypeError, match=type(empty).__name__):
        collector.update_policy_weights_(empty)
    assert collector.policy_version == 0


# Smaller things


def test_a_single_place_can_be_reset() -> None:
    collector = make(env := talk(), dialog_turns_per_batch=2, flatten_data=True)
    abandoned: list[Any] = []
    env.abandon = abandoned.append  # type: ignore[method-assign]
    assert told(next_of(collector)) == [("q0", 1), ("q1", 1)]
    assert told(next_of(collector)) == [("q2", 1), ("q1", 2)]
    collector.reset(1)
    assert [[each.key for each in conversations] for conversations in abandoned] == [[(1, 0)]]
    assert told(next_of(collector)) == [("q2", 2), ("q3", 1)]


def test_a_remote_class_needs_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.imports.is_installed", lambda package: package != "ray")
    with pytest.raises(MissingExtraError, match=r"as_remote .*rlpost\[ray\]"):
        LLMCollector.as_remote({"num_cpus": 1})
