"""Everything of a training but its algorithm: opened, resumed or begun, timed, recorded, saved, measured, concluded.

    with SamplingSession(settings, request) as session:
        parts = session.load(assemble_grpo)
        for _ in session.steps():
            ...  # the algorithm, which adds to session.metrics
            session.finish(batch)
    return session.run.exit_code

Every training has a `Session`. One that trains on completions of its own policy has a `SamplingSession`.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shlex
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from transformers import PreTrainedModel

from rlpost.config.paths import newest_checkpoint
from rlpost.distributed import Place
from rlpost.errors import ConfigError, DivergedError, RewardError
from rlpost.estimate.defaults import choose, in_yaml
from rlpost.estimate.needs import needs_of, share_beside
from rlpost.evaluation.play import held_out_metrics, play
from rlpost.model.device import compute_deterministically, leave_room, pick_device
from rlpost.model.load import save_model
from rlpost.model.lora import describe_adapter, save_adapter
from rlpost.model.memory import frozen_heap, give_back_freed_memory, keep_freed_memory
from rlpost.model.optim import learning_rate_of, optimizer_tensors, set_learning_rate
from rlpost.model.precision import Numbers
from rlpost.model.trainable import Reference, forward_precision
from rlpost.model.weights import is_adapted, is_sharded
from rlpost.objectives.policy_loss import PolicyObjective
from rlpost.output import output_into
from rlpost.record import read_metrics
from rlpost.runs.checkpoint import NUMBERS, load_checkpoint, mark_best, restore_moments, save_checkpoint
from rlpost.runs.diagnosis import AT_LEAST, Diagnosis, Symptom, repeated_text
from rlpost.runs.rollouts import write_rollouts
from rlpost.runs.writer import Run, Stopped
from rlpost.screen import Screen, evaluation_line
from rlpost.settings import GateAlarm, ModelPolicySettings, OnAlarm, SampledSettings, SamplerCorrection, SFTSettings
from rlpost.settings.commands import RunRequest, samples_per_prompt
from rlpost.text import counted
from rlpost.train import narration
from rlpost.train.assemble import SamplingParts, build_tracker, resolve_numbers
from rlpost.train.gate import Gate
from rlpost.train.progress import (
    ENDS_TRAINING,
    Progress,
    batch_metrics,
    check_measured,
    evaluations_until,
    restore_best,
    say_at_end,
    watch,
    why_ended,
)
from rlpost.train.ranks import Rank, Ranks, beside_ranks, join_ranks
from rlpost.train.update import Microbatches, Objective, diverged

log = logging.getLogger("rlpost")


class Parts(Protocol):
    """What every training works with."""

    model: PreTrainedModel
    tokenizer: Any
    optimizer: torch.optim.Optimizer
    reference: Reference | None

    @property
    def objective(self) -> Objective[Any]:
        """What is minimised."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the model is trained."""
        ...

    def start(self) -> None:
        """Start what was only built."""

    def close(self) -> None:
        """Close what was started."""


Settings = SampledSettings | SFTSettings


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
        self.has_to_spare = False  # whether memory is kept that the next phase may need
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
        compute_deterministically(self.settings.deterministic)
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
            leave_room(share_beside(self.settings), pick_device(self.settings.model.device))
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
        if not self.has_to_spare:
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
        shape, gpu = narration.size_and_room(self.settings.model)
        kept = None if self.run.resume_from is None else {}
        self.settings, chosen = choose(self.settings, shape, gpu, kept)
        if chosen:
            self.run.keep_settings(in_yaml(self.run.request.config_yaml, chosen))
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

    def _begin_ranks(self) -> None:
        parts, tokens = self.parts, self.tokens_per_microbatch
        microbatches = Microbatches.shown_on(
            self.screen, tokens, parts.device, forward_precision(self.settings), in_step=is_sharded(parts.model)
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
            narration.say_stopped(self.run)
        else:
            if why := self.why_ended():
                said = f"training ended early, after step {self.progress.step}: {why}"
                log.info("%s", said)
                self.screen.line(said, "bold")
            self.conclude()
        say_at_end(self.run, self.progress)


SampledSettingsT = TypeVar("SampledSettingsT", bound=SampledSettings)
SampledPartsT = TypeVar("SampledPartsT", bound=SamplingParts[Any])


class SamplingSession(Session[SampledSettingsT, SampledPartsT]):
    """A training on the completions of its own policy."""

    waits_for = "loading the model, starting the policy"
    _restarts = 0  # of the policy's engine, as far as they were reported

    def load(self, assemble: Callable[[SampledSettingsT, Path | None], SampledPartsT]) -> SampledPartsT:
        """See `Session.load`."""
        parts = super().load(assemble)
        self._opened.callback(self.screen.phase, "closing", "the policy")
        if not self.settings.samples_elsewhere:
            parts.policy.reload = self._reload
        self.gate = self._gate()
        return parts

    def _reload(self) -> None:
        """Push the current weights to an engine that was restarted, or that dropped its own to sleep."""
        policy = self.parts.policy
        self.parts.collector.weight_updater.send_weights(policy, self.parts.model)
        if policy.restarts > self._restarts:
            self._restarts = policy.restarts
            self.run.warn("the engine had failed and was started again with the present weights; log.txt says how")

    def steps(self) -> Iterator[int]:
        """See `Session.steps`."""
        for step in super().steps():
            self.parts.collector.begin_step()
            yield step

    def pushed(self) -> None:
        """Weights were pushed after the step's updates: look whether the sampler has them."""
        if self.gate is not None:
            self.screen.phase("checking", "the sampler")
            self.gate.pushed(self.step)

    def _gate(self) -> Gate | None:
        """What watches the sampler; None where it is off, or speaks from a script."""
        settings, parts = self.settings, self.parts
        if not settings.gate.enabled or not isinstance(settings.policy, ModelPolicySettings) or self._is_done:
            return None
        self.screen.phase("checking", "the sampler")
        gate = Gate(settings.gate, parts.policy, self.ranks, parts.model, self._gate_alarm)
        gate.begin()
        return gate

    def _gate_alarm(self, action: GateAlarm, text: str) -> None:
        """Go on where sampler and trainer disagree, with a correction for it where that is wanted."""
        objective = self.parts.objective
        corrects = action is GateAlarm.correct and getattr(objective, "sampler_correction", None) == "none"
        if corrects:
            assert isinstance(objective, PolicyObjective)
            objective.sampler_correction = SamplerCorrection.tis_token.name
            self.ranks.begin(self.ranks.own, self.tokens_per_microbatch)  # the others are told it too
            text += "; going on with loss.sampler_correction=tis_token"
        self.screen.note(text)

    def collected(self, batch: TensorDict) -> None:
        """A step's completions are there: describe them, and let the policy rest while the model learns.

        Raises RewardError where more of their rewards failed than `max_failed_share` allows.
        """
        self.metrics |= batch_metrics(batch, self.settings.group_size, self.parts.policy.version)
        failed, count = self.metrics["reward/failed"], batch.batch_size[0]
        if failed > self.settings.max_failed_share * count:
            raise RewardError(
                f"step {self.step}: {failed:.0f} of {count} rewards failed, more than the share "
                f"max_failed_share={self.settings.max_failed_share:g} allows; the run's log.txt says how"
            )
        if failed:
            more = f" ({failed:.0f} of {count}; {self.run.folder}/log.txt has the error)"
            self.note_step("rewards failed, and their completions were left out", more)
        self.metrics |= self.parts.buffer.take_counts() | self.parts.collector.counts()
        self.clock.lap()
        if not self.has_to_spare or self.parts.device.type != "cpu":
            self.parts.policy.rest()
        self.screen.phase("training")

    def trained(self) -> None:
        """The step's updates are done."""
        if getattr(self.settings.policy, "sleep", False) or share_beside(self.settings):
            self.ranks.free_unused()  # an engine of another process cannot take what torch only keeps
        self.clock.lap("time/train")

    def finish(self, batch: Any = None) -> None:
        """See `Session.finish`."""
        self.clock.lap("time/sync")
        self.metrics |= self.parts.collector.take_seconds()
        super().finish(batch)

    def announce(self, numbers: Numbers) -> None:
        """See `Session.announce`."""
        settings, parts, env = self.settings, self.parts, self.settings.env
        completions = settings.prompts_per_step * settings.group_size
        data = narration.name_of_data(env)
        lines = [
            narration.model_line(settings.model, parts.model_folder, parts.model),
            numbers.line,
            *settings.cluster.told_of_ranks(self.ranks.count),
            *narration.reading_lines(parts.model, settings.group_size),
            f"data    {data}" + (f", {self._prompts()}" if hasattr(env, "path") else ""),
            f"policy  {parts.policy.name}, {parts.policy.sampling}",
            f"work    {counted(settings.steps, 'step')} of {counted(settings.prompts_per_step, 'prompt')} x "
            f"{settings.group_size} completions = {completions}, at most {env.max_completion_tokens} tokens each",
            *settings.tools.told(env),
            *settings.told_of_lag(),
            *([f"lora    {describe_adapter(parts.model)}"] if settings.lora.enabled else []),
            f"lr      {settings.optim.rate:g}, seed {settings.seed}",
        ]
        notes = [*parts.notes, narration.thinking_note(env, parts.tokenizer)]
        if settings.eval.enabled:
            played, available = prompts_played(settings, parts), parts.eval_env.num_tasks
            divided, few = narration.held_out_told(settings.eval, env, played, available)
            lines, notes = [*lines, *divided], [*notes, few]
        for part in parts.eval_env.parts if settings.eval.enabled else ():
            if shared := part.prompts_shared_with(parts.env):
                source = f" of {part.source_name}" if part.source_name else ""
                notes.append(
                    f"{shared} of {part.num_tasks} held-out prompts{source} are trained on too, so figures called "
                    "held-out are not: take them out of one of the two"
                )
        narration.open_screen(self.run, numbers, lines, notes, f"{settings.model.path} · {data} · {parts.policy.name}")
        show_sampling(self.parts, self.screen.phase)

    def measure(self, when: str) -> dict[str, float]:
        """See `Session.measure`."""
        return evaluate_held_out(self.settings, self.parts, self.run, when)

    def state(self) -> dict[str, Any]:
        """Data cursor, what is under way, buffer and version, all of one moment."""
        parts = self.parts
        with parts.collector.pause():
            return {
                "buffer": parts.buffer.state_dict(),
                "collector": parts.collector.state_dict(),
                "policy_version": parts.policy.version,
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Session.restore`. Raises ConfigError where the run was collected in the other way."""
        began = "issued" in state["collector"]
        if began != self.settings.samples_elsewhere:
            asked = "collector=async or cluster=ray" if began else "collector=sync and cluster=none"
            raise ConfigError(f"--resume: the run began with {asked}; keep that")
        self.parts.buffer.load_state_dict(state["buffer"])
        self.parts.collector.load_state_dict(state["collector"])
        self.parts.collector.weight_updater.restore_version(state["policy_version"])

    def keep_batch(self, folder: Path, batch: Any) -> None:
        """See `Session.keep_batch`."""
        write_rollouts(folder / "rollouts.parquet", self.step, batch)

    def why_nothing(self) -> str:
        """See `Session.why_nothing`: of a step's completions."""
        settings, metrics, reward = self.settings, self.metrics, self.progress.same_reward
        look = f"read some with rlpost rollouts show {shlex.quote(str(self.run.folder))}"
        if metrics["completion/truncated"] == 1:
            limit = settings.env.max_completion_tokens
            return f"every completion is cut at env.max_completion_tokens={limit}; raise it"
        if reward is not None and metrics.get("accuracy/lenient") == 1:
            return "every completion is right; the task is too easy for this model"
        if reward == 0:
            return (
                f"every reward is 0: the task is too hard, or the reward does not find the answer in the reply; {look}"
            )
        if reward is not None:
            return f"every reward is {reward:g}, which tells no completion from another; {look}"
        return settings.why_nothing_learned(metrics, look)

    def remaining(self) -> str:
        """See `Session.remaining`."""
        return "give more steps to go on"

    def conclude(self) -> None:
        """See `Session.conclude`."""
        narration.say_before_and_after(self.run, self.progress)
        narration.say_best(self.run, self.progress)
        narration.say_evaluate(self.run, self.settings)

    def _prompts(self) -> str:
        held_out = f", {self.parts.eval_env.num_tasks} held out" if self.settings.eval.enabled else ""
        return f"{counted(self.parts.env.num_tasks, 'prompt')}{held_out}"


class Clock:
    """Measures the seconds of a step and of its named parts."""

    def begin(self) -> None:
        """Begin a step."""
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
        return self._laps | {"time/step": time.perf_counter() - self._began}


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
) -> Callable[[], Path]:
    """A function that saves the last finished step: weights, `tokenizer`, optimizer, RNG, and `state` as JSON.

    An adapter is saved on its own as well as merged: a resumed run reads the adapter, all else the merged model.
    """
    model, optimizer = parts.model, parts.optimizer
    return partial(
        save_checkpoint,
        run_folder / "checkpoints",
        progress.step,
        write_model=partial(save_model, model, tokenizer),
        write_adapter=partial(save_adapter, model) if is_adapted(model) else None,
        write_moments=ranks.save_moments(),
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


def show_sampling(parts: SamplingParts[Any], phase: Callable[..., None]) -> None:
    """Let the screen's `phase` show what the collector does, and how far it is."""

    def sampled(ended: int, total: int, tokens: int) -> None:
        phase("sampling", f"{total} completions", ended, total, tokens)

    parts.collector.show(phase, sampled)


def prompts_played(settings: SampledSettings, parts: SamplingParts[Any]) -> int:
    """How many held-out prompts an evaluation plays."""
    return min(settings.eval.limit or settings.env.eval_limit, parts.eval_env.num_tasks)


def evaluate_held_out(settings: SampledSettings, parts: SamplingParts[Any], run: Run, when: str) -> dict[str, float]:
    """The figures of held-out prompts; `when` tells a plain terminal which evaluation is under way.

    One completion a prompt is greedy; several, as `eval.k` asks for them, are drawn like those trained on.
    """
    num_prompts = prompts_played(settings, parts)
    samples = samples_per_prompt(settings.eval.k, settings.eval.samples)
    if not run.screen.is_live:
        run.screen.line(f"evaluating on {num_prompts} held-out prompts, {when} ...")
    before = parts.policy.tokens_sampled

    def progress(done: int, total: int) -> None:
        run.screen.phase("evaluating", "", done, total, parts.policy.tokens_sampled - before)

    sampling = replace(parts.policy.sampling, temperature=0.0) if samples == 1 else parts.policy.sampling
    played = play(
        parts.eval_env, parts.policy, num_prompts=num_prompts, samples=samples, sampling=sampling, progress=progress
    )
    some_decide = bool(settings.eval.stops)
    return held_out_metrics(played, k=settings.eval.k, temperature=sampling.temperature, some_decide=some_decide)
