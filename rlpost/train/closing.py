"""The lines that end a training: held-out figures before and after, the best step, and what to type next."""

from __future__ import annotations

import shlex
from pathlib import Path

from rlpost import record
from rlpost.catalog import TRAIN_GRPO
from rlpost.config.paths import BEST, as_model
from rlpost.evaluation.comparison import compare
from rlpost.evaluation.saved import held_out_table, read_evaluation
from rlpost.evaluation.statistics import FEWEST_DIFFERING
from rlpost.runs.reader import evaluation_words, newest_checkpoint, read_run, step_of
from rlpost.settings.commands import RunRequest
from rlpost.text import counted
from rlpost.train.progress import Closing, Progress, decisive


def stopped_line(request: RunRequest) -> str:
    """After which step a signal has ended the run, and the command that goes on from there."""
    saved = newest_checkpoint(request.folder)
    after = "before the first step" if saved is None else f"after step {step_of(saved)}"
    return f"stopped {after}; to go on: {read_run(request.folder).to_go_on}"


def before_and_after(progress: Progress) -> list[str]:
    """The held-out figures before and after training, and the number of prompts; empty if not both were measured.

    Strict accuracy and reward are given only if they differ from the accuracy.
    """
    if progress.eval_before is None or progress.eval_after is None:
        return []
    found = [each for each in record.held_out(progress.eval_before, progress.eval_after) if each.before and each.after]
    count = record.prompts_of(found)
    on = ", held out" if count is None else f" on {counted(count, 'held-out prompt')}"
    lines = [f"  {line}" for line in record.held_out_lines(found, count)]
    return ["", f"before and after training{on}, 95% intervals", *lines]


def last_lines(closing: Closing, request: RunRequest, progress: Progress) -> list[str]:
    """The best step, and the commands to type next, for a run that was not stopped."""
    folder, more = request.folder, closing.reward_words
    words = [*closing.notes, *_best(folder, progress)]
    if closing.talks:
        words.append("talk to it:   " + shlex.join(["rlpost", "chat", str(folder)]))
    if (evaluated := evaluation_words(read_run(folder))) is not None:
        words.append(_command(folder, "evaluate it:", "eval", *evaluated, *(more or [])))
    if more is not None:
        kept = [word for word in request.overrides if word.startswith(("env=", "env.", "plugin="))]
        kept = [word for word in kept if word.partition("=")[0] not in TRAIN_GRPO.without]
        words.append(_command(folder, "train on:", "train grpo", *kept, *more))
    return words


def _command(folder: Path, label: str, verb: str, *words: str) -> str:
    return f"{label:<13} rlpost {verb} {shlex.join([f'model={as_model(folder)}', *words])}"


def _best(folder: Path, progress: Progress) -> list[str]:
    """The best step, its figure and checkpoint, or that none was better than the start; empty if unmeasured."""
    rows, _ = record.read_metrics(folder / "metrics.jsonl")
    row = next((row for row in rows if row["step"] == progress.best_step), {})
    chosen_by, at_first = decisive(row), decisive(progress.eval_before or {})
    figure = record.main_figures([progress.eval_before or {}, row])[-1] or chosen_by
    if figure is None or chosen_by is None:
        return []
    name = "" if figure.is_share else "loss " if progress.best_loss is not None else "reward "
    place = f"{folder}/checkpoints/{BEST}"
    text = figure.as_text("prompt" if progress.best_loss is None else "row")
    if at_first is None or _is_better(folder, progress, at_first, chosen_by, by_prompt=chosen_by == figure):
        return [f"best: after step {progress.best_step}, {name}{text}, in {place}"]
    count, unit = figure.prompts, "prompt" if progress.best_loss is None else "row"
    why = "no step was better than the start by more than chance"
    if count is not None and count < FEWEST_DIFFERING:
        why = f"{counted(count, f'held-out {unit}')} cannot tell whether a step was better than the start"
    return [f"{why}; {place} is that of step {progress.best_step}, {name}{text}"]


def _is_better(
    folder: Path, progress: Progress, first: record.Interval, best: record.Interval, *, by_prompt: bool
) -> bool:
    """Whether the best step is better than the start: `by_prompt` if the completions were kept, else by intervals."""
    gain = (best.value - first.value) * (1 if progress.best_loss is None else -1)
    tables = [held_out_table(folder, step) for step in (0, progress.best_step or 0)]
    if gain > 0 and by_prompt and all(table.is_file() for table in tables):
        measures = compare(*map(read_evaluation, tables)).measures
        measure = "accuracy_lenient" if best.is_share else "reward" if progress.best_loss is None else "loss"
        return measures[measure].difference.is_significant
    return gain > 0 and best.differs_from(first)
