"""Supervised fine-tuning, from top to bottom: samples in a shuffled order, minibatches, update, held-out loss.

Samples are packed into microbatches without seeing each other, and the loss of a minibatch is
averaged over all its trained tokens, so neither packing nor the size of a microbatch changes the
gradient (`loss.aggregation=sequence_mean` lets every sample weigh the same instead).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path

import torch

from rlpost.assemble import build_tracker, resolve_numbers
from rlpost.assemble_sft import SFTParts, assemble_sft
from rlpost.batching import Row
from rlpost.data.demonstrations import Sample
from rlpost.errors import DataError
from rlpost.evaluate import evaluate
from rlpost.memory import give_back_freed_memory, keep_freed_memory
from rlpost.objectives.sft_objective import SFTOutput, sft_metrics
from rlpost.optim import learning_rate_of
from rlpost.output import output_into
from rlpost.run import Run
from rlpost.screen import Screen, evaluation_line
from rlpost.settings import SamplingSettings, SFTSettings
from rlpost.settings.run import RunRequest
from rlpost.train.best import BestSoFar, restore_best
from rlpost.train.finish import evaluations_until, finish, make_up
from rlpost.train.needs import check_needs
from rlpost.train.sft_narration import announce, conclude
from rlpost.train.standstill import LearningSoFar, say_at_end, watch
from rlpost.train.state import load_run, must_stay, save_run
from rlpost.train.update import Learner, Microbatches, Update, diverged, fill_reference, read_log_probs, update

WHY_NOTHING = "no token's loss moves a weight; look at the rows with rlpost data preview"
ONE_SAMPLE = 1  # tokens a microbatch that no two samples fit in


@dataclass
class Progress(LearningSoFar, BestSoFar):
    """How far a training is, and when it was best."""

    step: int = 0  # steps done, an optimizer step each
    position: int = 0  # samples trained on, those of every epoch counted
    eval_before: dict[str, float] | None = None  # the evaluation before the first step
    eval_after: dict[str, float] | None = None  # the latest one after a step


def train(settings: SFTSettings, request: RunRequest) -> int:
    """Run or resume the training that `settings` describes; returns the process's exit code."""
    screen = Screen(plain=request.plain)
    tracker = build_tracker(settings.tracking, request)
    with Run(request, seed=settings.seed, total_steps=settings.steps or 0, screen=screen, tracker=tracker) as run:
        keep_freed_memory()
        torch.manual_seed(settings.seed)
        torch.use_deterministic_algorithms(settings.deterministic)
        checkpoint = run.resume_from
        run.catch_signals()
        check_needs(settings, run)
        with screen, contextlib.ExitStack() as opened:
            with screen.waiting("reading the data, loading the model"), output_into(run.folder / "log.txt"):
                settings, numbers = resolve_numbers(settings, checkpoint)
                run.keep_numbers(numbers.record())
                parts = assemble_sft(settings, checkpoint)
                if parts.accuracy:
                    opened.enter_context(contextlib.closing(parts.accuracy)).policy.start()
            progress = restore(settings, parts, checkpoint) if checkpoint else Progress()
            run.plan(total_steps(settings, parts, progress))
            announce(settings, parts, numbers, run)
            tokens = settings.tokens_per_microbatch if settings.packing else ONE_SAMPLE
            microbatches = Microbatches.shown_on(screen, tokens, parts.device)
            begin(settings, parts, microbatches, run, progress, checkpoint)
            learn(settings, parts, microbatches, run, progress)
        conclude(run, progress.step, progress.eval_before, progress.eval_after, progress)
        say_at_end(run, progress)
    return run.exit_code


def learn(settings: SFTSettings, parts: SFTParts, microbatches: Microbatches, run: Run, progress: Progress) -> None:
    """The loop: every step still to do, one minibatch each."""
    learner = Learner(
        parts.model,
        parts.optimizer,
        parts.objective,
        settings.optim,
        settings.model.autocast,
        total_updates=run.total_steps,
    )
    stream = parts.samples.iter_from(progress.position)
    for step in run.steps(done=progress.step):
        started = time.perf_counter()
        samples = list(itertools.islice(stream, min(settings.minibatch_size, samples_left(settings, parts, progress))))
        run.screen.phase("training")
        rows = [row_of(sample) for sample in samples]
        fill_reference(parts.reference, microbatches, rows, kind=settings.model.autocast)
        try:
            updated = update(learner, microbatches, rows, number=step - 1)
        except FloatingPointError as error:
            folder = run.folder / f"diverged-step-{step:06d}"
            write_samples(folder / "samples.jsonl", samples)
            raise diverged(parts.model, parts.tokenizer, folder, f"step {step}: {error}") from error
        progress.step = step
        progress.position += len(samples)
        give_back_freed_memory()  # what training has freed is not beside what evaluating and saving take
        metrics = step_metrics(parts, updated, rows, progress)
        metrics["time/step"] = time.perf_counter() - started
        watch(run, progress, metrics, lambda: WHY_NOTHING)
        finish(
            run,
            step,
            metrics | run.memory.metrics(parts.device),
            None,
            progress,
            settings.checkpoint,
            save=lambda: save(settings, parts, run, progress),
            evaluate=lambda: evaluate_step(settings, parts, microbatches, run, progress),
            evaluation_due=evaluation_due(settings, run, step),
        )


def total_steps(settings: SFTSettings, parts: SFTParts, progress: Progress) -> int:
    """Steps of the whole run, those done included: as many as asked for, or as the epochs fill."""
    if reached(settings, progress):
        return progress.step
    return settings.steps or progress.step + ceil(samples_left(settings, parts, progress) / settings.minibatch_size)


def samples_left(settings: SFTSettings, parts: SFTParts, progress: Progress) -> int:
    """Samples until training ends. An epoch's end is no boundary of minibatches, but the last one's is."""
    if settings.steps is not None:
        return (settings.steps - progress.step) * settings.minibatch_size
    return (settings.epochs or 1) * parts.samples.count() - progress.position


def row_of(sample: Sample) -> Row:
    """A sample as packing and the objective read it: what comes before the first trained id is its prompt."""
    ids, mask = torch.tensor(sample.ids), torch.tensor(sample.mask)
    response = ids[sample.prompt_length :]
    return Row(
        prompt=ids[: sample.prompt_length],
        response=response,
        sampled=mask[sample.prompt_length :],
        sampler_log_probs=torch.zeros(response.numel()),  # nothing was sampled, and no objective here reads them
        advantage=1.0,
    )


def step_metrics(
    parts: SFTParts, updated: Update[SFTOutput], rows: Sequence[Row], progress: Progress
) -> dict[str, float]:
    """What the step did; `epoch` counts the passes over all samples so far."""
    return {
        **sft_metrics(updated.outputs),
        "tokens/read": float(sum(row.prompt.numel() + row.response.numel() for row in rows)),
        "grad_norm": updated.grad_norm,
        "lr": learning_rate_of(parts.optimizer),
        "epoch": progress.position / parts.samples.count(),
    }


def evaluation_due(settings: SFTSettings, run: Run, step: int) -> bool:
    """Whether held-out rows are read after `step`."""
    every = settings.eval.every
    return settings.eval.enabled and (step == run.total_steps or (every > 0 and step % every == 0))


def evaluate_step(
    settings: SFTSettings, parts: SFTParts, microbatches: Microbatches, run: Run, progress: Progress
) -> dict[str, float]:
    """Evaluate after the last step done; training ends where the accuracy is what was asked for."""
    progress.eval_after = evaluate_held_out(settings, parts, microbatches, run, f"after step {progress.step}")
    if reached(settings, progress):
        end_here(settings, run, progress)
    return progress.eval_after | run.memory.metrics(parts.device)


def evaluate_held_out(
    settings: SFTSettings, parts: SFTParts, microbatches: Microbatches, run: Run, when: str
) -> dict[str, float]:
    """Loss per trained token of the held-out rows, and where asked for the accuracy of greedy replies."""
    screen = run.screen
    if not screen.is_live:
        screen.line(f"evaluating on {len(parts.held_out)} held-out rows, {when} ...")
    screen.phase("evaluating", "the loss")
    rows = [row_of(sample) for sample in parts.held_out]
    read = read_log_probs(
        parts.model,
        microbatches,
        rows,
        kind=settings.model.autocast,
        progress=lambda done, total: screen.phase("evaluating", "the loss", done, total),
    )
    tokens = sum(row.num_trained for row in rows)
    metrics = {
        "eval/loss": -sum(log_probs.double().sum().item() for log_probs in read) / tokens,
        "eval/tokens": float(tokens),
    }
    if parts.accuracy is None:
        return metrics
    policy = parts.accuracy.policy
    parts.accuracy.updater.push(parts.model)
    before = policy.tokens_sampled
    result = evaluate(
        parts.accuracy.env,
        policy,
        num_prompts=min(settings.eval.limit or settings.env.eval_limit, parts.accuracy.env.num_tasks),
        sampling=SamplingSettings(temperature=0.0),
        progress=lambda done, total: screen.phase("evaluating", "replies", done, total, policy.tokens_sampled - before),
    )
    parts.accuracy.policy.rest()
    return metrics | result.metrics()


def reached(settings: SFTSettings, progress: Progress) -> bool:
    """Whether the latest held-out accuracy is what `eval.stop_at_accuracy` asks for.

    Raises DataError where the environment measures none.
    """
    wanted, evaluated = settings.eval.stop_at_accuracy, progress.eval_after
    if wanted is None or evaluated is None:
        return False
    if "eval/accuracy_lenient" not in evaluated:
        raise DataError(
            "eval.stop_at_accuracy: this environment measures no accuracy: set env.accuracy, or leave it out"
        )
    return evaluated["eval/accuracy_lenient"] >= wanted


def end_here(settings: SFTSettings, run: Run, progress: Progress) -> None:
    """Make the step under way the last, and say so."""
    assert progress.eval_after is not None
    progress.eval_after["eval/target_reached"] = 1.0
    run.plan(progress.step)
    run.screen.note(
        f"training ends after step {progress.step}: the held-out accuracy of "
        f"{progress.eval_after['eval/accuracy_lenient']:.1%} has reached "
        f"eval.stop_at_accuracy={settings.eval.stop_at_accuracy:g}"
    )


def begin(
    settings: SFTSettings,
    parts: SFTParts,
    microbatches: Microbatches,
    run: Run,
    progress: Progress,
    checkpoint: Path | None,
) -> None:
    """Evaluate the starting model, where evaluation is on; a run that goes on has done so."""
    if checkpoint is None:
        run.forget_after(-1)
        if settings.eval.enabled:
            progress.eval_before = evaluate_held_out(settings, parts, microbatches, run, "before training")
            run.record(0, progress.eval_before)
            run.screen.line(evaluation_line(progress.eval_before, "before training"))
        return
    run.forget_after(progress.step)
    restore_best(run, progress)
    run.screen.note(f"resuming after step {progress.step} from {checkpoint}")
    make_up(
        run,
        progress.step,
        progress,
        settings.checkpoint,
        evaluate=lambda: evaluate_step(settings, parts, microbatches, run, progress),
        evaluation_due=evaluation_due(settings, run, progress.step),
    )
    if progress.step >= run.total_steps:
        done = "1 step is" if progress.step == 1 else f"{progress.step} steps are"
        more = "its accuracy is what was asked for" if reached(settings, progress) else "give more steps or epochs"
        run.screen.note(f"nothing is left to do: {done} done; {more}")


def restore(settings: SFTSettings, parts: SFTParts, checkpoint: Path) -> Progress:
    """Take up the state of `checkpoint`, whose weights the parts were assembled with.

    Raises DataError where the samples are not those the run began with.
    """
    state = load_run(checkpoint, settings, parts.model, parts.optimizer)
    if state["samples"] != parts.fingerprint:
        raise DataError(
            f"--resume: the run began with {state['samples']}, and this data gives {parts.fingerprint}: resume with "
            "the data, the tokenizer and the env settings it began with"
        )
    progress = Progress(**state["progress"])
    for row in evaluations_until(checkpoint, progress.step):
        progress.is_new_best(row["step"], row)
        progress.eval_after = {k: v for k, v in row.items() if k.startswith("eval/") and v is not None}
    return progress


def save(settings: SFTSettings, parts: SFTParts, run: Run, progress: Progress) -> None:
    """Write a checkpoint of the last finished step."""
    state = {"samples": parts.fingerprint, "progress": asdict(progress), "must_stay": must_stay(settings)}
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


def write_samples(file: Path, samples: Iterable[Sample]) -> None:
    """What a step was about to train on, one JSON object a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"where": s.where, "ids": s.ids, "mask": [int(m) for m in s.mask]} for s in samples]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
