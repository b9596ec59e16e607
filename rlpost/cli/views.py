"""Views: how tables, runs, steps and completions look on the terminal, for every verb that shows them."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.cli.terminal import BOLD, DIM, GREEN, RED, output_width, painted, table
from rlpost.files import bytes_of
from rlpost.record import (
    ENDED_EARLY,
    has_evaluation,
    held_out_lines,
    legend,
    main_figures,
    number,
    prompts_of,
)
from rlpost.runs.reader import RunRecord, RunState
from rlpost.text import counted, paragraph, printable, readable

if TYPE_CHECKING:
    from rich.text import Text

    from rlpost.evaluation.sweeps import SweepResult

UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
STYLES = {RunState.running: GREEN, RunState.failed: RED, RunState.killed: RED}
ENDS = {
    RunState.killed: "it ended without a word: killed, or the machine went down; see log.txt",
    RunState.unknown: "how it ended is unknown: log.txt does not say",
}
LABEL = 12  # columns of the labels of a run's page
CURVE, BLOCKS = 40, "▁▂▃▄▅▆▇█"  # blocks of a curve at most, and their heights
COURSES = (  # label -> the metric, its scale, unit and digits
    ("reward", "reward/mean", 1.0, "", 2),
    ("accuracy", "accuracy/lenient", 100.0, "%", 0),
    ("pair loss", "loss/dpo", 1.0, "", 2),
    ("loss", "loss/sft", 1.0, "", 2),
    ("loss", "loss/distill", 1.0, "", 3),
    ("truncated", "completion/truncated", 100.0, "%", 0),
    ("entropy", "entropy", 1.0, "", 2),
    ("gap", "sampler/logprob_gap", 1.0, "", 3),
    ("no spread", "groups/zero_std", 100.0, "%", 0),
)
WIDEST_TEXT = 120  # columns: longer lines are hard to read
PROMPT_LINES, COMPLETION_LINES = 8, 16  # lines of one completion, unless it is shown in full


# Runs


def age(since: float) -> str:
    """The time since, in the largest unit that fits: 45s, 12m, 3h, 5d."""
    seconds = max(0.0, time.time() - since)
    unit, size = next(((u, s) for u, s in UNITS if seconds >= s), UNITS[-1])
    return f"{int(seconds // size)}{unit}"


def state_of(record: RunRecord) -> str:
    """The state of a run in its colour."""
    return painted(record.state.value, STYLES.get(record.state, BOLD), sys.stdout)


def progress(record: RunRecord) -> str:
    """Steps done, of all steps: `12/60`."""
    return f"{record.steps_done}/{'?' if record.total_steps is None else record.total_steps}"


def main_held_out(record: RunRecord) -> str:
    """`12→58% ±5 n=500`: accuracy or reward before and after, and the larger distance to an end of an interval."""
    found = main_figures([record.evaluation(before=before) or {} for before in (True, False)])
    known = [figure for figure in found if figure is not None]
    if not known:
        return "-"
    scale, digits, unit = (100, 0, "%") if known[-1].is_share else (1, 2, "")
    course = "→".join("-" if figure is None else f"{scale * figure.value:.{digits}f}" for figure in found)
    widths = [scale * half * 10**digits for figure in known if (half := figure.half_width) is not None]
    spread = f" ±{math.ceil(max(widths)) / 10**digits:.{digits}f}" if widths else ""
    prompts = known[-1].prompts
    return f"{course}{unit}{spread}" + ("" if prompts is None else f" n={prompts}")


def run_list(records: Sequence[RunRecord], folder: Path) -> list[str]:
    """The table of the runs in `folder`."""
    from rich.text import Text

    with_reward = any(record.last("reward/mean") is not None for record in records)
    with_loss = any(record.loss is not None for record in records)
    columns: dict[str, Callable[[RunRecord], str | Text]] = {
        "run": lambda run: printable(str(run.folder.relative_to(folder)) if run.folder != folder else folder.name),
        "state": lambda run: Text.from_ansi(state_of(run)),
        "steps": progress,
        "reward": lambda run: figure_text(run.last("reward/mean"), 2),
        "loss": lambda run: figure_text(run.loss, 3),
        "held-out": main_held_out,
        "age": lambda run: age(run.updated),
        "model": lambda run: printable(run.model_name or "-"),
        "env": lambda run: printable(run.choice("env") or "-"),
    }
    names = [n for n in columns if (n != "reward" or with_reward or not with_loss) and (n != "loss" or with_loss)]
    rows = [names, *([columns[name](record) for name in names] for record in records)]
    right = [names.index(name) for name in names if name in ("steps", "reward", "loss", "held-out", "age")]
    cuttable = [names.index(name) for name in ("env", "model", "run")]
    return table(rows, output_width(0) or None, right=right, cuttable=cuttable, heading=True)


def figure_text(value: float | None, digits: int) -> str:
    """A figure with `digits` decimals; `-` for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def candidate_lines(found: SweepResult, width: int | None) -> list[str]:
    """The table of a sweep's candidates, and which is better."""
    rows = found.rows()
    widest_first = sorted(range(len(found.candidates[0].settings)), key=lambda i: -max(len(row[i]) for row in rows))
    sentences = [line for each in found.lines() for line in (paragraph(each, width) if width else [printable(each)])]
    return [*table(rows, width, cuttable=widest_first), "", *sentences]


# A run's page


def run_page(record: RunRecord) -> list[str]:
    """Everything about one run, each part under its label."""
    width = max(20, output_width() - LABEL)
    name = painted(printable(record.folder.name), BOLD, sys.stdout)
    lines = [f"{name}  {state_of(record)}, step {progress(record)}, {age(record.updated)} ago"]
    for part in (_setup(record), _results(record), _diagnosed(record), _disk(record)):
        lines += [""] if part else []
        for label, text in part:
            wrapped = paragraph(text, width)
            lines += [f"{label if i == 0 else '':<{LABEL}}{line}".rstrip() for i, line in enumerate(wrapped)]
    return lines


def _setup(record: RunRecord) -> list[tuple[str, str]]:
    command = record.commands[-1] if record.commands else "unknown"
    lines = [("command", command)]
    if len(record.commands) > 1:
        lines.append(("", f"attempt {len(record.commands)}; begun with: {record.commands[0]}"))
    if not set(record.overrides) <= set(command.split()):  # a recipe's
        lines.append(("settings", " ".join(record.overrides)))
    lines += [(fact.name, fact.text) for fact in record.facts]
    lines += [("versions", record.versions), ("machine", record.machine)] if record.environment else []
    parts = {"command.txt": record.commands, "config.yaml": record.config, "environment.json": record.environment}
    if missing := [file for file, part in parts.items() if not part]:
        lines.append(("missing", f"{', '.join(missing)}: not there, or not whole"))
    early = record.environment.get(ENDED_EARLY)
    return [*lines, ("ended", f"early: {early}")] if early else lines


def _results(record: RunRecord) -> list[tuple[str, str]]:
    steps = len(record.series("time/step"))
    each = f", {record.seconds / steps:.1f} s each" if steps else ""
    results = [("progress", f"{progress(record)} steps, {record.seconds:.0f} s in them{each}")]
    if record.tokens:
        done = "generated" if record.series("tokens/generated") else "trained on"
        results.append(("", f"{record.tokens:,.0f} tokens {done}"))
    spent = {"scoring" if name == "reward" else name: seconds for name, seconds in record.phases().items()}
    spent["rest"] = record.seconds - sum(spent.values())
    shares = [f"{name} {s / record.seconds:.0%}" for name, s in spent.items() if s > 0.005 * record.seconds]
    if len(shares) > 1:
        results.append(("time", f"{', '.join(shares)} of the time in steps"))
    for name, key, scale, unit, digits in COURSES:
        if values := [scale * value for value in record.series(key) if math.isfinite(value)]:
            ends = f"{values[0]:.{digits}f}{unit} -> {values[-1]:.{digits}f}{unit}"
            results.append((name, f"{ends:<16} {curve(values)}"))
    words = legend(" ".join([*(name for name, _ in results), *shares]))
    return [*results, *_held_out(record), *([("words", words)] if words else [])]


def curve(values: Sequence[float]) -> str:
    """The course of finite `values` as at most `CURVE` blocks, from the least value to the greatest."""
    from rlpost.screen.picture import means

    points = means(values, min(CURVE, len(values)))
    low, high = min(points), max(points)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((point - low) * scale)] for point in points)


def _held_out(record: RunRecord) -> list[tuple[str, str]]:
    """Loss, accuracy and reward before and after training, one a line, and how they were measured."""
    found = record.held_out()
    prompts = prompts_of(found)
    lines = held_out_lines(found, prompts)
    if prompts is not None:
        from rlpost.settings.commands import samples_per_prompt

        settings = record.part("eval")
        samples = samples_per_prompt(settings.get("k") or [1], settings.get("samples"))
        drawn = "greedy" if samples == 1 else f"{samples} completions each"
        lines.append(f"{drawn}, on {counted(prompts, 'prompt')}, 95% intervals")
    elif found:
        lines.append("95% intervals")
    return [("" if i else "held-out", line) for i, line in enumerate(lines)]


def _diagnosed(record: RunRecord) -> list[tuple[str, str]]:
    """How the run ended, unless it ended well, the symptoms it shows, and how to go on."""
    from rlpost.runs.diagnosis import AT_LEAST

    lines = []
    if record.damaged_lines:
        lines.append(("damaged", f"{counted(record.damaged_lines, 'line')} of metrics.jsonl, left out here"))
    if error := ENDS.get(record.state, "") or record.error:
        doing = record.incident.get("doing")
        lines.append(("error", error + (f" (while {doing}; incident.json has the stacks)" if doing else "")))
    found = record.diagnosis
    lines += [("symptom", symptom.line()) for symptom in found.symptoms]
    if not record.metrics:
        lines.append(("", "no step is recorded yet"))
    elif not found.symptoms:
        few = "" if found.steps >= AT_LEAST else f"; most symptoms take {AT_LEAST} steps to show"
        lines.append(("symptoms", f"nothing stands out in {counted(found.steps, 'step')}{few}"))
    if found.unread:
        lines.append(("", f"the texts were not looked at: {found.unread}"))
    if record.state not in (RunState.finished, RunState.running):
        lines.append(("go on", record.to_go_on))
    return lines


def _disk(record: RunRecord) -> list[tuple[str, str]]:
    folder = record.folder
    used = {name: bytes_of(folder / name) for name in ("checkpoints", "rollouts")}
    of_which = ", ".join(f"{name} {readable(count)}" for name, count in used.items() if count)
    parts = [
        ("checkpoints", ", ".join(path.name for path in record.checkpoints) or "none"),
        ("rollouts", counted(len(record.rollout_steps), "step") if record.rollout_steps else "none"),
        ("size", readable(bytes_of(folder)) + (f" ({of_which})" if of_which else "") + f" in {folder}"),
    ]
    return [*parts, ("read them", f"rlpost runs rollouts {folder}")] if record.rollout_steps else parts


# The steps of a run


class StepText:
    """Metrics rows as the lines that training prints, called in the order of the steps."""

    def __init__(self, total_steps: int | None) -> None:
        from rlpost.screen.state import State

        self._state = State(total=total_steps or 0)

    def __call__(self, row: dict[str, Any]) -> str:
        from rlpost.screen import clock, evaluation_line, step_line

        step, lines = row["step"], []
        figures = {key: value for key in row if (value := number(row, key)) is not None}
        self._state.total = max(self._state.total, step)
        self._state.end_step(step, figures)
        if step and (left := self._state.left()) is not None:
            lines.append(step_line(step, self._state.total, figures, clock(left), width=output_width(0) or None))
        if has_evaluation(row):
            lines.append(evaluation_line(figures, f"after step {step}" if step else "before training"))
        return "\n".join(lines) or f"step {step}"


# Completions


def completion_block(heading: str, row: Mapping[str, Any], *, full: bool, more: Sequence[str] = ()) -> list[str]:
    """One completion of a training or an evaluation: its figures and `more` under `heading`, then prompt and reply.

    `row` has the names of rlpost.runs.rollouts.SCHEMA or rlpost.evaluation.saved.SCHEMA.
    """
    width = min(output_width(), WIDEST_TEXT)
    lines = [painted(heading, BOLD, sys.stdout)]
    lines += [f"  {line}" for text in (*_figures_of(row), *more) for line in paragraph(text, width - 2)]
    most = (None, None) if full else (PROMPT_LINES, COMPLETION_LINES)
    parts = [
        ("prompt", paragraph(row["prompt"].rstrip("\n"), width - 4, most[0], keep_end=True)),  # the question is there
        *((label, paragraph(text, width - 4, most[1])) for label, text in labelled_texts(row)),
    ]
    for label, text in parts:
        lines.append(painted(f"  {label}", DIM, sys.stdout))
        lines += [f"  | {line}".rstrip() for line in text]
    return lines


def below_each_other(blocks: Sequence[Sequence[str]]) -> list[str]:
    """The lines of `blocks` with an empty line between two of them."""
    return list(itertools.chain.from_iterable([*block, ""] for block in blocks))[:-1]


def labelled_texts(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The completion, or every turn of several, each with its label."""
    turns = row.get("turns") or []
    if len(turns) < 2:
        return [("completion", row["completion"])]
    return [(turn["role"], turn["content"]) for turn in turns]


def sampled_tokens(row: Mapping[str, Any]) -> int:
    """Tokens that the model sampled."""
    return row["tokens"] if "tokens" in row else sum(row["mask"])


def _figures_of(row: Mapping[str, Any]) -> list[str]:
    """Its reward and advantage, or its loss; its length, how it ended, and the weights that sampled it."""
    if row.get("loss") is not None:
        return [f"loss {row['loss']:.3f} a token, {row['tokens']} tokens"]
    parts = ", ".join(f"{name} {value:.3g}" for name, value in row["reward_parts"].items())
    reward = "reward failed" if row["reward"] is None else f"reward {row['reward']:.3g}"
    earned = [reward + (f" ({parts})" if parts else "")]
    for name in ("strict", "lenient"):
        if row[f"accuracy_{name}"] is not None:
            earned.append(f"{name} {row[f'accuracy_{name}']:.3g}")
    if row.get("advantage") is not None:
        earned.append(f"advantage {row['advantage']:+.2f}")
    ended = "cut at its limit" if row["finish_reason"] == "length" else row["finish_reason"]
    length_and_end = f"{sampled_tokens(row)} tokens, {ended}"
    if "policy_version_min" in row:
        low, high = row["policy_version_min"], row["policy_version_max"]
        length_and_end += f", policy version {low}" if low == high else f", policy versions {low} to {high}"
    return ["  ".join(earned), length_and_end]
