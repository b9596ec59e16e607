"""The examples of the collectors' documents that play gymnasium, with this package's imports."""

from __future__ import annotations

import gc
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from rlpost.collectors import Collector, RandomPolicy, SyncDataCollector
from rlpost.envs import GymEnv, ParallelEnv
from rlpost.errors import ConfigError, PolicyError
from rlpost.torchrl.frames import spec_of
from tests.collectors.here import wait_until

gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces


def linear() -> TensorDictModule:
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


def test_pendulum_is_played_with_a_linear_policy() -> None:
    env_maker = lambda: GymEnv("Pendulum-v1", device="cpu")  # noqa: E731  as the document has it
    policy = linear()
    collector = Collector(
        env_maker,
        policy,
        max_frames_per_traj=50,
        init_random_frames=-1,
        reset_at_each_iter=False,
        device="cpu",
        storing_device="cpu",
        total_frames=10000,
        frames_per_batch=200,
    )
    data: Any = None
    for i, data in enumerate(collector):  # noqa: B007
        if i == 2:
            break
    assert data.batch_size == (200,)
    assert data["collector", "traj_ids"].unique().tolist() == [8, 9, 10, 11]  # four of 50 frames each batch
    assert data["next", "truncated"].squeeze(-1).nonzero().flatten().tolist() == [49, 99, 149, 199]
    assert torch.allclose(data["action"], policy.module(data["observation"]), atol=1e-6)
    collector.shutdown()


def test_parallel_environments_are_seeded_one_after_the_other() -> None:
    env_fn = lambda: GymEnv("Pendulum-v1")  # noqa: E731
    env_fn_parallel = ParallelEnv(6, env_fn)
    collector = SyncDataCollector(env_fn_parallel, linear(), total_frames=300, frames_per_batch=100)
    out_seed = collector.set_seed(1)
    assert out_seed == 6
    batch = next(iter(collector))
    assert batch is not None
    assert batch.batch_size == (6, 17)  # 100 frames, and two more that make the step whole
    firsts = batch[:, 0]["observation"]
    assert len({tuple(first.tolist()) for first in firsts}) == 6
    again = ParallelEnv(6, env_fn)
    again.set_seed(1)
    assert torch.equal(again.reset()["observation"], firsts)
    again.set_seed(out_seed)  # the next of a chain shares no environment with the first
    assert not set(firsts.flatten().tolist()) & set(again.reset()["observation"].flatten().tolist())
    state = again.state_dict()
    second = again.reset()["observation"]
    again.load_state_dict(state)
    assert torch.equal(again.reset()["observation"], second)
    again.set_seed(1, static_seed=True)
    alone = GymEnv("Pendulum-v1")
    alone.set_seed(1)
    assert torch.equal(again.reset()["observation"], alone.reset()["observation"].expand(6, 3))
    collector.shutdown()


def test_an_environment_of_gymnasium_is_reset_and_rolled_out() -> None:
    env = GymEnv("CartPole-v1", max_episode_steps=7)
    assert env.set_seed(5) == 5
    first = env.reset()
    assert first["observation"].tolist() == gymnasium.make("CartPole-v1").reset(seed=5)[0].tolist()
    played = env.rollout(20, RandomPolicy(env.action_spec))
    assert played["action"].unique().tolist() in ([0, 1], [0], [1])
    assert played["next", "done"].squeeze(-1).tolist()[:-1] == [False] * (len(played) - 1)
    assert played["next", "done"][-1]
    on = env.rollout(20, RandomPolicy(env.action_spec), break_when_any_done=False)
    assert on.batch_size == (20,)
    assert on["next", "done"].sum() >= 2
    state = env.state_dict()
    following = env.reset()["observation"]
    again = GymEnv("CartPole-v1")
    again.load_state_dict(state)
    assert torch.equal(again.reset()["observation"], following)
    env.close()
    env.close()


def test_the_threads_of_a_pool_end_with_it() -> None:
    before = set(threading.enumerate())  # of which some may be about to end

    def threads() -> int:
        return sum(thread.name.startswith("rlpost-env") for thread in set(threading.enumerate()) - before)

    closed, forgotten = (ParallelEnv(2, partial(GymEnv, "Pendulum-v1")) for _ in range(2))
    assert threads() == 4
    closed.close()
    closed.close()
    del forgotten
    gc.collect()
    wait_until(lambda: threads() == 0)


@pytest.mark.parametrize(
    ("space", "values"),
    [
        (spaces.Discrete(3, start=-1), [-1, 0, 1]),
        (spaces.Box(-1, 1, (1,), dtype=np.int64), [-1, 0, 1]),
    ],
    ids=str,
)
def test_actions_are_drawn_from_the_whole_space(space: Any, values: list[int]) -> None:
    drawn: Any = spec_of(space).rand([100])
    assert drawn.unique().tolist() == values
    assert drawn.shape == (100, *space.shape)


def test_other_spaces_of_actions_are_refused() -> None:
    with pytest.raises(ConfigError, match="wrapper"):
        spec_of(spaces.Text(3))


def test_a_pool_names_the_environment_that_fails_or_hangs() -> None:
    class Broken(GymEnv):
        def act(self, tensordict: Any) -> Any:
            raise OSError("went away")

    pendulum = partial(GymEnv, "Pendulum-v1")
    pool = ParallelEnv(2, [pendulum, partial(Broken, "Pendulum-v1")])
    with pytest.raises(OSError, match="went away") as raised:
        Collector(pool, linear(), frames_per_batch=50).rollout()
    [note] = raised.value.__notes__
    assert "environment 1" in note

    over = threading.Event()

    class Slow(GymEnv):
        def begin(self, where: Any) -> Any:
            assert over.wait(60)
            return super().begin(where)

    slow = ParallelEnv(2, [pendulum, partial(Slow, "Pendulum-v1")], wait_seconds=2.5)  # for the other to be there
    with pytest.raises(PolicyError, match=r"2\.5 s .* 1"):
        slow.reset()
    over.set()
    arguments = [{"g": 1.0}, {"g": 2.0}]
    several = ParallelEnv(2, pendulum, create_env_kwargs=arguments)
    several.set_seed(0, static_seed=True)
    begun = several.reset()
    speed = begun["observation"][:, 2].clone()
    after = several.step(begun.set("action", torch.zeros(2, 1)))["next", "observation"][:, 2]
    assert torch.allclose((after - speed)[1], 2 * (after - speed)[0])  # gravity is twice as strong
