"""gymnasium's environments as those of TensorDicts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rlpost.errors import ConfigError
from rlpost.extras import require
from rlpost.torchrl.frames import Bounded, Categorical, Spec, TensorDictEnv


class GymEnv(TensorDictEnv):
    """One environment of gymnasium's: `GymEnv("Pendulum-v1")`, made with `arguments`, or an object of that kind.

    Observations are the entry `observation`, those of a dictionary an entry each, as their space has them;
    frames are (), flags and rewards (1,). Once it is seeded an episode is a function of the seed and its
    number, so that a saved environment begins the same ones again; before, each is gymnasium's.
    Raises MissingExtraError without gymnasium, ConfigError for a space that is no Box, Discrete,
    MultiDiscrete or MultiBinary, or a dictionary of them.
    """

    def __init__(self, game: Any, *, device: torch.device | str | None = None, **arguments: Any) -> None:
        require("gymnasium", "gymnasium", "GymEnv")
        import gymnasium

        self._game: Any = gymnasium.make(game, **arguments) if isinstance(game, str) else game
        self.device = None if device is None else torch.device(device)
        self.action_spec = spec_of(self._game.action_space)
        space = self._game.observation_space
        spaces = dict(space.spaces) if isinstance(space, gymnasium.spaces.Dict) else {"observation": space}
        self.observation_spec: dict[str, Spec] = {name: spec_of(inner) for name, inner in spaces.items()}
        self.observation_keys = tuple(spaces)
        self._by_name = isinstance(space, gymnasium.spaces.Dict)
        self._seed: int | None = None
        self._episodes = 0  # begun since it was seeded
        self._closed = False

    def begin(self, where: torch.Tensor) -> TensorDict:
        """See `TensorDictEnv.begin`."""
        observation, _ = self._game.reset(seed=self._episode_seed())
        self._episodes += 1
        return self._frame(observation)

    def act(self, tensordict: TensorDictBase) -> TensorDict:
        """See `TensorDictEnv.act`."""
        action = tensordict.get("action").detach().cpu().numpy()
        played = action.item() if isinstance(self.action_spec, Categorical) and action.ndim == 0 else action
        observation, reward, terminated, truncated, _ = self._game.step(played)
        frame = self._frame(observation)
        frame.set("reward", torch.tensor([float(reward)]))
        frame.set("terminated", torch.tensor([bool(terminated)]))
        return frame.set("truncated", torch.tensor([bool(truncated)]))

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """See `TensorDictEnv.set_seed`; the first episode is what gymnasium begins with `seed`."""
        self._seed, self._episodes = seed, 0
        return seed

    def state_dict(self) -> dict[str, Any]:
        """The seed, and how many episodes were begun with it."""
        return {"seed": self._seed, "episodes": self._episodes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `TensorDictEnv.load_state_dict`; the episode under way is given up."""
        self._seed, self._episodes = state["seed"], state["episodes"]

    def close(self) -> None:
        """Close the game."""
        if not self._closed:
            self._closed = True
            self._game.close()

    def _episode_seed(self) -> int | None:
        if self._seed is None or self._episodes == 0:
            return self._seed
        digest = hashlib.blake2b(f"{self._seed}/{self._episodes}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") >> 1

    def _frame(self, observation: Any) -> TensorDict:
        named = observation if self._by_name else {"observation": observation}
        return TensorDict({name: torch.as_tensor(value).clone() for name, value in named.items()}, batch_size=[])


def spec_of(space: Any) -> Spec:
    """A space of gymnasium's. Raises ConfigError for one of another kind."""
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        return Bounded(torch.as_tensor(space.low), torch.as_tensor(space.high))
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n), start=int(space.start))
    if isinstance(space, spaces.MultiBinary):
        return Categorical(2, space.shape)
    if isinstance(space, spaces.MultiDiscrete):
        start = torch.as_tensor(space.start)
        return Bounded(start, start + torch.as_tensor(space.nvec) - 1)
    raise ConfigError(
        f"GymEnv takes the spaces Box, Discrete, MultiDiscrete and MultiBinary, and dictionaries of them to observe, "
        f"not {space}: flatten it with a wrapper of gymnasium's first"
    )
