"""AsyncCollector's arguments and methods: what they do there, or why they are refused."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from moody import Moody
from tensordict import TensorDictBase

from rlpost.collectors import AsyncCollector, Collector, LLMCollector, SharedWeights, aSyncDataCollector
from rlpost.data import ReplayBuffer
from rlpost.envs.transforms import PolicyVersion
from rlpost.errors import PolicyError
from tests.collectors.here import Here, wait_until
from tests.collectors.talk import make as make_llm
from tests.collectors.talk import scripted, talk, told

STARTED: list[Here] = []  # in place of processes, by this test


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: Any, **how: Any) -> Here:
        STARTED.append(Here(*args, **how))
        return STARTED[-1]

    STARTED.clear()
    monkeypatch.setattr("rlpost.torchrl.async_collector.WorkerProcess", start)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # there is here


def half(tensordict: TensorDictBase) -> TensorDictBase:
    return tensordict.set("action", tensordict["observation"] / 2)


def frames(**options: Any) -> AsyncCollector:
    return AsyncCollector(Moody, options.pop("policy", half), **{"frames_per_batch": 8, **options})


def talks(**options: Any) -> AsyncCollector:
    return AsyncCollector(talk, options.pop("policy", scripted("a", "b")), **{"frames_per_batch": 2, **options})


def there() -> Any:
    """The collector that the last AsyncCollector has."""
    return STARTED[-1].object.collector


# Refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preemptive_threshold": 0.5}, "preemptive_threshold has no effect on one process: there is only one worker"),
        ({"num_workers": 1}, "num_workers has no effect on one process"),
        ({"weight_sync_schemes": {}}, "weights are sent as a folder"),
        ({"weight_updater": SharedWeights}, "weight_updater has no effect on frames"),
        ({"flatten_data": True}, "flatten_data has no effect on frames"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        frames(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu"}, "device has no effect on a language environment"),
        ({"env_device": "cpu"}, "conversations are not tensors"),
        ({"policy_device": "cpu"}, "stays on the device where it is built"),
        ({"max_frames_per_traj": 3}, "give that max_steps"),
        ({"init_random_frames": 8}, "random tokens are not a reply"),
        ({"split_trajs": True}, "give yield_completed_trajectories=True"),
        ({"set_truncated": True}, "goes on in the next batch"),
        ({"trust_policy": True}, "never wrapped"),
        ({"async_envs": True}, "raise its num_envs"),
    ],
)
def test_conversations_have_no_use_for_some_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        talks(**options)


def test_what_cannot_be_sent_or_makes_no_environment_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"policy cannot be sent to the collector's process \(cannot pickle"):
        frames(policy=lambda td: lock and td)


# Arguments of frames


@pytest.mark.parametrize(
    "options",
    [
        {"max_frames_per_traj": 2},
        {"max_frames_per_traj": -1, "init_random_frames": -1},
        {"reset_at_each_iter": True},
        {"split_trajs": True},
        {"reset_when_done": False},
        {"set_truncated": True},
        {"device": "cpu"},
        {"env_device": "cpu", "policy_device": ["cpu"]},
        {"postproc": lambda batch: batch["next"]},
        {"trust_policy": True},
        {"total_frames": None},
    ],
    ids=lambda options: "-".join(options),
)
def test_arguments_of_frames_are_those_of_a_collector_here(options: dict[str, Any]) -> None:
    collector = frames(**options)
    same = Collector(Moody, half, frames_per_batch=8, **{k: v for k, v in options.items() if v is not None})
    for _ in range(2):
        batch, wanted = collector.next(), same.next()
        assert batch is not None
        assert wanted is not None
        assert (batch.batch_size, batch.device) == (wanted.batch_size, wanted.device)
        assert set(batch.keys(True)) == set(wanted.keys(True))
        assert all((value == batch[key]).all() for key, value in wanted.items(True, True))
    collector.shutdown()


def test_a_rollout_is_collected_now_and_leaves_what_waits() -> None:
    collector, same = frames(), Collector(Moody, half, frames_per_batch=8)
    wanted = [same.rollout()["observation"] for _ in range(4)]
    batches = [collector.next()]
    wait_until(lambda: len(collector.state_dict()["waiting"]) == 2)
    rollout = collector.rollout()
    batches += [collector.next(), collector.next(), rollout]
    assert all(torch.equal(b["observation"], w) for b, w in zip(batches, wanted, strict=True) if b is not None)


def test_the_documents_loop_runs_with_changed_imports() -> None:
    pytest.importorskip("gymnasium")
    from tensordict.nn import TensorDictModule
    from torch import nn

    from rlpost.envs import GymEnv

    def env_maker() -> Any:
        return GymEnv("Pendulum-v1", device="cpu")

    policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    distributed_collector = AsyncCollector(
        create_env_fn=env_maker,
        policy=policy,
        collector_class=Collector,
        max_frames_per_traj=50,
        init_random_frames=-1,
        reset_at_each_iter=False,
        device="cpu",
        storing_device="cpu",
        total_frames=10000,
        frames_per_batch=200,
    )
    data: Any = None
    for i, data in enumerate(distributed_collector):  # noqa: B007
        if i == 2:
            break
    distributed_collector.shutdown()
    assert data.batch_size == (200,)
    assert data["collector", "traj_ids"].unique().tolist() == [8, 9, 10, 11]
    assert torch.allclose(data["action"], policy.module(data["observation"]), atol=1e-6)


# Arguments of conversations


def test_arguments_of_conversations_reach_their_collector() -> None:
    talks(
        exploration_type="deterministic",
        yield_completed_trajectories=True,
        reset_at_each_iter=True,
        begin_ahead=False,
        verbose=True,
        flatten_data=True,
        frames_per_batch=3,
        total_frames=6,
        max_frames_per_traj=-1,
    )
    inner = there()
    assert isinstance(inner, LLMCollector)
    assert inner.policy.sampling.temperature == 0
    assert (inner.yield_completed_trajectories, inner.begin_ahead, inner.reset_at_each_iter) == (True, False, True)
    assert (inner.verbose, inner.flatten_data, inner.frames_per_batch) == (True, True, 4)
    talks()
    assert there().policy.sampling.temperature == 1


class Copying(SharedWeights):
    """Says what it was given."""

    def send_weights(self, policy: Any, source: Any) -> None:
        policy.taken = {name: weight.tolist() for name, weight in source.items()}


def test_an_updater_of_ones_own_takes_weights_up_and_versions_are_counted_here() -> None:
    tracker = PolicyVersion("uuid")
    collector = talks(weight_updater=Copying, track_policy_version=tracker)
    first = collector.policy_version
    collector.update_policy_weights_({"x": torch.tensor([1.0, 2.0])}, worker_ids=0)
    inner = there()
    assert inner.policy.taken == {"x": [1.0, 2.0]}
    assert inner.policy.version == inner.policy_version_tracker.version == collector.policy_version == tracker.version
    assert [change[1:] for change in tracker.version_history] == [(first, tracker.version)]
    assert isinstance(tracker.version, str)
    batch = collector.next()
    assert batch is not None
    assert list(batch[:, 0]["policy_version"]) == [tracker.version] * 2
    collector.init_updater(model_metadata={"x": (torch.float32, [3])})
    assert inner.weight_updater.model_metadata == {"x": (torch.float32, [3])}
    frames().init_updater("anything")  # which has none


def test_a_model_samples_with_the_weights_that_were_pushed(tiny_folder: Path) -> None:
    def with_model() -> Any:
        from rlpost.model.conversion import tiny_tokenizer
        from rlpost.model.load import load_model
        from rlpost.policies import TransformersWrapper
        from rlpost.settings import DType, ModelSettings

        model = load_model(tiny_folder, ModelSettings(path=str(tiny_folder), dtype=DType.float32))
        return TransformersWrapper(model, tiny_tokenizer())

    collector = talks(policy=None, policy_factory=with_model)
    assert collector.get_policy_model() is None
    trained = with_model().model
    with torch.no_grad():
        for weight in trained.parameters():
            weight.mul_(1.5)
    collector.update_policy_weights_(trained)
    own = there().policy.model.state_dict()
    assert all(torch.equal(own[name], weight) for name, weight in trained.state_dict().items())
    assert (there().policy.version, collector.policy_version) == (1, 1)
    with pytest.raises(PolicyError, match="the policy's model has no weight x"):
        collector.update_policy_weights_({"x": torch.ones(1), **own})
    assert collector.policy_version == 1


# Buffers


def test_a_buffer_of_groups_is_filled_as_far_as_it_is_used() -> None:
    buffer = ReplayBuffer()
    collector = talks(
        replay_buffer=buffer, yield_completed_trajectories=True, postproc=lambda batch: batch.set("by", batch["turns"])
    )
    assert there().postproc is not None  # there, where a buffer is written
    assert [collector.next(), next(iter(collector))] == [None, None]
    collector.fill(3)
    taken = buffer.take(3)["group_id"].tolist()  # what is ahead of the two that were asked for may have come too
    collector.start()
    for _ in range(20):
        wait_until(lambda: collector.is_ahead)
        time.sleep(0.002)
        assert buffer.num_rows <= 1 + 2 * 4  # beside a row two batches of two, or with three turns at the end of four
        taken += buffer.take(2)["group_id"].tolist()
    assert sorted(set(taken)) == list(range(43))  # each group once
    with collector.pause():  # one moment
        state = {"collector": collector.state_dict(), "buffer": buffer.state_dict()}

    def five_times() -> list[list[int]]:
        return [(collector.fill(2), buffer.take(2)["group_id"].unique().tolist())[1] for _ in range(5)]

    following = five_times()
    with collector.pause():
        buffer.load_state_dict(state["buffer"])
        collector.load_state_dict(state["collector"])
    assert five_times() == following
    with pytest.raises(RuntimeError, match="started in the background: read its replay buffer"):
        collector.next()
    with pytest.raises(RuntimeError, match="another collector fills"):
        make_llm(talk(), replay_buffer=buffer)


class Noting(ReplayBuffer):
    """Notes that something was to be written."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def extend(self, batch: Any) -> None:
        self.asked.set()
        super().extend(batch)


def until_written(collector: AsyncCollector) -> None:
    """Wait until the last collector's first batch was written, or could not be."""
    assert collector.replay_buffer.asked.wait(60)  # type: ignore[union-attr]
    STARTED[-1].in_main_thread(lambda: None).result(60)  # once that call has returned


def test_what_cannot_be_written_is_raised_by_the_next_call_and_on_the_way_out(caplog: pytest.LogCaptureFixture) -> None:
    collector = frames(replay_buffer=ReplayBuffer())
    for _ in range(2):
        with pytest.raises(KeyError, match="group_id"):
            collector.next()
    collector.shutdown(raise_on_error=False)
    other = frames(replay_buffer=Noting())
    other.start()
    until_written(other)
    with pytest.raises(KeyError, match="group_id"):
        other.shutdown()
    quiet = frames(replay_buffer=Noting())
    quiet.start()
    until_written(quiet)
    with caplog.at_level("WARNING", "rlpost"):
        quiet.shutdown(raise_on_error=False)
    assert "the collector was shut down after an error" in caplog.text


# State, and the end


def test_the_state_of_a_collector_here_is_taken_up() -> None:
    alone = make_llm(talk(), dialog_turns_per_batch=2)
    alone.policy.version = 3
    alone.next()
    collector = talks()
    collector.load_state_dict(alone.state_dict())
    assert collector.policy_version == 3
    for _ in range(3):
        batch, wanted = collector.next(), alone.next()
        assert batch is not None
        assert wanted is not None
        assert told(batch[:, 0]) == told(wanted[:, 0])
    partial_state = {"policy_state_dict": alone.state_dict()["policy_state_dict"]}
    collector.load_state_dict(partial_state, strict=False)


@pytest.mark.parametrize("close_env", [True, False])
def test_the_environment_is_closed_unless_that_is_not_wanted(close_env: bool) -> None:
    collector = frames()
    inner = there()
    with collector as same:
        assert same.is_initialized()
        collector.shutdown(close_env=close_env)
    assert inner.env.closed == close_env
    with pytest.raises(RuntimeError, match="shut down: build another"):
        collector.set_seed(1)
    other = talks()
    other.async_shutdown(timeout=60)
    with pytest.raises(Exception, match="is closed and samples no more"):
        there().policy.submit(None)


def test_the_older_name_is_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match="is called AsyncCollector now"):
        collector = aSyncDataCollector(Moody, half, frames_per_batch=8)
    assert isinstance(collector, AsyncCollector)
