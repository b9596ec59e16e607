"""The lines that a training prints before its first and after its last step."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rlpost import record
from rlpost.catalog import TRAIN_GRPO, option_of
from rlpost.config.paths import BEST, as_model, newest_checkpoint, step_of
from rlpost.data.template_choice import thinking_cut_short
from rlpost.errors import DataError
from rlpost.evaluation.saved import compare, held_out_table, read_evaluation
from rlpost.evaluation.statistics import FEWEST_DIFFERING, few_prompts, few_rows
from rlpost.model.families import explain
from rlpost.model.load import describe
from rlpost.model.logprobs import verdict_of
from rlpost.model.precision import Precision
from rlpost.runs.reader import code_of, evaluation_words, read_run
from rlpost.runs.writer import Run
from rlpost.settings import EnvSettings, MixSettings, ModelSettings
from rlpost.settings.commands import HeldOutSettings, says_where
from rlpost.text import counted
from rlpost.train.progress import Progress, decisive

FEWEST_TO_DECIDE = 10  # held-out prompts on which training can be ended early, and as many to report


def open_screen(run: Run, numbers: Precision, lines: Sequence[str], notes: Sequence[str | None], about: str) -> None:
    """Say `lines` and where the run leaves its record; then begin to show the steps, with `notes`."""
    follows = f", and {run.tracker.name} follows" if run.tracker else ""
    plan = [*lines, f"writes  {run.folder}{follows}"]
    for line in plan:
        run.screen.line(line)
    log = run.folder / "log.txt"
    run.screen.open(title=run.folder.name, about=about, total_steps=run.total_steps, log=log, plan=plan)
    if numbers.warning is not None:
        run.warn(numbers.warning)
    for note in filter(None, notes):
        run.screen.note(note)


def thinking_note(env: EnvSettings, tokenizer: Any) -> str | None:
    """The warning if a completion has no room for the thinking that the model begins with."""
    return thinking_cut_short(tokenizer, env.max_completion_tokens, "env.max_completion_tokens")


def model_line(settings: ModelSettings, folder: Path, model: PreTrainedModel) -> str:
    """The model that is trained."""
    size = _short(sum(p.numel() for p in model.parameters()))
    return f"model   {settings.path}: {describe(folder)}, {size} parameters, {model.device}"


def reading_lines(model: PreTrainedModel, completions_a_prompt: int = 1) -> list[str]:
    """The line on the cost of reading `model` unpacked; none for one that is read packed."""
    line = explain(model, verdict_of(model), completions_a_prompt)
    return [f"reads   {line}"] if line else []


def name_of_data(env: EnvSettings) -> str:
    """The environment, and where its rows come from where it has rows, `gsm8k from data/gsm8k`; a mix's sources."""
    if isinstance(env, MixSettings):
        return f"mix of {', '.join(env.sources)}"
    source = getattr(env, "path", None)
    return option_of("env", type(env)) + (f" from {source}" if source else "")


def _short(count: int) -> str:
    """Three digits of a large number: 90.6k, 135M, 1.54B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def say_stopped(run: Run) -> None:
    """Print after which step a signal has ended the run, and the command that goes on from there."""
    saved = newest_checkpoint(run.folder)
    where = "" if says_where(run.request.command) else f" --out {shlex.quote(str(run.folder))}"
    again = f"the same command with --resume auto{where}"
    if saved is not None:  # the checkpoint's run keeps all settings except those that name code
        code = code_of(run.request.overrides)
        verb = " ".join(run.request.command[:3])
        again = f"{verb} --resume {shlex.join([str(run.folder), *code])}"
    after = "before the first step" if saved is None else f"after step {step_of(saved)}"
    run.screen.line(f"stopped {after}; to go on: {again}")


def say_evaluate(run: Run, *more: str) -> None:
    """Print the command that evaluates the run in its own environment, with `more`; nothing where there is none."""
    if (words := evaluation_words(read_run(run.folder))) is not None:
        _say_command(run, "evaluate it:", "eval", *words, *more)


def say_talk(run: Run) -> None:
    """Print the command that talks to the run's model."""
    run.screen.line("talk to it:   " + shlex.join(["rlpost", "chat", str(run.folder)]))


def say_train_on(run: Run, *more: str) -> None:
    """Print the command that trains the run's model with GRPO on the same environment, and `more`."""
    words = [word for word in run.request.overrides if word.startswith(("env=", "env.", "plugin="))]
    taken = [word for word in words if word.partition("=")[0] not in TRAIN_GRPO.without]
    _say_command(run, "train on:", "train grpo", *taken, *more)


def _say_command(run: Run, label: str, verb: str, *words: str) -> None:
    run.screen.line(f"{label:<13} rlpost {verb} {shlex.join([f'model={as_model(run.folder)}', *words])}")


def say_best(run: Run, progress: Progress) -> None:
    """Print the best step, its figure and checkpoint, or that none was better than the start; nothing if unmeasured."""
    rows, _ = record.read_metrics(run.folder / "metrics.jsonl")
    row = next((row for row in rows if row["step"] == progress.best_step), {})
    chosen_by, at_first = decisive(row), decisive(progress.eval_before or {})
    figure = record.main_figures([progress.eval_before or {}, row])[-1] or chosen_by
    if figure is None or chosen_by is None:
        return
    name = "" if figure.is_share else "loss " if progress.best_loss is not None else "reward "
    place = f"{run.folder}/checkpoints/{BEST}"
    told = figure.as_text("prompt" if progress.best_loss is None else "row")
    if at_first is None or _is_better(run, progress, at_first, chosen_by, by_prompt=chosen_by == figure):
        run.screen.line(f"best: after step {progress.best_step}, {name}{told}, in {place}")
    else:
        count, unit = figure.prompts, "prompt" if progress.best_loss is None else "row"
        why = "no step was better than the start by more than chance"
        if count is not None and count < FEWEST_DIFFERING:
            why = f"{counted(count, f'held-out {unit}')} cannot tell whether a step was better than the start"
        run.screen.line(f"{why}; {place} is that of step {progress.best_step}, {name}{told}")


def _is_better(run: Run, progress: Progress, first: record.Interval, best: record.Interval, *, by_prompt: bool) -> bool:
    """Whether the best step is better than the start: `by_prompt` if the completions were kept, else by intervals."""
    gain = (best.value - first.value) * (1 if progress.best_loss is None else -1)
    tables = [held_out_table(run.folder, step) for step in (0, progress.best_step or 0)]
    if gain > 0 and by_prompt and all(table.is_file() for table in tables):
        measures = compare(*map(read_evaluation, tables)).measures
        measure = "accuracy_lenient" if best.is_share else "reward" if progress.best_loss is None else "loss"
        return measures[measure].difference.is_significant
    return gain > 0 and best.differs_from(first)


MEASURES = {
    record.LOSS: "loss per token",
    record.ACCURACY: "accuracy",
    record.STRICT: "accuracy, strict",
    record.REWARD: "reward",
    record.PAIR_ACCURACY: "pair accuracy",
    record.MARGIN: "reward margin",
}


def say_before_and_after(run: Run, progress: Progress) -> None:
    """Print the held-out figures before and after training, and the number of prompts.

    Strict accuracy and reward are printed only if they differ from the accuracy.
    """
    both = progress.eval_before, progress.eval_after
    if None in both:
        return
    found = {key: [record.interval(metrics or {}, key) for metrics in both] for key in MEASURES}
    shown = record.worth_showing({key: [f and f.value for f in figures] for key, figures in found.items()})
    rows = {key: figures for key in shown if None not in (figures := found[key])}
    counts = [
        figure.prompts for key, figures in rows.items() if key not in record.OF_ROWS for figure in figures if figure
    ]
    said = counts[-1] if counts else None
    on = "" if said is None else f" on {counted(said, 'held-out prompt')}"
    run.screen.line("")
    run.screen.line(f"before and after training{on or ', held out'}, 95% intervals", "bold")
    for key, figures in rows.items():
        unit = "row" if key in record.OF_ROWS else "prompt"
        told = [figure.as_text(unit, shown=said) for figure in figures if figure]
        name = "loss per pair" if key == record.LOSS and record.MARGIN in rows else MEASURES[key]
        run.screen.line(f"  {name:<18}{'  ->  '.join(told)}", "bold")
    if record.STRICT in rows:
        run.screen.line(f"  {record.MEANS_STRICT}")


def held_out_told(settings: HeldOutSettings, env: EnvSettings, played: int, available: int) -> tuple[list[str], str]:
    """How the held-out prompts that are `played` divide, where some decide; and what to say where they are few.

    `available` are there to be played. Raises DataError where they are too few to decide and to report.
    """
    more = _more_held_out(env, is_limited=played < available)
    decide = played // 2 if settings.stops else 0
    if settings.stops and decide < FEWEST_TO_DECIDE:
        raise DataError(
            f"{settings.stops[0]} is decided on half of the held-out prompts, and the other half is reported: "
            f"{counted(played, 'prompt')} are too few, it takes {2 * FEWEST_TO_DECIDE}; {more}, or leave it out"
        )
    lines = []
    if settings.stops:
        asked = ", ".join(f"{key}={getattr(settings, key.partition('.')[2]):g}" for key in settings.stops)
        lines = [f"ends    early by {asked}: {decide} held-out prompts decide, {played - decide} others are reported"]
    few = few_prompts(played - decide)
    return lines, f"{few}; {more}" if few else ""


def few_rows_note(env: EnvSettings, rows: int, *, is_limited: bool) -> str:
    """The warning about a held-out loss on few rows."""
    few = few_rows(rows)
    return f"{few}; {_more_held_out(env, is_limited=is_limited)}" if few else ""


def _more_held_out(env: EnvSettings, *, is_limited: bool) -> str:
    if is_limited:
        return "raise eval.limit"
    if hasattr(env, "test_path"):
        return "hold out more with env.test_path=FILE, or a larger env.held_out"
    return "hold out more with a larger env.held_out" if hasattr(env, "held_out") else "hold out more"
