"""The base of the collectors under TorchRL's names.

`CollectorBase` delivers batches on demand or from a `Background` thread, and takes weights that a parent process
sends; `WeightsCollector` adds one policy, the updater of its weights, and their version.
"""

from __future__ import annotations

import logging
import re
import threading
import time
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
from rlpost.model.weights import SavedWeights, load_weights
from rlpost.policies.base import Policy
from rlpost.torchrl.replay_buffer import ReplayBuffer
from rlpost.weight_sync.base import (
    MODEL_ID,
    WeightReceiver,
    WeightSource,
    WeightSyncScheme,
    WeightUpdater,
    begin_versions,
    check_weights,
    default_updater,
    named_weights,
)

log = logging.getLogger("rlpost")
_PART = re.compile(r"""(?:^|(?!^)\.)([A-Za-z]\w*)|\[(?:'([^']*)'|"([^"]*)"|(-?\d+))\]""")  # .name, ['key'] or [3]
LOOK_SECONDS = 0.05  # between two looks of the background whether it may go on
_FILLED_BY: weakref.WeakKeyDictionary[ReplayBuffer, weakref.ref[CollectorBase]] = weakref.WeakKeyDictionary()
WorkerIds = int | torch.device | Sequence[int | torch.device]


class CollectorBase(ABC):
    """Plays `env` and delivers batches, or fills `replay_buffer` with them: on demand or from a thread of its own."""

    receiver_schemes: Mapping[str, WeightReceiver] = {}  # by model

    def __init__(self, env: EnvBase, replay_buffer: ReplayBuffer | None, *, wait_seconds: float) -> None:
        self.env = env
        self.replay_buffer = replay_buffer
        self.wait_seconds = wait_seconds  # for a batch that is collected in the background
        self._background: Background | None = None
        self._is_shut_down = False
        self._worker_idx: int | None = None

    @property
    @abstractmethod
    def policy_version(self) -> PolicyVersionLabel | None:
        """The version of the policy's weights; None if it is not known."""

    def get_policy_version(self) -> PolicyVersionLabel | None:
        """`policy_version` as a method, for callers that cannot read a property."""
        return self.policy_version

    @property
    def plays_conversations(self) -> bool:
        """Whether a batch holds turns of conversations, not frames."""
        return False

    @property
    def worker_idx(self) -> int | None:
        """Its number, from 0, among the workers of a RayCollector; None for any other collector."""
        return self._worker_idx

    def number_as_worker(self, number: int) -> None:
        """Be worker `number` of a RayCollector."""
        self._worker_idx = number

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
        """Whether the background rests because enough rows wait to be taken."""
        return False

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
        """Collect one more batch into the replay buffer, or wait for the next one of the background.

        Raises RuntimeError without a buffer.
        """
        if self.replay_buffer is None:
            raise RuntimeError("collect() fills a replay buffer, and this collector has none: iterate over it instead")
        if self._background is None:
            self._check_foreground("collect with")
            self.collect_round()
        else:
            self._background.check()
            self._background.wait_for_round()

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

        name = "the batch that is collected in the background"
        self._background = Background(work, name, self.wait_seconds, may_begin)

    def pause(self) -> AbstractContextManager[None]:
        """A block in which nothing is collected in the background; waits for the batch in flight first."""
        return nullcontext() if self._background is None else self._background.held()

    # Weights, which a parent process may send

    @abstractmethod
    def take_up(self, weights: WeightSource | Path, version: PolicyVersionLabel, *, adapter: bool = False) -> None:
        """Sample as `version` from now on, with `weights`: a source of them, or a folder of *.safetensors.

        With `adapter` the folder holds a peft adapter. The background pauses meanwhile.
        """

    @abstractmethod
    def update_policy_weights_(self, policy_or_weights: Any = None) -> None:
        """Push weights into the policy; by default those of the model that it was made from."""

    def receive_weights(self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None) -> None:
        """Sample with these weights from now on: a module's, a TensorDict or a mapping, given in one of three ways.

        Registered receivers bring what they were offered. Without receivers and weights, the weights are those of the
        policy's own model; see `update_policy_weights_`.
        """
        for model_id, receiver in self.receiver_schemes.items():
            receiver.receive(self, model_id)
        if not self.receiver_schemes:
            self.update_policy_weights_(*(each for each in (policy_or_weights, weights, policy) if each is not None))

    def register_scheme_receiver(
        self, weight_recv_schemes: Mapping[str, WeightSyncScheme | WeightReceiver], *, synchronize_weights: bool = True
    ) -> None:
        """Take weights from these schemes, by model; with `synchronize_weights` also what they offer already.

        A model is "policy", or the path of a module, written as in `cascade_execute`. Raises ValueError for
        another.
        """
        made = {
            model_id: scheme.receiver() if isinstance(scheme, WeightSyncScheme) else scheme
            for model_id, scheme in weight_recv_schemes.items()
        }
        for model_id in made.keys() - {MODEL_ID}:
            _reached(self, model_id)
        self.receiver_schemes = {**self.receiver_schemes, **made}
        if synchronize_weights:
            self.receive_weights()

    def take_up_model(
        self, model_id: str, weights: WeightSource | Path, version: PolicyVersionLabel, *, adapter: bool = False
    ) -> None:
        """`take_up` of the policy, or load the module at the path `model_id`, which has no version."""
        if model_id == MODEL_ID:
            self.take_up(weights, version, adapter=adapter)
            return
        with self.pause():
            load_weights(
                _reached(self, model_id), SavedWeights(weights) if isinstance(weights, Path) else named_weights(weights)
            )

    def receive_offered(self, offers: Mapping[str, Any], version: PolicyVersionLabel) -> None:
        """Load a parent's weights, by model, as `version`. Raises KeyError for a model without a receiver."""
        for model_id, content in offers.items():
            self.receiver_schemes[model_id].offer(content, version)
        self.receive_weights()

    def receiving_places(self) -> dict[str, Any]:
        """The place of this worker, for the sender, by model; see `WeightReceiver.place`."""
        return {model_id: receiver.place() for model_id, receiver in self.receiver_schemes.items()}

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method by its path from the collector, such as `"receiver_schemes['policy'].place"`.

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

    def _claim(self, buffer: ReplayBuffer) -> None:
        """Be the one collector that fills `buffer`. Raises RuntimeError if another one, not shut down, does."""
        other = _FILLED_BY.get(buffer)
        if other is not None and (collector := other()) is not None and collector.is_initialized():
            raise RuntimeError(
                "another collector fills this replay buffer, and both would number their draws from 0: shut it down "
                "first, or give this one a buffer of its own"
            )
        _FILLED_BY[buffer] = weakref.ref(self)

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        worker_ids: WorkerIds | None = None,
        model_id: str | None = None,
        **given: Any,
    ) -> None:
        """Push weights into the policy; its version rises once the push has wholly succeeded.

        They come from a module, a TensorDict or a mapping, as the first argument, `weights`, `policy` or
        `state_dict`, or as `weights_dict={"policy": ...}`; by default they are those of the policy's own model, if
        it has one. The only model is "policy" (`model_id`), the only worker number 0, or the device that samples.
        The background pauses meanwhile.

        Raises TypeError without weights, ValueError for two sets of them.
        """
        del worker_ids  # of collectors with several workers
        sources = self._given_weights(model_id, policy_or_weights=policy_or_weights, **given)
        with self.pause():
            self.weight_updater.push(sources[MODEL_ID])

    def _given_weights(
        self, model_id: str | None, *, weights_dict: Mapping[str, Any] | None = None, **given: Any
    ) -> dict[str, Any]:
        """The weights that `update_policy_weights_` was given, by model, or else the policy's own."""
        for name in given.keys() - {"policy_or_weights", "weights", "policy", "state_dict"}:
            raise TypeError(f"update_policy_weights_ takes no {name}")
        named = [name for name, value in (*given.items(), ("weights_dict", weights_dict)) if value is not None]
        if weights_dict is not None and model_id is not None:
            named.append("model_id")
        if len(named) > 1:
            raise ValueError(f"update_policy_weights_ was given weights twice, as {' and '.join(named)}: leave one out")
        if weights_dict is not None:
            return dict(weights_dict)
        return {model_id or MODEL_ID: given[named[0]] if named else getattr(self.policy, "model", None)}

    def take_up(self, weights: WeightSource | Path, version: PolicyVersionLabel, *, adapter: bool = False) -> None:
        """See `CollectorBase.take_up`; the policy loads a folder itself if it can and has no updater of the user's."""
        policy, updater = self.policy, self.weight_updater
        loads = not self._has_own_updater and type(policy).load_folder is not Policy.load_folder
        with self.pause():
            if adapter and isinstance(weights, Path):
                policy.load_adapter_folder(weights, version)
                return
            if isinstance(weights, Path) and loads:
                if updater.model_metadata is not None:
                    check_weights(SavedWeights(weights), updater.model_metadata)
                policy.load_folder(weights, version)  # which may need no second copy of them
            else:
                updater.push(SavedWeights(weights) if isinstance(weights, Path) else weights)
                updater.restore_version(version)

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
    found, position = start, 0
    while position < len(path) or not position:
        part = _PART.match(path, position)
        if part is None:
            raise ValueError(
                f"{path!r} is not a path of public names and ['keys'], from {path[position:]!r} on: names that begin "
                "with an underscore are not reached from elsewhere"
            )
        name, *keys, index = part.groups()
        key = next((key for key in keys if key is not None), None)
        found = getattr(found, name) if name else found[int(index) if key is None else key]
        position = part.end()
    return found


class Background:
    """Calls `work` repeatedly in a thread, until it returns False or raises, or `stop` is called.

    A round begins if nobody holds the work, and `may_begin()` is true or somebody waits for a round.
    An error of `work` is raised by the next call of `check`, `wait_for_round`, `held` or `stop`, in
    their caller's thread. A wait of more than `wait_seconds` raises PolicyError, which names `work_name`.
    """

    def __init__(
        self,
        work: Callable[[], bool],
        work_name: str,
        wait_seconds: float,
        may_begin: Callable[[], bool] = lambda: True,
    ) -> None:
        self.wait_seconds = wait_seconds
        self._work = work
        self._name = work_name
        self._may_begin = may_begin
        self._changed = threading.Condition()  # guards everything below
        self._rounds = 0  # ended so far
        self._at_work = False
        self._holders = 0
        self._round_requested = False  # for a round even if `may_begin` is false
        self._stopping = False
        self._ended = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rlpost-collector", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of `work`, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait_for_round(self) -> None:
        """Wait until one more round has ended, or the last one has."""
        with self._changed:
            before = self._rounds
            self._round_requested = True
            self._changed.notify_all()
            self._wait(lambda: self._rounds > before or self._ended, self.wait_seconds)
        self.check()

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block during which no round runs."""
        with self._changed:
            self._holders += 1
        try:
            with self._changed:
                self._wait(lambda: not self._at_work, self.wait_seconds)
            self.check()
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._changed.notify_all()

    def stop(self, timeout_seconds: float | None = None) -> None:
        """Begin no further round, and wait for the present one to end."""
        self.tell_to_stop()
        with self._changed:
            self._wait(lambda: self._ended, self.wait_seconds if timeout_seconds is None else timeout_seconds)
        self.check()

    def tell_to_stop(self) -> None:
        """Begin no further round; returns at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _wait(self, until: Callable[[], bool], seconds: float) -> None:
        began = time.monotonic()
        if not self._changed.wait_for(until, seconds):
            raise PolicyError(
                f"waited {time.monotonic() - began:.0f} s for {self._name} to end: the policy or the environment may "
                "hang"
            )

    def _run(self) -> None:
        try:
            while self._begin():
                goes_on = self._work()
                with self._changed:
                    self._at_work = False
                    self._rounds += 1
                    self._changed.notify_all()
                if not goes_on:
                    break
        except BaseException as error:  # noqa: BLE001  raised again in the thread that asks next
            self._failure = error
        finally:
            with self._changed:
                self._at_work, self._ended = False, True
                self._changed.notify_all()

    def _begin(self) -> bool:
        """Wait until a round may begin; False once `stop` was called."""
        with self._changed:
            while not (self._stopping or (not self._holders and (self._round_requested or self._may_begin()))):
                self._changed.wait(LOOK_SECONDS)
            self._at_work, self._round_requested = not self._stopping, False
            return self._at_work
