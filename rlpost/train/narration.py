"""What the terminal says before and after every training."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rlpost.config.code import is_code
from rlpost.config.overrides import Override
from rlpost.config.paths import BEST
from rlpost.data.template_choice import thinking_cut_short
from rlpost.model.families import explain
from rlpost.model.load import describe
from rlpost.model.logprobs import verdict_of
from rlpost.model.precision import Numbers
from rlpost.runs.writer import Run
from rlpost.settings import EnvSettings, MixSettings, ModelSettings
from rlpost.train.progress import ACCURACY, Progress


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
    """The environment, and where its rows come from where it has rows, `GSM8K from data/gsm8k`; a mix's sources."""
    if isinstance(env, MixSettings):
        return f"Mix of {', '.join(env.sources)}"
    source = getattr(env, "path", None)
    return type(env).__name__.removesuffix("Settings") + (f" from {source}" if source else "")


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


def say_best(run: Run, progress: Progress) -> None:
    """Which step was best, its accuracy, and where its checkpoint is; nothing where accuracy was not measured."""
    if progress.best_step is None or progress.best_accuracy is None:
        return
    at_first = (progress.eval_before or {}).get(ACCURACY)
    more = "" if at_first is None or at_first <= progress.best_accuracy else "; the starting model had more"
    place = f"{run.folder}/checkpoints/{BEST}"
    run.screen.line(f"best: after step {progress.best_step}, {progress.best_accuracy:.1%}, in {place}{more}")
