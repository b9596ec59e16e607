"""What the terminal says before and after a training."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rlpost.assemble import SamplingParts
from rlpost.config.code import is_code
from rlpost.config.overrides import Override
from rlpost.config.paths import BEST
from rlpost.data.template_choice import thinking_cut_short
from rlpost.evaluation.play import EvalResult
from rlpost.model.families import explain
from rlpost.model.load import describe
from rlpost.model.logprobs import verdict_of
from rlpost.model.lora import describe_adapter
from rlpost.model.precision import Numbers
from rlpost.runs.writer import Run
from rlpost.settings import EnvSettings, ExpertIterationSettings, GRPOSettings, ModelSettings
from rlpost.text import counted
from rlpost.train.progress import ACCURACY, Progress


def announce(
    settings: GRPOSettings | ExpertIterationSettings, parts: SamplingParts, numbers: Numbers, run: Run
) -> None:
    """The effective model, data, sizes and folder, before anything is done."""
    completions = settings.prompts_per_step * settings.group_size
    data = name_of_data(settings.env)
    lines = [
        model_line(settings.model, parts.model_folder, parts.model),
        numbers.line,
        *reading_lines(parts.model, settings.group_size),
        f"data    {data}" + (f", {_prompts(settings, parts)}" if hasattr(settings.env, "path") else ""),
        f"policy  {type(parts.policy).__name__}, temperature {settings.sampling.temperature:g}",
        f"work    {counted(settings.steps, 'step')} of {counted(settings.prompts_per_step, 'prompt')} x "
        f"{settings.group_size} completions = {completions}, at most {settings.env.max_completion_tokens} tokens each",
        *settings.tools.told(settings.env),
        *([f"lora    {describe_adapter(parts.model)}"] if settings.lora.enabled else []),
        f"lr      {settings.optim.lr:g}, seed {settings.seed}",
    ]
    notes = [thinking_note(settings.env, parts.tokenizer)]
    if settings.eval.enabled and (shared := parts.eval_env.prompts_shared_with(parts.env)):
        notes.append(
            f"{shared} of {parts.eval_env.num_tasks} held-out prompts are trained on too, so figures called held-out "
            "are not: take them out of one of the two"
        )
    open_screen(run, numbers, lines, notes, f"{settings.model.path} · {data} · {type(parts.policy).__name__}")


def open_screen(run: Run, numbers: Numbers, lines: Sequence[str], notes: Sequence[str | None], about: str) -> None:
    """Say `lines`, where the run leaves its record, and `notes`; then begin to show the steps."""
    follows = f", and {run.tracker.name} follows" if run.tracker else ""
    for line in [*lines, f"writes  {run.folder}{follows}"]:
        run.screen.line(line)
    if numbers.warning is not None:
        run.warn(numbers.warning)
    for note in filter(None, notes):
        run.screen.note(note)
    run.screen.open(title=run.folder.name, about=about, total_steps=run.total_steps, log=run.folder / "log.txt")


def thinking_note(env: EnvSettings, tokenizer: Any) -> str | None:
    """What to say where a completion has no room for the thinking that the model begins with."""
    return thinking_cut_short(tokenizer, env.max_completion_tokens, "env.max_completion_tokens")


def model_line(settings: ModelSettings, folder: Path, model: PreTrainedModel) -> str:
    """The model that is trained."""
    size = _short(sum(p.numel() for p in model.parameters()))
    return f"model   {settings.path}: {describe(folder)}, {size} parameters, {model.device}"


def reading_lines(model: PreTrainedModel, completions_a_prompt: int = 1) -> list[str]:
    """What training `model` in another way than packed costs; none for one that is read packed."""
    line = explain(model, verdict_of(model), completions_a_prompt)
    return [f"reads   {line}"] if line else []


def name_of_data(env: EnvSettings) -> str:
    """The environment, and where its rows come from where it has rows: `GSM8K from data/gsm8k`."""
    source = getattr(env, "path", None)
    return type(env).__name__.removesuffix("Settings") + (f" from {source}" if source else "")


def _prompts(settings: GRPOSettings | ExpertIterationSettings, parts: SamplingParts) -> str:
    held_out = f", {parts.eval_env.num_tasks} held out" if settings.eval.enabled else ""
    return f"{counted(parts.env.num_tasks, 'prompt')}{held_out}"


def _short(count: int) -> str:
    """Three digits of a large number: 90.6k, 135M, 1.54B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def say_stopped(run: Run, step: int) -> None:
    """How a run goes on that a signal has ended after `step`."""
    named = any(word.partition("=")[0] in ("--out", "--name") for word in run.request.command)
    where = "" if named else f" --out {run.folder}"
    again = f"the same command with --resume auto{where}"
    if step > 0:  # there is a checkpoint, and with it the settings but for those that name code
        code = [word for word in run.request.overrides if is_code(Override(*word.split("=", 1)))]
        verb = " ".join(run.request.command[:3])
        again = f"{verb} --resume {shlex.join([str(run.folder), *code])}"
    run.screen.note(f"stopped after step {step}; to go on: {again}")


def best_line(run: Run, progress: Progress) -> str:
    """Which step was best, its accuracy, and where its checkpoint is; empty where accuracy was not measured."""
    if progress.best_step is None or progress.best_accuracy is None:
        return ""
    at_first = (progress.eval_before or {}).get(ACCURACY)
    line = f"best: after step {progress.best_step}, {progress.best_accuracy:.1%}, in {run.folder}/checkpoints/{BEST}"
    return line if at_first is None or at_first <= progress.best_accuracy else f"{line}; the starting model had more"


def conclude(run: Run, progress: Progress, after: EvalResult | None) -> None:
    """The result in a few lines, and the one command to look closer."""
    screen, before = run.screen, progress.eval_before
    if before is not None and after is not None:
        screen.line("")
        measured = (("lenient", after.accuracy_lenient), ("strict", after.accuracy_strict))
        shares = {name: share for name, share in measured if share is not None and f"eval/accuracy_{name}" in before}
        if shares:
            screen.line("held-out accuracy before and after training, 95% intervals", "bold")
        else:
            screen.line("held-out reward before and after training", "bold")
            screen.line(f"  {before['eval/reward']:.3f}   ->   {after.reward_mean:.3f}", "bold")
        for name, share in shares.items():
            value, low, high = (before[f"eval/accuracy_{name}{end}"] for end in ("", "_low", "_high"))
            screen.line(f"  {name:<8} {value:6.1%}  [{low:.1%}, {high:.1%}]   ->  {share}{after.extent(share)}", "bold")
    if line := best_line(run, progress):
        screen.line(line)
    chosen = [shlex.quote(w) for w in run.request.overrides if w.startswith(("env=", "env.", "tools.", "plugin="))]
    screen.line("look closer:  " + " ".join(["rlpost eval", f"model={run.folder}/", *chosen]))
