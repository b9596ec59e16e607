"""AsyncCollector: batches of a collector in a process of its own, and every argument's effect there or its refusal."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from moody import Moody, Scaled, half, next_of, seen
from processes import children, is_gone

from rlpost.collectors import AsyncCollector, Collector
from rlpost.errors import PolicyError
from tests.collectors.talk import make as make_llm
from tests.collectors.talk import scripted, talk, told

WEIGHTS = {"scale": torch.tensor(3.0)}
THREADS: list[int] = []  # of torch, here, where there is a collector
PIDS: dict[str, int] = {}  # of the collectors' processes


def workers() -> set[int]:
    return {process.pid for process, command in children().items() if "rlpost.remote.process" in command}


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[AsyncCollector, dict[str, Any]]]:
    with begun() as collector:
        yield collector, collector.state_dict()


@contextmanager
def begun() -> Iterator[AsyncCollector]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_num_threads", torch._C.set_num_threads)  # vLLM in this process takes it away
        collector = begin()
        yield collector
        collector.shutdown(raise_on_error=False)


def begin() -> AsyncCollector:
    before = workers()
    collector = AsyncCollector(
        lambda lengths: Moody(lengths=lengths),
        Scaled(),
        create_env_kwargs=[{"lengths": (3, 9)}],
        frames_per_batch=8,
        total_frames=48,
        max_frames_per_traj=4,
        exploration_type="mode",
        num_threads=2,
        num_sub_threads=3,
        storing_device="cpu",
        track_policy_version=True,
        postproc=lambda batch: batch.set("seen_in", torch.full(batch.batch_size, os.getpid())),
    )
    THREADS.append(torch.get_num_threads())
    [PIDS["frames"]] = workers() - before
    return collector


@pytest.fixture
def frames(started: tuple[AsyncCollector, dict[str, Any]]) -> AsyncCollector:
    """A collector that has collected nothing."""
    collector, state = started
    collector._update_interval = -1
    collector.set_seed(0)
    collector.load_state_dict(state)
    return collector


def plain() -> Collector:
    """The same in this process."""
    env = Moody(lengths=(3, 9))
    return Collector(env, half, frames_per_batch=8, max_frames_per_traj=4, track_policy_version=True)


# Batches


def test_batches_are_those_that_the_collector_gives_here(frames: AsyncCollector) -> None:
    here = plain()
    batches: list[Any] = list(frames.iterator())
    assert len(batches) == 6  # the total
    for batch in batches:
        same = next_of(here)
        assert {"threads", "seen_in", *same.keys(include_nested=True)} == set(batch.keys(include_nested=True))
        assert all((value == batch[key]).all() for key, value in same.items(include_nested=True, leaves_only=True))
        assert batch["threads"].reshape(-1, 2).unique(dim=0).tolist() == [[3, 3]]  # there
        assert THREADS[0] == 2  # here
        assert batch["seen_in"].unique().tolist() == [os.getpid()]  # by the postproc
        assert batch.device == torch.device("cpu")
    assert (frames.next(), list(frames), frames.wants_more) == (None, [], False)


def test_no_more_is_collected_ahead_than_one_batch(frames: AsyncCollector) -> None:
    frames.next()
    with frames.pause():
        assert frames.state_dict()["frames"] == 16
        assert seen(frames.next()) == [[1, 2, 0, 1], [0, 1, 2, 3]]
        with pytest.raises(RuntimeError, match="pause"):
            frames.next()
    assert frames.next() is not None


def test_a_seed_reaches_the_environment_and_drops_what_waited(frames: AsyncCollector) -> None:
    frames.next()
    assert frames.state_dict()["waiting"] is not None  # which is thrown away, and counts towards no total
    assert frames.set_seed(7) == plain().set_seed(7)
    assert seen(frames.next())[0] == [70, 71, 72, 70]
    frames.set_seed(7, static_seed=True)
    assert seen(frames.next())[0] == [7, 8, 9, 7]
    assert len(list(frames)) == 3  # 6 in all


def test_an_error_there_is_raised_here_once_and_it_goes_on(frames: AsyncCollector) -> None:
    frames.set_seed(66)
    with pytest.raises(OSError, match="went away") as raised:
        frames.next()
    assert "in act" in raised.value.__notes__[0]
    assert "process" in raised.value.__notes__[1]
    with pytest.raises(TypeError, match="'seconds'"):
        frames.reset(seconds=2)
    frames.set_seed(2)
    assert seen(frames.next())[0] == [20, 21, 22, 20]


# Weights


def test_weights_go_over_and_their_version_with_them(frames: AsyncCollector) -> None:
    tracker: Any = frames.policy_version_tracker
    frames.update_policy_weights_(WEIGHTS)
    frames.update_policy_weights_(weights_dict={"policy": WEIGHTS})
    assert tracker.version == frames.policy_version == frames.get_policy_version() == 2
    batch = next_of(frames)
    assert torch.equal(batch["action"], batch["observation"] * 3)
    assert batch["policy_version"].unique().tolist() == [2]
    with pytest.raises(ValueError, match="bias"):
        frames.update_policy_weights_(torch.nn.Linear(1, 1))
    assert frames.policy_version == 2
    frames.update_policy_weights_()  # those of the policy that was given
    model = frames.get_policy_model()
    assert [seen(b) for b in frames if b is not None and not torch.equal(b["action"], b["observation"] * 3)]
    assert (frames.policy_version, model.scale.item()) == (3, 0.5)


def test_weights_may_follow_each_batch(frames: AsyncCollector) -> None:
    model = frames.get_policy_model()
    frames.update_policy_weights_()
    frames._update_interval = 0  # as with update_at_each_batch
    first: Any = frames.policy_version
    for i, batch in enumerate(frames):
        assert batch is not None
        assert torch.equal(batch["action"], batch["observation"] * model.scale)
        assert batch["policy_version"].unique().tolist() == [first + i]
        model.scale.data.fill_(i + 1.0)  # goes over before the next
    model.scale.data.fill_(0.5)
    with pytest.raises(RuntimeError, match="buffer"):
        frames.start()


# State


@pytest.fixture(scope="module")
def talks() -> Iterator[AsyncCollector]:
    with talking() as collector:
        yield collector


@contextmanager
def talking() -> Iterator[AsyncCollector]:
    def with_child() -> Any:
        import subprocess

        subprocess.Popen(["sleep", "1000"])
        return talk()

    before = workers()
    collector = AsyncCollector(with_child, policy_factory=lambda: scripted("a", "b"), frames_per_batch=6)
    [PIDS["talks"]] = workers() - before
    yield collector
    collector.shutdown()


def turns(batch: Any) -> list[Any]:
    return [told(step) for step in batch.unbind(1)]


def test_a_saved_collector_goes_on_with_what_it_had_not_given(talks: AsyncCollector) -> None:
    here = make_llm(talk(), dialog_turns_per_batch=6)
    assert talks.frames_per_batch == 6
    batches = [turns(talks.next())]
    for wanted in (True, False):  # a batch that waits
        with talks.pause():
            batches += [] if wanted else [turns(talks.next())]
            state = pickle.loads(pickle.dumps(talks.state_dict()))
        talks.next()
        assert (state["waiting"] is not None) == wanted
        talks.load_state_dict(state)
    batches += [turns(talks.next()) for _ in range(3)]
    assert batches == [turns(here.next()) for _ in batches]


def test_a_language_policy_takes_weights_and_versions(talks: AsyncCollector) -> None:
    version: Any = talks.policy_version
    talks.update_policy_weights_({"any": torch.ones(1)})
    assert talks.policy_version == version + 1
    sampled = [next_of(talks) for _ in range(4)]
    assert sampled[-1]["policy_version"].unique().tolist() == [version + 1]


# The end


def test_a_death_is_named_wakes_who_waits_and_leaves_nothing() -> None:
    before = asleep()
    with talking() as talks:
        [child], pid = asleep() - before, PIDS["talks"]
        killing = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
        killing.start()
        with pytest.raises(PolicyError, match="SIGKILL"):
            for _ in talks:
                pass
        killing.join()
        assert (is_gone(child), is_gone(pid)) == (True, True)
        for use in (talks.next, talks.state_dict, lambda: talks.update_policy_weights_({"any": torch.ones(1)})):
            with pytest.raises(PolicyError, match="SIGKILL"):
                use()
        assert not talks.is_initialized()
        talks.shutdown()  # the loss was raised already


def asleep() -> set[int]:
    return {process.pid for process, command in children().items() if command == "sleep 1000"}


def test_what_takes_too_long_is_named_and_ended_by_force() -> None:
    threads = torch.get_num_threads()
    with begun() as frames:
        frames.set_seed(99)
        frames.wait_seconds = 0.1
        with pytest.raises(PolicyError, match=r"0 s .*batch"):
            frames.next()
        with pytest.raises(PolicyError, match=r"0 s .*finish"):
            frames.shutdown(timeout=0.1)
        assert is_gone(PIDS["frames"])
        assert torch.get_num_threads() == threads  # as it was
        assert not frames.is_initialized()
        with pytest.raises(RuntimeError, match="shut down"):
            frames.next()
