"""What an AsyncCollector sends to its process: how the collector there is built, and what is refused of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import cloudpickle
from tensordict.nn import InteractionType

from rlpost.collectors.frame_parts import made_env
from rlpost.collectors.general import Collector
from rlpost.collectors.llm import LLMCollector
from rlpost.envs.base import EnvBase
from rlpost.envs.transforms.policy_version import PolicyVersion
from rlpost.weight_sync.base import WeightUpdater

# an argument that a language environment has no use for -> what there is instead
NOT_OF_LANGUAGE = {
    "device": "a language policy lies where it is built: build it there, and name storing_device for batches",
    "env_device": "conversations are no tensors and lie nowhere: leave it out",
    "policy_device": "a language policy lies where it is built: build it there",
    "max_frames_per_traj": "a conversation's turns are bounded by its environment: give that max_steps",
    "init_random_frames": "random tokens are no reply: leave it out",
    "split_trajs": "conversations are told apart by themselves: give yield_completed_trajectories=True",
    "set_truncated": "a conversation under way goes on in the next batch, and is not over: leave it out",
    "trust_policy": "a policy of conversations is never wrapped: leave it out",
    "async_envs": "the conversations of one language environment wait for one another in no pool: raise its num_envs",
}
# an argument that frames have no use for -> what there is instead
NOT_OF_FRAMES = {
    "weight_updater": "the weights of a policy of frames are copied into it by their names: leave it out",
    "yield_completed_trajectories": "give split_trajs=True",
    "yield_only_last_steps": "give split_trajs=True",
    "flatten_data": "a FrameBuffer is written frame by frame whatever their shape: leave it out",
    "begin_ahead": "nothing of a later batch is played: leave it out",
    "verbose": "frames are too many to be told one by one: leave it out",
}
# what collectors of several processes take -> why this one does not
NOT_OF_ONE_PROCESS = {
    "preemptive_threshold": "there is one worker, and nobody waits for another",
    "num_workers": "there is one worker",
    "cat_results": "there is one worker, whose batches are not put together",
    "use_buffers": "a batch is sent as it is",
    "extend_buffer": "a batch is always written with the buffer's extend",
    "no_cuda_sync": "a batch is sent once it is whole",
    "queue": "iterate over the collector, or give it a replay_buffer",
    "weight_sync_schemes": "weights go over as a folder, which weight_updater takes up where the policy is",
    "weight_recv_schemes": "weights go over as a folder, which weight_updater takes up where the policy is",
}
OPTIONS = {*NOT_OF_FRAMES, "trust_policy", "async_envs"}  # that LLMCollector or Collector has beside the arguments
GREEDY = (InteractionType.DETERMINISTIC, InteractionType.MODE)


@dataclass
class CollectorPlan:
    """Builds, in the process it is called in, an environment, a policy and the collector that plays them.

    `options` are the collector's keyword arguments beside those here. Without a `collector_class` it is LLMCollector
    for a language environment, else Collector. Raises TypeError for an option that such an environment has no use
    for, and what building raises.
    """

    create_env_fn: Callable[..., Any]
    create_env_kwargs: Mapping[str, Any]
    policy: Any
    policy_factory: Callable[[], Any] | None
    frames_per_batch: int
    total_frames: int
    exploration_type: InteractionType
    reset_when_done: bool
    track_policy_version: bool | PolicyVersion
    stores: bool = False  # whether batches are moved to a device when they have come
    collector_class: type[Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)  # those alone that were given

    def built(self) -> Any:
        """The collector."""
        env = self.create_env_fn(**self.create_env_kwargs)
        chosen = self.collector_class or (LLMCollector if isinstance(env, EnvBase) else Collector)
        own = inspect.isclass(chosen) and issubclass(chosen, LLMCollector)
        return self._of_language(chosen, env) if own else self._of_frames(chosen, env)

    def _of_language(self, chosen: type[Any], env: Any) -> Any:
        refuse(NOT_OF_LANGUAGE, self.options, "a language environment")
        if not self.reset_when_done:
            raise TypeError("reset_when_done=False: a conversation that is over has no further turn; leave it out")
        if self.exploration_type not in (*GREEDY, InteractionType.RANDOM):
            raise TypeError(f"exploration_type={self.exploration_type}: tokens have no mean; give RANDOM or MODE")
        collector = chosen(
            env,
            policy=self.policy,
            policy_factory=self.policy_factory,
            dialog_turns_per_batch=self.frames_per_batch,
            total_dialog_turns=self.total_frames,
            track_policy_version=self.track_policy_version,
            **self.options,
        )
        policy = collector.policy
        if self.exploration_type in GREEDY:
            from rlpost.torchrl.called import CalledPolicy

            if isinstance(policy, CalledPolicy):
                raise TypeError(
                    f"exploration_type={self.exploration_type}: a callable policy samples as it likes; leave it out"
                )
            policy.sampling = replace(policy.sampling, temperature=0.0)
        policy.start()
        return collector

    def _of_frames(self, chosen: type[Any], env: Any) -> Any:
        refuse(NOT_OF_FRAMES, self.options, "frames")
        return chosen(
            made_env(env, None),
            self.policy,
            policy_factory=self.policy_factory,
            frames_per_batch=self.frames_per_batch,
            total_frames=self.total_frames,
            exploration_type=self.exploration_type,
            reset_when_done=self.reset_when_done,
            track_policy_version=self.track_policy_version,
            **({"storing_device": "cpu"} if self.stores else {}),
            **self.options,
        )


def refuse(useless: Mapping[str, str], given: Mapping[str, Any], what_for: str) -> None:
    """Raise TypeError for the first of `given` that is `useless`, with what there is instead."""
    for name in given:
        if name in useless:
            raise TypeError(f"{name} has no effect on {what_for}: {useless[name]}")


def maker(create_env_fn: Any) -> Callable[..., Any]:
    """`create_env_fn`. Raises TypeError for what is no function that makes an environment."""
    if isinstance(create_env_fn, EnvBase) or not callable(create_env_fn):
        raise TypeError(
            f"create_env_fn makes the environment in the collector's process, and {type(create_env_fn).__name__} makes "
            "none: pass one function"
        )
    return create_env_fn


def one_of(create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None) -> Mapping[str, Any]:
    """The arguments of the one environment. Raises ValueError for several."""
    if create_env_kwargs is None or isinstance(create_env_kwargs, Mapping):
        return create_env_kwargs or {}
    if len(create_env_kwargs) != 1:
        raise ValueError(f"{len(create_env_kwargs)} create_env_kwargs for one environment: give one")
    return create_env_kwargs[0]


def check_options(given: Mapping[str, Any], collector_class: type[Any] | None, replay_buffer: Any) -> None:
    """Raise TypeError for what has no effect in one process, is not known, or contradicts the rest."""
    refuse(NOT_OF_ONE_PROCESS, given, "one process")
    if collector_class in (None, LLMCollector, Collector):
        known = {*NOT_OF_LANGUAGE, *OPTIONS, "reset_at_each_iter", "postproc"}
        if strange := sorted(given.keys() - known):
            raise TypeError(f"AsyncCollector takes no {strange[0]}: leave it out, or name a collector_class that does")
    if isinstance(given.get("weight_updater"), WeightUpdater):
        raise TypeError("a weight_updater lives where its policy does: pass its constructor, which is called there")
    if "split_trajs" in given and replay_buffer is not None:
        raise TypeError("split_trajs pads trajectories, and a replay buffer stores frames: leave one of them out")


def unsendable(plan: CollectorPlan) -> str:
    """The first part of `plan` that cannot be pickled."""
    parts = {each.name: getattr(plan, each.name) for each in fields(plan)} | plan.options
    for name, part in parts.items():
        try:
            cloudpickle.dumps(part)
        except Exception:  # noqa: BLE001  any failure of a stranger's class to be pickled
            if name != "options":
                return name
    return "options"
