"""`rlpost eval`: scores a model on held-out prompts; lists, shows and compares saved evaluations."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from rlpost.catalog import EVAL
from rlpost.cli.completion import complete_eval, complete_evaluation, complete_shown
from rlpost.cli.plan import compose_and_check, resolved
from rlpost.cli.rollouts import below_each_other, completion_block
from rlpost.cli.run_folder import NOT_PLAYED, first_free, given_folder
from rlpost.cli.runs import age
from rlpost.cli.terminal import (
    BOLD,
    DIM,
    StatusLine,
    output_width,
    painted,
    paragraph,
    print_json,
    saying_stopped,
    stdout_on_stderr,
)
from rlpost.cli.usage import MULTIRUN_HELP, OVERRIDES_HELP, App, AsJson, VerbWithVerbs
from rlpost.cli.views import table
from rlpost.config.paths import (
    EVALS,
    RESULT,
    RUNS,
    SAMPLES,
    SWEEP_FILE,
    as_model,
    evaluation_names,
    is_run_folder,
    resolve_model_path,
    run_of_model,
)
from rlpost.config.schema import as_text
from rlpost.errors import CheckpointError, ConfigError
from rlpost.files import expanded, json_in, slug
from rlpost.record import ACCURACY, REWARD, STRICT, Interval, interval, one_of_each_first, says_more
from rlpost.runs.reader import playable, read_run
from rlpost.text import counted, did_you_mean, nearest, printable

if TYPE_CHECKING:
    from rlpost.config.compose import Composed
    from rlpost.evaluation.play import Result
    from rlpost.settings import EvalSettings

EXAMPLES = """\
  rlpost eval
  rlpost eval model=runs/my-run
  rlpost eval model=my-run env=gsm8k env.limit=64
  rlpost eval model=runs/my-run 'eval.k=[1,8]' --name my-run
  rlpost eval compare before my-run
  rlpost eval list
  rlpost eval show my-run
  rlpost eval -m model=smollm2,runs/my-run
"""
COMPARE_SHORT = "Say whether one evaluation is better than another."
COMPARE_EXAMPLES = """\
  rlpost eval compare before my-run
  rlpost eval compare evals/gsm8k-qwen-1 evals/gsm8k-my-run-1 --json
"""

LIST_SHORT = "List saved evaluations, the newest first."
LIST_EXAMPLES = """\
  rlpost eval list
  rlpost eval list evals/my-sweep --json
"""
SHOW_SHORT = "Show the completions of an evaluation, the worst first."
SHOW_EXAMPLES = """\
  rlpost eval show                       the newest
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
    """`rlpost eval KEY=VALUE...`, and the verbs for evaluations that are saved: compare, list and show."""

    @cached_property
    def below(self) -> dict[str, TyperCommand]:
        """See `VerbWithVerbs.below`."""
        app = App()
        app.command("compare", examples=COMPARE_EXAMPLES, short_help=COMPARE_SHORT)(compare)
        app.command("list", examples=LIST_EXAMPLES, short_help=LIST_SHORT)(list_evaluations)
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
    for flag, given in (("--resume", resume), ("--dry-run", dry_run or None)):
        if given is not None:
            raise ConfigError(f"{flag} belongs to a sweep of several evaluations: add -m, or leave it out")
    with saying_stopped("stopping: the evaluation is abandoned, nothing is written"):
        evaluate_once(words, typed, out, name, as_json=as_json)


def evaluate_once(words: list[str], typed: list[str], out: Path | None, name: str | None, *, as_json: bool) -> None:
    """One evaluation from its settings to its figures on stdout."""
    composed = compose_and_check(EVAL, words, as_json=as_json, typed=typed)
    folder = choose_evaluation_folder(out, name, f"{composed.choices['env']}-{composed.model_name}")
    print("\n".join(map(printable, played_lines(composed))), file=sys.stderr, flush=True)
    if as_json:
        with stdout_on_stderr():
            record, _ = score(composed, folder, typed)
        print_json(record)
        return
    _, result = score(composed, folder, typed)
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


Order = Literal["reward", "length"]  # the figure that an evaluation's completions are sorted by


def list_evaluations(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder that holds the evaluations.")] = EVALS,
    as_json: AsJson = False,
) -> None:
    """List saved evaluations: model, environment, accuracy or reward with its 95% interval, prompts, age."""
    found = saved_evaluations(folder)
    if as_json:
        print_json([_summary(*each) for each in found])
    elif found:
        print("\n".join(list_lines(found)))
    else:
        print(f"no evaluations in {folder}/ yet: rlpost eval makes one", file=sys.stderr)


def show(
    evaluation: Annotated[
        str | None,
        typer.Argument(
            metavar="[EVAL]",
            help="An evaluation: its name in evals/, its folder, its samples.parquet; or a run. Default: the newest.",
            autocompletion=complete_shown,
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(metavar="N", help="Of a run: after step N; default: the last.")] = None,
    sort: Annotated[
        Order, typer.Option(metavar="reward|length", help="Sort by reward, the worst first, or by length, long first.")
    ] = "reward",
    part: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Sort by this part of the reward, or by accuracy_strict or _lenient."),
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", "--best", help="Sort the other way round.")] = False,
    text: Annotated[str, typer.Option(metavar="TEXT", help="Only with TEXT in prompt or completion, any case.")] = "",
    failed: Annotated[bool, typer.Option("--failed", help="Only completions whose reward failed.")] = False,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Show at most N.")] = MOST_SHOWN,
    full: Annotated[bool, typer.Option("--full", help="Print whole prompts and completions.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show an evaluation's figures, then its completions with the expected answer: the worst first.

    One completion of each prompt comes first. A run's held-out completions are in RUN/held-out.
    """
    opened = _opened(evaluation, step)
    from rlpost.evaluation.saved import read_completions

    rows = read_completions(opened.table)
    chosen = _chosen(rows, text=text, failed=failed, part=part, order=sort, reverse=reverse)
    if as_json:
        shown = [{**row, "expected": _expected(row, full=True)} for row in chosen[:limit]]
        figures = {name: figure.as_dict() for name, figure in opened.figures.items()}
        print_json(
            {
                "name": opened.name,
                "table": str(opened.table),
                "figures": figures,
                "found": len(chosen),
                "completions": shown,
            }
        )
        return
    lines = _headline(opened, rows)
    several = len({row["sample"] for row in rows}) > 1
    blocks = []
    for row in chosen[:limit]:
        place = f"prompt {row['prompt_number']}" + (f", sample {row['sample']}" if several else "")
        blocks.append(completion_block(place, row, full=full, more=_why(row, full=full)))
    lines += ["", *below_each_other(blocks)] if blocks else ["no completion is like that"]
    if len(blocks) < len(chosen):
        lines += ["", f"{len(blocks)} of {len(chosen)} completions: --limit {len(chosen)} shows all"]
    print("\n".join(lines))


def saved_evaluations(folder: Path) -> list[tuple[str, dict[str, Any], float]]:
    """Name, `result.json` and time of every evaluation in a folder and its sweeps, the newest first."""
    below = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    found = [folder / name for name in evaluation_names(folder)]
    found += [sweep / name for sweep in below for name in evaluation_names(sweep)]
    timed = sorted(((path / RESULT).stat().st_mtime, path) for path in found)
    return [(str(path.relative_to(folder)), json_in(path / RESULT), when) for when, path in reversed(timed)]


def list_lines(found: Sequence[tuple[str, dict[str, Any], float]]) -> list[str]:
    """The table of evaluations."""
    rows: list[Sequence[str]] = [("evaluation", "model", "env", "figure", "n", "age")]
    for name, record, when in found:
        figures = _figures(record)
        title, figure = next(
            ((t, f) for t, f in figures.items() if f.value and t in ("accuracy", "reward")), next(iter(figures.items()))
        )
        cells = (name, slug(record["model"]), record["choices"]["env"], f"{title:<8} {figure}")
        rows.append((*map(printable, cells), str(figure.prompts), age(when)))
    heading, *lines = table(rows, output_width(0) or None, right=(4, 5), cuttable=(2, 1, 0))
    return [painted(heading, DIM, sys.stdout), *lines]


@dataclass(frozen=True)
class _Opened:
    """A table of samples with the figures of its evaluation; `about` says model, environment and age."""

    name: str
    table: Path
    figures: dict[str, Interval]
    about: str


def _opened(name: str | None, step: int | None) -> _Opened:
    """The evaluation of a name, or a run's after `step`. Raises ConfigError if there is none."""
    from rlpost.evaluation.saved import find_evaluation

    if name is None:
        found = saved_evaluations(EVALS)
        if not found:
            raise ConfigError("there is no evaluation in evals/ yet: rlpost eval makes one")
        name = str(EVALS / found[0][0])
    path = expanded(name)
    run = next((folder for folder in (path, RUNS / name) if is_run_folder(folder)), None)
    if run is not None and (step is not None or not (EVALS / name / RESULT).is_file()):
        return _opened_run(run, step)
    table = find_evaluation(name)
    if step is not None:
        raise ConfigError(f"--step {step} is for a run: {name} is one evaluation")
    result = table.with_name(RESULT)
    if table.name != SAMPLES or not result.is_file():
        return _Opened(str(table), table, {}, f"{age(table.stat().st_mtime)} ago")
    record = json_in(result)
    result_of, when = record["result"], age(result.stat().st_mtime)
    samples = result_of["num_samples"]
    drawn = "greedy" if samples == 1 else f"{samples} completions each"
    drawn = "demonstrated replies" if "loss" in result_of else drawn
    about = f"{record['choices']['env']}, model {record['model']}, {drawn}, {when} ago"
    return _Opened(table.parent.name, table, _figures(record), about)


def _opened_run(run: Path, step: int | None) -> _Opened:
    from rlpost.evaluation.saved import held_out_steps, held_out_table

    steps = held_out_steps(run)
    if not steps:
        raise ConfigError(f"{run} holds no held-out completions: make some with rlpost eval model={as_model(run)}")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ConfigError(f"{run} holds no evaluation after step {step}: it has {', '.join(map(str, steps))}")
    row = next((row for row in read_run(run).metrics if row["step"] == step), {})
    keys = (("accuracy", ACCURACY), ("strict", STRICT), ("reward", REWARD))
    figures = {name: figure for name, key in keys if (figure := interval(row, key)) is not None}
    when = "before training" if step == 0 else f"after step {step}"
    return _Opened(run.name, held_out_table(run, step), figures, f"held-out prompts, {when}")


def _figures(record: Mapping[str, Any]) -> dict[str, Interval]:
    """The figures of a `result.json`, by title."""
    result = record["result"]
    if "loss" in result:
        ends = result["loss_low"], result["loss_high"]
        return {"loss": Interval(result["loss"], *ends, result["num_prompts"], is_share=False)}
    shares = {"accuracy": result["accuracy_lenient"], "strict": result["accuracy_strict"]}
    for name, share in result["attempts"].items():
        if name.endswith("_lenient"):
            shares[name.removesuffix("_lenient").replace("_at_", "@")] = share
    ends = (result["reward_low"], result["reward_high"])
    reward = Interval(result["reward_mean"], *ends, result["num_prompts"], is_share=False)
    return {title: Interval(**share) for title, share in shares.items() if share} | {"reward": reward}


def _summary(name: str, record: dict[str, Any], when: float) -> dict[str, Any]:
    return {
        "name": name,
        "folder": record["folder"],
        "model": record["model"],
        "env": record["choices"]["env"],
        "samples": record["result"]["num_samples"],
        "figures": {title: figure.as_dict() for title, figure in _figures(record).items()},
        "finished": datetime.fromtimestamp(when, UTC).isoformat(timespec="seconds"),
    }


def _headline(opened: _Opened, rows: Sequence[Row]) -> list[str]:
    """The evaluation, its figures, and what went wrong in it."""
    prompts, name = len({row["prompt_number"] for row in rows}), printable(opened.name)
    first, *others = paragraph(f"{opened.name}  {opened.about}", output_width())
    lines = [painted(first[: len(name)], BOLD, sys.stdout) + first[len(name) :], *others]
    strict, lenient = ([f.value] if (f := opened.figures.get(n)) else [] for n in ("strict", "accuracy"))
    shown = [(n, f) for n, f in opened.figures.items() if n != "strict" or says_more(strict, lenient)]
    lines += [f"  {name:<9} {f'{figure}'.strip()}" for name, figure in shown]
    failed, cut = (
        sum(row[key] == value for row in rows) for key, value in (("valid", False), ("finish_reason", "length"))
    )
    wrong = [f"{cut} cut at the limit"] if cut else []
    wrong += [f"{counted(failed, 'reward')} failed (--failed)"] if failed else []
    return [*lines, "  " + ", ".join([counted(prompts, "prompt"), counted(len(rows), "completion"), *wrong])]


def _chosen(
    rows: Sequence[Row], *, text: str, failed: bool, part: str | None, order: Order, reverse: bool
) -> list[Row]:
    """The completions asked for, in their order; those without the figure come last.

    Raises ConfigError for a part that no completion has.
    """
    parts = dict.fromkeys([*(name for row in rows for name in row["reward_parts"]), *READINGS])
    if part is not None and part not in parts:
        raise ConfigError(
            f"--part {part}: there is no such part of the reward{did_you_mean(nearest(part, parts), _listed(parts))}"
        )
    kept = [row for row in rows if not failed or not row["valid"]]
    kept = [row for row in kept if text.lower() in f"{row['prompt']}\n{row['completion']}".lower()]

    def figure(row: Row) -> float | None:
        if part is None and row.get("loss") is not None:
            return -row["loss"]
        if part is not None:
            return row[part] if part in READINGS else row["reward_parts"].get(part)
        return -row["tokens"] if order == "length" else row["reward"]

    sign = -1 if reverse else 1
    ordered = sorted(kept, key=lambda row: math.inf if (value := figure(row)) is None else sign * value)
    return ordered if order == "length" and part is None else one_of_each_first(ordered, "prompt_number")


def _listed(parts: Mapping[str, None]) -> str:
    return f"it has {', '.join(parts)}"


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
    first, sources = f"{label:<7} {data.value}", [str(source) for source in sources]
    lines = [f"{first}, {each}", *sources]
    run = run_of_model(path)
    if run is None:
        return [*lines, f"model   {composed.model_name} ({path})"]
    if (began := playable(run)) not in (run, None):
        return [*lines, f"model   {path}, learned from pairs; the environment is that of {began}"]
    record = read_run(run)
    trained, played = record.part("env"), composed.as_dict()["env"]
    unlike = NOT_PLAYED.union(EVAL.without, [] if trained.get("reward") else ["env.reward"])  # fine-tuning takes none
    other = [key for key in played if f"env.{key}" not in unlike and trained.get(key, played[key]) != played[key]]
    if not trained:
        training = f"{run} does not say what it was trained on"
    elif (name := record.choice("env")) != composed.choices["env"]:
        rows = f" from {trained['path']}" if "path" in trained else ""
        training = f"trained on another environment, {name}{rows}"
    elif other:
        training = f"trained on the same, but with {' '.join(f'env.{key}={as_text(trained[key])}' for key in other)}"
    else:
        training = "trained on the same"
    return [*lines, f"model   {path}, {training}"]


def choose_evaluation_folder(out: Path | None, name: str | None, stem: str) -> Path:
    """The folder that `--out` and `--name` ask for; `evals/STEM-N` if they leave it open.

    Creates nothing. Raises ConfigError for a name that is taken or invalid.
    """
    folder = given_folder(out, name, root=EVALS, kind="an evaluation")
    if folder is None:
        return first_free(stem, EVALS)
    for file, held in ((RESULT, "an evaluation"), (SAMPLES, "an evaluation"), (SWEEP_FILE, "a sweep")):
        if (folder / file).exists():
            raise ConfigError(f"{folder} already holds {held}: give another --name")
    return folder


@contextmanager
def reserved(folder: Path) -> Iterator[None]:
    """Make the folder before any long work, and remove it again if nothing was written into it.

    Raises CheckpointError if it cannot be made.
    """
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error}; give another --out") from error
    try:
        yield
    finally:
        for each in new:
            if each.is_dir() and not any(each.iterdir()):  # another evaluation may have removed a parent
                each.rmdir()


def score(composed: Composed[EvalSettings], folder: Path, typed: list[str]) -> tuple[dict[str, Any], Result]:
    """Evaluate, with progress on stderr, and write `folder`; returns the content of `result.json`, and its figures."""
    composed, _ = resolved(composed)
    settings = composed.settings
    began = time.monotonic()
    with reserved(folder):
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
