"""AsyncCollector: a collector in a process of its own, which goes on while its batches are used here.

`ChildUpdater` sends its weights; the process and its batches are those of `rlpost.torchrl.remote_collector`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from rlpost.data.conversation import PolicyVersionLabel, next_version
from rlpost.envs.base import EnvBase
from rlpost.envs.transforms.training import PolicyVersion
from rlpost.errors import PolicyError
from rlpost.model.weights import save_one_by_one
from rlpost.policies.base import Policy
from rlpost.policies.remote import PUSH_SECONDS
from rlpost.remote.exchange import exchange_folder
from rlpost.remote.process import END_SECONDS, WorkerProcess
from rlpost.torchrl.collector import Device, one_device, only_kwargs
from rlpost.torchrl.collector_base import postprocessed
from rlpost.torchrl.remote_collector import (
    NOT_OF_FRAMES,
    Batches,
    ChildPolicy,
    CollectorHost,
    CollectorPlan,
    Member,
    RemoteCollector,
    WorkerPool,
    pickled_plan,
    refuse,
)
from rlpost.torchrl.replay_buffer import ReplayBuffer
from rlpost.weight_sync.base import WeightSource, WeightUpdater, named_weights

log = logging.getLogger("rlpost")
# argument of collectors with several processes -> why it has no effect here
NOT_OF_ONE_PROCESS = {
    "preemptive_threshold": "there is only one worker",
    "num_workers": "there is only one worker",
    "cat_results": "there is only one worker, and no batches to join",
    "use_buffers": "a batch is sent as it is",
    "extend_buffer": "a batch is always written with the buffer's extend",
    "no_cuda_sync": "a batch is sent once it is whole",
    "queue": "iterate over the collector, or give it a replay_buffer",
    "weight_sync_schemes": "weights are sent as a folder, which weight_updater loads",
    "weight_recv_schemes": "weights are sent as a folder, which weight_updater loads",
}
OPTIONS = {*NOT_OF_FRAMES, "trust_policy", "async_envs"}  # that LLMCollector or Collector has beside the arguments


class AsyncCollector(RemoteCollector):
    """Iterates over the batches of one collector in a process of its own, or fills a replay buffer with them.

    `create_env_fn(**create_env_kwargs)` and `policy_factory()` are called there; a `policy` is sent as a copy. The
    default of `collector_class` is LLMCollector for a language environment, where `frames_per_batch` counts turns of
    conversations, and else Collector; further arguments are those of that class. All is sent by cloudpickle, so it
    may be a lambda.

    Collecting begins when the first batch is asked for, and goes on while that is used, until `batches_ahead`
    batches wait; `next` returns them one by one. With `replay_buffer` each is written to it when it is taken, and
    iteration yields None; `start` fills it in the background: a ReplayBuffer of groups until `batches_ahead` batches of
    rows wait there to be taken, one of frames all the time. `postproc` is called here, or, with a buffer, there.
    Iteration ends after `total_frames`, a multiple of `frames_per_batch` (-1: never).

    `update_policy_weights_` waits for the batch in flight, and the next one is collected with the new weights;
    `update_at_each_batch` sends those of `policy` whenever a batch is taken, and does not wait. They are sent as a
    folder in memory, with the version that this process counts. `weight_updater`, a constructor, loads them there, if
    a language policy does not do that itself. `num_threads` is torch's number of threads here, until `shutdown`, and
    `num_sub_threads` there.

    An error there is raised here by the next call, with the traceback as a note; a death of the process is a
    PolicyError that says how it ended. Both wake whoever waits. `shutdown`, the end of a `with` block and of the
    collector end the process and all it has started. Raises TypeError for arguments that have no effect, and what
    building the environment and the policy raises.

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
        refuse(NOT_OF_ONE_PROCESS, given, "one process")
        self.storing_device = one_device(device if storing_device is None else storing_device)
        super().__init__(cast(EnvBase, None), replay_buffer, wait_seconds=wait_seconds)  # it has its env elsewhere
        self.policy = ChildPolicy(policy)
        self.postproc = postproc if replay_buffer is None else None
        self.update_at_each_batch = update_at_each_batch
        self.batches_ahead = batches_ahead
        self.total_frames = total
        named = isinstance(exploration_type, str)
        plan = CollectorPlan(
            create_env_fn=create_env_fn,
            create_env_kwargs=only_kwargs(create_env_kwargs),
            policy=policy,
            policy_factory=policy_factory,
            frames_per_batch=frames_per_batch,
            exploration_type=InteractionType.from_str(exploration_type) if named else exploration_type,
            reset_when_done=reset_when_done,
            track_policy_version=track_policy_version,
            stores=self.storing_device is not None,
            collector_class=collector_class,
            options=given,
        )
        sent = pickled_plan(plan, "the collector's process")
        self._worker = worker = WorkerProcess(partial(CollectorHost, 0, num_sub_threads)).start()
        self._workers = WorkerPool(wait_seconds)
        try:
            self._workers.build({0: (member := Member(worker, self.storing_device))}, {0: sent})
        except BaseException:
            worker.kill("was not wanted any more")
            raise
        self._batches = Batches(self._workers, total_frames=total, ahead=batches_ahead)
        self._push: Future[PolicyVersionLabel] | None = None  # not waited for yet
        self.frames_per_batch = member.frames_per_batch
        self.weight_updater = ChildUpdater(self.policy, worker)
        self._has_own_updater = weight_updater is not None
        self._begin(track_policy_version)
        self._threads_before = None if num_threads is None else torch.get_num_threads()
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    def collect_round(self) -> TensorDictBase | None:
        """See `CollectorBase.collect_round`; raises an error of the process, and its death."""
        [(_, batch)] = self._batches.take()
        if self.update_at_each_batch:
            self._settle()
            self._push = cast(ChildUpdater, self.weight_updater).begin(self.get_policy_model())
        if self.replay_buffer is None:
            return postprocessed(batch, self.postproc)
        self.replay_buffer.extend(batch)
        return None

    def rollout(self) -> TensorDictBase:
        """One batch, collected now and returned, even with a buffer; batches that wait are delivered later."""
        with self.pause():
            return self._workers.of_one(0, "rollout")

    def start(self) -> None:
        """Fill the replay buffer in the background from now on; see `CollectorBase.start`."""
        super().start()
        if isinstance(self.replay_buffer, ReplayBuffer):
            self._batches.ahead = 0  # what is ahead waits in the buffer

    def take_up(self, weights: WeightSource | Path, version: PolicyVersionLabel, *, adapter: bool = False) -> None:
        """See `CollectorBase.take_up`: the process loads the same folder."""
        self._check_open("use")
        cast(ChildUpdater, self.weight_updater).bring(weights, version, adapter=adapter)

    # State

    def state_dict(self) -> dict[str, Any]:
        """The collector's state, with its policy's and its environment's, and the batches that were not taken yet.

        For conversations it is JSON-compatible; for frames it holds tensors.
        """
        return self._states()[0]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Continue from `state_dict`, of this class or of the collector's; batches that wait are discarded."""
        self._load_states([state_dict], strict)

    # The end

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Close the policy, and with `close_env` the environment, and end the process with all it has started.

        The batch in flight has `timeout` seconds to end (None: 20) before the process is killed. A second call does
        nothing. Raises an error that was not raised yet, and PolicyError if the process was killed; without
        `raise_on_error` either is logged.
        """
        if self._is_shut_down:
            return
        error = self._batches.pending_error()
        try:
            super().shutdown(timeout, close_env=False)
            errors = self._workers.finish(close_env, END_SECONDS if timeout is None else timeout)
            error = error or errors.get(0)
            if not errors:
                self._settle()
        except Exception as raised:  # noqa: BLE001  raised or logged below
            error = error or raised
        finally:
            self._end("was shut down")
        if error is not None and raise_on_error:
            raise error
        if error is not None:
            log.warning("the collector was shut down after an error: %s", error)

    def __del__(self) -> None:
        if hasattr(self, "_threads_before") and not self._is_shut_down:  # a constructor may have failed before
            self._end("was held by nobody any more")
            super().__del__()
            if (error := self._batches.pending_error()) is not None:  # an error that was not raised yet
                raise error

    def _end(self, why: str) -> None:
        self._worker.kill(why)
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)

    def _settle(self) -> None:
        """Wait for the push in flight, if any. Raises its error."""
        push, self._push = self._push, None
        if push is not None:
            push.result(self.wait_seconds)


class aSyncDataCollector(AsyncCollector):
    """`AsyncCollector` under its name in older examples."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        warnings.warn("aSyncDataCollector is called AsyncCollector now", DeprecationWarning, stacklevel=2)
        super().__init__(*args, **kwargs)


class ChildUpdater(WeightUpdater):
    """Writes weights into an exchange folder, which the collector there loads between two batches."""

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
        loaded = self._worker.submit("cascade_execute", "take_up", folder, version, adapter=adapter)
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
