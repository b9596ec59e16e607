"""What the loops share that learn from what their own policy samples: how they begin, go on, evaluate and save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from tensordict import TensorDict

from rlpost.assemble import SamplingParts
from rlpost.errors import RewardError
from rlpost.evaluate import EvalResult, evaluate
from rlpost.memory import give_back_freed_memory
from rlpost.run import Run
from rlpost.screen import Screen, evaluation_line
from rlpost.settings import ExpertIterationSettings, GRPOSettings, SamplingSettings
from rlpost.settings.evaluation import samples_per_prompt
from rlpost.train.best import BestSoFar, restore_best
from rlpost.train.finish import evaluations_until, finish, make_up
from rlpost.train.standstill import LearningSoFar, watch, why_sampled
from rlpost.train.state import collection_state, load_run, must_stay, restore_collection, save_run

Settings = GRPOSettings | ExpertIterationSettings


@dataclass
class SampledProgress(LearningSoFar, BestSoFar):
    """How far a training is, and when it was best."""

    step: int = 0  # steps done
    eval_before: dict[str, float] | None = None  # the evaluation before the first step


P = TypeVar("P", bound=SampledProgress)


def show_sampling(parts: SamplingParts, screen: Screen) -> None:
    """Let the screen show what the collector does, and how far it is."""

    def sampled(ended: int, total: int, tokens: int) -> None:
        screen.phase("sampling", f"{total} completions", ended, total, tokens)

    parts.collector.on_phase = screen.phase
    parts.collector.on_sampled = sampled


def begin(settings: Settings, parts: SamplingParts, run: Run, progress: P) -> P:
    """`progress` with the evaluation of the starting model, where evaluation is on."""
    run.forget_after(-1)
    if settings.eval.enabled:
        progress.eval_before = evaluate_held_out(settings, parts, run, "before training").metrics()
        run.record(0, progress.eval_before)
        run.screen.line(evaluation_line(progress.eval_before, "before training"))
    return progress


def resume(settings: Settings, parts: SamplingParts, run: Run, checkpoint: Path, kind: type[P]) -> P:
    """Take up the state of `checkpoint`, whose weights the parts were assembled with."""
    state = load_run(checkpoint, settings, parts.model, parts.optimizer)
    restore_collection(parts, state)
    progress = kind(**state["progress"])
    for row in evaluations_until(checkpoint, progress.step):
        progress.is_new_best(row["step"], row)
    run.forget_after(progress.step)
    restore_best(run, progress)
    run.screen.note(f"resuming after step {progress.step} from {checkpoint}")
    if progress.step >= settings.steps:
        done = "1 step is" if progress.step == 1 else f"{progress.step} steps are"
        run.screen.note(f"nothing is left to do: {done} done; give more steps to go on")
    return progress


def owed_evaluation(settings: Settings, parts: SamplingParts, run: Run, progress: SampledProgress) -> EvalResult | None:
    """The evaluation after the last step done, where a signal has ended it before; else None."""
    measuring = Measuring(settings, parts, run, progress)
    due = evaluation_due(settings, progress.step)
    make_up(run, progress.step, progress, settings.checkpoint, evaluate=measuring, evaluation_due=due)
    return measuring.result


@dataclass
class Measuring:
    """Called, it evaluates after the last step done, keeps the result and gives its metrics."""

    settings: Settings
    parts: SamplingParts
    run: Run
    progress: SampledProgress
    result: EvalResult | None = None

    def __call__(self) -> dict[str, float]:
        when = f"after step {self.progress.step}"
        self.result = evaluate_held_out(self.settings, self.parts, self.run, when)
        return self.result.metrics() | self.run.memory.metrics(self.parts.device)


def check_failed(settings: Settings, step: int, metrics: Mapping[str, float]) -> None:
    """Raise RewardError where more rewards of a step failed than `max_failed_share` allows."""
    count = settings.prompts_per_step * settings.group_size
    failed = metrics["reward/failed"]
    if failed > settings.max_failed_share * count:
        raise RewardError(
            f"step {step}: {failed:.0f} of {count} rewards failed, more than the share "
            f"max_failed_share={settings.max_failed_share:g} allows; the run's log.txt says how"
        )


def finish_step(
    settings: Settings,
    parts: SamplingParts,
    run: Run,
    progress: SampledProgress,
    step: int,
    metrics: dict[str, float],
    batch: TensorDict,
) -> EvalResult | None:
    """Record a step that trained on `batch`, save it if that is due, then evaluate if that is."""
    progress.step = step
    give_back_freed_memory()  # what training has freed is not beside what evaluating and saving take
    watch(run, progress, metrics, lambda: why_sampled(settings, run, progress, metrics))
    measuring = Measuring(settings, parts, run, progress)
    finish(
        run,
        step,
        metrics | run.memory.metrics(parts.device),
        batch,
        progress,
        settings.checkpoint,
        save=lambda: save(settings, parts, run, progress),
        evaluate=measuring,
        evaluation_due=evaluation_due(settings, step),
    )
    return measuring.result


def save(settings: Settings, parts: SamplingParts, run: Run, progress: SampledProgress) -> None:
    """Write a checkpoint of the last finished step."""
    state = {**collection_state(parts), "progress": asdict(progress), "must_stay": must_stay(settings)}
    save_run(
        run,
        progress.step,
        parts.model,
        parts.tokenizer,
        parts.optimizer,
        settings.checkpoint,
        state,
        best=progress.best_step,
    )


def evaluation_due(settings: Settings, step: int) -> bool:
    """Whether held-out prompts are played after `step`."""
    every = settings.eval.every
    return settings.eval.enabled and (step == settings.steps or (every > 0 and step % every == 0))


def evaluate_held_out(settings: Settings, parts: SamplingParts, run: Run, when: str) -> EvalResult:
    """Accuracy on held-out prompts; `when` tells a plain terminal which evaluation is under way.

    One completion a prompt is greedy; several, as `eval.k` asks for them, are drawn like those trained on.
    """
    num_prompts = min(settings.eval.limit or settings.env.eval_limit, parts.eval_env.num_tasks)
    samples = samples_per_prompt(settings.eval.k, settings.eval.samples)
    if not run.screen.is_live:
        run.screen.line(f"evaluating on {num_prompts} held-out prompts, {when} ...")
    before = parts.policy.tokens_sampled

    def progress(done: int, total: int) -> None:
        run.screen.phase("evaluating", "", done, total, parts.policy.tokens_sampled - before)

    return evaluate(
        parts.eval_env,
        parts.policy,
        num_prompts=num_prompts,
        sampling=SamplingSettings(temperature=0.0) if samples == 1 else settings.sampling,
        k=settings.eval.k,
        samples=samples,
        progress=progress,
    )
