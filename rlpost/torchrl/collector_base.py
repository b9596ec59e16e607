"""The base of the collectors under TorchRL's names.

`CollectorBase` delivers batches on demand or from a `Background` thread; `WeightsCollector` adds one policy, the
updater of its weights, and their version.
"""

from __future__ import annotations

import ast
import logging
import re
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from tensordict import TensorDictBase

from rlpost.data.conversation import PolicyVersionLabel
from rlpost.envs.base import EnvBase
from rlpost.envs.transforms.training import PolicyVersion
from rlpost.errors import PolicyError
from rlpost.model.weights import SavedWeights
from rlpost.policies.base import Policy
from rlpost.torchrl.replay_buffer import ReplayBuffer
from rlpost.weight_sync.base import WeightUpdater, begin_versions, check_weights, default_updater
from rlpost.weight_sync.folder import RayWeightSyncScheme

log = logging.getLogger("rlpost")
_STEP = r"""\['[^']*'\]|\["[^"]*"\]|\[-?\d+\]"""  # ['key'], ["key"] or [3]
_PATH = re.compile(rf"[A-Za-z]\w*(?:\.[A-Za-z]\w*|{_STEP})*")
LOOK_SECONDS = 0.05  # between two looks of the background whether it may go on
MODEL_ID = "policy"  # the one model whose weights a collector takes
WorkerIds = int | torch.device | Sequence[int | torch.device]


class CollectorBase(ABC):
    """Plays `env` and delivers batches, or fills `replay_buffer` with them: on demand or from a thread of its own."""

    frames_per_batch: int  # or turns of conversations
    batches_ahead: int | None = None  # batches of rows that the background collects ahead; None: without limit
    plays_conversations = False  # whether a batch holds turns of conversations, not frames
    worker_idx: int | None = None  # its number, from 0, among the workers of a RayCollector
    receiver_schemes: Mapping[str, RayWeightSyncScheme] = {}  # by model

    def __init__(self, env: EnvBase, replay_buffer: ReplayBuffer | None, *, wait_seconds: float) -> None:
        self.env = env
        self.replay_buffer = replay_buffer
        self.wait_seconds = wait_seconds  # for a batch that is collected in the background
        self._background: Background | None = None
        self._is_shut_down = False

    @property
    @abstractmethod
    def policy_version(self) -> PolicyVersionLabel | None:
        """The version of the policy's weights; None if it is not known."""

    def get_policy_version(self) -> PolicyVersionLabel | None:
        """`policy_version` as a method, for callers that cannot read a property."""
        return self.policy_version

    def rollout(self) -> TensorDictBase:
        """One batch, collected now and returned, even with a buffer."""
        self._check_foreground("take a rollout of")
        return self._collected()

    @abstractmethod
    def _collected(self) -> TensorDictBase:
        """Collect one more batch."""

    def collect_round(self) -> TensorDictBase | None:
        """Collect one more batch and return it; None if it goes into a buffer or a queue."""
        batch = self._collected()
        if self.replay_buffer is None:
            return batch
        self.replay_buffer.extend(batch)
        return None

    @property
    @abstractmethod
    def wants_more(self) -> bool:
        """Whether the total is not reached yet."""

    @property
    def is_ahead(self) -> bool:
        """Whether the background rests: `batches_ahead` batches of rows wait in a buffer of groups to be taken."""
        buffer: Any = self.replay_buffer
        if self.batches_ahead is None or not getattr(buffer, "holds_groups", False):
            return False
        return buffer.num_rows >= self.batches_ahead * self.frames_per_batch

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        while self.wants_more:
            self._check_foreground("iterate over")
            yield self.collect_round()

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Iterate over the collector."""
        return iter(self)

    def next(self) -> TensorDictBase | None:
        """The next batch; None if it is delivered elsewhere, and at the end."""
        return next(iter(self), None)

    def collect(self) -> None:
        """Collect one more batch into the replay buffer, or wait for the one that the background collects.

        Raises RuntimeError without a buffer.
        """
        if self.replay_buffer is None:
            raise RuntimeError("collect() fills a replay buffer, and this collector has none: iterate over it instead")
        if self._background is None:
            self._check_open("collect with")
            self.collect_round()
            return
        before = self.replay_buffer.write_count
        with self._background.held():
            if self.replay_buffer.write_count == before:
                self.collect_round()

    def start(self) -> None:
        """Fill the replay buffer from a thread of its own, without end or up to `total_dialog_turns`.

        An error there is raised by the next call here. Raises RuntimeError without a buffer, if the thread runs
        already, or after `shutdown`.
        """
        if self.replay_buffer is None:
            raise RuntimeError("start() fills a replay buffer, and this collector has none: give it one")
        self._check_foreground("start")
        mine = weakref.ref(self)  # the thread keeps no collector alive

        def work() -> bool:
            collector = mine()
            if collector is None or not collector.wants_more:
                return False
            collector.collect_round()
            return collector.wants_more

        def may_begin() -> bool:
            collector = mine()
            return collector is None or not collector.is_ahead

        self._background = Background(work, may_begin, self.wait_seconds)

    def pause(self) -> AbstractContextManager[None]:
        """A block in which nothing is collected in the background; waits for the batch in flight first."""
        return nullcontext() if self._background is None else self._background.held()

    # Weights, which a parent process may send

    @abstractmethod
    def take_up(self, folder: Path, version: PolicyVersionLabel, *, adapter: bool = False) -> None:
        """Sample as `version` from now on, with the weights in the *.safetensors of `folder`.

        With `adapter` they are a peft adapter. The background pauses meanwhile.
        """

    @abstractmethod
    def set_version(self, version: PolicyVersionLabel) -> None:
        """The policy has the weights of `version` already."""

    @abstractmethod
    def update_policy_weights_(self, policy_or_weights: Any = None) -> None:
        """Push weights into the policy; by default those of the model that it was made from."""

    def receive_weights(self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None) -> None:
        """Sample with these weights from now on: a module's, a TensorDict or a mapping, given in one of three ways.

        Registered receivers bring what they were offered. Without receivers and weights, the weights are those of the
        policy's own model; see `update_policy_weights_`.
        """
        for receiver in self.receiver_schemes.values():
            receiver.receive(self)
        if not self.receiver_schemes:
            self.update_policy_weights_(*(each for each in (policy_or_weights, weights, policy) if each is not None))

    def register_scheme_receiver(
        self, weight_recv_schemes: Mapping[str, RayWeightSyncScheme], *, synchronize_weights: bool = True
    ) -> None:
        """Take weights from these schemes, by model, and with `synchronize_weights` what they offer already.

        The only model is "policy".
        """
        self.receiver_schemes = {**self.receiver_schemes, **weight_recv_schemes}
        if synchronize_weights:
            self.receive_weights()

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method by its path from the collector, such as `"receiver_schemes['policy'].offer"`.

        The path consists of names, and of keys or indices in brackets. Raises ValueError for anything else and for
        names that begin with an underscore.
        """
        return _reached(self, attr_path)(*args, **kwargs)

    # The end

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Collect no more, and close the environment if it has `close`, not the policy. A second call does nothing.

        Raises the background's error, and PolicyError if its batch does not end within `timeout` seconds (None:
        `wait_seconds`); without `raise_on_error` either is logged.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        try:
            self._stop(timeout, close_env)
        except Exception as error:
            if raise_on_error:
                raise
            log.warning("the collector was shut down after an error: %s", error)

    def _stop(self, timeout: float | None, close_env: bool) -> None:
        try:
            if self._background is not None:
                self._background.stop(timeout)
        finally:
            if close_env and hasattr(self.env, "close"):
                self.env.close()

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """`shutdown`, under its other name in TorchRL."""
        self.shutdown(timeout, close_env)

    def is_initialized(self) -> bool:
        """Whether batches can be collected: until `shutdown`."""
        return not self._is_shut_down

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        if getattr(self, "_background", None) is not None:  # a constructor may have failed before
            assert self._background is not None
            self._background.tell_to_stop()
            self._background.check()  # an error that was not raised yet

    @classmethod
    def as_remote(cls, remote_config: Mapping[str, Any] | None = None) -> Any:
        """This class as a Ray actor class: `as_remote({"num_cpus": 1}).remote(env, policy=...)` makes one.

        `remote_config` is what `ray.remote` takes. Raises MissingExtraError without ray.
        """
        from rlpost.remote.cluster import actor_class

        return actor_class(cls, remote_config or {})

    def _check_foreground(self, doing: str) -> None:
        """Raise RuntimeError after `shutdown` and if the background collects; first the background's error, if any."""
        self._check_open(doing)
        if self._background is not None:
            self._background.check()
            raise RuntimeError(f"cannot {doing} a collector that was started in the background: read its replay buffer")

    def _check_open(self, doing: str) -> None:
        if self._is_shut_down:
            raise RuntimeError(f"cannot {doing} a collector that was shut down: build another")


class WeightsCollector(CollectorBase):
    """A collector with one policy, whose weights a `weight_updater` pushes."""

    policy: Policy
    weight_updater: WeightUpdater

    def fill(self, num_groups: int, max_policy_lag: int | None = None) -> dict[str, float]:
        """Collect until the replay buffer has `num_groups` whole groups, or wait until the background has: take them.

        Groups that are older than `max_policy_lag` pushes are dropped. Returns the counts of the buffer. Raises
        RuntimeError without a `ReplayBuffer`, PolicyError if too few groups become whole (see its `draw_limit`).
        """
        buffer = self.replay_buffer
        if not isinstance(buffer, ReplayBuffer):
            raise RuntimeError("fill() is for a ReplayBuffer of this process: give the collector one as replay_buffer")
        buffer.drop_stale(self.policy_version, max_policy_lag)
        for _ in buffer.rounds(num_groups):
            self.collect()
            buffer.drop_stale(self.policy_version, max_policy_lag)
        return buffer.take_counts()

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        worker_ids: WorkerIds | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> None:
        """Push weights into the policy; its version rises once the push has wholly succeeded.

        They come from a module, a TensorDict or a mapping, as the first argument, `weights`, `policy` or
        `state_dict`, or as `weights_dict={"policy": ...}`; by default they are those of the policy's own model, if
        it has one. The only model is "policy" (`model_id`). Of several workers `worker_ids` chooses some, by their
        numbers or the devices of their policies. The background pauses meanwhile.

        Raises TypeError without weights, ValueError for two sets of them.
        """
        for name in given.keys() - {"weights", "policy", "state_dict"}:
            raise TypeError(f"update_policy_weights_ takes no {name}")
        for model in (model_id or MODEL_ID, *(weights_dict or ())):
            if model != MODEL_ID:
                raise ValueError(f"a collector takes the weights of {MODEL_ID!r} alone, not of {model!r}")
        named = {"policy_or_weights": policy_or_weights, **given, "weights_dict": (weights_dict or {}).get(MODEL_ID)}
        sources = {name: source for name, source in named.items() if source is not None}
        if len(sources) > 1:
            raise ValueError(f"weights were given twice, as {' and '.join(sources)}: leave one out")
        self._push(next(iter(sources.values()), getattr(self.policy, "model", None)), worker_ids)

    def _push(self, source: Any, worker_ids: WorkerIds | None) -> None:
        with self.pause():
            self.weight_updater.push(source)

    def take_up(self, folder: Path, version: PolicyVersionLabel, *, adapter: bool = False) -> None:
        """See `CollectorBase.take_up`; the policy loads a folder itself if it can and has no updater of the user's."""
        policy, updater = self.policy, self.weight_updater
        with self.pause():
            if adapter:
                policy.load_adapter_folder(folder, version)
                return
            weights = SavedWeights(folder)
            if updater.model_metadata is not None:
                check_weights(weights, updater.model_metadata)
            if not self._has_own_updater and type(policy).load_folder is not Policy.load_folder:
                policy.load_folder(folder, version)  # which may need no second copy of them
            else:
                updater.push(weights)
                updater.restore_version(version)

    def set_version(self, version: PolicyVersionLabel) -> None:
        """See `CollectorBase.set_version`."""
        self.weight_updater.restore_version(version)

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """`weight_updater.init` with these arguments."""
        self.weight_updater.init(*args, **kwargs)

    def get_policy_model(self) -> Any:
        """The policy's transformers model or vLLM engine; None if it has neither."""
        return getattr(self.policy, "model", None)

    @property
    def policy_version(self) -> PolicyVersionLabel:
        """The version the policy samples with now, tracked or not."""
        return self.policy.version

    def _version_tracker(self, track: bool | PolicyVersion) -> PolicyVersion | None:
        if track is False:
            return None
        tracker = PolicyVersion() if track is True else track
        self.env = self.env.append_transform(tracker)
        begin_versions(self.policy, tracker)
        return tracker

    def _updater(self, updater: WeightUpdater | Callable[[], WeightUpdater] | None) -> WeightUpdater:
        self._has_own_updater = updater is not None
        if updater is None:
            return default_updater(self.policy)
        built = updater if isinstance(updater, WeightUpdater) else updater()
        if built.policy is None:
            built.init(self.policy)
        elif built.policy is not self.policy:
            raise ValueError("the weight_updater pushes to another policy than the one this collector samples with")
        return built


# Parts of collectors


def postprocessed(batch: TensorDictBase, postproc: Callable[[TensorDictBase], TensorDictBase] | None) -> TensorDictBase:
    """`batch` as `postproc` returns it. Raises TypeError if that is not a TensorDict."""
    if postproc is None:
        return batch
    made = postproc(batch)
    if not isinstance(made, TensorDictBase):
        raise TypeError(
            f"the postproc returned {type(made).__name__}: it must return the batch to deliver; what holds rows back "
            "is a transform of the buffer, ReplayBuffer(transforms=[...])"
        )
    return made


def _reached(start: Any, path: str) -> Any:
    """The object at a path of public names and keys. Raises as `CollectorBase.cascade_execute` does."""
    if not _PATH.fullmatch(path):
        raise ValueError(
            f"{path!r} is not a path of public names and ['keys']: names that begin with an underscore are not reached "
            "from elsewhere"
        )
    found = start
    for step in re.findall(rf"\w+|{_STEP}", path):
        found = found[ast.literal_eval(step[1:-1])] if step[0] == "[" else getattr(found, step)
    return found


class Background:
    """Calls `work` repeatedly in a thread, until it returns False or raises, or `stop` is called.

    A round begins if nobody holds the work and `may_begin()` is true. An error of `work` is raised by the next call of
    `check`, `held` or `stop`, in their caller's thread. A wait of more than `wait_seconds` raises PolicyError.
    """

    def __init__(self, work: Callable[[], bool], may_begin: Callable[[], bool], wait_seconds: float) -> None:
        self.wait_seconds = wait_seconds
        self._turn = threading.RLock()  # of the round that runs, or of whoever holds the work
        self._holders: list[int] = []  # threads that hold the work, or wait for it
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work, may_begin), name="rlpost-collector", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of `work`, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block during which no round runs; waits for the present one to end."""
        thread = threading.get_ident()
        self._holders.append(thread)
        try:
            if not self._turn.acquire(timeout=self.wait_seconds):
                raise _late(self.wait_seconds)
            try:
                self.check()
                yield
            finally:
                self._turn.release()
        finally:
            self._holders.remove(thread)

    def stop(self, timeout_seconds: float | None = None) -> None:
        """Begin no further round, and wait for the present one to end."""
        seconds = self.wait_seconds if timeout_seconds is None else timeout_seconds
        self.tell_to_stop()
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise _late(seconds)
        self.check()

    def tell_to_stop(self) -> None:
        """Begin no further round; returns at once."""
        self._stopping.set()

    def _run(self, work: Callable[[], bool], may_begin: Callable[[], bool]) -> None:
        goes_on = True
        try:
            while goes_on and not self._stopping.is_set():
                if self._holders or not may_begin():
                    self._stopping.wait(LOOK_SECONDS)
                    continue
                with self._turn:
                    goes_on = work()
        except BaseException as error:  # noqa: BLE001  raised again in the thread that asks next
            self._failure = error


def _late(seconds: float) -> PolicyError:
    return PolicyError(
        f"waited {seconds:.0f} s for the batch that is collected in the background to end: the policy or the "
        "environment may hang"
    )
