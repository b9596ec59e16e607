"""Collector: frames of any environment of TensorDicts, played with any policy on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from math import ceil
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDictBase, lazy_stack
from tensordict.nn import InteractionType, TensorDictModule, TensorDictModuleBase, set_interaction_type

from rlpost.data.conversation import PolicyVersionLabel
from rlpost.envs.transforms.training import PolicyVersion
from rlpost.model.weights import SavedWeights, load_weights
from rlpost.torchrl.collector_base import CollectorBase, postprocessed
from rlpost.torchrl.frames import TRAJ_IDS, dense, mark_truncated, split_trajectories
from rlpost.weight_sync.base import named_weights

Device = torch.device | str | int
TDPolicy = Callable[[TensorDictBase], TensorDictBase]


class Collector(CollectorBase):
    """Iterates over batches of frames, or fills a replay buffer with them.

    `create_env_fn` is an environment of TensorDicts or makes one, with `create_env_kwargs`: anything with `reset`,
    `step` and `batch_size`, and, if `policy` or `init_random_frames` need them, `action_spec`, `observation_keys` and
    `action_keys` (`rlpost.envs.TensorDictEnv`, `GymEnv`, `ParallelEnv`). `policy` is a TensorDictModule, a callable on
    TensorDicts, or any other callable, which becomes the TensorDictModule from the environment's observations to its
    action unless `trust_policy`; without one actions are drawn at random. If it returns another TensorDict than its
    argument, that is merged into the argument. `policy_factory` makes the policy here instead.

    A batch has the environment's shape and then time, (*batch_size, T), of `frames_per_batch` frames in all, rounded
    up to a multiple of the environment's size. Each frame has the policy's input and output, `next` with the frame
    that followed, and `("collector", "traj_ids")`, the number of its trajectory. Trajectories go on from batch to
    batch unless `reset_at_each_iter`; they end when the environment is done, unless not `reset_when_done`, or,
    truncated, after `max_frames_per_traj` frames in their place (None or negative: never).

    Iteration ends once `total_frames`, a multiple of `frames_per_batch`, are there (-1: never). The first
    `init_random_frames`, rounded up to whole batches, are played at random, with zeros for the policy's other outputs;
    the policy is called once to find those. `set_truncated` marks the last frame of each batch as truncated.
    `split_trajs` delivers one trajectory a row, (N, T), padded behind `("collector", "mask")`; `postproc` sees a batch
    last. With `track_policy_version` each frame has `policy_version`. `exploration_type` is tensordict's
    InteractionType while the policy is called. `device` is the default of `storing_device`, `env_device` and
    `policy_device`: a policy whose weights lie elsewhere is copied, and `update_policy_weights_` updates that copy.
    With `replay_buffer`, a `FrameBuffer`, batches go there and iteration yields None; `start` fills it from a thread of
    its own.
    """

    env: Any  # an environment of TensorDicts

    def __init__(
        self,
        create_env_fn: Any,
        policy: Callable[..., Any] | None = None,
        *,
        policy_factory: Callable[[], Callable[..., Any]] | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        device: Device | Sequence[Device] | None = None,
        storing_device: Device | Sequence[Device] | None = None,
        env_device: Device | Sequence[Device] | None = None,
        policy_device: Device | Sequence[Device] | None = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        split_trajs: bool | None = None,
        exploration_type: InteractionType | str = InteractionType.RANDOM,
        reset_when_done: bool = True,
        set_truncated: bool = False,
        track_policy_version: bool | PolicyVersion = False,
        trust_policy: bool | None = None,
        replay_buffer: Any = None,
        wait_seconds: float = 600.0,
    ) -> None:
        super().__init__(
            cast(Any, made_env(create_env_fn, create_env_kwargs)), replay_buffer, wait_seconds=wait_seconds
        )
        env = self.env
        size = env.batch_size.numel()
        self.frames_per_batch = ceil(frames_per_batch / size) * size
        self.total_frames = total_frames
        self.storing_device, self.env_device, self.policy_device = (
            one_device(device if given is None else given) for given in (storing_device, env_device, policy_device)
        )
        if self.env_device is None:
            self.env_device = getattr(env, "device", None)
        elif hasattr(env, "to"):
            env.to(self.env_device)
        self._given = policy if policy_factory is None else policy_factory()
        self.policy = self._on_its_device(as_policy(self._given, env, bool(trust_policy)))
        self.max_frames_per_traj = max_frames_per_traj if max_frames_per_traj and max_frames_per_traj > 0 else None
        self.init_random_frames = ceil(max(0, init_random_frames or 0) / self.frames_per_batch) * self.frames_per_batch
        self._random = as_policy(None, env) if self.init_random_frames else None
        self._zeros: TensorDictBase | None = None  # for what the policy writes, in random frames
        self.reset_at_each_iter = reset_at_each_iter
        self.postproc = postproc
        self.split_trajs = bool(split_trajs)
        named = isinstance(exploration_type, str)
        self.exploration_type = InteractionType.from_str(exploration_type) if named else exploration_type
        self.reset_when_done = reset_when_done
        self.set_truncated = set_truncated
        self.policy_version_tracker = PolicyVersion() if track_policy_version is True else track_policy_version or None
        self._frames = 0  # delivered
        self._trajectories = 0  # begun
        self._begin_anew()

    # Batches

    @property
    def wants_more(self) -> bool:
        """See `CollectorBase.wants_more`: until `total_frames`."""
        return self.total_frames < 0 or self._frames < self.total_frames

    def _collected(self) -> TensorDictBase:
        if self.reset_at_each_iter:
            self._begin_anew()
        with torch.no_grad(), set_interaction_type(self.exploration_type):
            frames = [self._frame() for _ in range(self.frames_per_batch // self._steps.numel())]
        batch = dense(lazy_stack(frames, dim=-1))
        if self.set_truncated:
            mark_truncated(batch)
        self._frames += self.frames_per_batch
        return postprocessed(split_trajectories(batch) if self.split_trajs else batch, self.postproc)

    # Frames

    def _frame(self) -> TensorDictBase:
        """One more frame of every place."""
        if self._current is None:
            self._current = self._begun(self.env.reset())
        frame = self.env.step(self._act(self._current))
        frame.set(TRAJ_IDS, self._traj_ids)
        self._steps += 1
        following = frame["next"]
        if self.max_frames_per_traj is not None:
            over = self._steps >= self.max_frames_per_traj
            cut = over.reshape(following["done"].shape).to(following["done"].device)
            following.set("truncated", following.get("truncated", torch.zeros_like(cut)) | cut)
            following.set("done", following["done"] | cut)
        current = following.exclude("reward")
        done = following["done"]
        if self.reset_when_done and done.any():
            current = self.env.reset() if done.all() else self.env.reset(current.set("_reset", done))
            where = done.reshape(self._steps.shape).cpu()
            self._steps *= ~where
            self._number(where)
        self._flag(current)
        self._current = current
        return frame if self.storing_device is None else frame.to(self.storing_device)

    def _act(self, current: TensorDictBase) -> TensorDictBase:
        """`current` with the policy's action, on the environment's device."""
        shown = current if self.policy_device is None else current.to(self.policy_device)
        policy = self.policy
        if self._random is not None and self._frames < self.init_random_frames:
            policy = self._random
            if self._zeros is None:
                written = _written(self.policy, shown.clone()).exclude(*shown.keys(True, True))
                self._zeros = cast(TensorDictBase, torch.zeros_like(written))
            shown.update(self._zeros, clone=True)
        acted = _written(policy, shown)
        if self.policy_version_tracker is not None:
            acted = self.policy_version_tracker(acted)
        return acted if self.env_device is None else acted.to(self.env_device)

    def _begun(self, begun: TensorDictBase) -> TensorDictBase:
        """The first frames of new trajectories in every place."""
        self._number(torch.ones_like(self._steps, dtype=torch.bool))
        self._flag(begun)
        return begun

    def _flag(self, current: TensorDictBase) -> None:
        """Set `truncated` in `current` if trajectories have a limit."""
        if self.max_frames_per_traj is not None and "truncated" not in current.keys():  # noqa: SIM118
            current.set("truncated", torch.zeros_like(current["done"]))

    def _number(self, where: torch.Tensor) -> None:
        """Number the trajectories that begin where the mask is True."""
        numbers = self._trajectories + where.reshape(-1).cumsum(0).reshape(where.shape) - 1
        self._traj_ids = torch.where(where, numbers, self._traj_ids)
        self._trajectories += int(where.sum())

    def _begin_anew(self) -> None:
        """Abandon the trajectories in flight."""
        self._current: TensorDictBase | None = None
        self._steps = torch.zeros(cast(Any, self.env).batch_size, dtype=torch.int64)
        self._traj_ids = torch.full_like(self._steps, -1)

    # Weights and versions

    def update_policy_weights_(
        self, policy_or_weights: Any = None, *, worker_ids: int | Sequence[int] | None = None
    ) -> None:
        """Load weights into the policy, all or none, and raise its version.

        They come from a module, a TensorDict or a mapping; the default is the given policy, and this one may be
        a copy of it on another device. Raises ValueError for weights that do not fit.
        """
        with self.pause():
            source = self._given if policy_or_weights is None else policy_or_weights
            load_weights(cast(torch.nn.Module, self.policy), named_weights(cast(Any, source)))
            if self.policy_version_tracker is not None:
                self.policy_version_tracker.increment_version()

    def take_up(self, folder: Path, version: PolicyVersionLabel, *, adapter: bool = False) -> None:
        """See `CollectorBase.take_up`."""
        with self.pause():
            self.update_policy_weights_(SavedWeights(folder))
            self.set_version(version)

    def set_version(self, version: PolicyVersionLabel) -> None:
        """See `CollectorBase.set_version`."""
        if self.policy_version_tracker is not None:
            self.policy_version_tracker.load_state_dict({"version": version})

    @property
    def policy_version(self) -> PolicyVersionLabel | None:
        """The version of the policy's weights; None if it is not tracked."""
        return None if self.policy_version_tracker is None else self.policy_version_tracker.version

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: weights are copied here, without a weight updater."""

    def get_policy_model(self) -> Any:
        """The policy."""
        return self.policy

    # State

    def reset(self, index: int | Sequence[int] | None = None, **kwargs: Any) -> None:
        """Begin new trajectories everywhere, or in the places `index`; `kwargs` go to the environment's reset."""
        with self.pause():
            if index is None or self._current is None:
                self._begin_anew()
                if kwargs:
                    self._current = self._begun(self.env.reset(**kwargs))
                return
            where = torch.zeros_like(self._steps, dtype=torch.bool)
            where[index if isinstance(index, int) else list(index)] = True
            self._current = self.env.reset(self._current.set("_reset", where.unsqueeze(-1)), **kwargs)
            self._steps *= ~where
            self._number(where)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment's next trajectories, those of several in one way if `static_seed`.

        Returns the seed for the next collector of a chain: the last one that the environment counts, and another than
        `seed` in any case, unless `static_seed`.
        """
        with self.pause():
            self._begin_anew()
            used = self.env.set_seed(seed, *([True] if static_seed else []))
            return seed if static_seed else max(seed + 1, seed if used is None else used)

    def state_dict(self) -> dict[str, Any]:
        """`policy_state_dict`, `env_state_dict` and counts; trajectories in flight are not kept."""
        with self.pause():
            return {
                "policy_state_dict": self.policy.state_dict() if isinstance(self.policy, torch.nn.Module) else {},
                "env_state_dict": self.env.state_dict() if hasattr(self.env, "state_dict") else {},
                "frames": self._frames,
                "trajectories": self._trajectories,
                "policy_version": self.policy_version,
            }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Continue from `state_dict`, with new trajectories; `strict` is that of the module's weights."""
        with self.pause():
            if isinstance(self.policy, torch.nn.Module):
                self.policy.load_state_dict(state_dict["policy_state_dict"], strict=strict)
            self._begin_anew()
            if state_dict["env_state_dict"]:
                self.env.load_state_dict(state_dict["env_state_dict"])
            self._frames = state_dict.get("frames", 0)
            self._trajectories = state_dict.get("trajectories", 0)
            if (version := state_dict.get("policy_version")) is not None:
                self.set_version(version)

    def _on_its_device(self, policy: TDPolicy) -> TDPolicy:
        """`policy`, or a copy on `policy_device` if its weights lie elsewhere."""
        if self.policy_device is None or not isinstance(policy, torch.nn.Module):
            return policy
        tensors = [*policy.parameters(), *policy.buffers()]
        are_there = all(tensor.device == self.policy_device for tensor in tensors)
        return policy if are_there else cast(TDPolicy, deepcopy(policy).to(self.policy_device))


class RandomPolicy:
    """Writes actions drawn from `action_spec`, anything with `rand(batch_size)`, with torch's own randomness."""

    def __init__(self, action_spec: Any, action_key: str = "action") -> None:
        self.action_spec = action_spec
        self.action_key = action_key

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """`tensordict` (*batch_size) with an action (*batch_size, ...)."""
        drawn = self.action_spec.rand(tensordict.batch_size)
        return tensordict.set(self.action_key, drawn.to(tensordict.device) if tensordict.device else drawn)


# Parts of a Collector


def made_env(create_env_fn: Any, create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None) -> Any:
    """The environment, which `create_env_fn` is or makes with these arguments, or with the only ones of a list."""
    if not callable(create_env_fn):
        return create_env_fn
    kwargs = create_env_kwargs[0] if isinstance(create_env_kwargs, Sequence) else create_env_kwargs or {}
    return create_env_fn(**kwargs)


def as_policy(policy: Any, env: Any, trust_policy: bool = False) -> Any:
    """`policy` as a callable on TensorDicts."""
    action_keys: list[Any] = list(getattr(env, "action_keys", ("action",)))
    if policy is None:
        return RandomPolicy(env.action_spec, action_keys[0])
    if trust_policy or isinstance(policy, TensorDictModuleBase) or takes_tensordict(policy):
        return policy
    return TensorDictModule(policy, in_keys=list(env.observation_keys), out_keys=action_keys)


def takes_tensordict(policy: Callable[..., Any]) -> bool:
    """Whether `policy` takes a TensorDict: its one argument is named `tensordict` or `td`, or typed as one."""
    called: Any = policy.forward if isinstance(policy, torch.nn.Module) else policy
    try:
        parameters = inspect.signature(called).parameters.values()
    except ValueError:  # of some builtins
        return False
    wanted = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(wanted) == 1 and (wanted[0].name in ("tensordict", "td") or "TensorDict" in str(wanted[0].annotation))


def one_device(given: Device | Sequence[Device] | None) -> torch.device | None:
    """`given`, or the first of a list."""
    if isinstance(given, (list, tuple)):
        given = given[0]
    return None if given is None else torch.device(cast(Device, given))


def _written(policy: TDPolicy, shown: TensorDictBase) -> TensorDictBase:
    """`shown` with the policy's output, written into it or returned apart."""
    return shown.update(policy(shown))
