"""What the terminal says before and after fine-tuning."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rlpost.assemble_sft import SFTParts
from rlpost.data.demonstrations import Sample
from rlpost.model.lora import describe_adapter
from rlpost.model.precision import Numbers
from rlpost.runs.record import interval
from rlpost.runs.writer import Run
from rlpost.settings import SFTSettings
from rlpost.text import counted
from rlpost.train.narration import (
    best_line,
    model_line,
    name_of_data,
    open_screen,
    reading_lines,
    thinking_note,
)
from rlpost.train.progress import Progress


def announce(settings: SFTSettings, parts: SFTParts, numbers: Numbers, run: Run) -> None:
    """The effective model, data, sizes and folder, before anything is done."""
    samples = parts.samples.rows
    trained, read = sum(s.num_trained for s in samples), sum(len(s.ids) for s in samples)
    data = name_of_data(settings.env)
    passes = run.total_steps * settings.minibatch_size / len(samples)
    length = counted(settings.epochs or 1, "epoch") if settings.steps is None else f"{passes:.3g} epochs"
    lines = [
        model_line(settings.model, parts.model_folder, parts.model),
        numbers.line,
        *reading_lines(parts.model),
        f"data    {data}, {counted(len(samples), 'sample')}"
        + (f", {len(parts.held_out)} held out" if parts.held_out else ""),
        f"tokens  {trained} of {read} are trained ({trained / read:.0%}), at most {settings.max_tokens} a sample",
        f"work    {counted(run.total_steps, 'step')} of {counted(settings.minibatch_size, 'sample')} ({length})"
        + ("" if settings.packing else ", each in a forward of its own"),
        *([f"lora    {describe_adapter(parts.model)}"] if settings.lora.enabled else []),
        f"loss    {settings.loss.variant}, lr {settings.optim.lr:g}, seed {settings.seed}",
        *([f"policy  {type(parts.accuracy.policy).__name__}, greedy"] if parts.accuracy else []),
    ]
    notes = [
        *(f"bad rows: {line}" for line in parts.bad_rows.lines()),
        *(f"bad rows held out: {line}" for line in parts.bad_held_out.lines()),
        thinking_note(settings.env, parts.tokenizer) if parts.accuracy else None,
    ]
    if shared := _shared(samples, parts.held_out):
        notes.append(
            f"{shared} of {counted(len(parts.held_out), 'held-out row')} are trained on too, so a loss called held-out "
            "is not: take them out of one of the two"
        )
    open_screen(run, numbers, lines, notes, f"{settings.model.path} · {data} · {settings.loss.variant}")


def _shared(samples: Sequence[Sample], held_out: Sequence[Sample]) -> int:
    trained = {tuple(sample.ids) for sample in samples} if held_out else set()
    return sum(tuple(sample.ids) in trained for sample in held_out)


def conclude(run: Run, progress: Progress) -> None:
    """The result in a few lines, and what one does next."""
    screen, before, after = run.screen, progress.eval_before, progress.eval_after
    if before is not None and after is not None:
        screen.line("")
        screen.line("held out, before and after training", "bold")
        screen.line(f"  loss per token    {before['eval/loss']:.3f}  ->  {after['eval/loss']:.3f}", "bold")
        for name in ("lenient", "strict"):
            shares = [interval(metrics, f"eval/accuracy_{name}") for metrics in (before, after)]
            if all(shares):
                label = f"accuracy, {name}"
                screen.line(f"  {label:<17} {shares[0]}  ->  {shares[1]}", "bold")
    if line := best_line(run, progress):
        screen.line(line)
    chosen = [shlex.quote(w) for w in run.request.overrides if w.startswith(("env=", "env.", "plugin="))]
    model = f"model={run.folder}/"
    screen.line("talk to it:   " + shlex.join(["rlpost", "chat", str(run.folder)]))
    screen.line("measure it:   " + " ".join(["rlpost eval", model, *chosen]))
    screen.line("go on:        " + " ".join(["rlpost train grpo", model, *chosen]))
