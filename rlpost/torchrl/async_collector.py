"""AsyncCollector: a collector in a process of its own, which goes on while its batches are used here.

`ChildUpdater` sends its weights; the process and its batches are those of `rlpost.torchrl.remote_collector`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from rlpost.data.conversation import PolicyVersionLabel, next_version
from rlpost.envs.transforms.training import PolicyVersion
from rlpost.errors import PolicyError
from rlpost.policies.base import Policy
from rlpost.policies.remote import PUSH_SECONDS
from rlpost.remote.process import END_SECONDS, WorkerProcess
from rlpost.torchrl.collector import Device, one_device
from rlpost.torchrl.collector_base import postprocessed
from rlpost.torchrl.remote_collector import (
    CollectorHost,
    Member,
    RemoteCollector,
    built_collector,
    pickled,
    without,
)
from rlpost.torchrl.replay_buffer import ReplayBuffer
from rlpost.weight_sync.base import WeightSource, WeightUpdater
from rlpost.weight_sync.folder import weights_folder

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


class AsyncCollector(RemoteCollector):
    """Iterates over the batches of one collector in a process of its own, or fills a replay buffer with them.

    `create_env_fn(**create_env_kwargs)` and `policy_factory()` are called there; a `policy` is sent as a copy. The
    default of `collector_class` is LLMCollector for a language environment, where `frames_per_batch` counts turns of
    conversations, and else Collector. `options` are further arguments of that class, such as `env_device`,
    `policy_device`, `create_env_kwargs`, `max_frames_per_traj`, `init_random_frames`, `reset_at_each_iter`,
    `split_trajs`, `exploration_type`, `reset_when_done` and `set_truncated`. All is sent by cloudpickle, so it may be a
    lambda.

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
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        update_at_each_batch: bool = False,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        track_policy_version: bool | PolicyVersion = False,
        replay_buffer: Any = None,
        collector_class: type[Any] | None = None,
        batches_ahead: int = 2,
        wait_seconds: float = 600.0,
        **options: Any,
    ) -> None:
        self.total_frames = -1 if total_frames is None else total_frames
        super().__init__(
            policy, replay_buffer, wait_seconds=wait_seconds, total_frames=self.total_frames, ahead=batches_ahead
        )
        self.storing_device = one_device(device if storing_device is None else storing_device)
        self.postproc = postproc if replay_buffer is None else None
        self.update_at_each_batch = update_at_each_batch
        self.batches_ahead = batches_ahead
        options |= {"device": device, "track_policy_version": track_policy_version}
        if self.storing_device is not None:
            options["storing_device"] = "cpu"  # there
        if replay_buffer is not None:
            options["postproc"] = postproc
        plan = partial(
            built_collector,
            create_env_fn=create_env_fn,
            policy=policy,
            policy_factory=policy_factory,
            frames_per_batch=frames_per_batch,
            collector_class=collector_class,
            options=without(NOT_OF_ONE_PROCESS, options, "one process"),
        )
        sent = pickled("the collector's process", plan, plan.keywords | options)
        self._worker = worker = WorkerProcess(partial(CollectorHost, 0, num_sub_threads)).start()
        try:
            self._workers.build({0: (member := Member(worker, self.storing_device))}, {0: sent})
        except BaseException:
            worker.kill("was not wanted any more")
            raise
        self._push: tuple[Future[None], PolicyVersionLabel] | None = None  # weights that are on their way
        self.frames_per_batch = member.frames_per_batch
        self.weight_updater = self._pusher = ChildUpdater(self.policy, worker)
        self._begin(track_policy_version)
        self._threads_before = None if num_threads is None else torch.get_num_threads()
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    def _collected(self) -> TensorDictBase:
        """The next batch. Raises an error of the process, and its death."""
        [(_, batch)] = self._batches.take()
        if self.update_at_each_batch:
            self._settle()
            version = next_version(self.policy_version)
            self._push = self._pusher.begin(self.get_policy_model(), version), version
        return postprocessed(batch, self.postproc)

    def rollout(self) -> TensorDictBase:
        """One batch, collected now and returned, even with a buffer; batches that wait are delivered later."""
        with self.pause():
            return self._workers.call("rollout")[0]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """See `CollectorBase.pause`; waits for weights that are on their way too."""
        with super().pause():
            self._settle()
            yield

    def start(self) -> None:
        """Fill the replay buffer in the background from now on; see `CollectorBase.start`."""
        super().start()
        if isinstance(self.replay_buffer, ReplayBuffer):
            self._batches.ahead = 0  # what is ahead waits in the buffer

    def take_up(self, weights: WeightSource | Path, version: PolicyVersionLabel, *, adapter: bool = False) -> None:
        """See `CollectorBase.take_up`: the process loads the same folder."""
        self._check_open("use")
        self._settle()
        loaded(self._pusher.begin(weights, version, adapter=adapter))
        self.policy.become(version)

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

    def _stop(self, timeout: float | None, close_env: bool) -> None:
        """Close the policy, and with `close_env` the environment, and end the process with all it has started.

        The batch in flight has `timeout` seconds to end (None: 20) before the process is killed, which is an error.
        """
        try:
            super()._stop(timeout, close_env=False)
            before = self._batches.error
            late = self._workers.finish(close_env, END_SECONDS if timeout is None else timeout).get(0)
            if (error := before or late) is not None:
                raise error
            self._settle()
        finally:
            self._end("was shut down")

    def __del__(self) -> None:
        if hasattr(self, "_threads_before") and not self._is_shut_down:  # a constructor may have failed before
            error = self._batches.error  # before the end, which fails the batch in flight
            self._end("was held by nobody any more")
            super().__del__()
            if error is not None:
                raise error

    def _end(self, why: str) -> None:
        self._worker.kill(why)
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)

    def _settle(self) -> None:
        """Wait for the push in flight, if any. Raises its error."""
        push, self._push = self._push, None
        if push is not None:
            loaded(push[0])
            self.policy.become(push[1])


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

    def send_weights(self, policy: Policy, source: WeightSource) -> None:
        """See `WeightUpdater.send_weights`. Raises PolicyError after `PUSH_SECONDS`."""
        loaded(self.begin(source, self.new_version))

    def begin(
        self, weights: WeightSource | Path, version: PolicyVersionLabel, *, adapter: bool = False
    ) -> Future[None]:
        """Have weights loaded as `version`: those of a folder, or of a source, which are copied before this returns.

        Raises TypeError for a source without weights.
        """
        with ExitStack() as stack:
            folder = weights if isinstance(weights, Path) else stack.enter_context(weights_folder(weights))
            future = self._worker.submit("cascade_execute", "take_up", folder, version, adapter=adapter)
            kept = stack.pop_all()
        future.add_done_callback(lambda _: kept.close())
        return future


def loaded(push: Future[None]) -> None:
    """Wait until the process has loaded the weights. Raises its error, and PolicyError after `PUSH_SECONDS`."""
    try:
        push.result(PUSH_SECONDS)
    except FutureTimeout:
        raise PolicyError(f"waited {PUSH_SECONDS:.0f} s for weights to be loaded: the policy may hang") from None
