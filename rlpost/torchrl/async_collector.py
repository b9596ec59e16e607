"""AsyncCollector: a collector in a process of its own, which goes on while its batches are used here.

A `CollectorPlan` goes to the process, where a `CollectorHost` builds the collector from it; `ChildBatches` asks for
batches ahead and delivers them, and `ChildUpdater` sends weights. `ChildPolicy` is the policy as seen from here.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakMethod

import cloudpickle
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from rlpost.collectors.driver import PUSH_SECONDS
from rlpost.collectors.player import HostProtocol
from rlpost.data.batch import from_plain, to_plain
from rlpost.data.conversation import Completion, PolicyVersionLabel, next_version
from rlpost.data.replay_buffer import ReplayBuffer
from rlpost.envs.base import EnvBase
from rlpost.envs.transforms.training import PolicyVersion
from rlpost.errors import PolicyError
from rlpost.model.weights import save_one_by_one
from rlpost.policies.base import Policy, Request
from rlpost.remote.exchange import exchange_folder
from rlpost.remote.process import END_SECONDS, WorkerProcess
from rlpost.settings import SamplingSettings
from rlpost.torchrl.chat_envs import CalledPolicy
from rlpost.torchrl.collector import Collector, Device, made_env, one_device, only_kwargs, whole_steps
from rlpost.torchrl.collector_base import WeightsCollector, postprocessed
from rlpost.torchrl.llm_collector import LLMCollector
from rlpost.weight_sync.base import WeightSource, WeightUpdater, begin_versions, named_weights

log = logging.getLogger("rlpost")

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


class AsyncCollector(WeightsCollector):
    """Iterates over the batches of one collector in a process of its own, or fills a replay buffer with them.

    `create_env_fn(**create_env_kwargs)` and `policy_factory()` are called there; a `policy` is sent as a copy. The
    default of `collector_class` is LLMCollector for a language environment, where `frames_per_batch` counts turns of
    conversations, and else Collector; further arguments are those of that class. All is sent by cloudpickle, so it
    may be a lambda.

    Collecting begins when the first batch is asked for, and goes on while that is used, until `batches_ahead`
    batches wait; `next` returns them one by one. With `replay_buffer` each is written to it as it comes, and iteration
    yields None; `start` fills it in the background: a ReplayBuffer of groups until `batches_ahead` batches of rows
    wait there to be taken, one of frames all the time. `postproc` is called here, or, with a buffer, there. Iteration
    ends after `total_frames`, a multiple of `frames_per_batch` (-1: never).

    `update_policy_weights_` waits for the batch in flight, and the next one is collected with the new weights;
    `update_at_each_batch` sends those of `policy` whenever a batch is taken, and does not wait. They are sent as a
    folder in memory, with the version that this process counts. `weight_updater`, a constructor, loads them there, if
    a language policy does not do that itself. `num_threads` is torch's number of threads here, until `shutdown`, and
    `num_sub_threads` there.

    An error there is raised here by the next call, with the traceback as a note; a death of the process is a
    PolicyError that says how it ended. Both wake whoever waits. `shutdown`, the end of a `with` block and of the
    collector end the process and all it has started. Raises TypeError or ValueError for arguments that are invalid or
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
        _check_options(given, collector_class, replay_buffer)
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
        if isinstance(create_env_fn, EnvBase) or not callable(create_env_fn):
            raise TypeError(
                "create_env_fn makes the environment in the collector's process, and "
                f"{type(create_env_fn).__name__} makes none: pass one function"
            )
        named = isinstance(exploration_type, str)
        plan = CollectorPlan(
            create_env_fn=create_env_fn,
            create_env_kwargs=only_kwargs(create_env_kwargs),
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
        self._push: Future[PolicyVersionLabel] | None = None  # not waited for yet
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
        """One batch, collected now and returned, even with a buffer; batches that wait are delivered later."""
        with self.pause():
            return self._batches.ask("rollout")

    def _take(self) -> tuple[TensorDictBase | None] | None:
        """As `ChildBatches.take`, postprocessed."""
        self._check_foreground("iterate over")
        taken = self._batches.take(self.wait_seconds)
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
        """See `CollectorBase.wants_more`."""
        return self._batches.wants_more

    @property
    def is_ahead(self) -> bool:
        """See `CollectorBase.is_ahead`."""
        return self._batches.room <= 0

    def collect_round(self) -> TensorDictBase | None:
        """See `CollectorBase.collect_round`; raises an error of the process, and its death."""
        return next(iter(self), None)

    def collect(self) -> None:
        """See `CollectorBase.collect`."""
        if self.replay_buffer is None:
            raise RuntimeError("collect() fills a replay buffer, and this collector has none: iterate over it instead")
        self._check_open("collect with")
        landed = self._batches.wait_for_one(self.wait_seconds) if self._batches.is_free else self._take() is not None
        if not landed:
            raise PolicyError("the collector has collected all its total_frames: the buffer gets no more")

    def taken(self, groups: Sequence[int]) -> None:
        """See `GroupSource.taken`: the process may go on."""
        self._batches.look_again()

    def start(self) -> None:
        """Fill the replay buffer in the background from now on; see `CollectorBase.start`."""
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
        """See `CollectorBase.pause`; batches that have come already are delivered."""
        self._check_open("use")
        with self._batches.held():
            yield

    # Weights

    def take_up(self, weights: WeightSource | Path, version: PolicyVersionLabel, *, adapter: bool = False) -> None:
        """See `CollectorBase.take_up`: the process loads the same folder."""
        self._check_open("use")
        cast(ChildUpdater, self.weight_updater).bring(weights, version, adapter=adapter)

    # State

    def reset(self, index: int | Sequence[int] | None = None, **kwargs: Any) -> None:
        """The collector's `reset`, in the places `index` or everywhere. Batches that wait are still delivered."""
        with self.pause():
            self._batches.ask("reset", index, **kwargs)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """The collector's `set_seed`; batches that were not taken yet are discarded."""
        with self.pause():
            following = self._batches.ask("set_seed", seed, static_seed)
            self._batches.ask("give_back", sum(batch.numel() for batch in self._batches.waiting))
            self._batches.begin_anew()
        return following

    def state_dict(self) -> dict[str, Any]:
        """The collector's state, with its policy's and its environment's, and the batches that were not taken yet.

        For conversations it is JSON-compatible; for frames it holds tensors.
        """
        with self.pause():
            state, waiting = self._batches.ask("state_dict"), self._batches.waiting
            kept = [to_plain(batch) for batch in waiting] if self._batches.is_language else waiting
            return {**state, "waiting": kept, "version": self.policy_version}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Continue from `state_dict`, of this class or of the collector's; batches that wait are discarded."""
        inner = {name: value for name, value in state_dict.items() if name not in ("waiting", "version")}
        kept = state_dict.get("waiting", ())
        with self.pause():
            self._batches.ask("load_state_dict", inner, strict)
            there = self._batches.ask("get_policy_version")
            self._batches.begin_anew([from_plain(each) for each in kept] if self._batches.is_language else kept)
            self.policy.version = state_dict.get("version", self.policy.version if there is None else there)

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """`init_updater` of the collector in the process."""
        self._check_open("use")
        self._batches.ask("init_updater", *args, **kwargs)

    # The end

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Close the policy, and with `close_env` the environment, and end the process with all it has started.

        The batch in flight has `timeout` seconds to end (None: 20) before the process is killed. A second call does
        nothing. Raises an error that was not raised yet, and PolicyError if the process was killed; without
        `raise_on_error` either is logged.
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
            if (error := self._batches.untold()) is not None:  # an error that was not raised yet
                raise error

    def _end(self, why: str) -> None:
        self._batches.worker.kill(why)
        self._batches.worker.close()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)

    def _settle(self) -> None:
        """Wait for the push in flight, if there is one. Raises its error."""
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


# The process, its batches and its weights


class ChildBatches:
    """Has a `CollectorHost` collect in a process of its own, at most `batches_ahead` batches beyond those taken.

    The thread that listens to the process moves a batch to `storing_device` and writes it to `replay_buffer`, if
    there is one; an error there is raised by the next call here. No call waits for an answer of the process while it
    holds `_changed`, which that thread needs. Raises TypeError for a plan that cannot be sent, and what building it
    raises.
    """

    def __init__(
        self,
        plan: CollectorPlan,
        *,
        num_threads: int,
        batches_ahead: int,
        wait_seconds: float,
        storing_device: torch.device | None = None,
        replay_buffer: Any = None,
    ) -> None:
        self.batches_ahead = batches_ahead
        self.wait_seconds = wait_seconds
        self.storing_device = storing_device
        self.replay_buffer = replay_buffer
        self.is_free = False  # the buffer is filled in the background
        self.is_death_told = False
        self._changed = threading.Condition()  # guards everything below
        self._waiting: deque[TensorDictBase | None] = deque()  # batches not taken yet; None is in the buffer
        self._under_way = 0  # batches that were asked for and have not come
        self._landed = 0  # batches that have come
        self._has_ended = False  # the last batch has come
        self._has_failed = False  # no batch begins before more is asked for
        self._error: BaseException | None = None  # raised by the next call
        self._held_by: list[int] = []  # threads in a block of `held`
        self.worker = self._started(plan, num_threads)
        self.frames_per_batch, self.is_language, self.first_version = self.worker.call("about", seconds=wait_seconds)

    def _started(self, plan: CollectorPlan, num_threads: int) -> WorkerProcess:
        hear, wake = WeakMethod(self._hear), WeakMethod(self._wake)  # the process keeps no collector alive

        def on_event(kind: str, content: Any) -> None:
            if (mine := hear()) is not None:
                mine(kind, content)

        def on_death() -> None:
            if (mine := wake()) is not None:
                mine()

        try:
            worker = WorkerProcess(
                partial(CollectorHost, plan, num_threads),
                on_event=on_event,
                on_death=on_death,
                environment={"OMP_NUM_THREADS": str(num_threads)},
            )
        except Exception as error:
            raise TypeError(
                f"{unsendable(plan)} cannot be sent to the collector's process ({error}): build what it needs in "
                "create_env_fn or in policy_factory, which are called there"
            ) from error
        return worker.start()

    # Taking

    @property
    def wants_more(self) -> bool:
        """Whether a batch waits, or the last one has not come yet."""
        return bool(self._waiting) or not self._has_ended

    @property
    def room(self) -> int:
        """How many more batches may be asked for, beside those that wait or are in flight."""
        waiting = len(self._waiting)
        if self.is_free and isinstance(self.replay_buffer, ReplayBuffer):
            waiting = self.replay_buffer.num_rows // self.frames_per_batch
        return self.batches_ahead - self._under_way - waiting

    def take(self, seconds: float) -> tuple[TensorDictBase | None] | None:
        """A tuple of the next batch, which is None if it is in the buffer; None instead of the tuple at the end.

        Raises as `check` does, PolicyError if none comes in `seconds`, and RuntimeError if none waits inside a
        block of `held`.
        """
        with self._changed:
            self.check()
            if not self._waiting and threading.get_ident() in self._held_by:
                raise RuntimeError("no batch is collected inside a block of pause(): take it before or after the block")
            self._wait(lambda: bool(self._waiting) or self._has_ended, seconds)
            if not self._waiting:
                return None
            batch = self._waiting.popleft()
            self._ask_for_more()
            return (batch,)

    def wait_for_one(self, seconds: float) -> bool:
        """Wait for one more batch in a buffer that is filled in the background; False at the end."""
        with self._changed:
            self.check()
            before = self._landed
            self._ask_for_more(at_least=1)
            self._wait(lambda: self._landed > before or self._has_ended, seconds)
            return self._landed > before

    def free(self) -> None:
        """Fill the buffer in the background from now on."""
        with self._changed:
            self.is_free = True
            self._waiting.clear()
            self._ask_for_more()

    def look_again(self) -> None:
        """Rows were taken out of the buffer: ask for more."""
        with self._changed:
            if self.is_free:
                self._ask_for_more()

    def check(self) -> None:
        """Raise an error once, or the death of the process every time."""
        if (error := self.untold()) is not None:
            raise error
        if (failure := self.worker.failure) is not None:
            self.is_death_told = True
            raise PolicyError(*failure.args)

    def untold(self) -> BaseException | None:
        """Return and clear the error that was not raised yet."""
        error, self._error = self._error, None
        return error

    # Asking

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block in which nothing is collected; waits for the batch in flight first."""
        self.check()
        thread = threading.get_ident()
        try:
            self._call("hold")
            self._held_by.append(thread)
            yield
        finally:
            with suppress(ValueError):  # it was not held in time
                self._held_by.remove(thread)
            self.worker.submit("release")

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the collector in the process."""
        self.check()
        return self._call("ask", method, args, kwargs)

    def _call(self, method: str, *args: Any) -> Any:
        """Call a method of the host. Raises its error, PolicyError after `wait_seconds` or at a death."""
        try:
            return self.worker.call(method, *args, seconds=self.wait_seconds)
        except PolicyError:
            self.is_death_told = self.worker.failure is not None
            raise

    @property
    def waiting(self) -> list[TensorDictBase]:
        """The batches that were not taken yet."""
        with self._changed:
            return [batch for batch in self._waiting if batch is not None]

    def begin_anew(self, batches: Iterable[TensorDictBase] = ()) -> None:
        """Replace the batches that wait or were asked for by `batches`; inside a block of `held`."""
        with self._changed:
            self._waiting = deque(batches)
            self._has_ended = False
            self.worker.submit("forget")
            self._under_way = 0
            if self.is_free:
                self._ask_for_more()
            self._changed.notify_all()

    # Events of the process, in the thread that listens to it

    def _hear(self, kind: str, content: Any) -> None:
        error: BaseException | None = content if kind == "failed" else None
        if kind == "batch":
            try:
                content = content if self.storing_device is None else content.to(self.storing_device)
                if self.replay_buffer is not None:
                    self.replay_buffer.extend(content)
                    content = None
            except Exception as raised:  # noqa: BLE001  raised again by the next call
                error = raised
        with self._changed:
            self._error = self._error or error
            self._has_failed = self._has_failed or error is not None
            if kind == "ended":
                self._has_ended = True
            else:
                self._under_way -= 1
            if kind == "batch" and error is None:
                self._landed += 1
                if self.is_free:
                    self._ask_for_more()
                else:
                    self._waiting.append(content)
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # Waiting

    def _ask_for_more(self, at_least: int = 0) -> None:
        """Ask the process for as many batches as there is room for; for none while an error waits to be raised."""
        if self._error is not None:
            return
        batches = max(0, self.room, at_least - self._under_way)
        if batches or self._has_failed:
            self._under_way += batches
            self._has_failed = False
            self.worker.submit("more", batches)

    def _wait(self, until: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            self.check()
            if not self.is_free:
                self._ask_for_more()
            if not self._changed.wait(deadline - time.monotonic()):
                raise PolicyError(
                    f"waited {seconds:.0f} s for a batch of the collector's process: the policy or the "
                    "environment may hang"
                )


class ChildPolicy(Policy):
    """The policy of a collector's process, as its owner sees it: its version, and `model`, whose weights it gets."""

    shares_weights = False
    pushes = "torchrl.async_collector:ChildUpdater"

    def __init__(self, given: Any) -> None:
        super().__init__(sampling=SamplingSettings())
        model = given if isinstance(given, torch.nn.Module) else getattr(given, "model", None)
        self.model = model if isinstance(model, torch.nn.Module) else None

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """Raises PolicyError: it samples in its collector's process alone."""
        raise PolicyError("this policy samples in its collector's process: build another to sample with here")


class ChildUpdater(WeightUpdater):
    """Writes weights into an exchange folder, which the collector of a `CollectorHost` loads between two batches."""

    def __init__(self, policy: Policy, worker: WorkerProcess) -> None:
        super().__init__(policy)
        self._worker = worker

    def push(self, source: WeightSource) -> PolicyVersionLabel:
        """See `WeightUpdater.push`."""
        assert self.policy is not None
        self.send_weights(self.policy, source)
        return self.policy.version

    def send_weights(self, policy: Policy, source: WeightSource) -> None:
        """See `WeightUpdater.send_weights`; the version rises with it. Raises PolicyError after `PUSH_SECONDS`."""
        self.bring(source, next_version(policy.version))

    def bring(self, weights: WeightSource | Path, version: PolicyVersionLabel, *, adapter: bool = False) -> None:
        """Push weights, of a source or in a folder, as `version`. Raises as `send_weights` does."""
        if isinstance(weights, Path):
            risen = self._risen(weights, version, adapter, ExitStack())
        else:
            risen = self.begin(weights, version)
        try:
            risen.result(PUSH_SECONDS)
        except FutureTimeout:
            raise PolicyError(f"waited {PUSH_SECONDS:.0f} s for weights to be loaded: the policy may hang") from None

    def begin(self, source: WeightSource, version: PolicyVersionLabel | None = None) -> Future[PolicyVersionLabel]:
        """Copy the weights of `source` now, and have them loaded soon; done when the version has risen.

        The default of `version` is the next one. Raises TypeError for a source without weights.
        """
        assert self.policy is not None
        weights = named_weights(source)
        version = next_version(self.policy.version) if version is None else version
        with ExitStack() as stack:
            folder = stack.enter_context(exchange_folder())
            save_one_by_one(weights.items(), folder)
            return self._risen(folder, version, False, stack)

    def _risen(
        self, folder: Path, version: PolicyVersionLabel, adapter: bool, stack: ExitStack
    ) -> Future[PolicyVersionLabel]:
        """Have `folder` loaded, and close `stack` afterwards; done when the version has risen."""
        loaded = self._worker.submit("ask", "take_up", (folder, version), {"adapter": adapter})
        kept = stack.pop_all()
        risen: Future[PolicyVersionLabel] = Future()
        loaded.add_done_callback(lambda done: self._arrived(done, kept, version, risen))
        return risen

    def _arrived(
        self, loaded: Future[None], folder: ExitStack, version: PolicyVersionLabel, risen: Future[PolicyVersionLabel]
    ) -> None:
        """The weights were loaded, or failed to load: remove their folder, and end `risen`."""
        folder.close()
        if (error := loaded.exception()) is not None:
            risen.set_exception(error)
            return
        assert self.policy is not None
        self.policy.become(version)
        risen.set_result(version)


class CollectorHost:
    """Collects as many batches as its owner has asked for, on the process's main thread, between its owner's calls.

    Each is sent as the event "batch", or "failed" with the error, after which nothing begins before more is asked
    for; "ended" follows the last one. So a call never meets a batch that is half collected, and the deadline of a
    score can interrupt one.
    """

    def __init__(self, plan: CollectorPlan, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self.host: HostProtocol | None = None  # set by the process before the first call
        self.collector = plan.built()
        self._asked = 0  # for this many batches that have not begun
        self._holders = 0
        self._is_due = False  # a round waits for the main thread
        self._has_failed = False

    # Called by the owner

    def about(self) -> tuple[int, bool, PolicyVersionLabel | None]:
        """The frames in a batch, whether they are turns of conversations, and the policy's version."""
        is_language = isinstance(self.collector, LLMCollector)
        return self.collector.frames_per_batch, is_language, self.collector.policy_version

    def more(self, batches: int) -> None:
        """Collect this many more; after a failure, try again."""
        self._asked += batches
        self._has_failed = False
        self._go_on()

    def forget(self) -> None:
        """Drop the requests for batches that have not begun."""
        self._asked = 0

    def hold(self) -> None:
        """Begin no batch; none is in flight when this call is carried out."""
        self._holders += 1

    def release(self) -> None:
        """End one `hold`; go on after the last one."""
        self._holders -= 1
        self._go_on()

    def ask(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the collector."""
        return getattr(self.collector, method)(*args, **kwargs)

    def finish(self, close_env: bool) -> None:
        """Collect no more, and close the policy, and with `close_env` the environment."""
        self._holders += 1
        self.collector.shutdown(close_env=close_env)
        if isinstance(self.collector.policy, Policy):
            self.collector.policy.close()

    def close(self) -> None:
        """`finish`, when the owner is gone."""
        self.finish(True)

    # Rounds

    def _go_on(self) -> None:
        if self._is_due or self._holders or self._has_failed or not self._asked:
            return
        assert self.host is not None
        if self.collector.wants_more:
            self._is_due = True
            self.host.in_main_thread(self._round)
        else:
            self.host.tell("ended", None)

    def _round(self) -> None:
        self._is_due = False
        if self._holders or not self._asked:
            return
        assert self.host is not None
        self._asked -= 1
        try:
            self.host.tell("batch", self.collector.next())
        except BaseException as error:  # noqa: BLE001  raised again in the owner's process
            self._has_failed = True
            self.host.tell("failed", error)
        self._go_on()


@dataclass
class CollectorPlan:
    """Builds an environment, a policy and the collector that plays them, in the process that calls `built`.

    `options` are further keyword arguments of the collector. The default of `collector_class` is LLMCollector for a
    language environment, else Collector. Raises TypeError for an option without effect on the environment, and what
    building raises.
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
    stores: bool = False  # the owner moves batches to a device
    collector_class: type[Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)  # only those that were given

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
    """Raise TypeError for the first of `given` that is `useless`, with its alternative."""
    for name in given:
        if name in useless:
            raise TypeError(f"{name} has no effect on {what_for}: {useless[name]}")


def _check_options(given: Mapping[str, Any], collector_class: type[Any] | None, replay_buffer: Any) -> None:
    """Raise TypeError for an option that has no effect in one process, is unknown, or contradicts another."""
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
