"""The facts of a training, made from its settings, its parts and the machine; and the lines that end it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpost import record
from rlpost.catalog import TRAIN_GRPO, option_of
from rlpost.config.paths import BEST, as_model, newest_checkpoint, step_of
from rlpost.data.template_choice import thinking_cut_short
from rlpost.errors import DataError
from rlpost.model.families import explain
from rlpost.model.load import describe
from rlpost.model.logprobs import verdict_of
from rlpost.model.precision import Precision
from rlpost.record import Fact
from rlpost.settings import EnvSettings, MixSettings
from rlpost.settings.commands import HeldOutSettings, RunRequest, says_where
from rlpost.text import counted
from rlpost.train.progress import Progress, decisive

FEWEST_TO_DECIDE = 10  # held-out prompts on which training can be ended early, and as many to report


def facts_of(settings: Any, parts: Any, precision: Precision, *, ranks: int, total_steps: int) -> list[Fact]:
    """The facts of a training that is about to begin or to go on, in the order in which they are shown.

    `parts` are those of the training, `ranks` how many processes train, `total_steps` its steps, those done included.
    """
    model = parts.model
    reading = explain(model, verdict_of(model), settings.group_size if settings.learns_from_own else 1)
    return [
        Fact("model", f"{settings.model.path}: {describe(parts.model_folder)}, {_size_of(model)}, {model.device}"),
        Fact("precision", precision.line.removeprefix("precision").strip(), note=precision.warning or ""),
        *map(Fact.of_line, settings.cluster.rank_lines(ranks)),
        *([Fact("reads", reading)] if reading else []),
        *parts.facts(total_steps),
        *(Fact("data", note=note) for note in parts.notes),
    ]


def held_out_facts(settings: HeldOutSettings, env: EnvSettings, played: int, available: int) -> list[Fact]:
    """How the held-out prompts that are `played` divide, where some decide when training ends; a note if they are few.

    `available` are there to be played. Raises DataError where they are too few to decide and to report.
    """
    from rlpost.evaluation.statistics import few_prompts

    more = more_held_out(env, is_limited=played < available)
    decide = played // 2 if settings.stops else 0
    if settings.stops and decide < FEWEST_TO_DECIDE:
        raise DataError(
            f"{settings.stops[0]} is decided on half of the held-out prompts, and the other half is reported: "
            f"{counted(played, 'prompt')} are too few, it takes {2 * FEWEST_TO_DECIDE}; {more}, or leave it out"
        )
    facts = []
    if settings.stops:
        keys = ", ".join(f"{key}={getattr(settings, key.partition('.')[2]):g}" for key in settings.stops)
        facts = [
            Fact("ends", f"early by {keys}: {decide} held-out prompts decide, {played - decide} others are reported")
        ]
    few = few_prompts(played - decide)
    return [*facts, Fact("eval", note=f"{few}; {more}" if few else "")]


def thinking_note(env: EnvSettings, tokenizer: Any) -> str:
    """The warning if a completion has no room for the thinking that the model begins with."""
    return thinking_cut_short(tokenizer, env.max_completion_tokens, "env.max_completion_tokens") or ""


def name_of_data(env: EnvSettings) -> str:
    """The environment, and where its rows come from where it has rows, `gsm8k from data/gsm8k`; a mix's sources."""
    if isinstance(env, MixSettings):
        return f"mix of {', '.join(env.sources)}"
    source = getattr(env, "path", None)
    return option_of("env", type(env)) + (f" from {source}" if source else "")


def adapter_facts(settings: Any, model: Any) -> list[Fact]:
    """The adapter, if one is trained."""
    if not settings.lora.enabled:
        return []
    from rlpost.model.lora import describe_adapter

    return [Fact("lora", describe_adapter(model))]


def _size_of(model: Any) -> str:
    """The number of parameters in three digits: 90.6k, 135M, 1.54B."""
    count = sum(p.numel() for p in model.parameters())
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit} parameters"
    return f"{count} parameters"


def trained_on_too(shared: int, of: str, figures: str) -> Fact:
    """The warning that `shared` of the held-out prompts or rows are trained on."""
    are = "are" if figures == "figures" else "is"
    note = (
        f"{shared} of {of} are trained on too, so {figures} called held-out {are} not: take them out of one of the two"
    )
    return Fact("eval", note=note)


def more_held_out(env: EnvSettings, *, is_limited: bool) -> str:
    """How to measure on more held-out prompts or rows."""
    if is_limited:
        return "raise eval.limit"
    if hasattr(env, "test_path"):
        return "hold out more with env.test_path=FILE, or a larger env.held_out"
    return "hold out more with a larger env.held_out" if hasattr(env, "held_out") else "hold out more"


# The end of a training


MEASURES = {
    record.LOSS: "loss per token",
    record.ACCURACY: "accuracy",
    record.STRICT: "accuracy, strict",
    record.REWARD: "reward",
    record.PAIR_ACCURACY: "pair accuracy",
    record.MARGIN: "reward margin",
}


def stopped_line(request: RunRequest) -> str:
    """After which step a signal has ended the run, and the command that goes on from there."""
    saved = newest_checkpoint(request.folder)
    where = "" if says_where(request.command) else f" --out {shlex.quote(str(request.folder))}"
    again = f"the same command with --resume auto{where}"
    if saved is not None:  # resuming takes the settings from the run folder, but no code
        from rlpost.runs.reader import code_of

        verb = " ".join(request.command[:3])
        again = f"{verb} --resume {shlex.join([str(request.folder), *code_of(request.overrides)])}"
    after = "before the first step" if saved is None else f"after step {step_of(saved)}"
    return f"stopped {after}; to go on: {again}"


def before_and_after(progress: Progress) -> list[str]:
    """The held-out figures before and after training, and the number of prompts; empty if not both were measured.

    Strict accuracy and reward are given only if they differ from the accuracy.
    """
    both = progress.eval_before, progress.eval_after
    if None in both:
        return []
    found = {key: [record.interval(metrics or {}, key) for metrics in both] for key in MEASURES}
    shown = record.worth_showing({key: [f and f.value for f in figures] for key, figures in found.items()})
    rows = {key: figures for key in shown if None not in (figures := found[key])}
    counts = [
        figure.prompts for key, figures in rows.items() if key not in record.OF_ROWS for figure in figures if figure
    ]
    count = counts[-1] if counts else None
    on = "" if count is None else f" on {counted(count, 'held-out prompt')}"
    lines = ["", f"before and after training{on or ', held out'}, 95% intervals"]
    for key, figures in rows.items():
        unit = "row" if key in record.OF_ROWS else "prompt"
        texts = [figure.as_text(unit, shown=count) for figure in figures if figure]
        name = "loss per pair" if key == record.LOSS and record.MARGIN in rows else MEASURES[key]
        lines.append(f"  {name:<18}{'  ->  '.join(texts)}")
    if record.STRICT in rows:
        lines.append(f"  {record.MEANS_STRICT}")
    return lines


def last_lines(settings: Any, parts: Any, request: RunRequest, progress: Progress) -> list[str]:
    """The best step, and the commands to type next, for a run that was not stopped."""
    folder, talk = request.folder, "talk to it:   " + shlex.join(["rlpost", "chat", str(request.folder)])
    words = [*_best(folder, progress)]
    if settings.learns_from_own:
        return [*words, *_evaluate(folder), *([] if settings.env.scores else [talk])]
    more = parts.words_for_rewards
    words = [*parts.bad_rows_met, *words, talk, *_evaluate(folder, *(more or []))]
    if more is not None:
        kept = [word for word in request.overrides if word.startswith(("env=", "env.", "plugin="))]
        kept = [word for word in kept if word.partition("=")[0] not in TRAIN_GRPO.without]
        words.append(_command(folder, "train on:", "train grpo", *kept, *more))
    return words


def _evaluate(folder: Path, *more: str) -> list[str]:
    """The command that evaluates the run in its own environment, with `more`; none where there is none."""
    from rlpost.runs.reader import evaluation_words, read_run

    words = evaluation_words(read_run(folder))
    return [] if words is None else [_command(folder, "evaluate it:", "eval", *words, *more)]


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
    from rlpost.evaluation.statistics import FEWEST_DIFFERING

    count, unit = figure.prompts, "prompt" if progress.best_loss is None else "row"
    why = "no step was better than the start by more than chance"
    if count is not None and count < FEWEST_DIFFERING:
        why = f"{counted(count, f'held-out {unit}')} cannot tell whether a step was better than the start"
    return [f"{why}; {place} is that of step {progress.best_step}, {name}{text}"]


def _is_better(
    folder: Path, progress: Progress, first: record.Interval, best: record.Interval, *, by_prompt: bool
) -> bool:
    """Whether the best step is better than the start: `by_prompt` if the completions were kept, else by intervals."""
    from rlpost.evaluation.comparison import compare
    from rlpost.evaluation.saved import held_out_table, read_evaluation

    gain = (best.value - first.value) * (1 if progress.best_loss is None else -1)
    tables = [held_out_table(folder, step) for step in (0, progress.best_step or 0)]
    if gain > 0 and by_prompt and all(table.is_file() for table in tables):
        measures = compare(*map(read_evaluation, tables)).measures
        measure = "accuracy_lenient" if best.is_share else "reward" if progress.best_loss is None else "loss"
        return measures[measure].difference.is_significant
    return gain > 0 and best.differs_from(first)


# A training from which nothing is learned


def why_nothing_learned(settings: Any, metrics: Mapping[str, float], same_reward: float | None, folder: Path) -> str:
    """The likely reason where nothing is learned from a step with these `metrics`, and what to do.

    `same_reward` is the reward of every completion so far, None where they differ.
    """
    if "completion/truncated" not in metrics:  # the step sampled nothing
        shown = "" if settings.learns_from_pairs else " with rlpost data preview"
        return f"no token's loss moves a weight; look at the rows{shown}"
    look = f"read some with rlpost rollouts show {shlex.quote(str(folder))}"
    if settings.learns_from_rewards and metrics["completion/truncated"] == 1:
        limit = settings.env.max_completion_tokens
        return f"every completion is cut at env.max_completion_tokens={limit}; raise it"
    if settings.learns_from_rewards and same_reward is not None:
        if metrics.get("accuracy/lenient") == 1:
            return "every completion is right; the task is too easy for this model"
        if same_reward == 0:
            return (
                f"every reward is 0: the task is too hard, or the reward does not find the answer in the reply; {look}"
            )
        return f"every reward is {same_reward:g}, which tells no completion from another; {look}"
    return settings.why_nothing_learned(metrics, look)
