"""One training in its run folder: its parts are loaded, its steps gone through, and each step is watched."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

import torch
import yaml

from rlpost.data.template_choice import thinking_cut_short
from rlpost.errors import STOPPED_BY, ConfigError, DivergedError
from rlpost.estimate.machine import ranks_started
from rlpost.estimate.needs import Machine, Needs, needs_of, share_beside
from rlpost.estimate.shape import parameters_text
from rlpost.model.device import compute_deterministically, leave_room, pick_device
from rlpost.model.families import explain
from rlpost.model.load import describe, save_model
from rlpost.model.locate import shape_of
from rlpost.model.logprobs import verdict_of
from rlpost.model.memory import MemoryWatch, frozen_heap, give_back_freed_memory, keep_freed_memory
from rlpost.model.optim import set_learning_rate
from rlpost.model.packing import Row
from rlpost.model.precision import this_device
from rlpost.model.tokenizer import notes_of_model
from rlpost.model.trainable import forward_precision
from rlpost.model.weights import is_sharded
from rlpost.output import output_into
from rlpost.record import Fact
from rlpost.runs.checkpoint import Saving, kept_precision, load_checkpoint, restore_moments
from rlpost.runs.folder import RunFolder
from rlpost.runs.reader import newest_checkpoint, step_of
from rlpost.screen import Screen
from rlpost.settings import FineTuningSettings, SampledSettings, TrackerSettings, TrackingSettings, VLLMSettings
from rlpost.settings.commands import RunRequest
from rlpost.text import without_passwords
from rlpost.train.facts import Seen, needs_facts
from rlpost.train.gate import gate_of, restart_with_weights
from rlpost.train.parts import Parts
from rlpost.train.progress import ENDS_TRAINING, Progress, check_enough_to_decide, evaluations_until, why_ended
from rlpost.train.ranks import Rank, Ranks
from rlpost.train.resolve import Change, in_yaml, kept_of, resolve
from rlpost.train.signals import Signals, Stopped
from rlpost.train.step import Clock, NotFiniteError, Step
from rlpost.train.update import Microbatches

if TYPE_CHECKING:
    from rlpost.tracking.trackers import Tracking

log = logging.getLogger("rlpost")
BEFORE_ANY = -1  # the step before step 0, the evaluation before training
Settings = SampledSettings | FineTuningSettings
S = TypeVar("S", bound=Settings)


P = TypeVar("P", bound=Parts[Any])


@dataclass(frozen=True)
class Evaluated:
    """An evaluation on held-out data: the step after which it was made (0: before training) and its metrics."""

    step: int
    metrics: Mapping[str, float]  # eval/...
    is_best: bool = False  # whether none was better so far


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    error: BaseException | None  # that ended it
    was_stopped: bool  # by a signal
    ended_early: str  # the reason for which it ended before its last step; empty otherwise


class Watcher:
    """Sees a training without being part of its loop, and can end it with `Run.stop`. Each method does nothing here."""

    name = ""  # of a plugin's, under which its state is kept

    def on_start(self, facts: Sequence[Fact]) -> None:
        """Before the first step; `facts` say what the training is."""

    def on_step(self, step: Step) -> None:
        """After each step."""

    def on_evaluation(self, evaluation: Evaluated) -> None:
        """After an evaluation on held-out data, also the one before the first step."""

    def on_end(self, outcome: Outcome) -> None:
        """Once, at the end, in the opposite order, when the parts are closed."""

    def state(self) -> Any:
        """The state that a resumed run goes on from, as JSON has it; None: it has none."""

    def restore(self, state: Any) -> None:
        """Restore what `state` returned; called after `on_start`."""


class Run(Generic[S, P]):
    """One training in its run folder, open from `with` to its last line on the screen.

    Its `watchers` see what the loop does, in the order of their list.
    """

    step_class = Step  # of the steps that it makes

    def __init__(self, settings: S, request: RunRequest) -> None:
        self.settings = settings
        self.request = request
        self.screen = Screen(plain=request.plain)
        self.signals = Signals(self.screen)
        self.folder = RunFolder(request, seed=settings.seed, note=self.screen.note)
        self.tracking = build_tracking(settings.tracking, request)
        self.saving = Saving(lambda: self.screen.phase("saving checkpoint"))
        self.memory = MemoryWatch()
        self.progress = Progress()
        self.is_resumed = False  # from a checkpoint
        self.total_steps = settings.steps or 0
        self.watchers: list[Watcher] = []
        self.parts: P
        self.ranks: Ranks  # that train
        self.engine_started_from: int | None = None  # the step of the checkpoint whose model folder an engine reads
        self.has_spare_memory = False  # so that freed memory can be kept beside what the next phase takes
        self.step: Step | None = None  # the current one
        self.ended_early = ""  # why the run ends before its last step, if not by a signal
        self.loading: dict[str, float] = {}  # the seconds of loading, until a row of metrics.jsonl has them
        self._check_push: Callable[[int], None] | None = None
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._opened.enter_context(self.folder)
        self._opened.callback(self.signals.release)
        self.memory.start()
        self._opened.enter_context(contextlib.closing(self.memory))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Exception):
            self.folder.look_into(error, self.screen.doing, self.step.number if self.step else 0)
        stopped = isinstance(error, Stopped)
        self._opened.__exit__(*((None, None, None) if stopped else (kind, error, trace)))
        return stopped

    def stop(self, reason: str) -> None:
        """End the run after the current step, or before the first one, for `reason`; its exit code is 0.

        A run that is resumed has nothing left to do then, unless it is given more steps.
        """
        if self.step is not None and self.step.is_last:
            return
        self.ended_early = self.progress.ended_early = reason
        self.progress.ended_length = self._length
        self.total_steps = self.progress.step
        if self.step is not None:
            self.total_steps = self.step.total = self.step.number
        self.folder.keep(total_steps=self.total_steps, ended_early=reason)

    def warn(self, text: str) -> None:
        """Show a warning, and write it to log.txt."""
        log.warning("%s", text)
        self.screen.note(without_passwords(text), is_logged=True)

    def load(self, assemble: Callable[[S, Path | None], P], watchers: Callable[[Self], list[Watcher]]) -> P:
        """The parts, assembled and started; then the run is begun, or resumed from its checkpoint, and watched.

        `assemble(settings, checkpoint)` makes the parts, with the weights of a checkpoint's folder where one is given.
        """
        clock = Clock()
        keep_freed_memory()
        torch.manual_seed(self.settings.seed)
        compute_deterministically(self.settings.deterministic)
        checkpoint = self.folder.resume_from
        self.is_resumed = checkpoint is not None
        changes, needs = self._resolve(checkpoint)
        if checkpoint is not None and isinstance(self.settings.sampler, VLLMSettings):
            self.engine_started_from = step_of(checkpoint)
        self._opened.enter_context(self.screen)  # what an engine says while it closes is not for the terminal
        self._opened.push(self._end)  # once all that is opened below is closed
        with self.screen.waiting(self.settings.waits_for), output_into(self.folder.path / "log.txt"):
            self.ranks = self._opened.enter_context(self._joined(checkpoint))
            leave_room(share_beside(self.settings), pick_device(self.settings.model.device))
            self.parts = parts = assemble(self.settings, checkpoint)
            self._opened.enter_context(parts.opened)
            self.folder.keep(data=parts.data)
            if parts.policy is not None:
                parts.policy.start()
            self._opened.enter_context(frozen_heap())
            state = {} if checkpoint is None else self._restore(checkpoint)
        self.total_steps = self._decide_total_steps()
        facts = parts.facts(changes, self._seen(needs))
        self.folder.keep(total_steps=self.total_steps, ended_early=self.ended_early, facts=facts)
        self.begin_ranks()
        self.folder.forget_after(self.progress.step if self.is_resumed else BEFORE_ANY)
        self.loading = {"time/load": clock.seconds}
        policy, collector = parts.policy, parts.collector
        if policy is not None and collector is not None:
            if not self.settings.elsewhere:
                restart_with_weights(policy, collector.weight_updater, parts.model)
            self._opened.callback(self.screen.phase, "closing", "the policy")
        self.watchers = watchers(self)
        states = state.get("watchers", {})
        for watcher in self.watchers:
            watcher.on_start(facts)
            if watcher.name in states:
                watcher.restore(states[watcher.name])
        if self.is_resumed:
            self._say_where_it_goes_on(checkpoint)
        if policy is not None and collector is not None and self.progress.step < self.total_steps:
            own: Any = self.settings
            self._check_push = gate_of(own.gate, own.policy, own.model, policy, self.ranks, self.screen)
        return parts

    def steps(self) -> Iterator[Step]:
        """The steps still to do, until the last or until a signal requests to stop."""
        self.signals.steps_begin()
        frees = getattr(self.settings.policy, "sleep", False) or bool(share_beside(self.settings))
        while self.progress.step < self.total_steps and not self.signals.stopping:
            number = self.progress.step + 1
            if number == self.request.stops_after:
                self.signals.exit_code = STOPPED_BY[signal.SIGTERM]  # once it is done
            self.screen.begin_step()
            self.step = self.step_class(
                number,
                self.total_steps,
                self.ranks,
                self.progress.updates,
                phase=self.screen.phase,
                wait_for_save=self.saving.wait,
                check_push=self._check_push,
                is_short_of_memory=not self.has_spare_memory,
                frees_before_push=frees,
                metrics=self.loading,
            )
            self.loading = {}
            yield self.step
            self._end_step(self.step)
        self.signals.steps_end()

    def _end_step(self, step: Step) -> None:
        """Let the watchers see the step. If one of them fails, the others still record and save it."""
        if self.parts.collector is not None and step.has_unpushed_weights:
            raise RuntimeError(
                f"step {step.number}: the weights have changed and were not pushed: call step.push(parts.collector)"
            )
        self.progress.step = step.number
        self.progress.updates += len(step.updates)
        step.metrics |= step.gradient()
        if not self.has_spare_memory:
            give_back_freed_memory()  # what training has freed is not beside what evaluating and saving take
        failures: list[Exception] = []
        for watcher in self.watchers:
            try:
                watcher.on_step(step)
            except Exception as error:
                log.exception("a watcher has failed after step %d", step.number)
                failures.append(error)
                step.must_save = True
        if failures:
            raise failures[0]

    def check_ended(self) -> None:
        """Raise RuntimeError if the loop has left a step in its middle: it would be lost."""
        if self.step is not None and self.step.number != self.progress.step:
            raise RuntimeError(f"the loop has left step {self.step.number} before its end: let run.steps() end it")

    def diverged(self, error: NotFiniteError) -> DivergedError:
        """Write the minibatch that `error` stopped, the weights and a report; returns the error to raise."""
        assert self.step is not None
        number, folder = self.step.number, self.folder.path / f"diverged-step-{self.step.number:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "minibatch.jsonl").write_text("".join(json.dumps(_plain(row)) + "\n" for row in self.step.minibatch))
        what, last = f"step {number}: {error}", newest_checkpoint(self.folder.path)
        report = {"what": what, "parameters_with_bad_gradient": self.ranks.bad_gradients()}
        (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        save_model(self.parts.model, self.parts.tokenizer, folder / "model")
        advice = "begin again with a lower optim.lr"  # the weights at the stop are likely to be ruined already
        if last is not None:
            advice = f"--resume auto with a lower optim.lr goes on from {last}"
        return DivergedError(
            f"stopped before an update that would have destroyed the weights: {what}. The minibatch, the weights and a "
            f"report are in {folder}; {advice}"
        )

    def begin_ranks(self) -> None:
        """Send the objective to all ranks."""
        parts, tokens = self.parts, self.settings.microbatch_tokens
        microbatches = Microbatches(
            tokens,
            parts.model.device,
            forward_precision(self.settings.cluster, self.settings.model),
            note=self.screen.note,
            progress=lambda done, total: self.screen.phase("training", done=done, total=total),
            in_step=is_sharded(parts.model),
        )
        own = Rank(parts.model, parts.optimizer, parts.objective, self.settings.optim, parts.reference, microbatches)
        self.ranks.begin(own, tokens)

    # Beginning, going on, ending

    def _resolve(self, checkpoint: Path | None) -> tuple[list[Change], Needs | None]:
        """Resolve the settings and estimate what they need; returns the changes, and the estimate or None.

        Raises ResourceError if the training cannot fit at all.
        """
        model, kept = self.settings.model, self.request.kept
        if checkpoint is not None:
            kept = {**(kept or {}), **(kept_precision(checkpoint) or {})}
        shape, device = shape_of(model.path, model.revision), this_device(model.device)
        self.settings, changes = resolve(self.settings, device, shape, kept)
        reasons = {each.key: each.why for each in changes}
        self.folder.keep_settings(in_yaml(self.request.config_yaml, changes), reasons)
        self.folder.keep(precision=kept_of(self.settings.model, self.settings.policy, changes))
        machine = Machine.here(self.folder.path, device.room)
        needs = None if shape is None else needs_of(self.settings, shape, machine)
        self.has_spare_memory = needs is not None and needs.has_to_spare
        if needs is not None:
            needs.check(model.path)
            for fact in needs_facts(needs) if needs.may_not_fit else ():  # now: loading may be as far as it gets
                self.screen.line(str(fact) if fact.value else fact.note)
        return changes, needs

    def _seen(self, needs: Needs | None) -> Seen:
        """The machine and model of the training, in words."""
        parts, model, env = self.parts, self.parts.model, self.settings.env
        size = parameters_text(sum(each.numel() for each in model.parameters()))
        group = getattr(self.settings, "group_size", 1)  # rows that share a prompt
        adapter = ""
        if self.settings.lora.enabled:
            from rlpost.model.lora import describe_adapter

            adapter = describe_adapter(model)
        notes = notes_of_model(self.settings.model, self.settings.lora.path)
        if parts.policy is not None:
            if self.settings.eval.enabled:
                check_enough_to_decide(self.settings.eval, env, parts.eval_env.num_tasks)
            cut = thinking_cut_short(parts.tokenizer, env.max_completion_tokens, "env.max_completion_tokens")
            notes += [cut] if cut else []
        return Seen(
            model=f"{describe(self.parts.model_folder)}, {size}, {model.device}",
            writes=f"{self.folder.path}{f', and {self.tracking.name} follows' if self.tracking else ''}",
            needs=needs,
            reads=explain(model, verdict_of(model), group) or "",
            adapter=adapter,
            ranks=self.ranks.count,
            steps=self.total_steps,
            notes=notes,
            is_resumed=self.is_resumed,
        )

    def _joined(self, checkpoint: Path | None) -> Ranks:
        """The ranks that train, which load their model meanwhile; most trainings have this one alone."""
        if (self.settings.cluster.trainer_ranks or 1) == 1 and ranks_started() == 1:
            return Ranks()
        from rlpost.train.several_ranks import join_ranks

        return join_ranks(self.settings, checkpoint, self.folder.path)

    def _decide_total_steps(self) -> int:
        """Steps of the whole run, those done included: as many as the settings say, or as the epochs fill.

        A run that ended early, and is given no more steps, has done them all.
        """
        self.ended_early = self._why_ended()
        if self.ended_early:
            return self.progress.step
        self.progress.ended_early, self.progress.ended_length = "", []
        if self.settings.steps is not None:
            return self.settings.steps
        left = cast(Any, self.parts).samples_left  # only trainings on rows can leave the steps open
        return self.progress.step + ceil(left / cast(Any, self.settings).minibatch_size)

    def _restore(self, checkpoint: Path) -> dict[str, Any]:
        """Bring the parts, the RNG and the progress to where they were at `checkpoint`; returns its state.

        Raises ConfigError for settings that would read the saved data position as another one.
        """
        _, state = load_checkpoint(checkpoint)
        settings, optimizer = self.settings, self.parts.optimizer
        for key, saved in state["must_stay"].items():
            if (now := getattr(settings, key)) != saved:
                raise ConfigError(f"--resume: the run began with {key}={saved}, not {now}; keep it")
        if state["optimizer"] != type(optimizer).__name__:
            raise ConfigError(
                f"--resume: the run began with {state['optimizer']}, not {type(optimizer).__name__}; keep its optim"
            )
        restore_moments(self.parts.model, optimizer, checkpoint)
        if "lr" in state:  # a step without an update reports the rate of the last one
            set_learning_rate(optimizer, state["lr"])
        known = {field.name for field in fields(Progress)}
        self.progress = Progress(**{name: value for name, value in state["progress"].items() if name in known})
        self.parts.restore(state)
        for row in evaluations_until(checkpoint, self.progress.step):  # of a checkpoint saved before its evaluation
            self.progress.is_new_best(row["step"], row)
            self.progress.eval_after = {k: v for k, v in row.items() if k.startswith("eval/") and v is not None}
        return state

    @property
    def _length(self) -> list[int | None]:
        """How long the settings let it train: steps, epochs."""
        return [self.settings.steps, getattr(self.settings, "epochs", None)]

    def _why_ended(self) -> str:
        """Why the run has ended before its last step; empty where it has not, or where the settings let it go on."""
        progress = self.progress
        if (progress.eval_after or {}).get(ENDS_TRAINING):
            return why_ended(self.settings.eval, progress)
        return progress.ended_early if progress.ended_length == self._length else ""

    def _say_where_it_goes_on(self, checkpoint: Path | None) -> None:
        done = self.progress.step
        self.screen.note(f"resuming after step {done} from {checkpoint}")
        if done >= self.total_steps:
            left = f"give more {self.settings.ends_by} to go on"
            if self.ended_early:
                without = " ".join(f"{key}=null" for key in self.settings.eval.stops)
                more = f"to go on to the last step all the same: --resume {self.folder.path} {without}"
                left = f"it ended early: {self.ended_early}; {more if without else left}"
            self.screen.note(f"nothing is left to do: {'1 step is' if done == 1 else f'{done} steps are'} done; {left}")

    def _end(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Let the watchers end, the last of the list first, each even if another one fails."""
        self.folder.was_stopped = self.signals.stopping

        failed: Exception | None = None
        for watcher in reversed(self.watchers):
            try:
                watcher.on_end(Outcome(error or failed, self.signals.stopping, self.ended_early))
            except Exception as failure:
                log.exception("a watcher has failed at the end")
                failed = failed or failure
        if error is None and failed is not None:
            raise failed
        if error is None and self.signals.stopping:
            from rlpost.train.closing import stopped_line

            self.screen.end()
            self.screen.line(stopped_line(self.request))


def build_tracking(settings: TrackingSettings, request: RunRequest) -> Tracking | None:
    """The tracker that follows the run's metrics.jsonl, not started yet; None without one.

    Raises MissingExtraError where the tracker is not installed.
    """
    if not isinstance(settings, TrackerSettings):
        return None
    from rlpost.runs.rollouts import spread_of
    from rlpost.tracking.trackers import Tracking, chosen_tracker

    tracker = chosen_tracker(settings)
    if tracker is None:
        return None

    count = settings.completions

    def completions_of(step: int) -> list[dict[str, Any]]:
        return spread_of(request.folder, step, count) if count else []

    config = yaml.safe_load(request.config_yaml)
    return Tracking(tracker, request.folder, config, settings.timeout_seconds, completions_of)


def _plain(row: Row) -> dict[str, Any]:
    """A row that an update was to read, for JSON."""
    return {
        "prompt": row.prompt.tolist(),
        "response": row.response.tolist(),
        "sampled": row.sampled.int().tolist(),
        "sampler_log_probs": row.sampler_log_probs.tolist(),
        "advantage": row.advantage.tolist() if isinstance(row.advantage, torch.Tensor) else row.advantage,
    }
