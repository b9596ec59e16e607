"""LLMCollector's life: the background thread, pauses, ends, and weights from different hands."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from talk import make, next_of, scripted, talk, tokenizer, told

from rlpost.collectors import LLMCollector
from rlpost.data import ReplayBuffer
from rlpost.errors import MissingExtraError, PolicyError
from rlpost.policies import Request, ScriptedPolicy
from rlpost.settings import SamplingSettings
from rlpost.torchrl.collector_base import Background
from rlpost.weight_sync.base import SharedWeights

ONE_TURN = [{"question": f"q{i}", "turns": 1} for i in range(6)]


def until(happened: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"it has not happened within {seconds} s"
        time.sleep(0.005)


def started(total: int = -1, **options: Any) -> tuple[LLMCollector, ReplayBuffer]:
    buffer = ReplayBuffer()
    options.setdefault("policy", scripted("a", "b"))
    collector = LLMCollector(
        talk(rows=ONE_TURN), dialog_turns_per_batch=2, total_dialog_turns=total, replay_buffer=buffer, **options
    )
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
    until(lambda: buffer.write_count == 6)
    assert told(buffer.take(6)) == [(f"q{i}", 1) for i in range(6)]
    collector.shutdown()


def test_a_buffer_is_filled_by_the_background_once_it_runs() -> None:
    policy = Gate()
    collector, buffer = started(policy=policy)
    assert policy.asked.wait(60)
    threading.Timer(0.1, policy.open.set).start()
    collector.fill(2)
    assert told(buffer.take(2)) == [("q0", 1), ("q1", 1)]
    assert threading.active_count() >= 2
    collector.shutdown()


def test_nothing_is_collected_while_it_is_paused_and_after_shutdown() -> None:
    collector, buffer = started(batches_ahead=None)
    until(lambda: buffer.write_count > 0)
    with collector.pause():
        before = buffer.write_count
        time.sleep(0.1)
        assert buffer.write_count == before
    until(lambda: buffer.write_count > before)
    assert collector.is_initialized()
    collector.async_shutdown()
    after = buffer.write_count
    time.sleep(0.05)
    assert buffer.write_count == after
    assert not collector.is_initialized()
    with pytest.raises(RuntimeError, match="was shut down"):
        collector.rollout()


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


@pytest.mark.parametrize(
    "ask",
    [
        lambda collector, buffer: collector.fill(3),
        lambda collector, buffer: collector.pause().__enter__(),
        lambda collector, buffer: collector.shutdown(),
        lambda collector, buffer: collector.state_dict(),
    ],
    ids=["fill", "pause", "shutdown", "state_dict"],
)
def test_what_goes_wrong_in_the_background_is_raised_by_the_next_call(ask: Callable[..., Any]) -> None:
    threads: list[threading.Thread] = []

    class Broken(ScriptedPolicy):
        def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Any]:
            threads.append(threading.current_thread())
            raise PolicyError("the engine burns")

    collector, buffer = started(policy=Broken(["x"], tokenizer()))
    until(lambda: bool(threads))  # a round that has not begun raises nothing
    threads[0].join(60)
    with pytest.raises(PolicyError, match="the engine burns"):
        ask(collector, buffer)


def test_a_batch_that_does_not_end_is_named_at_the_deadline() -> None:
    policy = Gate()
    collector, _ = started(policy=policy, wait_seconds=0.1)
    assert policy.asked.wait(60)
    with pytest.raises(PolicyError, match=r"waited \d+ s for the batch that is collected in the background to end"):
        collector.shutdown()
    policy.open.set()


def test_the_thread_ends_with_the_collector_and_with_its_block() -> None:
    def threads() -> int:
        return sum(thread.name == "rlpost-collector" for thread in threading.enumerate())

    gc.collect()
    until(lambda: threads() == 0)
    collector, buffer = started()
    until(lambda: buffer.write_count > 0)
    del collector
    gc.collect()
    until(lambda: threads() == 0)
    with started()[0]:
        assert threads() == 1
    until(lambda: threads() == 0)


def test_background_rounds_are_counted_and_held() -> None:
    done: list[int] = []
    background = Background(lambda: done.append(1) is None and len(done) < 3, "the work", 5.0)
    until(lambda: len(done) == 3)
    for _ in range(2):  # the first may still see the third round end
        background.wait_for_round()  # returns without a round once the work has ended
    assert done == [1, 1, 1]
    background.stop()


def test_what_cannot_be_started_says_so() -> None:
    with pytest.raises(RuntimeError, match="this collector has none: give it one"):
        make(talk(), dialog_turns_per_batch=2).start()
    collector, _ = started()
    for call in (collector.start, collector.rollout, lambda: next(collector.iterator())):
        with pytest.raises(RuntimeError, match="started in the background: read its replay buffer"):
            call()
    collector.shutdown()


# Weights


def test_weights_come_from_a_module_or_a_state_dict_or_the_policys_own_model() -> None:
    collector = make(talk(), dialog_turns_per_batch=2, weight_updater=SharedWeights)
    weights = torch.nn.Linear(1, 1)
    collector.update_policy_weights_(weights)
    collector.update_policy_weights_(state_dict=weights.state_dict(), worker_ids=[0])
    assert collector.get_policy_version() == 2
    assert collector.get_policy_model() is None
    collector.policy.model = weights  # type: ignore[attr-defined]
    collector.update_policy_weights_()
    assert collector.get_policy_model() is weights
    assert collector.get_policy_version() == 3
    assert collector.get_policy_version() == 3


def test_an_updater_may_be_told_what_a_push_has_to_bring() -> None:
    collector = make(talk(), dialog_turns_per_batch=2, weight_updater=SharedWeights)
    collector.weight_updater.init(model_metadata={"weight": (torch.float32, (1, 1)), "bias": (torch.float32, (1,))})
    collector.update_policy_weights_(torch.nn.Linear(1, 1))
    with pytest.raises(PolicyError, match="lacks 1 weights, bias among them; nothing was pushed"):
        collector.update_policy_weights_(torch.nn.Linear(1, 1, bias=False))
    with pytest.raises(
        PolicyError, match=r"weight is float32 \(2, 1\) in this push and float32 \(1, 1\) in the engine"
    ):
        collector.update_policy_weights_(state_dict={"weight": torch.zeros(2, 1), "bias": torch.zeros(1)})
    assert collector.get_policy_version() == 1
    collector.init_updater(scripted("other"))
    assert collector.weight_updater.policy is not collector.policy


# Smaller things


def test_a_single_place_can_be_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = make(env := talk(), dialog_turns_per_batch=2, flatten_data=True)
    abandoned: list[Any] = []
    monkeypatch.setattr(env, "abandon", abandoned.append)
    assert told(next_of(collector)) == [("q0", 1), ("q1", 1)]
    assert told(next_of(collector)) == [("q2", 1), ("q1", 2)]
    collector.reset(1)
    assert [[each.key for each in conversations] for conversations in abandoned] == [[(1, 0)]]
    assert told(next_of(collector)) == [("q2", 2), ("q3", 1)]


def test_a_remote_class_needs_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.imports.is_installed", lambda package: package != "ray")
    with pytest.raises(MissingExtraError, match=r"LLMCollector.as_remote needs ray, .*rlpost\[ray\]"):
        LLMCollector.as_remote({"num_cpus": 1})
