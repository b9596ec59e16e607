"""The watchers of a training: each sees a step once its loop is done with it; see `rlpost.train.run.Watcher`."""

from __future__ import annotations

import copy
import json
import logging
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel

from rlpost.catalog import option_of
from rlpost.config.paths import BEST, LATEST, REFERENCE
from rlpost.errors import ConfigError, DivergedError, WatcherError
from rlpost.model.load import save_model
from rlpost.model.memory import CoresWatch
from rlpost.model.optim import learning_rate_of, optimizer_tensors
from rlpost.model.weights import is_adapted
from rlpost.record import PRECISION, Fact, read_metrics
from rlpost.runs.checkpoint import mark_best, point_best, save_checkpoint, write_readme
from rlpost.runs.diagnosis import AT_LEAST, STANDSTILL, Diagnosis, Symptom, repeated_text
from rlpost.settings import OnAlarm
from rlpost.text import counted
from rlpost.train.facts import name_of_data
from rlpost.train.progress import ENDS_TRAINING, PATIENCE, check_measured, why_ended
from rlpost.train.run import Evaluated, Outcome, Run, Watcher
from rlpost.train.step import Clock, Step

log = logging.getLogger("rlpost")
SHARED = 0.25  # of the cores, from which other programs' use of them is worth a note
TEXTS_EVERY = 5  # steps between two looks for completions that repeat themselves


class PluginWatcher(Watcher):
    """A plugin's watcher. Its errors carry its name, or are counted and shown if it is registered as optional."""

    def __init__(self, run: Run[Any, Any], name: str, registered: tuple[Callable[[Any], Any], bool]) -> None:
        build, self.is_optional = registered
        self.name = name
        self.failures = 0
        self._warn = run.warn
        self._watcher = self._guarded("its first call", build, run)
        methods = [method for method in dir(self._watcher) if method.startswith("on_")]
        if unknown := [method for method in methods if not hasattr(Watcher, method)]:
            known = ", ".join(method for method in dir(Watcher) if method.startswith("on_"))
            raise ConfigError(f"the watcher {name} has {unknown[0]}, which is never called: it can have {known}")

    def _guarded(self, doing: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            log.exception("the watcher %s has failed", self.name)
            text = (
                f"the watcher {self.name} failed in {doing}: {type(error).__name__}: {error}; log.txt has the traceback"
            )
            if not self.is_optional:
                raise WatcherError(text) from error
            self.failures += 1
            if self.failures == 1:
                self._warn(f"{text}; the training goes on")

    def _call(self, method: str, *arguments: Any) -> None:
        if (called := getattr(self._watcher, method, None)) is not None:
            self._guarded(method, called, *arguments)

    def on_start(self, facts: Sequence[Fact]) -> None:
        """See `Watcher`."""
        self._call("on_start", facts)

    def on_step(self, step: Step) -> None:
        """See `Watcher`."""
        self._call("on_step", step)

    def on_evaluation(self, evaluation: Evaluated) -> None:
        """See `Watcher`."""
        self._call("on_evaluation", evaluation)

    def restore(self, state: Any) -> None:
        """See `Watcher`."""
        self._call("restore", state)

    def state(self) -> Any:
        """The watcher's state, as JSON has it; None without any."""
        state = getattr(self._watcher, "state", None)
        return None if state is None else self._guarded("state", lambda: json.loads(json.dumps(state())))

    def on_end(self, outcome: Outcome) -> None:
        """See `Watcher`."""
        self._call("on_end", outcome)
        if self.failures > 1:
            self._warn(f"the watcher {self.name} failed {self.failures} times")


class Timing(Watcher):
    """Adds time, memory and the use of the cores by other programs to a step's metrics."""

    def __init__(self, run: Run[Any, Any]) -> None:
        self.ranks, self.memory, self.device = run.ranks, run.memory, run.parts.model.device
        # on a cluster or with several ranks, processes of the run are not below this one
        self._sees_all = not run.settings.cluster.elsewhere and run.ranks.count == 1
        self._cores = CoresWatch()

    def on_start(self, facts: Sequence[Fact]) -> None:
        """See `Watcher`."""
        self._cores.begin()

    def on_step(self, step: Step) -> None:
        """See `Watcher`."""
        step.metrics |= step.clock.metrics() | self.memory.metrics(self.device) | self.ranks.memory()
        others, cores = self._cores.of_others(), len(self._cores.cores)  # since the step before
        self._cores.begin()
        if self._sees_all and others is not None:
            step.metrics["time/others_cores"] = others
            if others > SHARED * cores:
                what = "other programs are busy on the cores, so steps take longer"
                step.note(what, f": they use {others:.1f} of {cores}")


class OnScreen(Watcher):
    """Shows the facts, each step and evaluation, and at the end what came of the run and what to type next."""

    def __init__(self, run: Run[Any, Any]) -> None:
        self.run = run
        self.screen = run.screen
        self._noted: dict[str, set[int]] = {}  # note -> the numbers of its steps

    def on_start(self, facts: Sequence[Fact]) -> None:
        """Print the facts, and begin to show the steps, with the facts' notes."""
        run, screen, settings = self.run, self.screen, self.run.settings
        plan = [str(fact) for fact in facts if fact.value]
        for line in plan:
            screen.line(line)
        last = run.parts.policy.name if run.parts.collector is not None else option_of("loss", type(settings.loss))
        about = f"{settings.model.path} · {name_of_data(settings.env)} · {last}"
        log_file, path = run.folder.path / "log.txt", run.folder.path
        screen.open(title=path.name, about=about, total_steps=run.total_steps, log=log_file, plan=plan)
        for note in filter(None, (fact.note for fact in facts)):
            screen.note(note)
        rows, _ = read_metrics(path / "metrics.jsonl")
        screen.begin(run.progress.step, run.total_steps, ((row["step"], row) for row in rows))
        if run.parts.collector is not None:
            run.parts.collector.show(screen.phase, self._show_sampled)

    def _show_sampled(self, ended: int, total: int, tokens: int) -> None:
        self.screen.phase("sampling", f"{total} completions", ended, total, tokens)

    def on_step(self, step: Step) -> None:
        """Show the step, and what happened in it, the first time with more about it."""
        for what, more in step.notes.items():
            if what not in self._noted:
                self.screen.note(f"step {step.number}: {what}{more}")
            self._noted.setdefault(what, set()).add(step.number)
        self.screen.step(step.number, step.total, step.metrics, step.batch)

    def on_evaluation(self, evaluation: Evaluated) -> None:
        """See `Watcher`."""
        self.screen.evaluated(evaluation.step, evaluation.metrics)

    def on_end(self, outcome: Outcome) -> None:
        """End the picture; print the last lines, unless an error has ended the run."""
        run, screen = self.run, self.screen
        screen.end()
        if outcome.error is not None:
            return
        for what, steps in self._noted.items():
            if len(steps) > 1:
                screen.note(f"in {len(steps)} steps: {what}")
        if outcome.was_stopped:
            return
        if outcome.ended_early:
            text = f"training ended early, after step {run.progress.step}: {outcome.ended_early}"
            log.info("%s", text)
            screen.line(text, "bold")
        from rlpost.train.closing import before_and_after, last_lines

        for line in before_and_after(run.progress):
            screen.line(line, "bold" if line else "")
        for line in last_lines(run.parts.closing, run.request, run.progress):
            screen.line(line)


class Evaluations(Watcher):
    """Measures held-out data before the first step, after the last, and between them where that is set."""

    def __init__(self, run: Run[Any, Any]) -> None:
        self.run = run
        self.settings, self.progress = run.settings.eval, run.progress

    def on_start(self, facts: Sequence[Fact]) -> None:
        """Measure before training; or, of a resumed run, after its last step, if a signal has kept it from that."""
        run, step = self.run, self.progress.step
        if not run.is_resumed and self.settings.enabled:
            metrics = self._measure("before training")
            check_measured(self.settings, metrics)
            self.progress.eval_before = _figures(metrics)
            run.folder.record(0, metrics | run.loading)
            run.loading = {}
            self._announce(0, metrics)
        elif step and self._is_due(step, run.total_steps) and run.folder.lacks_evaluation(step):
            metrics = self._evaluated(step, run.total_steps)
            run.folder.add_evaluation(step, metrics)
            self._announce(step, metrics)

    def on_step(self, step: Step) -> None:
        """Measure if that is due. A signal ends it; resuming then measures."""
        if not self._is_due(step.number, step.total) or self.run.signals.stopping:
            return
        with self.run.signals.abandoning(f"the evaluation after step {step.number}"):
            step.evaluation = self._evaluated(step.number, step.total)
        if step.evaluation:
            self._announce(step.number, step.evaluation)

    def _is_due(self, step: int, total: int) -> bool:
        every = self.settings.every
        return self.settings.enabled and (step == total or (every > 0 and step % every == 0))

    def _evaluated(self, step: int, total: int) -> dict[str, float]:
        """The metrics of the evaluation after `step`; if it ends training, that step is the last."""
        metrics = self._measure(f"after step {step}")
        self.progress.eval_after = _figures(metrics)
        self.progress.is_new_best(step, metrics)
        if (reason := why_ended(self.settings, self.progress)) and step < total:
            metrics[ENDS_TRAINING] = self.progress.eval_after[ENDS_TRAINING] = 1.0
            self.run.stop(reason)
        return metrics | self.run.memory.metrics(self.run.parts.model.device)

    def _measure(self, when: str) -> dict[str, float]:
        run, clock = self.run, Clock()
        metrics, table = run.parts.measure(run.ranks, run.screen, when)
        if table:
            from rlpost.evaluation.saved import held_out_table, write_rows

            with run.folder.writing("free some space, then --resume auto"):
                write_rows(held_out_table(run.folder.path, self.progress.step), table)
        return {**metrics, "time/eval": clock.seconds}

    def _announce(self, step: int, metrics: Mapping[str, float]) -> None:
        is_best = step > 0 and self.progress.best_step == step
        for watcher in self.run.watchers:
            watcher.on_evaluation(Evaluated(step, metrics, is_best))


def _figures(metrics: Mapping[str, float]) -> dict[str, float]:
    """The figures of an evaluation, without its time."""
    return {key: value for key, value in metrics.items() if key.startswith("eval/")}


class Recording(Watcher):
    """Writes metrics.jsonl and the rollouts."""

    def __init__(self, run: Run[Any, Any]) -> None:
        self.folder, self.screen = run.folder, run.screen

    def on_step(self, step: Step) -> None:
        """See `Watcher`."""
        self.screen.phase("recording", f"step {step.number}")
        self.folder.record(step.number, step.metrics | step.evaluation, step.batch, step.rows)
        step.is_recorded = True


class Symptoms(Watcher):
    """Looks for what goes wrong: nothing is learned, a symptom of rlpost/runs/diagnosis.py, an engine that failed."""

    def __init__(self, run: Run[Any, Any]) -> None:
        self.run, self.progress = run, run.progress
        self.on_alarm = run.settings.diagnosis.on_alarm
        self._diagnosis = Diagnosis()
        self._restarts = 0  # of the policy's engine, as far as they were reported

    def on_start(self, facts: Sequence[Fact]) -> None:
        """See `Watcher`."""
        if self.run.is_resumed:
            self._diagnosis = Diagnosis(read_metrics(self.run.folder.path / "metrics.jsonl")[0])

    def on_evaluation(self, evaluation: Evaluated) -> None:
        """See `Watcher`."""
        if evaluation.step == 0:
            self._diagnosis.after({"step": 0, **evaluation.metrics})

    def on_step(self, step: Step) -> None:
        """Warn of what shows for the first time. Raises DivergedError if diagnosis.on_alarm=stop asks for that."""
        self._look_at_learning(step)
        self._look_at_engine()
        if self.on_alarm is OnAlarm.off:
            return
        found = self._new_symptoms(step)
        has_explained_why = bool(self.progress.stands_still) and self.progress.steps_watched >= PATIENCE
        for symptom in found:
            if not (has_explained_why and symptom.name in STANDSTILL):
                self.run.warn(symptom.line())
        if found and self.on_alarm in (OnAlarm.checkpoint, OnAlarm.stop):
            step.must_save = True
            if self.on_alarm is OnAlarm.stop:
                alarms = "; ".join(symptom.line() for symptom in found)
                raise DivergedError(
                    f"stopped after step {step.number} by diagnosis.on_alarm=stop: {alarms}. The step is saved: "
                    "--resume auto goes on with what is changed, or with diagnosis.on_alarm=warn"
                )

    def on_end(self, outcome: Outcome) -> None:
        """Warn of a run that learned nothing."""
        progress = self.progress
        self._look_at_engine()
        if outcome.error is None and progress.steps_watched and progress.stands_still:
            self._warn_of_standstill(f"the {counted(progress.steps_watched, 'step')} of this run")

    def _look_at_learning(self, step: Step) -> None:
        """Warn once if the first steps had no gradient, or, where rewards are learned from, one and the same reward."""
        settings, progress = self.run.settings, self.progress
        progress.take_in(step.metrics)
        same = settings.learns_from_rewards and progress.same_reward is not None
        progress.stands_still = ""
        if same or not progress.had_gradient:
            progress.stands_still = self._why_nothing_learned(step, progress.same_reward if same else None)
            if progress.steps_watched == PATIENCE:
                self._warn_of_standstill(f"the first {PATIENCE} steps")

    def _why_nothing_learned(self, step: Step, same_reward: float | None) -> str:
        """The likely reason where nothing is learned from `step`, and what to do.

        `same_reward` is that of every completion so far, None where they differ or do not matter.
        """
        settings, metrics = self.run.settings, step.metrics
        if "completion/truncated" not in metrics:  # the step sampled nothing
            return f"no token's loss moves a weight; {settings.look}"
        look = f"read some with rlpost runs rollouts {shlex.quote(str(self.run.folder.path))}"
        if settings.learns_from_rewards and metrics["completion/truncated"] == 1:
            limit = settings.env.max_completion_tokens
            return f"every completion is cut at env.max_completion_tokens={limit}; raise it"
        if same_reward is not None and metrics.get("accuracy/lenient") == 1:
            return "every completion is right; the task is too easy for this model"
        if same_reward == 0:
            return (
                f"every reward is 0: the task is too hard, or the reward does not find the answer in the reply; {look}"
            )
        if same_reward is not None:
            return f"every reward is {same_reward:g}, which tells no completion from another; {look}"
        if step.explanation:
            return f"{step.explanation}; {look}"
        if metrics.get("groups/zero_std") == 1:
            return "the completions of each prompt earn the same; raise group_size or sampling.temperature"
        return f"no token is left to train on; see {settings.leaves_out}"

    def _warn_of_standstill(self, steps: str) -> None:
        what = f"every completion in {steps} earned the same reward, so nothing was learned from it"
        if not self.progress.had_gradient:
            what = f"nothing was learned in {steps}: every gradient was 0"
        self.run.warn(f"{what}; likely reason: {self.progress.stands_still}")

    def _look_at_engine(self) -> None:
        policy = self.run.parts.policy
        if policy is not None and policy.restarts > self._restarts:
            self._restarts = policy.restarts
            self.run.warn("the engine had failed and was started again with the present weights; log.txt says how")

    def _new_symptoms(self, step: Step) -> list[Symptom]:
        """The symptoms that show for the first time after `step`; `progress` keeps their names."""
        found = self._diagnosis.after({"step": step.number, **step.metrics, **step.evaluation})
        batch, number = step.batch, step.number
        if batch is not None and number >= AT_LEAST and number % TEXTS_EVERY == 0:
            texts = repeated_text(number, list(batch["text", "response"]), list(batch["query"]))
            found += [texts] if texts is not None else []
        new = [symptom for symptom in found if symptom.name not in self.progress.symptoms]
        self.progress.symptoms += [symptom.name for symptom in new]
        return new


class Checkpoints(Watcher):
    """Saves the steps that are due, while the next one samples; `best` points at the one that measured best."""

    def __init__(self, run: Run[Any, Any]) -> None:
        self.run, self.settings = run, run.settings.checkpoint
        self.folder = run.folder.path / "checkpoints"
        self.saving = run.saving
        self._saved_at = time.monotonic()

    def on_start(self, facts: Sequence[Fact]) -> None:
        """Point `best` at the best checkpoint of the step from which the run resumes."""
        self._saved_at = time.monotonic()
        best = self.run.progress.best_step
        if self.run.is_resumed and not point_best(self.folder, best) and best is not None:
            self.run.screen.note(
                f"the checkpoint of step {best}, the best so far, is no longer there: checkpoints/{BEST} comes back "
                "with a better one"
            )

    def on_evaluation(self, evaluation: Evaluated) -> None:
        """Point `best` at a checkpoint that was measured late."""
        if evaluation.is_best and self.run.step is None:
            settings = self.settings
            mark_best(self.folder, evaluation.step, settings.keep_last, settings.every, self.run.engine_started_from)

    def on_step(self, step: Step) -> None:
        """Save the step if it is due: by the settings, as the last, as the best so far, or as a watcher requests."""
        if step.is_recorded and self._is_due(step):  # a checkpoint's steps are all in metrics.jsonl
            self._save()
            self._saved_at = time.monotonic()

    def _is_due(self, step: Step) -> bool:
        every, longest = self.settings.every, 60 * self.settings.every_minutes
        unsaved = time.monotonic() - self._saved_at
        return (
            step.is_last
            or self.run.signals.stopping
            or step.must_save
            or (bool(step.evaluation) and self.run.progress.best_step == step.number)
            or (every > 0 and step.number % every == 0)
            or 0 < longest < unsaved + step.clock.seconds  # with one more step like this one
        )

    def on_end(self, outcome: Outcome) -> None:
        """Wait until the last checkpoint is on disk, before any line reports it."""
        self.saving.wait()

    def _save(self) -> None:
        """Write a checkpoint of the last finished step; nothing that it reads changes before the next update."""
        run = self.run
        self.saving.wait()
        run.screen.phase("saving checkpoint")
        states = {watcher.name: watcher.state() for watcher in run.watchers}
        state = {
            **copy.deepcopy(run.parts.state()),
            PRECISION: run.folder.precision,
            "watchers": {name: state for name, state in states.items() if state is not None},
            "progress": asdict(run.progress),
            "must_stay": {key: getattr(run.settings, key) for key in run.settings.must_stay},
            "optimizer": type(run.parts.optimizer).__name__,
            "lr": learning_rate_of(run.parts.optimizer),
        }
        write = self._writer(state)
        if run.ranks.count == 1:  # several have to gather what is written together
            self.saving.begin(lambda: log.info("saved %s", write()))
        else:
            log.info("saved %s", write())

    @cached_property
    def _tokenizer(self) -> Any:
        """A copy of the tokenizer: the fast ones do not let two threads use them at will."""
        return copy.deepcopy(self.run.parts.tokenizer)

    def _writer(self, state: Mapping[str, Any]) -> Callable[[], Path]:
        """A function that saves weights, tokenizer, optimizer, RNG, and `state` as JSON.

        An adapter is saved on its own as well as merged: a resumed run reads the adapter, all else the merged model.
        """
        run, parts, tokenizer = self.run, self.run.parts, self._tokenizer
        model, step = parts.model, run.progress.step
        latest = self.folder / LATEST / REFERENCE
        has_moved = parts.reference is not None and latest.is_dir()  # before a resumed run that moves it no longer

        def write_reference(folder: Path) -> None:
            assert parts.reference is not None
            with parts.reference() as reference:
                save_model(cast(PreTrainedModel, reference), tokenizer, folder)

        def write_adapter(folder: Path) -> None:
            from rlpost.model.lora import save_adapter

            save_adapter(model, folder)

        def write_model(folder: Path) -> None:
            save_model(model, tokenizer, folder)
            write_readme(folder, run.folder.path, step, run.settings.model.path)

        return partial(
            save_checkpoint,
            self.folder,
            step,
            write_model=write_model,
            write_adapter=write_adapter if is_adapted(model) else None,
            write_moments=run.ranks.save_moments(),
            write_reference=write_reference if run.settings.moves_reference or has_moved else None,
            tensors=optimizer_tensors(model, parts.optimizer),
            state=state,
            keep_last=self.settings.keep_last,
            every=self.settings.every,
            best=run.progress.best_step,
            in_use=run.engine_started_from,
        )


class OnTracker(Watcher):
    """Lets a tracker follow metrics.jsonl; its failures are shown and end nothing."""

    def __init__(self, run: Run[Any, Any]) -> None:
        self.run, self.tracking = run, run.tracking
        self._is_lost = False

    def on_evaluation(self, evaluation: Evaluated) -> None:
        """See `Watcher`."""
        if evaluation.step == 0:  # it is in metrics.jsonl
            self._follow()

    def on_step(self, step: Step) -> None:
        """See `Watcher`."""
        self._follow()

    def _follow(self) -> None:
        """Start the tracker once metrics.jsonl exists; report once that tracking has ended early."""
        if (tracking := self.tracking) is None or self._is_lost:
            return
        if not tracking.started:
            tracking.start(self.run.folder.kept_step)
        if reason := tracking.failure():
            self._is_lost = True
            self.run.warn(f"tracking with {tracking.name} has ended: {reason}; the training goes on")

    def on_end(self, outcome: Outcome) -> None:
        """Let the tracker finish; warn if it lacks a part of the run."""
        if (tracking := self.tracking) is None or not tracking.started:
            return

        status = "failed" if outcome.error else "stopped" if outcome.was_stopped else "finished"
        if reason := tracking.close(status, self.run.screen.note):
            step = tracking.last_step
            extent = "has nothing of this run" if step < 0 else f"has this run up to step {step} only"
            self.run.warn(f"{tracking.name} {extent}: {reason}; log.txt says more")
