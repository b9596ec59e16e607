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
from rlpost.screen import evaluation_line
from rlpost.settings import ExpertIterationSettings, GRPOSettings, SamplingSettings
from rlpost.settings.evaluation import samples_per_prompt
from rlpost.train.best import BestSoFar, restore_best
from rlpost.train.state import collection_state, load_run, must_stay, restore_collection, save_run

Settings = GRPOSettings | ExpertIterationSettings


@dataclass
class SampledProgress(BestSoFar):
    """How far a training is, and when it was best."""

    step: int = 0  # steps done
    eval_before: dict[str, float] | None = None  # the evaluation before the first step


P = TypeVar("P", bound=SampledProgress)


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
    run.forget_after(progress.step)
    restore_best(run, progress)
    run.screen.note(f"resuming after step {progress.step} from {checkpoint}")
    if progress.step >= settings.steps:
        done = "1 step is" if progress.step == 1 else f"{progress.step} steps are"
        run.screen.note(f"nothing is left to do: {done} done; give more steps to go on")
    return progress


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
    """Record a step that trained on `batch`; evaluate if that is due, save if it is, or if none was better so far."""
    progress.step = step
    give_back_freed_memory()  # what training has freed is not beside what evaluating and saving take
    when = f"after step {step}"
    result = evaluate_held_out(settings, parts, run, when) if evaluation_due(settings, step) else None
    evaluated = result.metrics() if result else {}
    run.screen.phase("recording", f"step {step}")
    run.record(step, metrics | evaluated | run.memory.metrics(parts.device), batch)
    if evaluated:
        run.screen.line(evaluation_line(evaluated, when))
    is_best = progress.is_new_best(step, evaluated)
    if run.due(step, settings.checkpoint.every) or is_best:
        save(settings, parts, run, progress)
    return result


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
    return evaluate(
        parts.eval_env,
        parts.policy,
        num_prompts=num_prompts,
        sampling=SamplingSettings(temperature=0.0) if samples == 1 else settings.sampling,
        k=settings.eval.k,
        samples=samples,
        progress=lambda done, total: run.screen.phase("evaluating", done=done, total=total),
    )
