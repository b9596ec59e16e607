"""`rlpost runs`: lists, shows, follows and diagnoses the runs on this machine, and removes what they no longer need."""

from __future__ import annotations

import datetime
import json
import math
import shlex
import sys
import time
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlpost.cli.completion import complete_run, complete_run_or_sweep
from rlpost.cli.terminal import BOLD, DIM, GREEN, RED, curve, output_width, painted, paragraph, print_json
from rlpost.cli.usage import App
from rlpost.cli.views import table
from rlpost.config.paths import RUNS, SWEEP_FILE, checkpoints
from rlpost.files import bytes_of
from rlpost.record import (
    ACCURACY,
    ENDED_EARLY,
    HELD_OUT_FIGURES,
    MEANS_STRICT,
    OF_ROWS,
    REWARD,
    STRICT,
    TRAINED_LOSSES,
    WORDS,
    MetricsFile,
    has_evaluation,
    legend,
    main_figures,
    number,
    worth_showing,
)
from rlpost.runs.reader import (
    RunRecord,
    RunState,
    code_of,
    find_run,
    find_runs,
    find_sweep,
    is_running,
    read_run,
)
from rlpost.runs.removal import Rule, removals, remove
from rlpost.settings.commands import samples_per_prompt
from rlpost.text import counted, printable, readable

if TYPE_CHECKING:
    from rlpost.evaluation.sweeps import SweepResult
    from rlpost.runs.diagnosis import Symptom
    from rlpost.runs.removal import Removal

LIST_EXAMPLES = """\
  rlpost runs list
  rlpost runs list experiments --json
"""
SHOW_EXAMPLES = """\
  rlpost runs show                   the newest
  rlpost runs show my-run
  rlpost runs show runs/my-run --json
"""
IN_STEPS = ("accuracy", "tokens", "lag", "ess", "gap", "grad", "rollout", "wait", "idle")  # words of a step's line
TAIL_EXAMPLES = f"""\
  rlpost runs tail -f                the newest, until it ends
  rlpost runs tail my-run --lines 50

\b
Words:
  {f"{chr(10)}  ".join(f"{word:<9} {WORDS[word]}" for word in IN_STEPS)}
"""
DIAGNOSE_EXAMPLES = """\
  rlpost runs diagnose               the newest
  rlpost runs diagnose my-run --json
"""
GC_EXAMPLES = """\
  rlpost runs gc                     what could go, and how much that is
  rlpost runs gc --yes
  rlpost runs gc --keep-state --keep-rollouts 7 --yes
"""
RUN_HELP = "A run's name or folder; default: the newest in runs/."
NewestRun = Annotated[str | None, typer.Argument(metavar="[RUN]", help=RUN_HELP, autocompletion=complete_run)]
FIGURES = ("steps", "reward", "loss", "held-out", "age")
CUTTABLE = ("env", "model", "run")
STYLES = {RunState.running: GREEN, RunState.failed: RED, RunState.killed: RED}
LABEL = 12  # columns of the labels in `show`
CURVE = 40  # blocks of a curve at most
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
UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
POLL_SECONDS = 0.5
RECENT = 8  # steps from which the time left is estimated
app = App(help="List, show, follow, diagnose and clean up runs.")


@app.command("list", examples=LIST_EXAMPLES, short_help="List runs, the newest first.")
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder that holds the runs.")] = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List runs: state, steps, last reward, held-out accuracy before and after; the newest first."""
    found = [] if folder == RUNS and not folder.exists() else find_runs(folder)
    records = [read_run(run) for run in found]
    if as_json:
        print_json([summary(record) for record in records])
    elif records:
        print("\n".join([*list_lines(records, folder), *_sweep_lines(found, folder)]))
    else:
        print(f"no runs in {folder}/ yet: rlpost train grpo begins one", file=sys.stderr)


@app.command("show", examples=SHOW_EXAMPLES, short_help="Show a run's request and results.")
def show(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run's or sweep's name or folder; default: the newest run.",
            autocompletion=complete_run_or_sweep,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Show a run's settings, versions, progress, curves, evaluations, checkpoints and size.

    Of a sweep: the mean of each combination of settings over its seeds, and whether one is better.
    """
    if run is not None and (sweep := find_sweep(run)):
        from rlpost.evaluation.sweeps import read_sweep

        found = read_sweep(sweep)
        if as_json:
            print_json(found.as_dict())
        else:
            print("\n".join(candidate_lines(found, output_width(0) or None)))
        return
    record = read_run(find_run(run))
    if as_json:
        print_json(details(record))
    else:
        print("\n".join(show_lines(record)))


@app.command("tail", examples=TAIL_EXAMPLES, short_help="Print a run's last steps, and follow it.")
def tail(
    run: NewestRun = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow until the run ends; Ctrl-C leaves.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", metavar="N", min=0, help="Print the last N steps first.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print the steps as in metrics.jsonl.")] = False,
) -> None:
    """Print the last steps of a run as training prints them; the run itself is not touched."""
    folder = find_run(run)
    file = MetricsFile(folder / "metrics.jsonl")
    as_text = json.dumps if as_json else StepText(read_run(folder).total_steps)
    for text in deque((as_text(row) for row in file.new_rows()), maxlen=lines):
        print(text)
    sys.stdout.flush()
    while follow:
        running = is_running(folder)  # before reading, so that the last rows are read too
        for row in file.new_rows():
            print(as_text(row), flush=True)
        if not running:
            break
        time.sleep(POLL_SECONDS)
    if remark := ending(read_run(folder), follow=follow):
        print(printable(remark), file=sys.stderr)


@app.command("diagnose", examples=DIAGNOSE_EXAMPLES, short_help="Report problems that a run's metrics show.")
def diagnose(
    run: NewestRun = None, as_json: Annotated[bool, typer.Option("--json", help="Print the symptoms as JSON.")] = False
) -> None:
    """Say what is wrong with a run by its own figures and texts: each with its steps, the evidence and one fix.

    A training says the same when it first shows; diagnosis.on_alarm=checkpoint|stop makes it do something.
    """
    folder = find_run(run)
    record = read_run(folder)
    found, steps, unread = record.diagnosis
    if unread:
        print(f"the texts were not looked at: {unread}", file=sys.stderr)
    if as_json:
        symptoms = [{"name": s.name, "steps": list(s.steps), "evidence": s.evidence, "fix": s.fix} for s in found]
        ended = {"state": record.state.value, "error": record.error or None}
        print_json({"run": str(folder), **ended, "steps": steps, "symptoms": symptoms})
    else:
        print("\n".join(diagnosis_lines(record, found, steps)))


@app.command("gc", examples=GC_EXAMPLES, short_help="Remove what runs no longer need; lists it first.")
def gc(
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it, only list what would be removed.")] = False,
    keep_unstarted: Annotated[bool, typer.Option(help="Keep runs that never trained a step.")] = False,
    keep_checkpoints: Annotated[bool, typer.Option(help="Keep checkpoints other than the last and the best.")] = False,
    keep_state: Annotated[bool, typer.Option(help="Keep the optimizer state of finished runs.")] = False,
    keep_rollouts: Annotated[
        float, typer.Option(metavar="DAYS", min=0, help="Keep rollouts of the last DAYS days.", show_default=True)
    ] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """Remove from runs/, by rule, what is no longer needed: runs that never trained a step, checkpoints other than

    the last and the best, what finished runs would need to go on, and old rollouts. A run in use is left alone.
    """
    kept = {Rule.unstarted: keep_unstarted, Rule.checkpoint: keep_checkpoints, Rule.state: keep_state}
    found = removals(RUNS, frozenset(rule for rule in Rule if not kept.get(rule, False)), keep_rollouts)
    gone = [removal for removal in found if yes and remove(removal)]
    listed = gone if yes else found
    total = sum(removal.bytes for removal in listed)
    if as_json:
        removed = set(gone)
        print_json({"bytes": total, "removed": yes, "items": [_entry(each, removed=each in removed) for each in found]})
        return
    if not found:
        print(f"nothing to remove in {RUNS}/")
        return
    print(f"removed {readable(total)}:" if yes else f"would remove {readable(total)}; add --yes to do it:")
    print("\n".join(_table(listed)))
    for run in sorted({removal.run for removal in found} - {removal.run for removal in listed}):
        print(f"left alone: {printable(str(run))}, which a process has taken up meanwhile")


# What rlpost runs list and show print


def list_lines(records: Sequence[RunRecord], folder: Path) -> list[str]:
    """The table of runs in `folder`."""
    cells = [_cells(record, folder) for record in records]
    empty = [name for name in ("loss", "reward") if all(row[name] == "-" for row in cells)]
    names = [name for name in cells[0] if name not in empty[:1]]  # one of the two is always there
    rows = [names, *([row[name] for name in names] for row in cells)]
    width = output_width(0) or None  # a pipe takes them whole
    right = [i for i, name in enumerate(names) if name in FIGURES]
    heading, *lines = table(rows, width, right=right, cuttable=[names.index(name) for name in CUTTABLE])
    shown = [painted(heading, DIM, sys.stdout)]
    for record, line in zip(records, lines, strict=True):
        state = record.state.value
        shown.append(line.replace(f" {state} ", f" {painted(state, STYLES.get(record.state, ''), sys.stdout)} ", 1))
    return shown


def _sweep_lines(runs: Sequence[Path], folder: Path) -> list[str]:
    """A line for each sweep whose runs are in the list: which settings are better."""
    sweeps = {run.parent: None for run in runs if (run.parent / SWEEP_FILE).is_file()}
    lines = []
    for sweep in sweeps:
        from rlpost.evaluation.sweeps import read_sweep

        if verdict := read_sweep(sweep).verdict:
            name = sweep.relative_to(folder) if sweep != folder else sweep.name
            lines.append(printable(f"sweep {name}: {verdict.sentence}"))
    return lines


def candidate_lines(found: SweepResult, width: int | None) -> list[str]:
    """The table of a sweep's candidates, and which is better."""
    rows = found.rows()
    widest_first = sorted(range(len(found.candidates[0].settings)), key=lambda i: -max(len(row[i]) for row in rows))
    sentences = [line for each in found.lines() for line in (paragraph(each, width) if width else [printable(each)])]
    return [*table(rows, width, cuttable=widest_first), "", *sentences]


def summary(record: RunRecord) -> dict[str, Any]:
    """A run as one entry of `rlpost runs list --json`."""
    return {
        "name": record.folder.name,
        "folder": str(record.folder),
        "state": record.state.value,
        "error": record.error or None,
        "steps_done": record.steps_done,
        "steps": record.total_steps,
        "reward": record.last("reward/mean"),
        "loss": _loss(record),
        **{
            f"{name}_{when}": found and found.as_dict()
            for name, key in (("accuracy", ACCURACY), ("held_out_reward", REWARD))
            for when, found in zip(("before", "after"), record.before_and_after(key), strict=True)
        },
        "model": record.model_name,
        "env": record.choice("env"),
        "updated": datetime.datetime.fromtimestamp(record.updated, datetime.UTC).isoformat(timespec="seconds"),
    }


def details(record: RunRecord) -> dict[str, Any]:
    """A run as `rlpost runs show --json` prints it."""
    return {
        **summary(record),
        "commands": record.commands,
        "overrides": record.overrides,
        "config": record.config,
        "environment": record.environment,
        "seconds": record.seconds,
        "damaged_lines": record.damaged_lines,
        "checkpoints": [str(path) for path in checkpoints(record.folder / "checkpoints")],
        "bytes": bytes_of(record.folder),
        "metrics": record.metrics,
    }


def show_lines(record: RunRecord) -> list[str]:
    """Everything about one run, each part under its label."""
    width = output_width()
    state = painted(record.state.value, STYLES.get(record.state, BOLD), sys.stdout)
    name = painted(printable(record.folder.name), BOLD, sys.stdout)
    lines = [f"{name}  {state}, step {progress(record)}, {age(record.updated)} ago", ""]
    early = record.environment.get(ENDED_EARLY)
    ended = [("ended", f"early: {printable(early)}")] if early else []
    for label, text in [*_setup(record), *ended, ("", ""), *_results(record), ("", ""), *_disk(record)]:
        wrapped = paragraph(text, max(20, width - LABEL))
        lines += [f"{label if i == 0 else '':<{LABEL}}{line}".rstrip() for i, line in enumerate(wrapped)]
    return lines


def _loss(record: RunRecord) -> float | None:
    """The main loss of the last step, where no completions are sampled."""
    return next((loss for key in TRAINED_LOSSES if (loss := record.last(key)) is not None), None)


def age(since: float) -> str:
    """The time since, in the largest unit that fits: 45s, 12m, 3h, 5d."""
    seconds = max(0.0, time.time() - since)
    unit, size = next(((u, s) for u, s in UNITS if seconds >= s), UNITS[-1])
    return f"{int(seconds // size)}{unit}"


def _cells(record: RunRecord, folder: Path) -> dict[str, str]:
    """A run's cells in the table, by column."""
    reward, loss = record.last("reward/mean"), _loss(record)
    inside = record.folder.relative_to(folder) if record.folder != folder else Path(folder.name)
    return {
        "run": printable(str(inside)),
        "state": record.state.value,
        "steps": progress(record),
        "reward": "-" if reward is None else f"{reward:.2f}",
        "loss": "-" if loss is None else f"{loss:.3f}",
        "held-out": _main_held_out(record),
        "age": age(record.updated),
        "model": printable(record.model_name or "-"),
        "env": printable(record.choice("env") or "-"),
    }


def progress(record: RunRecord) -> str:
    """Steps done, of all steps: `12/60`."""
    return f"{record.steps_done}/{'?' if record.total_steps is None else record.total_steps}"


def _main_held_out(record: RunRecord) -> str:
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


def _setup(record: RunRecord) -> list[tuple[str, str]]:
    command = record.commands[-1] if record.commands else "command.txt is missing"
    lines = [("command", command)]
    if len(record.commands) > 1:
        lines.append(("", f"attempt {len(record.commands)}; begun with: {record.commands[0]}"))
    if not set(record.overrides) <= set(command.split()):  # a recipe's
        lines.append(("settings", " ".join(record.overrides)))
    if not record.config:
        lines.append(("", "config.yaml is missing or cannot be read, so the number of steps is unknown"))
    if not record.environment:
        lines.append(("versions", "environment.json is missing or cannot be read"))
    lines += [(fact.name, fact.text) for fact in record.facts]
    return [*lines, *([("versions", record.versions), ("machine", record.machine)] if record.environment else [])]


def _results(record: RunRecord) -> list[tuple[str, str]]:
    steps = len(record.series("time/step"))
    each = f", {record.seconds / steps:.1f} s each" if steps else ""
    results = [("progress", f"{progress(record)} steps, {record.seconds:.0f} s in them{each}")]
    generated = sum(record.series("tokens/generated"))
    trained = sum(record.series("tokens/trained"))
    if generated or trained:
        results.append(("", f"{generated:,.0f} tokens generated" if generated else f"{trained:,.0f} tokens trained on"))
    results += [("time", line) for line in _time(record)]
    results += [(name, line) for name, line in (_course(record, *c) for c in COURSES) if line]
    held_out = _held_out(record)
    words = legend(" ".join([*(course for course, *_ in COURSES if course in dict(results)), *_time(record)]))
    return [*results, *held_out, *([("words", words)] if words else []), *_troubles(record)]


def _time(record: RunRecord) -> list[str]:
    """The split of the time in steps."""
    spent = {"scoring" if name == "reward" else name: seconds for name, seconds in record.phases().items()}
    spent["rest"] = record.seconds - sum(spent.values())
    shown = [
        f"{label} {seconds / record.seconds:.0%}"
        for label, seconds in spent.items()
        if seconds > 0.005 * record.seconds
    ]
    return [", ".join(shown) + " of the time in steps"] if len(shown) > 1 else []


def _held_out(record: RunRecord) -> list[tuple[str, str]]:
    """Loss, accuracy and reward before and after training, one a line, and the number of prompts."""
    lines: list[str] = []
    prompts: int | None = None
    names = {key: name.partition(" accuracy")[0] if key == STRICT else name for name, key in HELD_OUT_FIGURES}
    found = {key: record.before_and_after(key) for key in names}
    for key in worth_showing({key: [figure and figure.value for figure in its] for key, its in found.items()}):
        name, (before, after) = names[key], found[key]
        unit = "row" if key in OF_ROWS else "prompt"
        if key not in OF_ROWS:
            prompts = prompts or next(figure.prompts for figure in (after, before) if figure)
        shown = [found and found.as_text(unit, shown=prompts) for found in (before, after)]
        lines.append(f"{name:<8} {shown[0] or 'not before':<22} ->  {shown[1] or 'not yet after'}")
    if prompts is not None:
        strict = f"; {MEANS_STRICT}" if any(line.startswith("strict") for line in lines) else ""
        lines.append(f"{_drawn(record)}, on {counted(prompts, 'prompt')}, 95% intervals{strict}")
    elif lines:
        lines.append("95% intervals")
    return [("" if i else "held-out", line) for i, line in enumerate(lines)]


def _drawn(record: RunRecord) -> str:
    """How an evaluation answers each prompt: greedy, or with several completions."""
    settings = record.part("eval")
    samples = samples_per_prompt(settings.get("k") or [1], settings.get("samples"))
    return "greedy" if samples == 1 else f"{samples} completions each"


def _course(record: RunRecord, name: str, key: str, scale: float, unit: str, digits: int) -> tuple[str, str]:
    """First and last value of a metric, and the curve between them."""
    values = [scale * value for value in record.series(key) if math.isfinite(value)]
    if not values:
        return name, ""
    ends = f"{values[0]:.{digits}f}{unit} -> {values[-1]:.{digits}f}{unit}"
    return name, f"{ends:<16} {curve(values, CURVE)}"


def _troubles(record: RunRecord) -> list[tuple[str, str]]:
    folder = record.folder
    troubles = []
    if not record.metrics:
        troubles.append(("", "no step is recorded yet"))
    if record.damaged_lines:
        lines = "1 line of metrics.jsonl is" if record.damaged_lines == 1 else f"{record.damaged_lines} lines are"
        troubles.append(("damaged", f"{lines} not whole, and left out here"))
    if record.state is RunState.failed:
        troubles.append(("error", record.error))
    if record.state is RunState.killed:
        troubles.append(("error", "it ended without a word: killed, or the machine went down; see log.txt"))
    if record.state is RunState.unknown:
        troubles.append(("error", "how it ended is unknown: log.txt does not say"))
    if record.state not in (RunState.finished, RunState.running):
        if checkpoints(folder / "checkpoints"):
            verb = record.verb or "train grpo"
            words = shlex.join([str(folder), *code_of(record.overrides)])
            troubles.append(("go on", f"rlpost {verb} --resume {words}"))
        else:
            where = "" if record.says_where else f" --out {shlex.quote(str(folder))}"
            troubles.append(("go on", f"the same command with --resume auto{where}"))
    return troubles


def _disk(record: RunRecord) -> list[tuple[str, str]]:
    folder = record.folder
    kept = checkpoints(folder / "checkpoints")
    names = ", ".join(path.name for path in kept) if kept else "none"
    rollouts = sorted((folder / "rollouts").glob("step-*.parquet"))
    parts = [("checkpoints", names), ("rollouts", counted(len(rollouts), "step") if rollouts else "none")]
    used = {name: bytes_of(folder / name) for name in ("checkpoints", "rollouts")}
    of_which = ", ".join(f"{name} {readable(count)}" for name, count in used.items() if count)
    parts.append(("size", readable(bytes_of(folder)) + (f" ({of_which})" if of_which else "") + f" in {folder}"))
    if rollouts:
        parts.append(("read them", f"rlpost rollouts show {folder}"))
    return parts


# The steps of rlpost runs tail


class StepText:
    """Metrics rows as the lines that training prints, called in the order of the steps."""

    def __init__(self, total_steps: int | None) -> None:
        self.total_steps = total_steps
        self._recent: deque[float] = deque(maxlen=RECENT)  # seconds of the last steps

    def __call__(self, row: dict[str, Any]) -> str:
        from rlpost.screen import clock, evaluation_line, step_line

        step, lines = row["step"], []
        figures = {key: value for key in row if (value := number(row, key)) is not None}
        if step and (seconds := figures.get("time/step")) is not None:
            self._recent.append(seconds)
            total = self.total_steps or step
            left = clock(fmean(self._recent) * (total - step))
            lines.append(step_line(step, total, figures, left, width=output_width(0) or None))
        if has_evaluation(row):
            lines.append(evaluation_line(figures, f"after step {step}" if step else "before training"))
        return "\n".join(lines) or f"step {step}"


def ending(record: RunRecord, *, follow: bool) -> str:
    """The line after the steps; empty for a run that is well and not followed."""
    remarks = []
    if not record.metrics:
        remarks.append("no step is recorded yet")
    if record.damaged_lines and record.state is not RunState.running:
        remarks.append(f"{record.damaged_lines} of its metrics lines cannot be read")
    if follow or record.state in (RunState.failed, RunState.killed):
        remarks.append(f"{record.state.value} {record.error}".rstrip())
    return f"{record.folder}: {'; '.join(remarks)}" if remarks else ""


# What rlpost runs diagnose and gc print


def diagnosis_lines(record: RunRecord, found: Sequence[Symptom], steps: int) -> list[str]:
    """How the run ended, unless it ended well, and its symptoms."""
    from rlpost.runs.diagnosis import AT_LEAST

    ended = [f"{name}: {printable(text)}" for name, text in _troubles(record) if name == "error"]
    if not found:
        few = "" if steps >= AT_LEAST else f"; most symptoms take {AT_LEAST} steps to show"
        return [*ended, f"nothing {'else ' if ended else ''}stands out in {counted(steps, 'step')}{few}"]
    return ended + [printable(symptom.line()) for symptom in found]


def _table(listed: list[Removal]) -> list[str]:
    """A line for each removal; the rollouts of a run share one."""
    rows = []
    for (run, rule), found in groupby(listed, key=lambda removal: (removal.run, removal.rule)):
        group = list(found)
        if rule is Rule.rollouts:
            named = f"{run}/rollouts: {counted(len(group), 'file')}"
            rows.append((readable(sum(r.bytes for r in group)), rule.value, printable(named)))
        else:
            end = "/state" if rule is Rule.state else ""
            rows += [(readable(r.bytes), rule.value, printable(f"{r.path}{end}")) for r in group]
    return table(rows, output_width(0) or None, right=[0], cuttable=[2]) if rows else []


def _entry(removal: Removal, *, removed: bool) -> dict[str, Any]:
    return {
        "run": str(removal.run),
        "path": str(removal.path),
        "rule": removal.rule.name,
        "why": removal.rule.value,
        "bytes": removal.bytes,
        "removed": removed,
    }
