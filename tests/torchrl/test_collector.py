"""Collector: frames of any environment of TensorDicts; every argument has its effect or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counting import Counting
from moody import half, next_of, seen
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from rlpost.collectors import Collector


def make(env: Any = None, policy: Any = half, **options: Any) -> Collector:
    return Collector(Counting() if env is None else env, policy, **{"frames_per_batch": 8, **options})


def trajectories(batch: TensorDictBase) -> list[Any]:
    return batch["collector", "traj_ids"].tolist()


# Batches


def test_a_batch_has_a_row_a_place_and_episodes_go_on() -> None:
    collector = make(total_frames=16)
    first, second = next_of(collector), next_of(collector)
    assert seen(first) == [[0, 1, 2, 0], [0, 1, 2, 3]]  # of 3 and of 5 steps
    assert first["next", "observation"].squeeze(-1).tolist() == [[1, 2, 3, 1], [1, 2, 3, 4]]
    assert first["next", "reward"].squeeze(-1).tolist() == [[0, 0.5, 1, 0], [0, 0.5, 1, 1.5]]
    assert first["next", "terminated"].squeeze(-1).tolist() == [[False, False, True, False], [False] * 4]
    assert trajectories(first) == [[0, 0, 0, 2], [1, 1, 1, 1]]
    assert seen(second) == [[1, 2, 0, 1], [4, 0, 1, 2]]
    assert trajectories(second) == [[2, 2, 4, 4], [1, 3, 3, 3]]  # place 1 began anew first
    assert collector.next() is None  # all 16 were delivered
    anew = make(reset_at_each_iter=True)
    assert seen(anew.rollout()) == seen(anew.rollout()) == seen(first)


def test_frames_are_rounded_up_to_whole_steps_and_batches() -> None:
    collector = make(frames_per_batch=3, total_frames=6)
    assert collector.frames_per_batch == 4
    assert [batch.batch_size for batch in collector.iterator() if batch is not None] == [(2, 2), (2, 2)]
    assert make(Counting(size=None), frames_per_batch=3).rollout().batch_size == (3,)


def test_trajectories_are_cut_in_each_place_by_itself() -> None:
    batch = make(max_frames_per_traj=4, frames_per_batch=12).rollout()
    assert seen(batch) == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]]
    flags = batch["next"]
    assert flags["truncated"].squeeze(-1).nonzero().tolist() == [[1, 3]]
    assert flags["done"].squeeze(-1).nonzero().tolist() == [[0, 2], [0, 5], [1, 3]]
    for ignored in (None, -1):
        assert not make(max_frames_per_traj=ignored).rollout()["next", "truncated"].any()


def test_what_is_done_may_be_played_on() -> None:
    batch = make(reset_when_done=False).rollout()
    assert seen(batch) == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert trajectories(batch) == [[0] * 4, [1] * 4]


def test_the_last_frame_of_a_batch_may_count_as_truncated() -> None:
    flags = make(set_truncated=True).rollout()["next"]
    assert flags["truncated"].squeeze(-1).tolist() == [[False, False, False, True]] * 2
    assert flags["done"].squeeze(-1).tolist() == [[False, False, True, True], [False, False, False, True]]
    assert flags["terminated"].squeeze(-1).nonzero().tolist() == [[0, 2]]


def test_trajectories_may_come_one_a_row() -> None:
    batch = make(split_trajs=True).rollout()
    assert seen(batch) == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 0, 0, 0]]  # a place is padded behind three, and three
    assert batch["collector", "mask"].tolist() == [[1, 1, 1, 0], [1] * 4, [1, 0, 0, 0]]


def test_the_postproc_sees_a_batch_last() -> None:
    collector = make(split_trajs=True, postproc=lambda batch: batch[batch["collector", "mask"]])
    assert seen(collector.rollout()) == [0, 1, 2, 0, 1, 2, 3, 0]
    with pytest.raises(TypeError, match="postproc"):
        make(postproc=lambda batch: None).rollout()


# Policies


def test_what_a_policy_returns_goes_into_what_it_was_shown() -> None:
    written = TensorDictModule(lambda seen: (seen / 2, seen + 7), ["observation"], ["action", "value"], inplace=False)
    in_step = Counting().rollout(4, half, break_when_any_done=False)
    for batch, same in [
        (make(policy=written).rollout(), make().rollout()),
        (Counting().rollout(4, written, break_when_any_done=False), in_step),
    ]:
        assert torch.equal(batch["value"], batch["observation"] + 7)
        assert set(batch.keys(True)) == {"value", *same.keys(True)}
        assert all((batch[key] == value).all() for key, value in same.items(True, True))


class Plain(torch.nn.Module):
    """Takes the observation itself, and so is wrapped."""

    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(scale))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return observation * self.scale


def test_a_policy_may_be_trusted_or_made_by_a_factory() -> None:
    made = make(policy=None, policy_factory=Plain)
    assert made.rollout()["action"][:, 2].tolist() == [[1.0], [1.0]]
    trusted = lambda frames: half(frames)  # noqa: E731  nothing says that it takes a TensorDict
    assert make(policy=trusted, trust_policy=True).policy is trusted


def test_data_and_weights_lie_on_the_chosen_devices() -> None:
    assert make().rollout().device is None
    batch = make(policy_device="cpu", storing_device="meta", frames_per_batch=2).rollout()
    assert batch.device == batch["next", "reward"].device == torch.device("meta")
    collector = make(device=["cpu"], frames_per_batch=2)
    assert collector.rollout().device == torch.device("cpu")
    assert collector.storing_device == collector.policy_device == collector.env_device == torch.device("cpu")
    assert collector.env.device == torch.device("cpu")  # type: ignore[attr-defined]
    own = Plain()
    elsewhere = make(policy=own, policy_device="meta").policy
    assert isinstance(elsewhere, torch.nn.Module)
    assert [p.device.type for p in (own.scale, *elsewhere.parameters())] == ["cpu", "meta"]


# Weights and versions


def test_weights_arrive_whole_or_not_and_raise_the_version() -> None:
    own = Plain()
    collector = make(policy=own, track_policy_version=True)
    assert collector.rollout()["policy_version"].tolist() == [[0] * 4] * 2
    collector.update_policy_weights_(Plain(2.0))  # of the module that was wrapped
    assert own.scale == 2.0
    wrapped = TensorDictModule(Plain(3.0), in_keys=["a"], out_keys=["b"])
    collector.update_policy_weights_(wrapped)
    collector.update_policy_weights_(TensorDict.from_module(wrapped))
    collector.update_policy_weights_({"scale": torch.tensor(4.0)})
    assert own.scale == 4.0
    with pytest.raises(ValueError, match="bias"):
        collector.update_policy_weights_(torch.nn.Linear(1, 1))
    batch = collector.rollout()
    assert torch.equal(batch["action"], batch["observation"] * 4)
    assert batch["policy_version"].unique().tolist() == [4]
    assert collector.get_policy_version() == collector.policy_version == 4


def test_a_copy_takes_the_weights_of_the_given_policy() -> None:
    own = Plain()
    collector = make(policy=own, policy_device="cpu")
    assert collector.get_policy_model().module is own  # it is there already, and not copied
    collector.policy = TensorDictModule(Plain(), in_keys=["observation"], out_keys=["action"])  # as on another device
    own.scale.data.fill_(3.0)
    collector.update_policy_weights_()
    assert collector.rollout()["action"][:, 1].tolist() == [[3.0], [3.0]]


# State


def test_a_seed_reaches_the_environment_and_the_next_is_returned() -> None:
    collector = make()
    assert collector.set_seed(3) == 4  # for the next collector of a chain
    assert seen(collector.rollout())[0] == [30, 31, 32, 30]
    assert collector.set_seed(3, static_seed=True) == 3
    assert seen(collector.rollout())[0] == [3, 4, 5, 3]


def test_places_are_reset_one_by_one_or_all() -> None:
    collector = make()
    collector.rollout()
    collector.reset(1)
    assert (seen(second := collector.rollout()), trajectories(second)[1][0]) == ([[1, 2, 0, 1], [0, 1, 2, 3]], 3)
    collector.reset()
    assert seen(collector.rollout()) == [[0, 1, 2, 0], [0, 1, 2, 3]]


def test_a_saved_collector_goes_on_with_new_trajectories() -> None:
    collector = make(policy=Plain(), total_frames=16, track_policy_version=True)
    collector.set_seed(1)
    collector.update_policy_weights_(Plain(2.0))
    collector.next()
    state = collector.state_dict()
    assert {"policy_state_dict", "env_state_dict"} <= state.keys()
    again = make(policy=Plain(), total_frames=16, track_policy_version=True)
    again.load_state_dict(state)
    batch = next_of(again)
    assert (seen(batch)[0], trajectories(batch)[0][0]) == ([10, 11, 12, 10], 3)
    assert torch.equal(batch["action"], batch["observation"] * 2)
    assert (again.policy_version, again.next()) == (1, None)
    with pytest.raises(RuntimeError, match=r"Missing.*scale"):
        again.load_state_dict(state | {"policy_state_dict": {}})
    again.load_state_dict(state | {"policy_state_dict": {}}, strict=False)


def test_shutdown_closes_the_environment_unless_told_not_to() -> None:
    collector = make()
    collector.shutdown()
    collector.shutdown()
    assert (collector.env.closed, collector.is_initialized()) == (1, False)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="shut down"):
        collector.next()
    open_env = Counting()
    make(open_env).shutdown(timeout=1, close_env=False)
    assert open_env.closed == 0


# Environments


def test_an_environment_is_made_here_from_what_it_takes() -> None:
    batch = make(Counting, create_env_kwargs={"size": 1, "lengths": (2,)}, frames_per_batch=4).rollout()
    assert seen(batch) == [[0, 1, 0, 1]]
