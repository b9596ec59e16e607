"""Everything of a training but its algorithm: opened, resumed or begun, timed, recorded, saved, measured, concluded.

    with Session(settings, request) as session:
        parts = session.load(assemble_grpo)
        for _ in session.steps():
            session.collected(batch)
            updates = [session.update(minibatch, batch) for minibatch in ...]
            session.trained(updates)
            ...  # the weights are pushed; metrics of the algorithm go into session.metrics
            session.finish(batch, rows)
    return session.run.exit_code

What differs between trainings are the parts, which `load` is given a function for: they know how to announce, measure
and save themselves. The calls of a step are these, in this order; a step that leaves one out is an error.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, cast

import torch
import yaml
from tensordict import TensorDictBase
from transformers import PreTrainedModel

from rlpost.config.paths import LATEST, REFERENCE, newest_checkpoint, step_of
from rlpost.data.conversation import Conversation
from rlpost.distributed import Place
from rlpost.errors import ConfigError, DivergedError
from rlpost.estimate.defaults import choose, in_yaml
from rlpost.estimate.machine import chosen_policy
from rlpost.estimate.needs import needs_of, share_beside
from rlpost.evaluation.play import halves
from rlpost.evaluation.saved import held_out_table, write_rows
from rlpost.model.device import compute_deterministically, leave_room, pick_device
from rlpost.model.load import save_model
from rlpost.model.lora import save_adapter
from rlpost.model.memory import CoresWatch, frozen_heap, give_back_freed_memory, keep_freed_memory
from rlpost.model.optim import learning_rate_of, optimizer_tensors, set_learning_rate
from rlpost.model.packing import Reference, Row
from rlpost.model.precision import Precision
from rlpost.model.tokenizer import notes_of_model
from rlpost.model.trainable import forward_precision
from rlpost.model.weights import is_adapted, is_sharded
from rlpost.output import output_into
from rlpost.record import PRECISION, read_metrics
from rlpost.runs.checkpoint import (
    kept_precision,
    load_checkpoint,
    mark_best,
    restore_moments,
    save_checkpoint,
    write_readme,
)
from rlpost.runs.diagnosis import AT_LEAST, STANDSTILL, Diagnosis, Symptom, repeated_text
from rlpost.runs.writer import Run, Stopped
from rlpost.screen import Screen, evaluation_line
from rlpost.settings import FineTuningSettings, NoTrackingSettings, OnAlarm, SampledSettings, TrackingSettings
from rlpost.settings.commands import RunRequest
from rlpost.train import narration
from rlpost.train.progress import (
    ENDS_TRAINING,
    Progress,
    check_measured,
    evaluations_until,
    restore_best,
    say_at_end,
    watch,
    why_ended,
)
from rlpost.train.ranks import Rank, Ranks, beside_ranks, join_ranks
from rlpost.train.resolve import DAY, resolve_numbers, size_and_room
from rlpost.train.update import Microbatches, Objective, Update, diverged

if TYPE_CHECKING:
    from rlpost.tracking.trackers import Tracking

log = logging.getLogger("rlpost")


Settings = SampledSettings | FineTuningSettings


class Parts(Protocol):
    """The parts of a training, and the methods that differ between trainings."""

    model: PreTrainedModel
    tokenizer: Any
    optimizer: torch.optim.Optimizer
    reference: Reference | None
    data: dict[str, str]  # the rows of each split, in words with a hash

    @property
    def objective(self) -> Objective[Any]:
        """The objective to minimise."""
        ...

    @property
    def device(self) -> torch.device:
        """The device on which the model is trained."""
        ...

    def start(self) -> None:
        """Start the policy and the environments."""

    def close(self) -> None:
        """Close everything that `start` started."""

    def total_steps(self, session: Session[Any, Any]) -> int:
        """Steps of the whole run, those done included."""
        ...

    def announce(self, session: Session[Any, Any], numbers: Precision) -> None:
        """Print the plan before the first step."""

    def loaded(self, session: Session[Any, Any]) -> None:
        """The run has begun, or goes on: the first step comes next."""

    def begin_step(self) -> None:
        """A step begins."""

    def collected(self, session: Session[Any, Any], batch: Any) -> None:
        """Describe the rows that the step trains on."""

    def end_step(self, session: Session[Any, Any], *, changed: bool) -> None:
        """A step ends; `changed`: its updates have changed the weights."""

    def measure(self, session: Session[Any, Any], when: str) -> dict[str, float]:
        """Evaluate on held-out data; `when` names the evaluation on a plain terminal."""
        ...

    def state(self, session: Session[Any, Any]) -> dict[str, Any]:
        """The state that resuming needs besides weights, optimizer and progress, JSON-compatible."""
        ...

    def restore(self, session: Session[Any, Any], state: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""

    def keep_batch(self, folder: Path, step: int, batch: Any) -> None:
        """Write the rows that a step was about to train on into `folder`."""

    def why_nothing(self, session: Session[Any, Any]) -> str:
        """The likely reason where nothing is learned, and what to do."""
        ...

    def conclude(self, session: Session[Any, Any]) -> None:
        """The commands to type next, for a run that was not stopped."""


S = TypeVar("S", bound=Settings)
P = TypeVar("P", bound=Parts)


class Session(Generic[S, P]):
    """One training in its run folder, open from `with` to its last line on the screen.

    `load` assembles the parts and begins or resumes the run, `steps` goes through the steps still to do, `finish` ends
    each. `metrics` are those of the current step.
    """

    def __init__(self, settings: S, request: RunRequest) -> None:
        self.settings = settings
        self.screen = Screen(plain=request.plain)
        self.run = Run(
            request,
            seed=settings.seed,
            total_steps=settings.steps or 0,
            screen=self.screen,
            tracker=build_tracker(settings.tracking, request),
        )
        self.parts: P
        self.ranks: Ranks  # that train
        self.progress = Progress()
        self.step = 0  # the current one
        self.metrics: dict[str, float] = {}
        self.clock = Clock()
        self._loading: dict[str, float] = {}  # the seconds of loading, until a row of metrics.jsonl has them
        self.cores = CoresWatch()
        self.saving = Saving(lambda: self.screen.phase("saving checkpoint"))
        self.has_to_spare = False  # whether memory is kept that the next phase may need
        self._diagnosis = Diagnosis()
        self._begun_from: int | None = None  # the step of the checkpoint from which an engine has started
        self._called: str | None = None  # the step's latest call
        self._changed = False  # whether the step's updates have changed the weights
        self._noted: dict[str, set[int]] = {}  # what was noted of a step -> all steps it holds for
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._opened.enter_context(self.run)
        return self

    def __exit__(self, *raised: Any) -> bool | None:
        if isinstance(raised[1], Exception):
            self.run.look_into(raised[1], self.step)
        return self._opened.__exit__(*raised)

    def note_step(self, what: str, more: str = "") -> None:
        """Print `what` happened in this step, with `more`, the first time; the end of the run counts its steps."""
        steps = self._noted.setdefault(what, set())
        if not steps:
            self.screen.note(f"step {self.step}: {what}{more}")
        steps.add(self.step)

    def load(self, assemble: Callable[[S, Path | None], P]) -> P:
        """The parts, assembled and started; then the run is begun, or resumed from its checkpoint."""
        self.clock.begin()
        keep_freed_memory()
        torch.manual_seed(self.settings.seed)
        compute_deterministically(self.settings.deterministic)
        self.run.catch_signals()
        self._opened.push(self._conclude)
        checkpoint = self.run.resume_from
        samples_by_vllm = self.settings.uses_policy and chosen_policy(self.settings.policy).needs_vllm
        self._begun_from = step_of(checkpoint) if checkpoint is not None and samples_by_vllm else None
        self._check_needs()
        self._opened.enter_context(self.screen)  # what an engine says while it closes is not for the terminal
        self._opened.push(self._end_saving)  # which the screen shows
        with self.screen.waiting(self.settings.waits_for), output_into(self.run.folder / "log.txt"):
            kept = self.run.request.precision if checkpoint is None else kept_precision(checkpoint)
            self.settings, numbers = resolve_numbers(self.settings, kept)
            self.run.keep_numbers(numbers.record() | {DAY: str(self.settings.model.day)})
            self.ranks = self._joined(checkpoint)
            leave_room(share_beside(self.settings), pick_device(self.settings.model.device))
            self.parts = self._opened.enter_context(contextlib.closing(assemble(self.settings, checkpoint)))
            self.run.keep_data(self.parts.data)
            self.parts.start()
            self._opened.enter_context(frozen_heap())
            if checkpoint is not None:
                self._restore(checkpoint)
        self.run.plan(self.progress.step if self.why_ended() else self.parts.total_steps(self))
        self.parts.announce(self, numbers)
        for doubt in [*self.settings.doubts(), *notes_of_model(self.settings.model, self.settings.lora.path)]:
            self.screen.note(doubt)
        self.begin_ranks()
        self._loading = {"time/load": self.clock.seconds}
        if checkpoint is None:
            self._begin()
        else:
            self._go_on(checkpoint)
        if self.settings.learns_from_own:
            self._opened.callback(self.screen.phase, "closing", "the policy")
        self.parts.loaded(self)
        return self.parts

    def steps(self) -> Iterator[int]:
        """Numbers of the steps still to do, until the last or until a signal asks to stop."""
        for step in self.run.steps(done=self.progress.step):
            self.step, self.metrics, self._loading = step, self._loading, {}
            self._called, self._changed = None, False
            self.clock.begin()
            self.cores.begin()
            self.parts.begin_step()
            yield step
            self._after("finish")

    def _after(self, expected: str, call: str | None = None) -> None:
        """Record `call` of the step. Raises RuntimeError if the step skipped `expected`."""
        if self._called not in expected.split(" or "):
            here = f"session.{call}" if call else "the end"
            missing = expected.partition(" or ")[0]
            raise RuntimeError(f"step {self.step}: the loop has come to {here} without session.{missing}")
        self._called = call

    def collected(self, batch: Any) -> None:
        """The step's rows have arrived: describe them."""
        self._called = "collected"
        self.parts.collected(self, batch)
        self.screen.phase("training")

    def update(self, minibatch: Sequence[Row], batch: Any, number: int | None = None) -> Update[Any]:
        """One optimizer step over whole groups, the run's next unless its `number` is given; `batch` has its rows.

        Raises DivergedError, with the batch and the model kept in the run folder, where a loss or gradient is not
        finite.
        """
        self._after("collected or update", "update")
        self.saving.wait()
        try:
            updated = self.ranks.update(minibatch, self.progress.updates if number is None else number)
        except FloatingPointError as error:
            folder = self.run.folder / f"diverged-step-{self.step:06d}"
            self.parts.keep_batch(folder, self.step, batch)
            bad = self.ranks.bad_gradients()
            what, last = f"step {self.step}: {error}", newest_checkpoint(self.run.folder)
            raise diverged(self.parts.model, self.parts.tokenizer, folder, what, bad, last) from error
        for row, log_probs in zip(minibatch, updated.log_probs, strict=False):  # none without an update
            row.trainer_log_probs = log_probs if row.trainer_log_probs is None else row.trainer_log_probs
        self.progress.updates += number is None
        return updated

    def trained(self, updates: Sequence[Update[Any]]) -> None:
        """The step's updates are done; the weights are pushed next, where one of them has changed any."""
        self._after("collected or update", "trained")
        self._changed = any(each.stepped for each in updates)
        if not self.settings.learns_from_own:
            return
        if getattr(self.settings.policy, "sleep", False) or share_beside(self.settings):
            self.ranks.free_unused()  # an engine of another process cannot take what torch only keeps
        self.clock.lap("time/train")
        if self._changed:
            self.screen.phase("pushing weights")

    def finish(self, batch: Any = None, rows: Sequence[Row] = ()) -> None:
        """Record the step, which trained on `batch`; save it if that is due, and evaluate if that is.

        `rows` are those of `batch`: the rollouts then have the trainer's log-probs.

        What is measured is saved before, so that a signal can end the evaluation: its figures are not
        recorded then. A step that none was better than so far is saved after its evaluation at the latest.
        """
        self._after("trained", "finish")
        self.parts.end_step(self, changed=self._changed)
        self.metrics |= self.clock.metrics()
        self._look_at_cores()
        self.progress.step = step = self.step
        if not self.has_to_spare:
            give_back_freed_memory()  # what training has freed is not beside what evaluating and saving take
        why = partial(self.parts.why_nothing, self)
        watch(self.run, self.progress, self.metrics, why, from_rewards=self.settings.learns_from_rewards)
        run, kept = self.run, self.settings.checkpoint
        measured = self._evaluation_due() and not run.stopping
        run.screen.phase("recording", f"step {step}")
        self.metrics |= run.memory.metrics(self.parts.device) | self.ranks.memory()
        run.record(step, self.metrics, batch, rows, evaluation_follows=measured)
        if saved := run.due(step, kept.every, kept.every_minutes):
            self.save()
        evaluated: Mapping[str, float] = {}
        if measured:
            with run.abandoning(f"the evaluation after step {step}"):
                evaluated = self._evaluated() if not run.stopping else {}
            run.add_evaluation(evaluated)
        is_best = bool(evaluated) and self.progress.best_step == step
        alarmed = self._look_for_symptoms(batch, evaluated)
        if alarmed or (not saved and (is_best or run.due(step))):  # a checkpoint knows which alarms were given
            self.save()
        elif is_best:
            self.saving.wait()
            mark_best(run.folder / "checkpoints", step, kept.keep_last, kept.every, self._begun_from)
        if alarmed and self.settings.diagnosis.on_alarm is OnAlarm.stop:
            raise DivergedError(
                f"stopped after step {step} by diagnosis.on_alarm=stop: {alarmed}. The step is saved: --resume auto "
                "goes on with what is changed, or with diagnosis.on_alarm=warn"
            )

    def keep_held_out(self, rows: Sequence[dict[str, Any]]) -> None:
        """Keep the table of an evaluation after the last finished step: see `rlpost.evaluation.saved.write_rows`."""
        with self.run.writing("free some space, then --resume auto"):
            write_rows(held_out_table(self.run.folder, self.progress.step), rows)

    def reported(self, played: Sequence[Conversation]) -> Sequence[Conversation]:
        """The held-out conversations whose figures are reported: with early stopping half of them, otherwise all."""
        return halves(played)[0] if self.settings.eval.stops else played

    @cached_property
    def _tokenizer_to_save(self) -> Any:
        """A copy of the tokenizer: the fast ones do not let two threads use them at will."""
        return copy.deepcopy(self.parts.tokenizer)

    def _look_for_symptoms(self, batch: Any, evaluated: Mapping[str, float]) -> str:
        """Print the symptoms that show for the first time; returns them if `diagnosis.on_alarm` is more than warn.

        A run that has said why it stands still does not say so again.
        """
        wanted = self.settings.diagnosis.on_alarm
        if wanted is OnAlarm.off:
            return ""
        found = symptoms_after(self.step, self._diagnosis, {**self.metrics, **evaluated}, batch, self.progress)
        for symptom in found:
            if not (self.progress.has_said_why and symptom.name in STANDSTILL):
                self.run.warn(symptom.line())
        return "; ".join(symptom.line() for symptom in found) if wanted in (OnAlarm.checkpoint, OnAlarm.stop) else ""

    def _look_at_cores(self) -> None:
        """Record how many cores other programs had in this step; say so if that makes it slower."""
        others, cores = self.cores.of_others(), len(self.cores.cores)
        on_cluster = getattr(self.settings, "on_cluster", False)
        if others is None or on_cluster or self.ranks.count > 1:  # processes of the run that are not below this one
            return
        self.metrics["time/others_cores"] = others
        if others > SHARED * cores:
            what = "other programs are busy on the cores, so steps take longer"
            self.note_step(what, f": they use {others:.1f} of {cores}")

    def save(self) -> None:
        """Write a checkpoint of the last finished step, while the next one samples.

        What it reads does not change before `update` waits for it.
        """
        self.saving.wait()
        run = self.run
        run.screen.phase("saving checkpoint")
        state = {**copy.deepcopy(self.parts.state(self)), PRECISION: run.numbers}
        write = checkpoint_writer(
            run.folder,
            self.settings,
            self.parts,
            self.ranks,
            self.progress,
            self._tokenizer_to_save,
            state,
            in_use=self._begun_from,
        )
        if self.ranks.count == 1:  # several have to gather what is written together
            self.saving.begin(lambda: log.info("saved %s", write()))
        else:
            log.info("saved %s", write())
        run.saved()

    @property
    def is_done(self) -> bool:
        """Whether no step is left to do."""
        return self.progress.step >= self.run.total_steps

    def why_ended(self) -> str:
        """Why the latest evaluation has ended training before its last step; empty where it has not."""
        has_ended = (self.progress.eval_after or {}).get(ENDS_TRAINING)
        return why_ended(self.settings.eval, self.progress) if has_ended else ""

    # Beginning, going on, ending

    def _check_needs(self) -> None:
        """Print the estimate of memory and disk. Raises ResourceError if the training cannot fit at all."""
        shape, gpu = size_and_room(self.settings.model)
        kept = None if self.run.resume_from is None else {}
        self.settings, chosen = choose(self.settings, shape, gpu, kept)
        if chosen:
            reasons = {each.key: each.why for each in chosen}
            self.run.keep_settings(in_yaml(self.run.request.config_yaml, chosen), reasons)
        needs = needs_of(self.settings, shape, self.run.folder, gpu)
        self.has_to_spare = needs is not None and needs.has_to_spare
        if needs is not None:
            needs.check(self.settings.model.path)
            for line in needs.lines():
                self.screen.line(line)

    def _joined(self, checkpoint: Path | None) -> Ranks:
        """The ranks that train, which load their model meanwhile; most trainings have this one alone."""
        if (self.settings.cluster.trainer_ranks or 1) == 1 and Place.from_environment(os.environ) is None:
            return Ranks()

        ranks = self._opened.enter_context(join_ranks(self.settings, checkpoint, self.run.folder))
        self.settings = beside_ranks(self.settings, ranks.count)
        return ranks

    def begin_ranks(self) -> None:
        """Send the objective to all ranks."""
        parts, tokens = self.parts, self.settings.microbatch_tokens
        microbatches = Microbatches.shown_on(
            self.screen, tokens, parts.device, forward_precision(self.settings), in_step=is_sharded(parts.model)
        )
        own = Rank(parts.model, parts.optimizer, parts.reference, parts.objective, self.settings.optim, microbatches)
        self.ranks.begin(own, tokens)

    def _begin(self) -> None:
        self.run.forget_after(-1)
        if self.settings.eval.enabled:
            self.clock.begin()
            before = self.progress.eval_before = self.parts.measure(self, "before training")
            check_measured(self.settings.eval, before)
            self.run.record(0, {**before, **self._loading, "time/eval": self.clock.seconds})
            self._loading = {}
            self._diagnosis.after({"step": 0, **before})
            self.screen.line(evaluation_line(before, "before training"))

    def _restore(self, checkpoint: Path) -> None:
        """The parts, the RNG and the progress as they were at `checkpoint`; raises as `restore_trainer` does."""
        state = restore_trainer(checkpoint, self.settings, self.parts)
        self.progress = Progress(**state["progress"])
        self.parts.restore(self, state)
        for row in evaluations_until(checkpoint, self.progress.step):  # it was saved before its own
            self.progress.is_new_best(row["step"], row)
            self.progress.eval_after = {k: v for k, v in row.items() if k.startswith("eval/") and v is not None}

    def _go_on(self, checkpoint: Path) -> None:
        run, progress = self.run, self.progress
        run.forget_after(progress.step)
        self._diagnosis = Diagnosis(read_metrics(run.folder / "metrics.jsonl")[0])
        restore_best(run, progress)
        self.screen.note(f"resuming after step {progress.step} from {checkpoint}")
        if progress.step and self._evaluation_due() and run.owes_evaluation(progress.step):  # a signal has ended it
            run.add_evaluation(self._evaluated())
            if progress.best_step == progress.step:
                kept = self.settings.checkpoint
                mark_best(run.folder / "checkpoints", progress.step, kept.keep_last, kept.every, self._begun_from)
        if self.is_done:
            done = "1 step is" if progress.step == 1 else f"{progress.step} steps are"
            left = f"give more {self.settings.ends_by} to go on"
            if why := self.why_ended():
                left = f"it ended early: {why}; {self._more()}"
            self.screen.note(f"nothing is left to do: {done} done; {left}")

    def _evaluation_due(self) -> bool:
        """Whether held-out data is measured after the last step done."""
        every, step = self.settings.eval.every, self.progress.step
        return self.settings.eval.enabled and (step == self.run.total_steps or (every > 0 and step % every == 0))

    def _evaluated(self) -> dict[str, float]:
        """The metrics of the evaluation after the last finished step; if it ends training, that step is the last."""
        progress = self.progress
        self.clock.begin()
        progress.eval_after = self.parts.measure(self, f"after step {progress.step}")
        seconds = {"time/eval": self.clock.seconds}
        progress.is_new_best(progress.step, progress.eval_after)
        if why_ended(self.settings.eval, progress) and progress.step < self.run.total_steps:
            progress.eval_after[ENDS_TRAINING] = 1.0
            self.run.plan(progress.step)
        return progress.eval_after | self.run.memory.metrics(self.parts.device) | seconds

    def _more(self) -> str:
        """How a run goes on that an evaluation has ended."""
        without = " ".join(f"{key}=null" for key in self.settings.eval.stops)
        return f"to go on to the last step all the same: --resume {self.run.folder} {without}"

    def _end_saving(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until the last checkpoint is on disk, before any line reports it."""
        try:
            self.saving.wait()
        except Exception as failed:
            if error is None:
                raise
            log.error("%s", failed)  # what ends the run is another error

    def _conclude(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Stopped):
            return
        for what, steps in self._noted.items():
            if len(steps) > 1:
                self.screen.note(f"in {len(steps)} steps: {what}")
        if self.run.stopping:
            narration.say_stopped(self.run)
        else:
            if why := self.why_ended():
                said = f"training ended early, after step {self.progress.step}: {why}"
                log.info("%s", said)
                self.screen.line(said, "bold")
            narration.say_before_and_after(self.run, self.progress)
            self.parts.conclude(self)
        say_at_end(self.run, self.progress)


def build_tracker(settings: TrackingSettings, request: RunRequest) -> Tracking | None:
    """The tracker that follows the run's metrics.jsonl, not started yet; None without one.

    Raises MissingExtraError where the tracker is not installed.
    """
    if isinstance(settings, NoTrackingSettings):
        return None
    from rlpost.runs.rollouts import spread_of
    from rlpost.tracking.trackers import Tracking, chosen_tracker

    choice = chosen_tracker(settings)
    config = yaml.safe_load(request.config_yaml)
    return None if choice is None else Tracking(choice, request.folder, config, spread_of)


class Clock:
    """Measures the seconds of loading, of an evaluation, and of a step and its named parts."""

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


SHARED = 0.25  # of the cores, from which other programs' use of them is worth a note
MOMENT = 1.0  # seconds to wait for a save before the screen says so


class Saving:
    """Runs at most one save at a time, in a thread. Nothing that it reads may change before `wait` has returned.

    Nothing is copied: weights and moments do not change before the next update. `say` is called if `wait` takes long.
    """

    def __init__(self, say: Callable[[], None] = lambda: None) -> None:
        self._say = say
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, write: Callable[[], None]) -> None:
        """Call `write` in a thread, after the previous save has ended."""
        self.wait()

        def run() -> None:
            try:
                write()
            except BaseException as error:  # noqa: BLE001  raised again by `wait`
                self._error = error

        self._thread = threading.Thread(target=run, name="rlpost-save")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save is on disk. Raises what `write` raised."""
        if self._thread is not None:
            self._thread.join(MOMENT)
            if self._thread.is_alive():
                self._say()
                self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def checkpoint_writer(
    run_folder: Path,
    settings: Settings,
    parts: Parts,
    ranks: Ranks,
    progress: Progress,
    tokenizer: Any,
    state: Mapping[str, Any],
    *,
    in_use: int | None,
) -> Callable[[], Path]:
    """A function that saves the last finished step: weights, `tokenizer`, optimizer, RNG, and `state` as JSON.

    An adapter is saved on its own as well as merged: a resumed run reads the adapter, all else the merged model.
    """
    model, optimizer = parts.model, parts.optimizer
    latest = run_folder / "checkpoints" / LATEST / REFERENCE
    has_moved = parts.reference is not None and latest.is_dir()  # before a resumed run that moves it no longer

    def write_reference(folder: Path) -> None:
        assert parts.reference is not None
        with parts.reference() as reference:
            save_model(cast(PreTrainedModel, reference), tokenizer, folder)

    def write_model(folder: Path) -> None:
        save_model(model, tokenizer, folder)
        write_readme(folder, run_folder, progress.step, settings.model.path)

    return partial(
        save_checkpoint,
        run_folder / "checkpoints",
        progress.step,
        write_model=write_model,
        write_adapter=partial(save_adapter, model) if is_adapted(model) else None,
        write_moments=ranks.save_moments(),
        write_reference=write_reference if settings.moves_reference or has_moved else None,
        tensors=optimizer_tensors(model, optimizer),
        state={
            **state,
            "progress": asdict(progress),
            "must_stay": {key: getattr(settings, key) for key in settings.must_stay},
            "optimizer": type(optimizer).__name__,
            "lr": learning_rate_of(optimizer),
        },
        keep_last=settings.checkpoint.keep_last,
        every=settings.checkpoint.every,
        best=progress.best_step,
        in_use=in_use,
    )


def restore_trainer(checkpoint: Path, settings: Settings, parts: Parts) -> dict[str, Any]:
    """Restore the optimizer and the RNG from `checkpoint`, whose weights the model already has; returns its state.

    Raises ConfigError for settings that would read the saved data position as another one.
    """
    _, state = load_checkpoint(checkpoint)
    optimizer, own = parts.optimizer, type(parts.optimizer).__name__
    for key, saved in state["must_stay"].items():
        if (now := getattr(settings, key)) != saved:
            raise ConfigError(f"--resume: the run began with {key}={saved}, not {now}; keep it")
    if state["optimizer"] != own:
        raise ConfigError(f"--resume: the run began with {state['optimizer']}, not {own}; keep its optim")
    restore_moments(parts.model, optimizer, checkpoint)
    if "lr" in state:  # a step without an update reports the rate of the last one
        set_learning_rate(optimizer, state["lr"])
    return state


TEXTS_EVERY = 5  # steps


def symptoms_after(
    step: int, diagnosis: Diagnosis, metrics: Mapping[str, float], batch: Any, progress: Progress
) -> list[Symptom]:
    """Symptoms that show for the first time after `step`, which trained on `batch`; `progress` records their names."""
    found = diagnosis.after({"step": step, **metrics})
    if isinstance(batch, TensorDictBase) and step >= AT_LEAST and step % TEXTS_EVERY == 0:
        texts = repeated_text(step, list(batch["text", "response"]), list(batch["query"]))
        found += [texts] if texts is not None else []
    new = [symptom for symptom in found if symptom.name not in progress.symptoms]
    progress.symptoms += [symptom.name for symptom in new]
    return new
