"""What a Collector is made of: its environment, its policy with its weights, their devices."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any, Protocol, cast, get_type_hints, runtime_checkable

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase

from rlpost.envs.base import EnvBase

Device = torch.device | str | int
TDPolicy = Callable[[TensorDictBase], TensorDictBase]


@runtime_checkable
class Pool(Protocol):
    """Environments that can be played apart from each other: `rlpost.envs.AsyncEnvPool`."""

    @property
    def num_under_way(self) -> int: ...

    def send(self, place: int, work: Callable[[Any], Any]) -> None: ...

    def receive(self) -> tuple[int, Any]: ...


class RandomPolicy:
    """Writes actions drawn from `action_spec`, anything with `rand(batch_size)`, with torch's own randomness."""

    def __init__(self, action_spec: Any, action_key: str = "action") -> None:
        if not hasattr(action_spec, "rand"):
            raise TypeError(f"an action_spec has rand(batch_size), and {type(action_spec).__name__} has none")
        self.action_spec = action_spec
        self.action_key = action_key

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """`tensordict` (*batch_size) with an action (*batch_size, ...)."""
        drawn = self.action_spec.rand(tensordict.batch_size)
        return tensordict.set(self.action_key, drawn.to(tensordict.device) if tensordict.device else drawn)


def as_policy(policy: Any, env: Any, trust_policy: bool = False) -> Any:
    """`policy` as a callable on TensorDicts. Raises TypeError for what cannot be one, or not with this environment."""
    action_keys: list[Any] = list(getattr(env, "action_keys", ("action",)))
    if policy is None:
        return RandomPolicy(asked_of(env, "action_spec", "random actions are drawn from it"), action_keys[0])
    if not callable(policy):
        raise TypeError(f"a policy is a TensorDictModule or another callable, not {type(policy).__name__}")
    if trust_policy or isinstance(policy, TensorDictModuleBase) or takes_tensordict(policy):
        return policy
    keys = asked_of(env, "observation_keys", "a policy that takes no TensorDict is given them")
    return TensorDictModule(policy, in_keys=list(keys), out_keys=action_keys)


def takes_tensordict(policy: Callable[..., Any]) -> bool:
    """Whether it is called with a TensorDict: its one argument is named `tensordict` or `td`, or typed as one."""
    called: Any = policy.forward if isinstance(policy, torch.nn.Module) else policy
    try:
        parameters = inspect.signature(called).parameters.values()
    except ValueError:  # of some builtins
        return False
    wanted = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(wanted) != 1 or wanted[0] in ("tensordict", "td"):
        return len(wanted) == 1
    function = called if inspect.isroutine(called) else type(called).__call__
    written = getattr(function, "__annotations__", {}).get(wanted[0])
    try:
        kind = get_type_hints(function).get(wanted[0])
    except NameError:  # imported for type checkers alone
        kind = written
    return kind in ("TensorDictBase", "TensorDict") or (isinstance(kind, type) and issubclass(kind, TensorDictBase))


def asked_of(env: Any, name: str, needed: str) -> Any:
    """The environment's `name`. Raises TypeError, which says what it is `needed` for, where it has none."""
    if not hasattr(env, name):
        raise TypeError(f"{type(env).__name__} has no {name}, and {needed}: give it one")
    return getattr(env, name)


def made_env(create_env_fn: Any, create_env_kwargs: Any) -> Any:
    """The environment. Raises TypeError for what is none that a Collector plays."""
    kwargs = create_env_kwargs
    if kwargs is not None and not isinstance(kwargs, Mapping):
        if len(kwargs) != 1:
            raise ValueError(f"{len(kwargs)} create_env_kwargs for one environment: give one")
        kwargs = kwargs[0]
    is_env = hasattr(create_env_fn, "reset") and hasattr(create_env_fn, "step") and not isinstance(create_env_fn, type)
    if is_env and kwargs:
        raise TypeError("create_env_kwargs are for a function that makes the environment, and this is one already")
    env = create_env_fn if is_env or not callable(create_env_fn) else create_env_fn(**(kwargs or {}))
    if isinstance(env, EnvBase):
        raise TypeError(f"{type(env).__name__} is an environment of conversations: play it with LLMCollector")
    lacking = [name for name in ("reset", "step", "batch_size") if not hasattr(env, name)]
    if lacking:
        raise TypeError(f"{type(env).__name__} is no environment of TensorDicts: it has no {' and no '.join(lacking)}")
    return env


def whole_steps(frames: int, size: int, total: int) -> int:
    """`frames` rounded up to steps of `size` environments. Raises ValueError for none, or a `total` with a rest."""
    if frames < 1:
        raise ValueError(f"frames_per_batch={frames} makes no batch: it must be at least 1")
    if total >= 0 and total % frames:
        raise ValueError(
            f"total_frames={total} is no multiple of frames_per_batch={frames}: give a multiple, or -1 for no end"
        )
    return ceil(frames / size) * size


def one_device(name: str, given: Device | Sequence[Device] | None) -> torch.device | None:
    """`given`, or the one of a list. Raises ValueError for a list of several: there is one worker."""
    if isinstance(given, (list, tuple)):
        if len(given) != 1:
            raise ValueError(f"{name}_device lists {len(given)} devices, one a worker, and there is one worker")
        given = given[0]
    return None if given is None else torch.device(cast(Device, given))
