"""AsyncCollector: a collector in a process of its own, which goes on while its batches are used here."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from rlpost.collectors.async_plan import CollectorPlan, check_options, maker, one_of
from rlpost.collectors.base import log, postprocessed
from rlpost.collectors.child_batches import ChildBatches
from rlpost.collectors.child_weights import ChildPolicy, ChildUpdater
from rlpost.collectors.frame_parts import Device, one_device, whole_steps
from rlpost.collectors.process import END_SECONDS
from rlpost.collectors.weights import WeightsCollector
from rlpost.data.conversation import PolicyVersionLabel
from rlpost.data.plain import from_plain, to_plain
from rlpost.data.replay_buffer import ReplayBuffer
from rlpost.envs.base import EnvBase
from rlpost.envs.transforms.policy_version import PolicyVersion
from rlpost.errors import PolicyError
from rlpost.weight_sync.base import WeightSource, WeightUpdater, begin_versions


class AsyncCollector(WeightsCollector):
    """Iterates over the batches of one collector in a process of its own, or fills a replay buffer with them.

    `create_env_fn(**create_env_kwargs)` and `policy_factory()` are called there; a `policy` goes over as a copy. It
    is an LLMCollector where the environment is a language environment, and else a Collector, unless
    `collector_class` names one: the arguments that are not told here are theirs, and `frames_per_batch` counts turns
    of conversations there. Everything goes over by cloudpickle, so it may be a lambda.

    Collecting begins when the first batch is asked for, and goes on while that is used, until `batches_ahead`
    batches wait; `next` gives them one by one. With `replay_buffer` each is written to it as it comes, and iteration
    gives None; `start` fills it without being asked. A ReplayBuffer of groups is then filled up to `batches_ahead`
    batches of rows that nobody has taken, and one of frames all the time. `postproc` is called here, or, with a
    buffer, there. Iteration ends after `total_frames`, a multiple of `frames_per_batch` (-1: never).

    `update_policy_weights_` waits for the batch under way, and the next one is collected with the new weights;
    `update_at_each_batch` sends those of `policy` whenever a batch is taken, and waits for nothing. They go over as a
    folder in memory, with the version that this process counts. `weight_updater`, a constructor, is what takes them
    up there, where a language policy does not do that itself. `num_threads` is torch's number of threads here, until
    `shutdown`; `num_sub_threads` there.

    What is raised there is raised here by the next call, with the traceback as a note; a death of the process is a
    PolicyError that says how it ended. Both wake whoever waits. `shutdown`, the end of a `with` block and of the
    collector end the process and all it has started. Raises TypeError or ValueError for arguments that cannot be, or
    have no effect, and what building the environment and the policy raises.

    >>> import torch
    >>> from rlpost.collectors import AsyncCollector
    >>> from rlpost.envs import GymEnv
    >>> env_maker = lambda: GymEnv("Pendulum-v1")  # doctest: +SKIP
    >>> collector = AsyncCollector(env_maker, torch.nn.Linear(3, 1), frames_per_batch=200)  # doctest: +SKIP
    >>> collector.next().batch_size  # doctest: +SKIP
    torch.Size([200])
    """

    def __init__(
        self,
        create_env_fn: Callable[..., Any],
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        frames_per_batch: int,
        total_frames: int | None = -1,
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
        update_at_each_batch: bool = False,
        preemptive_threshold: float | None = None,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        set_truncated: bool = False,
        track_policy_version: bool | PolicyVersion = False,
        replay_buffer: Any = None,
        weight_updater: Callable[[], WeightUpdater] | None = None,
        collector_class: type[Any] | None = None,
        batches_ahead: int = 2,
        wait_seconds: float = 600.0,
        **options: Any,
    ) -> None:
        total = -1 if total_frames is None else total_frames
        whole_steps(frames_per_batch, 1, total)
        given = {
            "device": device,
            "env_device": env_device,
            "policy_device": policy_device,
            "max_frames_per_traj": max_frames_per_traj if max_frames_per_traj and max_frames_per_traj > 0 else None,
            "init_random_frames": init_random_frames if init_random_frames and init_random_frames > 0 else None,
            "split_trajs": split_trajs or None,
            "set_truncated": set_truncated or None,
            "reset_at_each_iter": reset_at_each_iter or None,
            "weight_updater": weight_updater,
            "preemptive_threshold": preemptive_threshold,
            "postproc": None if replay_buffer is None else postproc,
            **options,
        }
        given = {name: value for name, value in given.items() if value is not None}
        check_options(given, collector_class, replay_buffer)
        if policy is not None and policy_factory is not None:
            raise TypeError("AsyncCollector takes policy or policy_factory, not both")
        if min(batches_ahead, num_sub_threads, 1 if num_threads is None else num_threads) < 1:
            raise ValueError("batches_ahead, num_threads and num_sub_threads are at least 1")
        self.storing_device = one_device("storing", device if storing_device is None else storing_device)
        super().__init__(cast(EnvBase, None), replay_buffer, wait_seconds=wait_seconds)  # it has its env elsewhere
        self.policy = there = ChildPolicy(policy)
        if update_at_each_batch and there.model is None:
            raise TypeError("update_at_each_batch=True sends the weights of `policy`: give one that is a module")
        self.postproc = postproc if replay_buffer is None else None
        self.update_at_each_batch = update_at_each_batch
        self.batches_ahead = batches_ahead
        self.total_frames = total
        named = isinstance(exploration_type, str)
        plan = CollectorPlan(
            create_env_fn=maker(create_env_fn),
            create_env_kwargs=one_of(create_env_kwargs),
            policy=policy,
            policy_factory=policy_factory,
            frames_per_batch=frames_per_batch,
            total_frames=total,
            exploration_type=InteractionType.from_str(exploration_type) if named else exploration_type,
            reset_when_done=reset_when_done,
            track_policy_version=track_policy_version,
            stores=self.storing_device is not None,
            collector_class=collector_class,
            options=given,
        )
        self._push: Future[PolicyVersionLabel] | None = None  # that nobody has waited for
        self._batches = ChildBatches(
            plan,
            num_threads=num_sub_threads,
            batches_ahead=batches_ahead,
            wait_seconds=wait_seconds,
            storing_device=self.storing_device,
            replay_buffer=replay_buffer,
        )
        self.frames_per_batch = self._batches.frames_per_batch
        self.policy_version_tracker = PolicyVersion() if track_policy_version is True else track_policy_version or None
        if self.policy_version_tracker is not None:
            begin_versions(self.policy, self.policy_version_tracker)
        if self._batches.first_version is not None:
            self.policy.version = self._batches.first_version
        self.weight_updater = ChildUpdater(self.policy, self._batches.worker)
        self._has_own_updater = weight_updater is not None
        if isinstance(replay_buffer, ReplayBuffer):
            self._become_source_of(replay_buffer)
        self._threads_before = None if num_threads is None else torch.get_num_threads()
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    # Batches

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        while (taken := self._take()) is not None:
            yield taken[0]

    def rollout(self) -> TensorDictBase:
        """One batch that is collected now, whatever batches are delivered into; those that wait are still given."""
        with self.pause():
            return self._batches.ask("rollout")

    def _take(self) -> tuple[TensorDictBase | None] | None:
        """The next batch, None where it is in the buffer; None alone at the end."""
        self._check_foreground("iterate over")
        taken = self._batches.take()
        if taken is None:
            return None
        if self.update_at_each_batch:
            self._settle()
            self._push = cast(ChildUpdater, self.weight_updater).begin(self._own_weights())
        [batch] = taken
        return (None if batch is None else postprocessed(batch, self.postproc),)

    @property
    def plays_conversations(self) -> bool:
        """See `CollectorBase.plays_conversations`."""
        return self._batches.is_language

    @property
    def wants_more(self) -> bool:
        """See `CollectorBase.wants_more`: as far as is known here."""
        return self._batches.wants_more

    @property
    def is_ahead(self) -> bool:
        """See `CollectorBase.is_ahead`."""
        return self._batches.room <= 0

    def collect_round(self) -> TensorDictBase | None:
        """See `CollectorBase.collect_round`; raises what was raised in the process, and how it died."""
        return next(iter(self), None)

    def collect(self) -> None:
        """See `CollectorBase.collect`."""
        if self.replay_buffer is None:
            raise RuntimeError("collect() fills a replay buffer, and this collector has none: iterate over it instead")
        self._check_open("collect with")
        landed = self._batches.wait_for_one() if self._batches.is_free else self._take() is not None
        if not landed:
            raise PolicyError("the collector has collected all its total_frames: the buffer gets no more")

    def taken(self, groups: Sequence[int]) -> None:
        """See `GroupSource.taken`: the process may go on."""
        self._batches.look_again()

    def start(self) -> None:
        """Fill the replay buffer from now on, without being asked: see `CollectorBase.start`."""
        if self.replay_buffer is None:
            raise RuntimeError("start() fills a replay buffer, and this collector has none: give it one")
        if self.update_at_each_batch:
            raise RuntimeError(
                "update_at_each_batch=True sends weights when a batch is taken, and after start() nobody takes one: "
                "call update_policy_weights_ where the weights are not being changed"
            )
        self._check_foreground("start")
        self._batches.free()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """See `CollectorBase.pause`; batches that have come already are still given."""
        self._check_open("use")
        with self._batches.held():
            yield

    # Weights

    def take_up(self, weights: WeightSource | Path, version: PolicyVersionLabel, *, adapter: bool = False) -> None:
        """See `ReceivesWeights.take_up`: the process loads the same folder."""
        self._check_open("use")
        cast(ChildUpdater, self.weight_updater).bring(weights, version, adapter=adapter)

    # State

    def reset(self, index: int | Sequence[int] | None = None, **kwargs: Any) -> None:
        """Begin anew everywhere, or in the places `index`: as the collector's `reset`. What waits is still given."""
        with self.pause():
            self._batches.ask("reset", index, **kwargs)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed what is collected from now on, batches that nobody has taken yet included; the seed for another one.

        See the collector's `set_seed`.
        """
        with self.pause():
            following = self._batches.ask("set_seed", seed, static_seed)
            self._batches.ask("give_back", sum(batch.numel() for batch in self._batches.waiting))
            self._batches.begin_anew()
        return following

    def state_dict(self) -> dict[str, Any]:
        """The collector's state, with its policy's and its environment's, and the batches that nobody has taken yet.

        Of conversations all of it is ready for JSON; of frames it holds tensors.
        """
        with self.pause():
            state, waiting = self._batches.ask("state_dict"), self._batches.waiting
            kept = [to_plain(batch) for batch in waiting] if self._batches.is_language else waiting
            return {**state, "waiting": kept, "version": self.policy_version}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Go on where `state_dict` was taken, here or by the collector's class alone; what waits now is discarded."""
        inner = {name: value for name, value in state_dict.items() if name not in ("waiting", "version")}
        kept = state_dict.get("waiting", ())
        with self.pause():
            self._batches.ask("load_state_dict", inner, strict)
            there = self._batches.ask("get_policy_version")
            self._batches.begin_anew([from_plain(each) for each in kept] if self._batches.is_language else kept)
            self.policy.version = state_dict.get("version", self.policy.version if there is None else there)

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """`init` of the process's weight updater with these arguments; nothing happens where it has none."""
        self._check_open("use")
        self._batches.init_updater(args, kwargs)

    # The end

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Close the policy, and with `close_env` the environment, and end the process with all it has started.

        The batch under way has `timeout` seconds to end (None: 20) before that is done by force. A second call does
        nothing. Raises what nobody has been told yet, and PolicyError where force was needed; without
        `raise_on_error` that is logged.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        worker, error = self._batches.worker, self._batches.untold()
        try:
            if worker.failure is None:
                worker.call("finish", close_env, seconds=END_SECONDS if timeout is None else timeout)
                self._settle()
            elif not self._batches.is_death_told:
                error = error or worker.failure
        except Exception as raised:  # noqa: BLE001  raised or logged below
            error = error or raised
        finally:
            self._end("was shut down")
        if error is not None and raise_on_error:
            raise error
        if error is not None:
            log.warning("the collector was shut down after an error: %s", error)

    def is_initialized(self) -> bool:
        """Whether batches can be collected: until `shutdown`, or the death of the process."""
        return not self._is_shut_down and self._batches.worker.failure is None

    def __del__(self) -> None:
        if hasattr(self, "_threads_before") and not self._is_shut_down:  # a constructor may have failed before
            self._end("was held by nobody any more")
            if (error := self._batches.untold()) is not None:  # what nobody has asked for is told on the way out
                raise error

    def _end(self, why: str) -> None:
        self._batches.worker.kill(why)
        self._batches.worker.close()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)

    def _settle(self) -> None:
        """Wait for the push that nobody has waited for, if there is one. Raises what went wrong with it."""
        push, self._push = self._push, None
        if push is not None:
            push.result(self.wait_seconds)

    def _check_open(self, doing: str) -> None:
        super()._check_foreground(doing)

    def _check_foreground(self, doing: str) -> None:
        self._check_open(doing)
        self._batches.check()
        if self._batches.is_free:
            raise RuntimeError(f"cannot {doing} a collector that was started in the background: read its replay buffer")


class aSyncDataCollector(AsyncCollector):
    """`AsyncCollector` under its name in older examples."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        warnings.warn("aSyncDataCollector is called AsyncCollector now", DeprecationWarning, stacklevel=2)
        super().__init__(*args, **kwargs)
