"""Everything of a training but its algorithm: opened, resumed or begun, timed, recorded, saved, measured, concluded.

with SamplingSession(settings, request) as session:
    parts = session.load(assemble_grpo)
    for _ in session.steps():
        ...  # the algorithm, which adds to session.metrics
        session.finish(batch)
return session.run.exit_code
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch

from rlpost.assemble import build_tracker, resolve_numbers
from rlpost.config.paths import newest_checkpoint
from rlpost.distributed import Place
from rlpost.errors import DivergedError
from rlpost.model.memory import frozen_heap, give_back_freed_memory, keep_freed_memory
from rlpost.model.precision import Numbers
from rlpost.model.shards import is_sharded
from rlpost.output import output_into
from rlpost.record import read_metrics
from rlpost.runs.checkpoint import NUMBERS, mark_best
from rlpost.runs.diagnosis import Diagnosis
from rlpost.runs.stopping import Stopped
from rlpost.runs.writer import Run
from rlpost.screen import Screen, evaluation_line
from rlpost.settings import OnAlarm
from rlpost.settings.run import RunRequest
from rlpost.train.clock import Clock
from rlpost.train.diagnosing import symptoms_after
from rlpost.train.kept import Parts, Settings, checkpoint_writer, restore_trainer
from rlpost.train.narration import say_stopped
from rlpost.train.needs import needs_here
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
from rlpost.train.rank import Rank
from rlpost.train.ranks import Ranks
from rlpost.train.saving import Saving
from rlpost.train.update import Microbatches, diverged

log = logging.getLogger("rlpost")


S = TypeVar("S", bound=Settings)
P = TypeVar("P", bound=Parts)


class Session(ABC, Generic[S, P]):
    """One training in its run folder, open from `with` to its last line on the screen.

    `load` assembles the parts and begins or resumes the run, `steps` goes through the steps still to do, `finish` ends
    each. `metrics` are those of the step under way.
    """

    waits_for: str  # while it loads, as the screen says it

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
        self.step = 0  # the one under way
        self.metrics: dict[str, float] = {}
        self.clock = Clock()
        self.saving = Saving(lambda: self.screen.phase("saving checkpoint"))
        self._diagnosis = Diagnosis()
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
        keep_freed_memory()
        torch.manual_seed(self.settings.seed)
        torch.use_deterministic_algorithms(self.settings.deterministic)
        self.run.catch_signals()
        self._opened.push(self._conclude)
        checkpoint = self.run.resume_from
        self._check_needs()
        self._opened.enter_context(self.screen)  # what an engine says while it closes is not for the terminal
        self._opened.push(self._end_saving)  # which the screen shows
        with self.screen.waiting(self.waits_for), output_into(self.run.folder / "log.txt"):
            self.settings, numbers = resolve_numbers(self.settings, checkpoint)
            self.run.keep_numbers(numbers.record())
            self.ranks = self._joined(checkpoint)
            self.parts = self._opened.enter_context(contextlib.closing(assemble(self.settings, checkpoint)))
            self.parts.start()
            self._opened.enter_context(frozen_heap())
            if checkpoint is not None:
                self._restore(checkpoint)
        self.run.plan(self.progress.step if self.why_ended() else self.total_steps())
        self.announce(numbers)
        if (question := self.settings.unusual_rate()) is not None:
            self.screen.note(question)
        self._begin_ranks()
        if checkpoint is None:
            self._begin()
        else:
            self._go_on(checkpoint)
        return self.parts

    def steps(self) -> Iterator[int]:
        """Numbers of the steps still to do, until the last or until a signal asks to stop."""
        for step in self.run.steps(done=self.progress.step):
            self.step, self.metrics = step, {}
            self.clock.begin()
            yield step

    @contextlib.contextmanager
    def diverging(self, batch: Any) -> Iterator[None]:
        """A block that updates the weights on `batch`; a loss or gradient that is not finite ends the run.

        Raises DivergedError, with the batch and the model kept in the run folder.
        """
        self.saving.wait()
        try:
            yield
        except FloatingPointError as error:
            folder = self.run.folder / f"diverged-step-{self.step:06d}"
            self.keep_batch(folder, batch)
            bad = self.ranks.bad_gradients()
            what, last = f"step {self.step}: {error}", newest_checkpoint(self.run.folder)
            raise diverged(self.parts.model, self.parts.tokenizer, folder, what, bad, last) from error

    def finish(self, batch: Any = None) -> None:
        """Record the step, which trained on `batch`; save it if that is due, and evaluate if that is.

        What is measured is saved before, so that a signal can end the evaluation: its figures are not
        recorded then. A step that none was better than so far is saved after its evaluation at the latest.
        """
        self.metrics |= self.clock.metrics()
        self.progress.step = step = self.step
        give_back_freed_memory()  # what training has freed is not beside what evaluating and saving take
        watch(self.run, self.progress, self.metrics, self.why_nothing)
        run, kept = self.run, self.settings.checkpoint
        measured = self._evaluation_due() and not run.stopping
        run.screen.phase("recording", f"step {step}")
        self.metrics |= run.memory.metrics(self.parts.device) | self.ranks.memory()
        run.record(step, self.metrics, batch, evaluation_follows=measured)
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
            mark_best(run.folder / "checkpoints", step, kept.keep_last, kept.every)
        if alarmed and self.settings.diagnosis.on_alarm is OnAlarm.stop:
            raise DivergedError(
                f"stopped after step {step} by diagnosis.on_alarm=stop: {alarmed}. The step is saved: --resume auto "
                "goes on with what is changed, or with diagnosis.on_alarm=warn"
            )

    @cached_property
    def _tokenizer_to_save(self) -> Any:
        """A copy of the tokenizer: the fast ones do not let two threads use them at will."""
        return copy.deepcopy(self.parts.tokenizer)

    def _look_for_symptoms(self, batch: Any, evaluated: Mapping[str, float]) -> str:
        """Print the symptoms that show for the first time; returns them if `diagnosis.on_alarm` is more than warn."""
        wanted = self.settings.diagnosis.on_alarm
        if wanted is OnAlarm.off:
            return ""
        found = symptoms_after(self.step, self._diagnosis, {**self.metrics, **evaluated}, batch, self.progress)
        lines = [symptom.line() for symptom in found]
        for line in lines:
            self.run.warn(line)
        return "; ".join(lines) if wanted in (OnAlarm.checkpoint, OnAlarm.stop) else ""

    def save(self) -> None:
        """Write a checkpoint of the last finished step, while the next one samples.

        What it reads does not change before `diverging` waits for it.
        """
        self.saving.wait()
        run = self.run
        run.screen.phase("saving checkpoint")
        state = {**copy.deepcopy(self.state()), NUMBERS: run.numbers}
        write = checkpoint_writer(
            run.folder, self.settings, self.parts, self.ranks, self.progress, self._tokenizer_to_save, state
        )
        if self.ranks.count == 1:  # several have to gather what is written together
            self.saving.begin(lambda: log.info("saved %s", write()))
        else:
            log.info("saved %s", write())
        run.saved()

    @property
    def _is_done(self) -> bool:
        """Whether no step is left to do."""
        return self.progress.step >= self.run.total_steps

    # What differs between the loops

    @property
    def tokens_per_microbatch(self) -> int | None:
        """What one forward and backward may hold; None: chosen by the device."""
        return self.settings.tokens_per_microbatch

    def total_steps(self) -> int:
        """Steps of the whole run, those done included."""
        return self.run.total_steps

    def why_ended(self) -> str:
        """Why the latest evaluation has ended training before its last step; empty where it has not."""
        has_ended = (self.progress.eval_after or {}).get(ENDS_TRAINING)
        return why_ended(self.settings.eval, self.progress) if has_ended else ""

    @abstractmethod
    def announce(self, numbers: Numbers) -> None:
        """Say what is about to be done, before it is."""

    @abstractmethod
    def measure(self, when: str) -> dict[str, float]:
        """Evaluate on held-out data; `when` tells a plain terminal which evaluation is under way."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What resuming needs beside weights, optimizer and progress, as JSON-compatible values."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""

    @abstractmethod
    def keep_batch(self, folder: Path, batch: Any) -> None:
        """Write what a step was about to train on into `folder`."""

    @abstractmethod
    def why_nothing(self) -> str:
        """The likely reason where nothing is learned, and what to do."""

    @abstractmethod
    def remaining(self) -> str:
        """How a run goes on that has nothing left to do."""

    @abstractmethod
    def conclude(self) -> None:
        """The result of a run that was not stopped, in a few lines, and what to do next."""

    # Beginning, going on, ending

    def _check_needs(self) -> None:
        """Say what the training takes, by estimate. Raises ResourceError where the machine cannot hold it at all."""
        needs = needs_here(self.settings, self.run.folder)
        if needs is not None:
            needs.check(self.settings.model.path)
            for line in needs.lines():
                self.screen.line(line)

    def _joined(self, checkpoint: Path | None) -> Ranks:
        """The ranks that train, which load their model meanwhile; most trainings have this one alone."""
        if (self.settings.cluster.trainer_ranks or 1) == 1 and Place.from_environment(os.environ) is None:
            return Ranks()
        from rlpost.train.joining import beside_ranks, join_ranks

        ranks = self._opened.enter_context(join_ranks(self.settings, checkpoint, self.run.folder))
        self.settings = beside_ranks(self.settings, ranks.count)
        return ranks

    def _begin_ranks(self) -> None:
        parts, tokens = self.parts, self.tokens_per_microbatch
        microbatches = Microbatches.shown_on(
            self.screen, tokens, parts.device, self.settings.model.autocast, in_step=is_sharded(parts.model)
        )
        own = Rank(parts.model, parts.optimizer, parts.reference, parts.objective, self.settings.optim, microbatches)
        self.ranks.begin(own, tokens)

    def _begin(self) -> None:
        self.run.forget_after(-1)
        if self.settings.eval.enabled:
            before = self.progress.eval_before = self.measure("before training")
            check_measured(self.settings.eval, before)
            self.run.record(0, before)
            self._diagnosis.after({"step": 0, **before})
            self.screen.line(evaluation_line(before, "before training"))

    def _restore(self, checkpoint: Path) -> None:
        """The parts, the RNG and the progress as they were at `checkpoint`; raises as `restore_trainer` does."""
        state = restore_trainer(checkpoint, self.settings, self.parts)
        self.progress = Progress(**state["progress"])
        self.restore(state)
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
                mark_best(run.folder / "checkpoints", progress.step, kept.keep_last, kept.every)
        if progress.step >= run.total_steps:
            done = "1 step is" if progress.step == 1 else f"{progress.step} steps are"
            left = f"it ended early: {why}; {self._more()}" if (why := self.why_ended()) else self.remaining()
            self.screen.note(f"nothing is left to do: {done} done; {left}")

    def _evaluation_due(self) -> bool:
        """Whether held-out data is measured after the last step done."""
        every, step = self.settings.eval.every, self.progress.step
        return self.settings.eval.enabled and (step == self.run.total_steps or (every > 0 and step % every == 0))

    def _evaluated(self) -> dict[str, float]:
        """The evaluation after the last step done, taken in; one that ends training makes that step the last."""
        progress = self.progress
        progress.eval_after = self.measure(f"after step {progress.step}")
        progress.is_new_best(progress.step, progress.eval_after)
        if why_ended(self.settings.eval, progress) and progress.step < self.run.total_steps:
            progress.eval_after[ENDS_TRAINING] = 1.0
            self.run.plan(progress.step)
        return progress.eval_after | self.run.memory.metrics(self.parts.device)

    def _more(self) -> str:
        """How a run goes on that an evaluation has ended."""
        without = " ".join(f"{key}=null" for key in self.settings.eval.stops)
        return f"to go on to the last step all the same: --resume {self.run.folder} {without}"

    def _end_saving(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The last checkpoint is on the disk before anything is said of it."""
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
            say_stopped(self.run)
        else:
            if why := self.why_ended():
                said = f"training ended early, after step {self.progress.step}: {why}"
                log.info("%s", said)
                self.screen.line(said, "bold")
            self.conclude()
        say_at_end(self.run, self.progress)
