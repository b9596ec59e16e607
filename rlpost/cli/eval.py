"""`rlpost eval`: scores a model on held-out prompts; shows and compares saved evaluations."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from rlpost.catalog import EVAL
from rlpost.cli.completion import complete_eval, complete_evaluation, complete_shown
from rlpost.cli.plan import compose_and_check, resolved
from rlpost.cli.run_folder import first_free, given_folder
from rlpost.cli.terminal import (
    BOLD,
    StatusLine,
    output_width,
    painted,
    print_json,
    saying_stopped,
    stdout_on_stderr,
)
from rlpost.cli.usage import MULTIRUN_HELP, OVERRIDES_HELP, App, AsJson, VerbWithVerbs
from rlpost.cli.views import age, completion_block, table
from rlpost.config.paths import EVALS, HELD_OUT, RESULT, SAMPLES, SWEEP_FILE, evaluation_names, resolve_model_path
from rlpost.errors import CheckpointError, ConfigError
from rlpost.files import expanded, json_in, slug
from rlpost.record import one_of_each_first, says_more
from rlpost.runs.kept import training_of
from rlpost.runs.reader import run_of_model
from rlpost.text import counted, did_you_mean, nearest, paragraph, printable

if TYPE_CHECKING:
    from rlpost.config.compose import Composed
    from rlpost.record import Interval
    from rlpost.settings import EvalSettings

EXAMPLES = """\
  rlpost eval
  rlpost eval model=runs/my-run
  rlpost eval model=my-run env=gsm8k env.limit=64
  rlpost eval model=runs/my-run 'eval.k=[1,8]' --name my-run
  rlpost eval -m model=smollm2,runs/my-run
"""
COMPARE_SHORT = "Say whether one evaluation is better than another."
COMPARE_EXAMPLES = """\
  rlpost eval compare before my-run
  rlpost eval compare evals/gsm8k-qwen-1 evals/gsm8k-my-run-1 --json
"""

SHOW_SHORT = "List evaluations, or show one's completions, the worst first."
SHOW_EXAMPLES = """\
  rlpost eval show                       all in evals/
  rlpost eval show evals/my-sweep --json
  rlpost eval show before --best --limit 10
  rlpost eval show before --text "I cannot" --full
  rlpost eval show before --failed
  rlpost eval show my-run --step 20      a run's held-out completions
"""
MOST_SHOWN = 5  # completions, without --limit
READINGS = ("accuracy_strict", "accuracy_lenient")
Row = dict[str, Any]  # one completion, under the names of rlpost.evaluation.saved.SCHEMA

Side = typer.Argument(
    help="An evaluation: its name in evals/, its folder, or its table; or a run: its last held-out completions.",
    autocompletion=complete_evaluation,
    show_default=False,
)


class EvalVerb(VerbWithVerbs):
    """`rlpost eval KEY=VALUE...`, and the verbs for evaluations that are saved: compare and show."""

    @cached_property
    def below(self) -> dict[str, TyperCommand]:
        """See `VerbWithVerbs.below`."""
        app = App()
        app.command("compare", examples=COMPARE_EXAMPLES, short_help=COMPARE_SHORT)(compare)
        app.command("show", examples=SHOW_EXAMPLES, short_help=SHOW_SHORT)(show)
        group: Any = typer.main.get_command(app)
        return dict(group.commands)


app = App()


@app.command("eval", cls=EvalVerb, examples=EXAMPLES)
def evaluate(
    context: typer.Context,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help=OVERRIDES_HELP, autocompletion=complete_eval),
    ] = None,
    multirun: Annotated[bool, typer.Option("--multirun", "-m", help=MULTIRUN_HELP)] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder of the evaluation itself.")] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the evaluation; its folder is evals/NAME.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="auto", help="With -m: leave out the jobs that are done there already.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With -m: check and list the jobs, stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Score a model on an environment's held-out prompts: one greedy completion each, or several for pass@k.

    A run's model plays the run's own environment, unless another one is named. The figures and every completion are
    kept in evals/.
    """
    words = overrides or []
    typed = ["rlpost", *context.obj]
    if multirun:
        from rlpost.cli.sweep import SweepOptions, sweep

        options = SweepOptions(out, name, resume, dry_run=dry_run, as_json=as_json)
        raise typer.Exit(sweep(EVAL, words, typed, options))
    if resume is not None or dry_run:
        raise ConfigError("--resume and --dry-run belong to a sweep of several evaluations: add -m, or leave them out")
    with saying_stopped("stopping: the evaluation is abandoned, nothing is written"):
        evaluate_once(words, typed, out, name, as_json=as_json)


def evaluate_once(words: list[str], typed: list[str], out: Path | None, name: str | None, *, as_json: bool) -> None:
    """One evaluation from its settings to its figures on stdout."""
    composed = compose_and_check(EVAL, words, as_json=as_json, typed=typed)
    folder = choose_evaluation_folder(out, name, f"{composed.choices['env']}-{composed.model_name}")
    print("\n".join(map(printable, played_lines(composed))), file=sys.stderr, flush=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)  # fails now rather than after the work
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error}; give another --out") from error
    try:
        with stdout_on_stderr() if as_json else nullcontext():
            record, result = score(composed, folder, typed)
    finally:
        for each in (folder, EVALS):
            with suppress(OSError):  # it holds something
                each.rmdir()
    if as_json:
        print_json(record)
    else:
        print("\n".join(printable(line) for line in [*result.lines(), f"written to {folder}"]))


def compare(a: Annotated[str, Side], b: Annotated[str, Side], as_json: AsJson = False) -> None:
    """Say whether B is better than A, prompt by prompt, or how large a difference these prompts could show."""
    from rlpost.evaluation.comparison import compare as compared
    from rlpost.evaluation.saved import find_evaluation, read_evaluation

    tables = find_evaluation(a), find_evaluation(b)  # both names are looked up before either is read
    found = compared(*(read_evaluation(table) for table in tables))
    if as_json:
        print_json(found.as_dict())
    else:
        print("\n".join(printable(line) for line in found.lines()))


def show(
    evaluation: Annotated[
        str | None,
        typer.Argument(
            metavar="[EVAL]",
            help="An evaluation: its name in evals/, its folder, its samples.parquet; or a run. A folder of several is "
            "listed, by default evals/.",
            autocompletion=complete_shown,
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(metavar="N", help="Of a run: after step N; default: the last.")] = None,
    sort: Annotated[
        str,
        typer.Option(metavar="NAME", help="Sort by reward, length, accuracy_strict, _lenient or a part of the reward."),
    ] = "reward",
    best: Annotated[bool, typer.Option("--reverse", "--best", help="Sort the other way round.")] = False,
    text: Annotated[str, typer.Option(metavar="TEXT", help="Only with TEXT in prompt or completion, any case.")] = "",
    failed: Annotated[bool, typer.Option("--failed", help="Only completions whose reward failed.")] = False,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Show at most N.")] = MOST_SHOWN,
    full: Annotated[bool, typer.Option("--full", help="Print whole prompts and completions.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show an evaluation's figures, then its completions with the expected answer: the worst, or longest, first.

    One completion of each prompt comes first. A run's held-out completions are in RUN/held-out. Without a name: the
    saved evaluations, the newest first, with model, environment, figure and age.
    """
    folder = _folder_of_evaluations(evaluation)
    if folder is not None or evaluation is None:
        if failed or text or step is not None:
            raise ConfigError("name one evaluation to choose among its completions: rlpost eval show lists them")
        list_evaluations(folder or EVALS, as_json=as_json)
        return
    from rlpost.evaluation.saved import figures_of, find_evaluation, read_evaluation

    place = find_evaluation(evaluation, step)
    saved = read_evaluation(place)
    rows, figures = saved.samples, figures_of(place, saved)
    name, about = _about(place, saved.record)
    kept = [row for row in _sorted(rows, sort, reverse=best) if not failed or not row["valid"]]
    kept = [row for row in kept if text.lower() in f"{row['prompt']}\n{row['completion']}".lower()]
    kept = kept if sort == "length" else one_of_each_first(kept, "prompt_number")
    if as_json:
        shown = [{**row, "expected": _expected(row, full=True)} for row in kept[:limit]]
        found = {"name": name, "table": str(place), "figures": _plain(figures)}
        print_json({**found, "found": len(kept), "completions": shown})
        return
    lines = headline(name, about, figures, rows)
    several = len({row["sample"] for row in rows}) > 1
    for row in kept[:limit]:
        heading = f"prompt {row['prompt_number']}" + (f", sample {row['sample']}" if several else "")
        lines += ["", *completion_block(heading, row, full=full, more=_why(row, full=full))]
    if not kept:
        lines.append("no completion is like that")
    elif limit < len(kept):
        lines += ["", f"{limit} of {len(kept)} completions: --limit {len(kept)} shows all"]
    print("\n".join(lines))


def _folder_of_evaluations(name: str | None) -> Path | None:
    """The folder of evaluations that has this name, such as a sweep's; None for the name of one evaluation."""
    folders = () if name is None else (expanded(name), EVALS / name)
    return next((folder for folder in folders if evaluation_names(folder)), None)


def list_evaluations(folder: Path, *, as_json: bool) -> None:
    """Print the evaluations in a folder and its sweeps, the newest first."""
    below = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    results = [parent / name / RESULT for parent in (folder, *below) for name in evaluation_names(parent)]
    results.sort(key=lambda result: (result.stat().st_mtime, result), reverse=True)
    found = [_summary(folder, result) for result in results]
    if as_json:
        print_json([{**each, "figures": _plain(each["figures"])} for each in found])
    elif found:
        rows = [("evaluation", "model", "env", "figure", "n", "age"), *map(_row, found)]
        print("\n".join(table(rows, output_width(0) or None, right=(4, 5), cuttable=(2, 1, 0), heading=True)))
    else:
        print(f"no evaluations in {folder}/ yet: rlpost eval makes one", file=sys.stderr)


def _summary(folder: Path, result: Path) -> dict[str, Any]:
    """An evaluation in `folder`, as the list has it."""
    from rlpost.evaluation.saved import figures_in, metrics_of

    record = json_in(result)
    return {
        "name": str(result.parent.relative_to(folder)),
        "folder": record["folder"],
        "model": record["model"],
        "env": record["choices"]["env"],
        "samples": record["result"]["num_samples"],
        "figures": figures_in(metrics_of(record["result"])),
        "finished": datetime.fromtimestamp(result.stat().st_mtime, UTC).isoformat(timespec="seconds"),
    }


def _plain(figures: Mapping[str, Interval]) -> dict[str, Any]:
    """Figures for JSON."""
    return {title: figure.as_dict() for title, figure in figures.items()}


def _row(each: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of the list: with the accuracy, or with the reward if no answer was right."""
    figures = each["figures"]
    title = next((t for t in ("accuracy", "reward") if t in figures and figures[t].value), next(iter(figures)))
    cells = (each["name"], slug(each["model"]), each["env"], f"{title:<8} {figures[title]}")
    since = datetime.fromisoformat(each["finished"]).timestamp()
    return (*map(printable, cells), str(figures[title].prompts), age(since))


def _about(place: Path, record: Mapping[str, Any]) -> tuple[str, str]:
    """The name of the evaluation with this table of samples, and what it measured."""
    if place.parent.name == HELD_OUT:
        step = int(place.stem.removeprefix("step-"))
        when = f"after step {step}" if step else "before training"
        return printable(place.parents[1].name), f"held-out prompts, {when}"
    when = f"{age(place.stat().st_mtime)} ago"
    if not record:
        return printable(str(place)), when
    samples = record["result"]["num_samples"]
    drawn = "greedy" if samples == 1 else f"{samples} completions each"
    drawn = "demonstrated replies" if "loss" in record["result"] else drawn
    return printable(place.parent.name), f"{record['choices']['env']}, model {record['model']}, {drawn}, {when}"


def headline(name: str, about: str, figures: Mapping[str, Interval], rows: Sequence[Row]) -> list[str]:
    """The evaluation, its figures, and what went wrong in it."""
    first, *others = paragraph(f"{name}  {about}", output_width())
    lines = [painted(first[: len(name)], BOLD, sys.stdout) + first[len(name) :], *others]
    strict, lenient = ([f.value] if (f := figures.get(title)) else [] for title in ("strict", "accuracy"))
    shown = [(title, f) for title, f in figures.items() if title != "strict" or says_more(strict, lenient)]
    lines += [f"  {title:<9} {str(figure).strip()}" for title, figure in shown]
    counts = [counted(len({row["prompt_number"] for row in rows}), "prompt"), counted(len(rows), "completion")]
    if cut := sum(row["finish_reason"] == "length" for row in rows):
        counts.append(f"{cut} cut at the limit")
    if failed := sum(not row["valid"] for row in rows):
        counts.append(f"{counted(failed, 'reward')} failed (--failed)")
    return [*lines, f"  {', '.join(counts)}"]


def _sorted(rows: Sequence[Row], by: str, *, reverse: bool) -> list[Row]:
    """The completions by a figure, the least or the longest first; those without it come last.

    Raises ConfigError for a name of no figure.
    """
    known = dict.fromkeys(["reward", "length", *READINGS, *(name for row in rows for name in row["reward_parts"])])
    if by not in known:
        hint = did_you_mean(nearest(by, known), f"it has {', '.join(known)}")
        raise ConfigError(f"--sort {by}: there is no such figure or part of the reward{hint}")

    def place(row: Row) -> float:
        reward = row["reward"] if row.get("loss") is None else -row["loss"]
        figure = {**row["reward_parts"], **row, "length": -row["tokens"], "reward": reward}.get(by)
        return math.inf if figure is None else -figure if reverse else figure

    return sorted(rows, key=place)


def _why(row: Row, *, full: bool) -> list[str]:
    """The answer read from the completion beside the expected one, and the error of its reward."""
    if row.get("loss") is not None:
        return []
    parts = [f"answered {row['answer']!r}"] if row["answer"] else []
    parts += [f"expected {expected}"] if (expected := _expected(row, full=full)) else []
    return [*([", ".join(parts)] if parts else []), *([f"error: {row['error']}"] if row["error"] else [])]


def _expected(row: Row, *, full: bool) -> str:
    """The task's `answer`, without `full` the last line of it; else what the task has beside the prompt."""
    task = {key: value if isinstance(value, str) else json.dumps(value) for key, value in row["task"].items()}
    if answer := task.get("answer", "").strip():
        return answer if full else answer.splitlines()[-1]
    return ", ".join(f"{key} {text}" for key, text in task.items() if text not in row["prompt"])


def played_lines(composed: Composed[EvalSettings]) -> list[str]:
    """The plan: the environment, the model, and for a run's model what the run was trained on."""
    path, env = composed.settings.model.path, composed.settings.env
    from rlpost.train.facts import data_facts

    label, each = "reads", "the loss of its demonstrated replies"
    if env.scores:
        label, each = "plays", f"at most {env.max_completion_tokens} tokens each"
    data, *sources = data_facts(env)
    run = run_of_model(path)
    model = f"{composed.model_name} ({path})" if run is None else f"{path}, {training_of(run)}"
    return [f"{label:<7} {data.value}, {each}", *map(str, sources), f"model   {model}"]


def choose_evaluation_folder(out: Path | None, name: str | None, stem: str) -> Path:
    """The folder that `--out` and `--name` ask for; `evals/STEM-N` if they leave it open.

    Creates nothing. Raises ConfigError for a name that is taken or invalid.
    """
    folder = given_folder(out, name, root=EVALS, kind="an evaluation")
    if folder is None:
        return first_free(stem, EVALS)
    if any((folder / file).exists() for file in (RESULT, SAMPLES, SWEEP_FILE)):
        raise ConfigError(f"{folder} already holds results: give another --name")
    return folder


def score(composed: Composed[EvalSettings], folder: Path, typed: list[str]) -> tuple[dict[str, Any], Any]:
    """Evaluate, with progress on stderr, and write `folder`; returns the content of `result.json`, and its figures."""
    composed, _ = resolved(composed)
    settings = composed.settings
    began = time.monotonic()
    with StatusLine(f"loading {settings.model.path}") as status:
        from rlpost.evaluation.saved import write_evaluation
        from rlpost.record import PRECISION
        from rlpost.runs.folder import environment

        if settings.env.scores:
            from rlpost.train.assemble import evaluate_command as evaluated
        else:
            from rlpost.train.demonstrated import evaluate_demonstrations as evaluated

        model = resolve_model_path(settings.model.path)  # now: a run may save a later checkpoint meanwhile
        evaluation = evaluated(settings, partial(status.now, "evaluating"), status.precision, status.note)
    record = {
        "folder": str(folder),
        "command": typed,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began, 1),
        "model": str(Path(model).resolve()) if Path(model).exists() else model,
        "choices": composed.choices,
        "overrides": composed.overrides,
        "settings": composed.as_dict(),
        "environment": environment(settings.seed) | {PRECISION: evaluation.precision},
        "result": evaluation.result.as_dict(),
    }
    write_evaluation(folder, record, evaluation.played, evaluation.demonstrated)
    return record, evaluation.result
