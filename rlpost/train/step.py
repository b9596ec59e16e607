"""One step of a training: the completions or rows it trains on, its updates, its metrics, and its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

from rlpost.model.optim import learning_rate_of
from rlpost.model.packing import Row
from rlpost.train.ranks import Ranks
from rlpost.train.update import Update

if TYPE_CHECKING:
    from rlpost.collectors.driver import GroupDriver
    from rlpost.collectors.sync import SyncCollector


class Clock:
    """Measures the seconds since `begin`, and those of named parts."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin to measure."""
        self._began = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str | None = None) -> None:
        """End the part `name`; None: the time since the last call is not recorded."""
        now = time.perf_counter()
        if name is not None:
            self._laps[name] = now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """Seconds of each part, and of the step so far."""
        return self._laps | {"time/step": self.seconds}

    @property
    def seconds(self) -> float:
        """Seconds since `begin`."""
        return time.perf_counter() - self._began


class NotFiniteError(FloatingPointError):
    """A loss or gradient of an update is not finite."""


@dataclass
class Step:
    """One step, from `Run.steps`. It ends when the loop asks for the next one: then the run's watchers see it.

    A loop learns from minibatches with `update`, pushes the weights with `push`, writes into `metrics`, and says with
    `trained_on` which completions it learned from. Where a policy samples from the trained model, weights that an
    update has changed must be pushed before the step ends; nothing else about the order is checked.
    """

    number: int  # from 1
    total: int  # steps of the whole run; falls to `number` if the run ends with this step
    ranks: Ranks
    updates_before: int = 0  # optimizer steps of the run before this step
    phase: Callable[..., None] = lambda *phase: None  # shows the current work, see `Screen.phase`
    wait_for_save: Callable[[], None] = lambda: None  # until a checkpoint in progress no longer reads the weights
    check_push: Callable[[int], None] | None = None  # compares sampler and trainer after the push of a step
    is_short_of_memory: bool = True  # nothing is kept that the next phase may need the memory of
    frees_before_push: bool = False  # an engine of another process needs the memory that torch keeps

    metrics: dict[str, float] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    notes: dict[str, str] = field(default_factory=dict)  # what happened -> more about it; see `note`
    explanation: str = ""  # why nothing can have been learned from the step, where the loop knows
    minibatch: Sequence[Row] = ()  # the latest one
    updates: list[Update[Any]] = field(default_factory=list)
    batch: TensorDictBase | None = None  # (B,) the completions that the step trained on; None: it sampled none
    rows: Sequence[Row] = ()  # of `batch`, with the trainer's log-probs
    evaluation: dict[str, float] = field(default_factory=dict)  # the metrics of the evaluation after the step
    is_recorded: bool = False  # whether its metrics and completions are on disk
    must_save: bool = False  # whether a checkpoint is due, whatever the settings say
    has_unpushed_weights: bool = False

    @property
    def is_last(self) -> bool:
        """Whether the run ends with this step."""
        return self.number >= self.total

    @property
    def changed_weights(self) -> bool:
        """Whether an update has changed the weights."""
        return any(update.stepped for update in self.updates)

    def gradient(self) -> dict[str, float]:
        """The mean gradient norm of the updates that changed weights, 0 without any, and the learning rate."""
        norms = [update.grad_norm for update in self.updates if update.stepped]
        return {"grad_norm": sum(norms) / max(1, len(norms)), "lr": learning_rate_of(self.ranks.own.optimizer)}

    def note(self, what: str, more: str = "") -> None:
        """Note `what` happened in this step. The first such step is shown with `more`; the run's end counts them."""
        self.notes.setdefault(what, more)

    def update(self, minibatch: Sequence[Row], number: int | None = None) -> Update[Any]:
        """One optimizer step over whole groups: the run's next, unless its `number` (from 0) is given.

        Raises NotFiniteError, before a weight has changed, if a loss or gradient is not finite.
        """
        self.wait_for_save()
        self.minibatch = minibatch
        number = self.updates_before + len(self.updates) if number is None else number
        try:
            updated = self.ranks.update(minibatch, number)
        except FloatingPointError as error:
            raise NotFiniteError(str(error)) from error
        for row, log_probs in zip(minibatch, updated.log_probs, strict=False):  # none without an update
            row.trainer_log_probs = log_probs if row.trainer_log_probs is None else row.trainer_log_probs
        if not updated.stepped and not any(row.valid for row in minibatch):
            self.note("all rewards of a minibatch failed, so it changed no weight")
        self.updates.append(updated)
        self.has_unpushed_weights |= updated.stepped
        return updated

    def push(self, collector: SyncCollector | GroupDriver) -> None:
        """Push the weights to the policy, if an update has changed them, and check that they have arrived."""
        if self.frees_before_push:
            self.ranks.free_unused()
        self.clock.lap("time/train")
        if self.has_unpushed_weights:
            self.phase("pushing weights")
            collector.update_policy_weights_(self.ranks.own.model)
            self.has_unpushed_weights = False
            if self.check_push is not None:
                self.phase("checking", "the sampler")
                self.check_push(self.number)
        self.clock.lap("time/sync")
        self.metrics |= collector.take_seconds()

    def trained_on(self, batch: TensorDictBase, rows: Sequence[Row]) -> None:
        """Keep the completions of the step for its rollouts; `rows` are those of `batch`."""
        self.batch, self.rows = batch, rows
